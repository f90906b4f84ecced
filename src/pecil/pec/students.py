"""Every class's student as one stack of tensors: how it learns and how it scores.

Student g_c is trained on the samples of class c alone, to predict the teacher's output,

    minimise  mean_j (g_c(x)_j − h(x)_j)²   by Adam,

and scores a sample by the same error. The students are rows of one matrix: row c holds
the parameters of class c, a second and a third matrix the two moments of its Adam.

* On a CPU each thread trains a large student of its own, so that a row and its moments stay in
  cache; small ones are trained ten at a time, which saves calls, while the teacher goes on
  answering in other threads. Either way a student becomes what it would become alone, to the last
  bit.
* On a GPU all rows advance in lockstep, one captured CUDA graph a step, each with its own
  samples, learning rate and step count; a class that has run out of samples stands still.
* Scoring is one pass of the teacher and one merged pass of all students.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pecil.pec.machine import by_threads, cached, in_full, one_thread, roomy, without_onednn
from pecil.pec.networks import Architecture, Stack, backward, draw, forward, outputs
from pecil.pec.teacher import Answers, asked

BETA1, BETA2, ADAM_EPS = 0.9, 0.999, 1e-8  # Adam's defaults
FLUSH_EVERY, TINY = 64, 1e-30  # moments below TINY are set to 0 before they turn denormal
SMALL = 2**16  # numbers of a student
SHRINKAGE = 0.01  # of the covariance of errors; anything from 0.001 to 0.1 does
TOGETHER = 10  # students trained side by side
LONG = 128  # steps from which on that pays on a CPU
PREPARED = 64  # samples whose patches are laid out at a time


@dataclass
class Lesson:
    """What one student is to learn: samples in order, in batches.

    Parameters
    ----------
    slot : int
        Row of the student.
    x : Tensor
        Samples (n, *input_shape).
    target : Tensor or Answers
        Teacher's outputs (n, d), or who gives them when they are needed.
    order : Tensor
        Indices into ``x`` in the order of learning; an index may come more than once.
    rates : list of float
        Learning rate at each position of ``order``; a batch uses that of its first sample.
    weights : Tensor, optional
        What the error at each position counts in the covariance of errors, if one is kept.
    """

    slot: int
    x: Tensor
    target: Tensor | Answers
    order: Tensor
    rates: list[float]
    weights: Tensor | None = None

    def part(self, span: slice) -> "Lesson":
        """Return a stretch of this lesson."""
        weights = None if self.weights is None else self.weights[span]
        return replace(self, order=self.order[span], rates=self.rates[span], weights=weights)


def in_time(x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Sort samples by when an order asks for them first; return them and the order among them.

    >>> in_time(torch.tensor([4.0, 5.0, 6.0]), torch.tensor([2, 0, 2]))
    (tensor([6., 4.]), tensor([0, 1, 0]))
    """
    asked_for, which = order.unique(return_inverse=True)
    first = torch.full_like(asked_for, len(order))
    first.scatter_reduce_(0, which, torch.arange(len(order)), "amin")
    ranked = first.argsort()
    return x[asked_for[ranked]], ranked.argsort()[which]


class Moment:
    """The weighted second moment of errors e = g_c(x) − h(x), all classes together.

    Each error is taken just before its sample is learned. Its inverse is the metric of
    whitened errors, eᵀ Σ̃⁻¹ e / d, with Σ̃ = (1 − a)·Σ + a·tr(Σ)/d·I and a = 0.01.
    """

    def __init__(self, dim: int, device: torch.device) -> None:
        self.matrix = torch.zeros(dim, dim, device=device)  # Σ w e eᵀ
        self.weight = torch.zeros((), device=device)  # Σ w

    @in_full
    def add(self, errors: Tensor, weights: Tensor) -> None:
        """Take in errors (n, d) with their weights (n,)."""
        self.matrix.addmm_((errors * weights.unsqueeze(1)).T, errors)
        self.weight += weights.sum()

    def merge(self, other: "Moment") -> None:
        """Add another moment."""
        self.matrix += other.matrix.to(self.matrix.device)
        self.weight += other.weight.to(self.weight.device)

    def whitener(self) -> Tensor:
        """Return the matrix Q, (d, d), for which ‖Qe‖² is the whitened error of e."""
        if float(self.weight) == 0:
            return torch.eye(len(self.matrix), device=self.matrix.device)
        covariance = self.matrix.double() / self.weight.double()
        covariance *= 1 - SHRINKAGE
        covariance.diagonal().add_(SHRINKAGE * covariance.diagonal().mean() + 1e-12)
        lower = torch.linalg.cholesky(covariance)
        eye = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
        return torch.linalg.solve_triangular(lower, eye, upper=False).float()


