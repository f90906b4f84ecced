"""PEC: prediction error-based classification (Zając, Tuytelaars, van de Ven, ICLR 2024).

For each class c a student network g_c learns to predict the outputs of one frozen random
teacher h, on samples of that class alone; the class whose student errs least wins::

    train    min_θ  ‖g_θᶜ(x) − h(x)‖²            x from class c
    predict  argmin_c  ‖g_θᶜ(x) − h(x)‖²
"""

import contextlib
import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pecil.pec.base import RECENT, ErrorClassifier, count, grouped, one_of, split_order
from pecil.pec.inputs import check_labels, check_samples
from pecil.pec.machine import most, one_thread, uninterrupted
from pecil.pec.networks import ACTIVATIONS, INITS, KINDS, Architecture
from pecil.pec.students import LONG, Lesson, Moment, Students, in_time
from pecil.pec.teacher import Answers, CustomTeacher, Teacher

DEFAULTS = {  # student width, teacher width as a multiple of it, outputs, pooled side
    "mlp": (10, 500, 99, 1),
    "conv": (40, 100, 172, 4),
    "linear": (1, 1, 1, 1),
}
SETTLED = 1000  # samples after which a student's errors begin to count in full
AFTER = 0.01  # share of the learning rate once a class is past its expected samples
FEW = 32  # samples that are learned in one go, before which Ctrl-C waits
SCORED = 4096  # samples that are on the device at a time while scoring
TEACHER, STUDENT, ORDER = range(3)  # uses of the seed


def _updates(plans: Mapping[Any, tuple[Tensor, list[float]]]) -> int:
    """Return how many samples are to be learned, those that come again counted again."""
    return sum(len(order) for order, _ in plans.values())


@dataclass
class Pair:
    """One teacher and the students that learn from it."""

    teacher: Teacher | CustomTeacher
    students: Students

    def lesson(
        self,
        slot: int,
        x: Tensor,
        order: Tensor,
        rates: list[float],
        weights: Tensor | None,
        batch_size: int,
    ) -> Lesson:
        """Make a lesson; small students learn while the teacher goes on answering."""
        target: Tensor | Answers
        if (
            isinstance(self.teacher, Teacher)
            and torch.get_num_threads() > 1
            and self.students.side_by_side(len(order), batch_size)
        ):
            x, order = in_time(x, order)
            target = Answers(self.teacher, x)
        else:
            target = self.teacher(x)
        return Lesson(slot, x, target, order, rates, weights)


