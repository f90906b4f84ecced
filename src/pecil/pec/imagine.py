"""Samples that a class of PEC would find its own: descend its error in the space of inputs.

Zając, Tuytelaars and van de Ven (ICLR 2024, Appendix C.5) ask so whether PEC is secretly a
generative model::

    start    x at random
    descend  min_x  ‖g_c(x) − h(x)‖²      by Adam

Student g_c and teacher h stay as they are. The answer is no: see docs/imagine.md.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pecil.pec.base import count
from pecil.pec.estimator import PEC
from pecil.pec.inputs import check_samples, to_tensor
from pecil.pec.machine import most
from pecil.pec.networks import Stack, draw, forward
from pecil.pec.teacher import Teacher

Progress = Callable[[int, int], object]


def imagine(
    model: PEC,
    labels: Sequence[Any] | NDArray[Any],
    *,
    start: ArrayLike | None = None,
    updates: int = 30_000,
    lr: float = 0.00003,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    random_state: int = 0,
    progress: Progress | None = None,
) -> NDArray[np.float32]:
    """Return one input for each label, at which the class's error is small.

    Parameters
    ----------
    model : PEC
        Fitted, with a teacher of its own (not a callable); it is not changed.
    labels : sequence of n labels
        Of the classes to imagine, as many times as samples are wanted.
    start : array-like of n samples, optional
        Where the descent starts; by default at random, uniform in [0, 1).
    updates : int
        Steps of descent.
    lr : float
        The learning rate: with Adam about how far an input number moves in one step.
    optimizer : callable
        Makes the optimiser, as ``torch.optim.Adam`` and ``torch.optim.SGD`` do.
    random_state : int
        Seed of the start.
    progress : callable, optional
        Called with the updates done and the updates in all.

    Returns
    -------
    ndarray of shape (n, *input_shape_)
        Floats as the model takes them: images are (channels, height, width), and what was learned
        as bytes is in units of 255. They are not cut to any range.

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> model = PEC(lr=0.01, teacher_width=500, device="cpu").fit(X / 16, y)
    >>> images = imagine(model, [3, 3, 8], updates=200, lr=0.005)
    >>> images.shape, model.predict(images).tolist()
    ((3, 64), [3, 3, 8])
    """
    check_fitting(model)
    count("updates", updates)
    slots = [model._slot_of(label) for label in labels]
    if start is None:
        chance = torch.Generator().manual_seed(random_state)
        x = torch.rand(len(slots), *model.input_shape_, generator=chance)
    else:
        raw = check_samples(model, start, reset=False, layout=model.channels)
        x = to_tensor(raw, model.device_, None, None)
        if len(x) != len(slots):
            raise ValueError(
                f"start must hold a sample for each of the {len(slots)} labels, but it holds "
                f"{len(x)}"
            )
    x = x.to(model.device_).requires_grad_()
    error = differentiable(model, slots)
    descent = optimizer([x], lr=lr)
    for done in range(1, updates + 1):
        x.grad = None
        for part in error(x):
            torch.autograd.backward(part.sum())
        descent.step()
        if progress is not None:
            progress(done, updates)
    return x.detach().cpu().numpy()


def check_fitting(model: Any) -> None:
    """Raise ValueError unless a model is a PEC whose teachers can be differentiated."""
    if not isinstance(model, PEC) or callable(model.teacher):
        came = type(model).__name__
        raise ValueError(
            "expected a PEC with a teacher of its own, got "
            + (f"one whose teacher is {model.teacher!r}" if isinstance(model, PEC) else f"a {came}")
        )
    check_is_fitted(model, "classes_")


def differentiable(model: PEC, slots: list[int]) -> Callable[[Tensor], Iterator[Tensor]]:
    """Return the error of n students, each on a sample of its own, as a function of the samples.

    The function takes samples (n, *input_shape), as a user gives them, and yields the errors of
    one part of them after the other, so that no more than one part's graph is in memory.
    """
    pairs = []
    for pair in model._pairs:
        students, teacher = pair.students, pair.teacher
        assert isinstance(teacher, Teacher)
        whitener = None if students.moment is None else students.moment.whitener().T
        pairs.append((_weights(teacher), students, whitener))
    rows = max(1, most(model.device_) // max(t.architecture.temporaries for t, _, _ in pairs))

    def part(x: Tensor, own: list[int]) -> Tensor:
        x, total = model._tensor(x), torch.zeros(len(x), device=x.device)
        for teacher, students, whitener in pairs:
            arch = students.architecture
            nets = Stack.over(arch, students.rows[own])
            inputs = arch.inputs(x)
            wanted = forward(teacher, inputs.unsqueeze(0))[0][0]  # (n, d)
            error = forward(nets, inputs.unsqueeze(1))[0][:, 0] - wanted
            if whitener is not None:
                error = error @ whitener
            total = total + error.square().mean(1)
        return total / len(pairs)

    def errors(x: Tensor) -> Iterator[Tensor]:
        for first in range(0, len(x), rows):
            yield part(x[first : first + rows], slots[first : first + rows])

    return errors


def _weights(teacher: Teacher) -> Stack:
    """Draw a teacher's values again: it keeps them in whatever order is fastest."""
    architecture, init, seed, device = teacher._recipe
    row = draw(architecture, init, torch.Generator().manual_seed(seed))
    return Stack.over(architecture, row.to(device))
