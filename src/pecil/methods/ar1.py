"""AR1: CWR+ whose layers below go on learning, held by SI.

The output layer is that of CWR+ (`pecil.methods.cwr`): from zero for every task, copied to a store
at its end. The layers below are not frozen; what mattered to earlier tasks is held as in SI
(`pecil.methods.si`), but no parameter matters more than Ω_max, so that none gets stuck:

    loss(x, y) = -log softmax(f(x))_y + c Σ_j Ω_j (θ_j - θ*_j)²      j of the layers below
    Ω_j  <-  min(Ω_max, max(0, Ω_j + ω_j / ((θ_j - θ*_j)² + ξ)))     at the end of a task

Maltoni and Lomonaco (2019). Continuous learning in single-incremental-task scenarios. Neural
Networks 116.
"""

from collections.abc import Sequence
from typing import Any

from pecil.methods.cwr import CWR
from pecil.methods.si import SI


class AR1(CWR, SI):
    """CWR+ above, SI below (Maltoni and Lomonaco 2019).

    As in van de Ven et al. (2021), with whose setup the paper compares it: ω sums up moves times
    slopes of the loss with its penalty.

    Parameters
    ----------
    n_classes, input_shape, **given
        As in `pecil.methods.trained.Trained`.
    c : float
        The weight of the penalty.
    xi : float
        ξ, which keeps Ω small for parameters that hardly move.
    omega_max : float
        Ω_max.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, axis=0), np.arange(4).repeat(50)
    >>> learner = AR1(4, (4,), omega_max=0.01, lr=0.01, active="seen")
    >>> for task in (y < 2, y >= 2):
    ...     learner.begin_task({label: 500 for label in np.unique(y[task]).tolist()})
    ...     for rows in [np.random.default_rng(0).permutation(np.flatnonzero(task))] * 10:
    ...         learner.learn(x[rows], y[rows])
    ...     learner.end_task()
    >>> round(float(learner.importance.max()), 4)
    0.01
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        c: float = 1.0,
        xi: float = 0.1,
        omega_max: float = 0.1,
        **given: Any,
    ) -> None:
        self.omega_max = omega_max
        super().__init__(
            n_classes,
            input_shape,
            plus=True,
            freeze=False,
            c=c,
            xi=xi,
            path="penalised",
            **given,
        )

    def end_task(self) -> None:
        """Copy the output weights; say what matters, within limits, in the layers below."""
        super().end_task()
        above = sum(values.numel() for values in self.network.head.parameters())
        self.importance.clamp_(0, self.omega_max)[-above:] = 0