class Students:
    """A growing stack of student networks that all start from the same values.

    Parameters
    ----------
    architecture : Architecture
    init : str
        One of :data:`pecil.pec.networks.INITS`.
    seed : int
    device : torch.device

    Attributes
    ----------
    start : Tensor
        Where every student starts, (1, row).
    steps : list of int
        Adam steps taken by each student.
    moment : Moment or None
        Of all students' errors; set it to have it kept and used.
    """

    def __init__(
        self, architecture: Architecture, init: str, seed: int, device: torch.device
    ) -> None:
        self.architecture = architecture
        self.moment: Moment | None = None
        generator = torch.Generator().manual_seed(seed)
        self.start = draw(architecture, init, generator).to(device)
        self.steps: list[int] = []
        self._store = [self.start.new_empty(0, architecture.row) for _ in range(3)]
        self._set_buffers()

    def _set_buffers(self) -> None:
        self._gradients = [self._room_for_gradient()]  # one a thread
        self._networks: dict[int, Stack] = {}

    def _room_for_gradient(self) -> tuple[Tensor, Stack]:
        """Return an empty row, and the same as a stack of one."""
        row = roomy(*self.start.shape, device=self.start.device).zero_()
        return row, Stack.over(self.architecture, row)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out buffers and views."""
        left_out = ("_gradients", "_networks")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make the buffers again: views would not stay views."""
        vars(self).update(state)
        self._set_buffers()

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def rows(self) -> Tensor:
        """Parameters, (number of classes, row)."""
        return self._store[0][: len(self)]

    @property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Adam's running means of the gradient and of its square, shaped like ``rows``."""
        return self._store[1][: len(self)], self._store[2][: len(self)]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters and both moments."""
        return (self.rows, *self.moments)

    def add(
        self, rows: Tensor | None = None, moments: Sequence[Tensor] = (), steps: Sequence[int] = ()
    ) -> None:
        """Append students: a fresh one, or given rows with their moments and step counts."""
        rows = self.start if rows is None else rows
        if not moments:
            moments = (torch.zeros_like(rows), torch.zeros_like(rows))
        count = len(self) + len(rows)
        for k, new in enumerate((rows, *moments)):
            old = self._store[k]
            if len(old) < count:
                old = roomy(max(count, 2 * len(old)), old.shape[1], device=old.device)
                old[: len(self)] = self._store[k][: len(self)]
                self._store[k] = old
            old[len(self) : count] = new
        self._networks.clear()
        self.steps.extend(steps or [0] * len(rows))

    def remove(self, slot: int) -> None:
        """Delete a student; those behind it move up."""
        keep = [k for k in range(len(self)) if k != slot]
        self._store = [part[keep] for part in self._store]
        self._networks.clear()
        del self.steps[slot]

    @contextmanager
    def unchanged_on_error(self, slots: Sequence[int]) -> Iterator[None]:
        """Put some students, and the moment, back to what they are now if something fails."""
        parts, steps = [part[slots] for part in self.parts], [self.steps[k] for k in slots]
        moment = copy.deepcopy(self.moment)
        try:
            yield
        except BaseException:
            for part, old in zip(self.parts, parts, strict=True):
                part[slots] = old
            for slot, old_steps in zip(slots, steps, strict=True):
                self.steps[slot] = old_steps
            self.moment = moment
            raise

    def learn(self, lessons: Iterable[Lesson], batch_size: int = 1) -> list[tuple[int, Tensor]]:
        """Train the students of ``lessons``, no two of which may share a slot.

        Returns
        -------
        list of (slot, Tensor)
            For each lesson the error of every sample just before it was learned.
        """
        with torch.no_grad():
            if self.start.device.type == "cuda":
                from pecil.pec.lockstep import learn

                return learn(self, list(lessons), batch_size)
            learned, group = [], []
            size = TOGETHER if self.small else torch.get_num_threads()
            for lesson in lessons:
                if self.small and not self.side_by_side(len(lesson.order), batch_size):
                    with without_onednn, one_thread():
                        learned.append((lesson.slot, self.learn_one(lesson, batch_size)))
                    continue
                group.append(lesson)
                if len(group) == size:
                    learned += self._learn_group(group, batch_size)
                    group = []
            return learned + self._learn_group(group, batch_size) if group else learned

    @property
    def small(self) -> bool:
        """Whether calling operations costs a CPU more than their arithmetic does."""
        architecture, device = self.architecture, self.start.device
        return device.type == "cpu" and architecture.row < SMALL and architecture.kind != "conv"

    def side_by_side(self, n: int, batch_size: int) -> bool:
        """Say whether a lesson of n samples is learned together with those of other students."""
        return self.small and batch_size == 1 and n >= LONG

    def _learn_group(self, lessons: list[Lesson], batch_size: int) -> list[tuple[int, Tensor]]:
        """Train several students on the CPU: small ones step by step, large ones by threads."""
        if self.small:
            return self._learn_together(lessons)
        losses = [torch.empty(0)] * len(lessons)
        alone = [[k] for k in range(len(lessons))]
        if self.moment is not None:  # all add to one
            alone = [list(range(len(lessons)))]
        while len(self._gradients) < len(alone):
            self._gradients.append(self._room_for_gradient())

        def work(thread: int) -> None:
            for k in alone[thread]:
                losses[k] = self.learn_one(lessons[k], batch_size, thread)

        with without_onednn:
            by_threads(work, len(alone))
        return [(lesson.slot, loss) for lesson, loss in zip(lessons, losses, strict=True)]

    def _learn_together(self, lessons: list[Lesson]) -> list[tuple[int, Tensor]]:
        """Train small students side by side on the CPU, one sample a step each.

        Every class takes its k-th step at the same time, each as if it were apart: the cost of
        such a step lies in calling operations, not in their arithmetic.
        """
        lessons = sorted(lessons, key=lambda lesson: -len(lesson.order))
        slots = [lesson.slot for lesson in lessons]
        parts = [part[slots] for part in self.parts]
        gradient = torch.zeros_like(parts[0])
        losses: list[list[Tensor]] = [[] for _ in lessons]
        start = 0
        ahead = [lesson.target for lesson in lessons if isinstance(lesson.target, Answers)]
        with asked(ahead), without_onednn, one_thread():
            for stop in sorted({len(lesson.order) for lesson in lessons}):
                active = [lesson for lesson in lessons if len(lesson.order) >= stop]
                for first in range(start, stop, PREPARED):
                    span = slice(first, min(first + PREPARED, stop))
                    errors = self._side_by_side(active, span, parts, gradient)
                    for loss, error in zip(losses, errors, strict=False):
                        loss.append(error)
                start = stop
        for part, new in zip(self.parts, parts, strict=True):
            part[slots] = new
        for lesson in lessons:
            self.steps[lesson.slot] += len(lesson.order)
        return [(slot, torch.cat(loss)) for slot, loss in zip(slots, losses, strict=True)]

    def _side_by_side(
        self, lessons: list[Lesson], span: slice, parts: list[Tensor], gradient: Tensor
    ) -> Tensor:
        """Train some steps of the students in the first rows of ``parts``; return their errors."""
        arch, k = self.architecture, len(lessons)
        nets = Stack.over(arch, parts[0][:k], apart=True)
        grads = Stack.over(arch, gradient[:k])
        mine = [part[:k].split(1) for part in (parts[0], gradient, *parts[1:])]
        orders = [lesson.order[span] for lesson in lessons]
        inputs = [arch.inputs(e.x[order]) for e, order in zip(lessons, orders, strict=True)]
        x = torch.stack(inputs, 1).unsqueeze(2)  # (steps, k, 1, f)
        targets = [e.target[order] for e, order in zip(lessons, orders, strict=True)]
        target = torch.stack(targets, 1).unsqueeze(2)  # (steps, k, 1, d)
        ahead = torch.arange(1.0, len(x) + 1)
        done = [self.steps[lesson.slot] + span.start for lesson in lessons]
        counts = [(ahead + steps).unbind() for steps in done]
        rates = [lesson.rates[span] for lesson in lessons]
        own = list(zip(*mine, strict=True))
        errors = torch.empty_like(target)
        for t, (sample, wanted, error) in enumerate(zip(x, target, errors, strict=True)):
            y, tape = forward(nets, sample)
            torch.sub(y, wanted, out=error)
            backward(nets, tape, error * (2 / arch.output_dim), grads)
            for c, (row, grad, first, second) in enumerate(own):
                _adam(row, grad, first, second, counts[c][t], rates[c][t])
                if (done[c] + t + 1) % FLUSH_EVERY == 0:
                    _flush(first)
                    _flush(second)
        errors = errors[:, :, 0]
        if self.moment is not None:
            weights = torch.stack([w[span] for w in _weights(lessons)], 1)
            self.moment.add(errors.flatten(0, 1), weights.flatten())
        return errors.square_().mean(2).T

    def _network(self, slot: int) -> Stack:
        """Return a student as a stack of one, made once for a stream of single samples."""
        if slot not in self._networks:
            self._networks[slot] = Stack.over(self.architecture, self.rows[slot : slot + 1])
        return self._networks[slot]

    def learn_one(self, lesson: Lesson, batch_size: int, thread: int = 0) -> Tensor:
        """Train one student, batch by batch; each thread has a room of its own for gradients."""
        arch, slot = self.architecture, lesson.slot
        row, first, second = (part[slot : slot + 1] for part in self._store)
        nets, (gradient, grads) = self._network(slot), self._gradients[thread]
        rates = lesson.rates[::batch_size]
        counts = torch.arange(1.0, len(rates) + 1, device=row.device).add_(self.steps[slot])
        steps = iter(zip(counts.unbind(), rates, strict=True))
        losses, start = [], 0
        for part in lesson.order.split(max(1, PREPARED // batch_size) * batch_size):
            inputs = arch.inputs(lesson.x[part]).split(batch_size)
            targets = lesson.target[part].split(batch_size)
            errors = []
            for x, target in zip(inputs, targets, strict=True):
                y, tape = forward(nets, x.unsqueeze(0))
                error = y.sub_(target)  # (1, b, d)
                errors.append(error)
                backward(nets, tape, error * (2 / target.numel()), grads)
                count, rate = next(steps)
                _adam(row, gradient, first, second, count, rate)
                self.steps[slot] += 1
                if self.steps[slot] % FLUSH_EVERY == 0:
                    _flush(first)
                    _flush(second)
            residuals = torch.cat(errors, 1)[0]
            if self.moment is not None and lesson.weights is not None:
                weights = lesson.weights[start : start + len(part)]
                self.moment.add(residuals, weights.to(residuals.device))
            start += len(part)
            losses.append(residuals.square_().mean(1))
        return torch.cat(losses)

    def errors(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the error (n, number of classes) of every student on every sample."""
        nets = Stack.over(self.architecture, self.rows)
        chunk = max(1, cached(x.device) // (self.architecture.kept * len(self)))
        out = x.new_empty(len(x), len(self))
        whitener = None if self.moment is None else self.moment.whitener().T
        with torch.no_grad():
            for part, wanted, row in zip(
                x.split(chunk), target.split(chunk), out.split(chunk), strict=True
            ):
                error = outputs(nets, part).sub_(wanted)
                if whitener is not None:
                    with in_full:
                        error = error @ whitener
                row.copy_(error.square_().mean(2).T)
        return out


def _weights(lessons: list[Lesson]) -> Iterator[Tensor]:
    for lesson in lessons:
        yield torch.ones(len(lesson.order)) if lesson.weights is None else lesson.weights


def _adam(
    row: Tensor, gradient: Tensor, first: Tensor, second: Tensor, count: Tensor, rate: float
) -> None:
    """Take Adam step number ``count`` in one pass over the row."""
    torch._fused_adam_(
        [row],
        [gradient],
        [first],
        [second],
        [],
        [count],
        lr=rate,
        beta1=BETA1,
        beta2=BETA2,
        weight_decay=0.0,
        eps=ADAM_EPS,
        amsgrad=False,
        maximize=False,
    )


def _flush(moment: Tensor) -> None:
    """Set tiny numbers to zero: as denormals they would make every later step far slower."""
    moment.mul_(moment.abs() > TINY)
