"""Students in lockstep: every class takes its k-th step at the same time.

Students do not depend on each other, so training them side by side, each on its own
samples in its own order, gives what training them one by one gives, in fewer and larger
operations. What a student becomes does not depend on its company, to the last bit.

On a GPU a step is captured once as a CUDA graph and replayed; which samples, which learning
rate and which step count each class has at step t is looked up in tables on the device, so
that nothing is sent while it runs. A class without samples left stands still: its rates in
the tables are zero. The library's batched products round differently for batches of different
size, so a batch always has ten students: more classes go ten by ten, fewer are filled up with
copies that nobody trains.

A CPU has a way of its own: :meth:`pecil.pec.students.Students.learn`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from pecil.pec.machine import has_kernels, side_stream
from pecil.pec.networks import Stack, backward, forward
from pecil.pec.students import ADAM_EPS, BETA1, BETA2, TOGETHER, Lesson, Students

WORTH = 32  # steps from which on capturing a graph pays


def learn(
    students: Students, lessons: Sequence[Lesson], batch_size: int
) -> list[tuple[int, Tensor]]:
    """Train the students of ``lessons``; see :meth:`pecil.pec.students.Students.learn`."""
    losses: dict[int, list[Tensor]] = {lesson.slot: [] for lesson in lessons}
    long = [lesson for lesson in lessons if len(lesson.order) // batch_size >= WORTH]
    long.sort(key=lambda lesson: -len(lesson.order))
    while long:  # classes of similar length go together, so that few stand still
        most = len(long[0].order)
        group = [lesson for lesson in long[:TOGETHER] if len(lesson.order) >= 0.7 * most]
        long = long[len(group) :]
        for slot, loss in _Run(students, group, batch_size).losses():
            losses[slot].append(loss)
    for lesson in lessons:
        whole = len(lesson.order) // batch_size * batch_size
        start = whole if whole // batch_size >= WORTH else 0
        if start < len(lesson.order):  # a last, partial batch or a short lesson
            rest = lesson.part(slice(start, None))
            losses[lesson.slot].append(students.learn_one(rest, batch_size))
    return [(lesson.slot, torch.cat(losses[lesson.slot])) for lesson in lessons]


class _Run:
    """One group of students, trained through all their whole batches."""

    def __init__(self, students: Students, lessons: Sequence[Lesson], batch_size: int) -> None:
        device, arch = students.start.device, students.architecture
        self.slots = [lesson.slot for lesson in lessons]
        self.arch = arch
        self.adam = _adam
        if has_kernels(device):
            from pecil.pec.kernels import adam

            self.adam = adam
        self.students, self.lessons, self.batch_size = students, lessons, batch_size
        filled = (self.slots * TOGETHER)[:TOGETHER]
        self.rows = students.rows[filled]
        self.first, self.second = (moment[self.slots] for moment in students.moments)
        self.gradient = torch.zeros_like(self.rows)
        self.x = torch.cat([lesson.x for lesson in lessons])
        self.target = torch.cat([cast(Tensor, lesson.target) for lesson in lessons])

        self.steps = [len(lesson.order) // batch_size for lesson in lessons]
        self.length = max(self.steps)
        # one more row at the end of each table: a step at which everybody stands still
        index = torch.zeros(self.length + 1, TOGETHER, batch_size, dtype=torch.int64)
        table = torch.zeros(4, self.length + 1, len(lessons), 1, dtype=torch.float64)
        table[3] = 1.0
        offset = 0
        for c, (lesson, n) in enumerate(zip(lessons, self.steps, strict=True)):
            index[:n, c] = lesson.order[: n * batch_size].view(n, batch_size) + offset
            offset += len(lesson.x)
            count = torch.arange(1, n + 1, dtype=torch.float64) + students.steps[lesson.slot]
            rates = torch.tensor(lesson.rates[: n * batch_size : batch_size], dtype=torch.float64)
            table[0, :n, c, 0] = 1 - BETA1
            table[1, :n, c, 0] = 1 - BETA2
            table[2, :n, c, 0] = -rates / (1 - BETA1**count)
            table[3, :n, c, 0] = (1 - BETA2**count).rsqrt()
        self.index, self.table = index.to(device), table.float().to(device)
        self.weights: Tensor | None = None  # of errors in their covariance
        if students.moment is not None:
            weights = torch.zeros(self.length + 1, TOGETHER, batch_size)
            for c, (lesson, n) in enumerate(zip(lessons, self.steps, strict=True)):
                if lesson.weights is not None:
                    weights[:n, c] = lesson.weights[: n * batch_size].view(n, batch_size)
            self.weights = weights.to(device)
        self.loss = torch.zeros(self.length + 1, TOGETHER, batch_size, device=device)
        self.t = torch.zeros(1, dtype=torch.int64, device=device)

    def losses(self) -> list[tuple[int, Tensor]]:
        """Train; return each student's errors in order."""
        nets, grads = (Stack.over(self.arch, rows) for rows in (self.rows, self.gradient))
        step: Callable[[], None] = partial(self._step, nets, grads)
        if self.rows.device.type == "cuda":
            step = self._captured(step)
        for _ in range(self.length):
            step()
        trained = (self.rows[: len(self.slots)], self.first, self.second)
        for part, new in zip(self.students.parts, trained, strict=True):
            part[self.slots] = new
        result = []
        for c, (lesson, n) in enumerate(zip(self.lessons, self.steps, strict=True)):
            self.students.steps[lesson.slot] += n
            result.append((lesson.slot, self.loss[:n, c].flatten()))
        return result

    def _captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """Return the step as a CUDA graph, after a rehearsal in which everybody stands still."""
        stream = side_stream(self.rows.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.t.fill_(self.length)
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        self.t.fill_(0)
        return graph.replay

    def _step(self, nets: Stack, grads: Stack) -> None:
        """Take step t in every class; all shapes and addresses are fixed."""
        at = self.index.index_select(0, self.t).flatten()
        shape = (TOGETHER, self.batch_size)
        x = self.arch.inputs(self.x.index_select(0, at)).unflatten(0, shape)
        y, tape = forward(nets, x)
        error = y - self.target.index_select(0, at).unflatten(0, shape)
        self.loss.index_copy_(0, self.t, error.square().mean(2).unsqueeze(0))
        if self.students.moment is not None and self.weights is not None:
            weights = self.weights.index_select(0, self.t).flatten()
            self.students.moment.add(error.flatten(0, 1), weights)
        backward(nets, tape, error * (2 / (self.batch_size * self.arch.output_dim)), grads)
        rows, gradient = (part[: len(self.slots)] for part in (self.rows, self.gradient))
        table = self.table.index_select(1, self.t).flatten(1)
        self.adam(rows, gradient, self.first, self.second, table, ADAM_EPS)
        self.t += 1


def _adam(
    rows: Tensor, gradient: Tensor, first: Tensor, second: Tensor, table: Tensor, eps: float
) -> None:
    """Take a step of Adam with every row: see :func:`pecil.pec.kernels.adam`."""
    new1, new2, rate, scale = table.unsqueeze(2)
    first.lerp_(gradient, new1)
    second.lerp_(gradient.square_(), new2)
    root = second.sqrt().mul_(scale).add_(eps)
    rows.addcmul_(first / root, rate)