class PEC(ErrorClassifier):
    """Learn classes one at a time from a single pass, without a buffer or forgetting.

    One student network per class learns to predict a frozen random teacher on samples of
    that class; the class whose student predicts best wins. Classes may come in any order,
    at any time; a class never seen is never predicted; training one class leaves every
    other student bit-identical.

    Parameters
    ----------
    architecture : {"auto", "mlp", "conv", "linear"}
        "auto" takes "conv" for colour images and for grey ones above 32×32, else "mlp".
        "linear" is the paper's *single linear* layer, with as many parameters as the
        default of "auto" unless ``output_dim`` or ``budget`` says otherwise.
    student_width, teacher_width : int, optional
        Hidden neurons or channels (w_g, w_h). By default 10 and 5,000 for "mlp", 40 and
        4,000 for "conv"; the teacher's follows the student's.
    output_dim : int, optional
        Outputs of teacher and students (d); 99 for "mlp", 172 for "conv".
    pool : int, optional
        Side of the pooled map (r) of "conv"; 4.
    hidden_layers : int
        Of students and teacher.
    activation : {"auto", "gelu", "relu", "identity"}
        "auto": GELU for "mlp", ReLU for "conv". "identity" removes the nonlinearity.
    init : {"kaiming", "xavier", "uniform0.001", "uniform0.01", "uniform0.1"}
        Initial values of teacher and students; "kaiming" is PyTorch's default.
    budget : int, optional
        Parameters per class: ``output_dim`` becomes the largest that fits, as in the paper.
    ensemble : int
        Independent student–teacher pairs whose errors are averaged; they share ``budget``.
    teacher : "random" or callable
        A callable (say a pre-trained ``torch.nn.Module``) maps samples (n, *input_shape)
        to outputs (n, d), and is used as it is.
    metric : {"plain", "whitened"}
        How large an error e = g_c(x) − h(x) is: its mean square, as in the paper, or
        eᵀΣ⁻¹e/d with Σ the covariance of errors, shared by all classes and taken from the
        stream (each error before its sample is learned, counted (t/T)² at the t-th of T
        samples, or (t/(t + 1000))² where T is not known); d(d + 1)/2 numbers more. Merging
        and learning are then exact up to rounding, ``forget`` leaves a class's part of Σ, and
        novelty needs samples to be told from: ``calibrate(X)``.
    lr : float
        Learning rate of Adam.
    schedule : {"linear", "constant"}
        "linear" lowers the rate to zero over a class's samples: ``lr·(1 − t/T)``. ``fit``
        knows T; for ``partial_fit`` it is ``expected_samples``, and without one the rate is
        constant. A class past its T samples goes on learning at 1 % of ``lr``: a guess too
        low neither freezes the student nor undoes what it learned.
    expected_samples : int or dict, optional
        Samples expected of every class, or of each: ``{label: n}``.
    batch_size : int
        Samples of one class per update.
    epochs : int
        Passes of ``fit`` over the data; ``partial_fit`` always makes one.
    shuffle : bool
        Whether ``fit`` shuffles the samples of each class.
    equal_budgets : bool or int
        True: ``fit`` cuts every class to the size of the smallest; a class then depends on its
        company, so ``merge`` and ``forget`` are exact only for classes cut to the same size.
        An int: every class gets that many updates, in ``fit`` by going through its samples as
        often as needed, in ``partial_fit`` by ignoring what comes after.
    mean, std : float or sequence, optional
        Inputs become ``(x − mean) / std``, one number or one per channel (or feature).
    channels : {"auto", "first", "last"}
        The channel axis of four-dimensional input.
    random_state : int, RandomState or None
        Seed of teacher, students and shuffling. Models must share it to be merged.
    device : str or torch.device
        "auto": the GPU if there is one.

    Attributes
    ----------
    classes_ : ndarray
        Known labels, sorted where they can be, else in order of arrival.
    input_shape_ : tuple
        (features,) or (channels, height, width).
    n_parameters_per_class_, n_parameters_ : int
        Trainable numbers of a class, and of all; the teacher is a seed.
    seed_ : int
        What ``random_state`` came to.
    threshold_ : float
        Novelty above which ``predict(reject_as=…)`` rejects; set by ``calibrate``.

    Notes
    -----
    uint8 input is divided by 255. Scoring is one pass of the teacher and one merged pass of
    all students, in chunks whose largest temporary stays below 64 MiB on a CPU and 256 MiB on a
    GPU (or what one sample needs, if that is more).

    References
    ----------
    Zając, Tuytelaars, van de Ven. Prediction Error-based Classification for
    Class-Incremental Learning. ICLR 2024.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PEC(lr=0.01, teacher_width=1000, mean=8, std=8)
    >>> for label in range(10):                      # one class after another
    ...     model = model.partial_fit(X[:1500][y[:1500] == label], y[:1500][y[:1500] == label])
    >>> round(model.score(X[1500:], y[1500:]), 2)
    0.82
    """

    def __init__(
        self,
        *,
        architecture: str = "auto",
        student_width: int | None = None,
        teacher_width: int | None = None,
        output_dim: int | None = None,
        pool: int | None = None,
        hidden_layers: int = 1,
        activation: str = "auto",
        init: str = "kaiming",
        budget: int | None = None,
        ensemble: int = 1,
        teacher: str | Callable[[Tensor], Tensor] = "random",
        metric: str = "plain",
        lr: float = 0.001,
        schedule: str = "linear",
        expected_samples: int | Mapping[Any, int] | None = None,
        batch_size: int = 1,
        epochs: int = 1,
        shuffle: bool = True,
        equal_budgets: bool | int = False,
        mean: Any = None,
        std: Any = None,
        channels: str = "auto",
        random_state: Any = 0,
        device: str | torch.device = "auto",
    ) -> None:
        self.architecture = architecture
        self.student_width = student_width
        self.teacher_width = teacher_width
        self.output_dim = output_dim
        self.pool = pool
        self.hidden_layers = hidden_layers
        self.activation = activation
        self.init = init
        self.budget = budget
        self.ensemble = ensemble
        self.teacher = teacher
        self.metric = metric
        self.lr = lr
        self.schedule = schedule
        self.expected_samples = expected_samples
        self.batch_size = batch_size
        self.epochs = epochs
        self.shuffle = shuffle
        self.equal_budgets = equal_budgets
        self.mean = mean
        self.std = std
        self.channels = channels
        self.random_state = random_state
        self.device = device

    LASTING = (
        *("architecture", "student_width", "teacher_width", "output_dim", "pool", "hidden_layers"),
        *("activation", "init", "budget", "ensemble", "teacher", "metric", "mean", "std"),
    )
    _pairs: list[Pair]
    _expected: dict[Any, int]

    # --------------------------------------------------------------------- learning

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from scratch; each class's learning rate falls over its own samples.

        Parameters
        ----------
        X : array-like or Tensor
            (n, features), (n, h, w), (n, h, w, c) or (n, c, h, w).
        y : array-like of n hashable labels
        """
        self._check_parameters()
        with self._unchanged_on_error():
            raw = check_samples(self, X, reset=True, layout=self.channels)
            groups = grouped(check_labels(y, len(raw)))
            self._start()
            self._warn_of_scale(raw)
            cut = min(map(len, groups.values())) if self.equal_budgets is True else None
            plans = {label: self._plan(len(at), cut) for label, at in groups.items()}
            self._expected = {label: len(order) for label, (order, _) in plans.items()}
            return self._learn(raw, groups, plans)

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        *,
        order: ArrayLike | None = None,
    ) -> Self:
        """Go on learning: one sample or many, of known classes or new ones.

        Parameters
        ----------
        X : array-like or Tensor
            Samples, learned once each, in their order, unless ``order`` says otherwise.
        y : array-like of n hashable labels
        classes : ignored
            New classes need no announcement; here for scikit-learn's sake.
        order : array-like of int, optional
            Positions of samples, as they are to be learned: the same one may come again and
            again. The teacher is asked only once for each.
        """
        self._check_parameters()
        first = not hasattr(self, "classes_")
        if self.equal_budgets is True:
            raise ValueError(
                "equal_budgets=True needs the sizes of all classes, which partial_fit cannot "
                "know; give the number of updates per class, or use fit"
            )
        with self._unchanged_on_error():
            raw = check_samples(self, X, reset=first, layout=self.channels)
            groups = grouped(check_labels(y, len(raw)))
            if first:
                self._start()
                self._warn_of_scale(raw)
            orders = split_order(order, groups)
            plans = {label: self._continued(label, own) for label, own in orders.items()}
            with one_thread(_updates(plans) < LONG and self._small):
                return self._learn(raw, groups, plans)

    @property
    def _small(self) -> bool:
        """Whether a CPU spends more time on calls than on the arithmetic of a sample."""
        return all(p.students.small and isinstance(p.teacher, Teacher) for p in self._pairs)

    def _plan(self, n: int, cut: int | None) -> tuple[Tensor, list[float]]:
        """Order and learning rates of a class of n samples in ``fit``.

        The shuffling depends on the seed and on n alone: not on the class or its company.
        """
        generator = torch.Generator().manual_seed(self._seed(ORDER, 0))
        length = int(self.epochs) * (n if cut is None else cut)
        if cut is None and self.equal_budgets is not False:
            length, cut = int(self.equal_budgets * self.batch_size), n
        passes: list[Tensor] = []
        for _ in range(-(-length // (n if cut is None else cut))):
            order = torch.randperm(n, generator=generator) if self.shuffle else torch.arange(n)
            passes.append(order[:cut])
        order = torch.cat(passes)[:length]
        return order, self._rates(0, length, length)

    def _continued(self, label: Any, order: Tensor) -> tuple[Tensor, list[float]]:
        """Order and learning rates of the next samples of a class in ``partial_fit``."""
        seen = self._seen[self._slots[label]] if label in self._slots else 0
        if self.equal_budgets is not False:
            order = order[: max(0, self.equal_budgets * self.batch_size - seen)]
        return order, self._rates(seen, len(order), self._awaited(label))

    def _awaited(self, label: Any) -> int | None:
        """Return the samples over which a class's learning rate falls, if they are known."""
        given = self.expected_samples
        expected = given.get(label) if isinstance(given, Mapping) else given
        return self._expected.get(label, expected)

    def _rates(self, seen: int, n: int, expected: int | None) -> list[float]:
        """Return the learning rates of a class's next n samples."""
        if self.schedule == "constant" or expected is None:
            return [float(self.lr)] * n
        left = (1 - t / expected if t < expected else AFTER for t in range(seen, seen + n))
        return [float(self.lr) * share for share in left]

    def _learn(
        self,
        raw: Any,
        groups: dict[Any, NDArray[np.intp]],
        plans: dict[Any, tuple[Tensor, list[float]]],
    ) -> Self:
        quick = _updates(plans) < FEW and all(isinstance(p.teacher, Teacher) for p in self._pairs)
        wait = uninterrupted() if quick else contextlib.nullcontext()
        with wait, self._as_before(groups, copies=not quick):
            known = len(self._labels)
            for label in groups:
                if label not in self._slots:
                    self._add_class(label)
                    for pair in self._pairs:
                        pair.students.add()
            totals: dict[int, Tensor] = {}
            for pair in self._pairs:
                lessons = self._lessons(pair, raw, groups, plans)
                for slot, errors in pair.students.learn(lessons, int(self.batch_size)):
                    totals[slot] = totals[slot] + errors if slot in totals else errors
            for slot, errors in totals.items():
                self._seen[slot] += len(errors)
                if not self._whitened:
                    mean = errors[-RECENT:].double().cpu().numpy() / len(self._pairs)
                    self._remember(slot, mean)
            if len(self._labels) > known:
                self._name_classes()
        return self

    @contextlib.contextmanager
    def _as_before(self, labels: Iterable[Any], *, copies: bool) -> Iterator[None]:
        """Drop new classes if learning fails; known ones are put back to what they are now.

        Without ``copies`` of their students these stay as they have become: they are for where
        a teacher may fail or Ctrl-C come half-way.
        """
        known, seen, recent = len(self._labels), list(self._seen), list(self._recent)
        slots = [self._slots[label] for label in labels if label in self._slots]
        with contextlib.ExitStack() as stack:
            for pair in self._pairs if copies else ():
                stack.enter_context(pair.students.unchanged_on_error(slots))
            try:
                yield
            except BaseException:
                for slot in reversed(range(known, len(self._labels))):
                    self._drop(slot)
                self._seen, self._recent = seen, recent
                raise

    def _lessons(
        self,
        pair: Pair,
        raw: Any,
        groups: dict[Any, NDArray[np.intp]],
        plans: dict[Any, tuple[Tensor, list[float]]],
    ) -> Iterator[Lesson]:
        """Make each class's lesson when it is asked for: one at a time is in memory.

        The teacher answers for each class apart, so that its answers, to the last bit, do
        not depend on which other classes there are.
        """
        for label, at in groups.items():
            order, rates = plans[label]
            if len(order):
                x, slot = self._tensor(raw[at]), self._slots[label]
                weights = self._weights(label, slot, len(order)) if pair.students.moment else None
                yield pair.lesson(slot, x, order, rates, weights, int(self.batch_size))

    @property
    def _whitened(self) -> bool:
        return self._pairs[0].students.moment is not None

    def _threshold(self, quantile: float | None = None) -> float:
        if self._whitened and (quantile is not None or not hasattr(self, "threshold_")):
            raise ValueError(
                "the stream tells no threshold with metric='whitened', since it settles only as "
                "samples are learned: calibrate(X) with samples of known classes"
            )
        return super()._threshold(quantile)

    def _weights(self, label: Any, slot: int, n: int) -> Tensor:
        """Return what the errors of a class's next n samples count in their covariance."""
        t = torch.arange(1.0, n + 1) + self._seen[slot]
        expected = self._awaited(label)
        share = t / (t + SETTLED) if expected is None else (t / expected).clamp(max=1)
        return share.square()

    # ---------------------------------------------------------------------- scoring

    def _class_errors(self, raw: Any) -> NDArray[np.float64]:
        out = np.zeros((len(raw), len(self._labels)))
        room = most(self._pairs[0].students.start.device) // self.n_features_in_
        held = max(1, min(SCORED, room))
        with one_thread(len(raw) == 1 and self._small):
            for start in range(0, len(raw), held):
                x = self._tensor(raw[start : start + held])
                for pair in self._pairs:
                    errors = pair.students.errors(x, pair.teacher(x))
                    out[start : start + held] += errors.cpu().numpy()
        return out / len(self._pairs)

    # ------------------------------------------------------------- merging, forgetting

    def merge(self, other: "PEC") -> Self:
        """Take over the classes of a model trained apart; as if trained together, bit for bit.

        Parameters
        ----------
        other : PEC
            Fitted, with the same seed and settings, and with none of this model's classes.
        """
        from pecil.pec.merging import check_apart, check_mergeable

        check_mergeable(self, other)
        check_apart(self, other)
        with self._whole_or_not():
            self._join(other)
        return self

    def _join(self, other: "PEC") -> None:
        for mine, theirs in zip(self._pairs, other._pairs, strict=True):
            students = theirs.students
            mine.students.add(students.rows, students.moments, students.steps)
            if mine.students.moment is not None and students.moment is not None:
                mine.students.moment.merge(students.moment)
        for label in other._labels:
            if (expected := other._awaited(label)) is not None:
                self._expected[label] = expected
            slot = self._add_class(label)
            self._seen[slot] = other._seen[other._slots[label]]
            self._recent[slot] = other._recent[other._slots[label]].copy()
        self._forget_threshold()
        self._name_classes()

    def _keep_the_old(self) -> None:
        super()._keep_the_old()
        self._expected = dict(self._expected)
        self._pairs = [replace(pair, students=copy.deepcopy(pair.students)) for pair in self._pairs]

    def forget(self, label: Any) -> Self:
        """Remove a class exactly: the model is what it would be had it never seen it.

        A ``threshold_`` set by ``calibrate`` goes too, since it may rest on that class.
        """
        self._forget(label)
        return self

    def _drop(self, slot: int) -> None:
        self._expected.pop(self._labels[slot], None)
        self._remove_class(slot)
        for pair in self._pairs:
            pair.students.remove(slot)

    # ----------------------------------------------------------------- saving, loading

    def save(self, path: str | os.PathLike[str], *, optimizer: bool = True) -> None:
        """Write the model into one safetensors file, whole or not at all.

        Parameters
        ----------
        path : path-like
        optimizer : bool
            Keep the optimiser's state, so that learning can go on after loading exactly as
            if it had not stopped; without it the file is a third of the size.
        """
        from pecil.pec.saving import save

        save(self, path, optimizer=optimizer)

    @property
    def _teachers(self) -> list[Any]:
        return [pair.teacher for pair in self._pairs]

    def _state(self, optimizer: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for k, pair in enumerate(self._pairs):
            tensors[f"{k}.students"] = pair.students.rows
            if optimizer:
                tensors[f"{k}.first"], tensors[f"{k}.second"] = pair.students.moments
            if (moment := pair.students.moment) is not None:
                tensors[f"{k}.moment"], tensors[f"{k}.weight"] = moment.matrix, moment.weight
        values = {
            "expected": list(self._expected.items()),
            "steps": [pair.students.steps for pair in self._pairs],
        }
        return values, tensors

    def _set_state(self, values: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for k, pair in enumerate(self._pairs):
            rows = tensors[f"{k}.students"].to(self.device_)
            if f"{k}.first" in tensors:
                names = (f"{k}.first", f"{k}.second")
                moments = [tensors[name].to(self.device_) for name in names]
                pair.students.add(rows, moments, values["steps"][k])
            else:
                pair.students.add(rows)
            if (moment := pair.students.moment) is not None:
                moment.matrix.copy_(tensors[f"{k}.moment"])
                moment.weight.copy_(tensors[f"{k}.weight"])
        self._expected = dict(values["expected"])

    # ------------------------------------------------------------------------ set-up

    @property
    def n_parameters_per_class_(self) -> int:
        """Trainable numbers of one class."""
        check_is_fitted(self, "classes_")
        return sum(pair.students.architecture.n_parameters for pair in self._pairs)

    @property
    def n_parameters_(self) -> int:
        """Trainable numbers of all classes, and those of the whitened metric."""
        check_is_fitted(self, "classes_")
        dims = [p.students.architecture.output_dim for p in self._pairs if p.students.moment]
        return self.n_parameters_per_class_ * len(self._labels) + sum(
            d * (d + 1) // 2 for d in dims
        )

    @property
    def macs_(self) -> int | None:
        """Multiply-accumulate operations to classify one sample; None with a callable teacher."""
        check_is_fitted(self, "classes_")
        total = 0
        for pair in self._pairs:
            if isinstance(pair.teacher, CustomTeacher):
                return None
            total += pair.teacher.architecture.macs
            total += len(self._labels) * pair.students.architecture.macs
        return total

    def _start(self) -> None:
        """Draw teachers and the students' common starting point."""
        self._set_up()
        self._expected = {}
        self._pairs = []
        for member in range(self.ensemble):
            teacher = self._teacher(member)
            seed = self._seed(STUDENT, member)
            students = Students(self._student(teacher), self.init, seed, self.device_)
            if self.metric == "whitened":
                students.moment = Moment(students.architecture.output_dim, self.device_)
            self._pairs.append(Pair(teacher, students))

    def _teacher(self, member: int) -> Teacher | CustomTeacher:
        if callable(self.teacher):
            return CustomTeacher(self.teacher, self.input_shape_, self.device_)
        student = self._student(None)
        width = int(self.teacher_width or DEFAULTS[student.kind][1] * student.width)
        return Teacher(
            replace(student, width=width), self.init, self._seed(TEACHER, member), self.device_
        )

    def _student(self, teacher: Teacher | CustomTeacher | None) -> Architecture:
        """Resolve the students' architecture from the parameters and the input's shape."""
        kind = self.architecture
        grey = len(self.input_shape_) == 3 and self.input_shape_[0] == 1
        small = len(self.input_shape_) == 1 or (grey and max(self.input_shape_) <= 32)
        if kind == "auto":
            kind = "mlp" if small else "conv"
        if kind == "conv" and len(self.input_shape_) != 3:
            raise ValueError(
                "architecture='conv' needs images, (n, h, w), (n, h, w, c) or (n, c, h, w), but "
                f"X holds vectors of {self.input_shape_[0]} features; choose 'mlp' or 'auto'"
            )
        width, _, outputs, pool = DEFAULTS[kind]
        auto = "relu" if kind == "conv" else "gelu"
        architecture = Architecture(
            kind=kind,
            input_shape=self.input_shape_,
            width=int(self.student_width or width),
            output_dim=int(self.output_dim or outputs),
            pool=int(self.pool or pool),
            hidden_layers=int(self.hidden_layers),
            activation=auto if self.activation == "auto" else self.activation,
        )
        if isinstance(teacher, CustomTeacher):
            return replace(architecture, output_dim=teacher.output_dim)
        if self.budget is not None:
            return architecture.fitting(int(self.budget // self.ensemble))
        if kind == "linear" and self.output_dim is None:
            usual = "mlp" if small else "conv"
            width, _, outputs, pool = DEFAULTS[usual]
            like = Architecture(usual, self.input_shape_, width, outputs, pool)
            return architecture.fitting(max(like.n_parameters, architecture.n_parameters))
        return architecture

    def _check_parameters(self) -> None:
        one_of("architecture", self.architecture, ("auto", *KINDS))
        one_of("activation", self.activation, ("auto", *ACTIVATIONS))
        one_of("init", self.init, INITS)
        one_of("metric", self.metric, ("plain", "whitened"))
        one_of("schedule", self.schedule, ("linear", "constant"))
        one_of("channels", self.channels, ("auto", "first", "last"))
        if not callable(self.teacher):
            one_of("teacher", self.teacher, ("random",))
        _ = self.device_
        self._check_numbers()
        if self.budget is not None and self.output_dim is not None:
            raise ValueError("give either budget or output_dim: a budget sets the output_dim")
        if callable(self.teacher) and (self.budget is not None or self.output_dim is not None):
            raise ValueError("a callable teacher sets output_dim: give neither it nor a budget")

    def _check_numbers(self) -> None:
        for name in ("hidden_layers", "ensemble", "batch_size", "epochs"):
            count(name, getattr(self, name))
        for name in ("student_width", "teacher_width", "output_dim", "pool", "budget"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name))
        if not isinstance(self.equal_budgets, bool):
            count("equal_budgets", self.equal_budgets)
        if not isinstance(self.lr, Real) or not 0 < self.lr < float("inf"):
            raise ValueError(f"lr must be a positive number, but it is {self.lr!r}")
        expected = self.expected_samples
        if expected is not None:
            for value in expected.values() if isinstance(expected, Mapping) else (expected,):
                count("expected_samples", value)
