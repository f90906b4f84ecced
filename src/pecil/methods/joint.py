"""Joint training: one network, all classes at once.

The stream's samples of all classes are one task, mixed (Caruana 1997 on learning together).
Nothing comes later that could overwrite anything: the upper end of every class-incremental
benchmark, for the same network and the same number of passes.

    loss(x, y) = -log softmax(f(x))_y    over all classes
"""

from collections.abc import Mapping, Sequence

from pecil.methods.finetuning import FineTuning


class Joint(FineTuning):
    """The network of `FineTuning`, trained on all classes together (Caruana 1997).

    All else is as there: Adam, cross-entropy over all classes, the linear schedule over all
    passes. The paper has it with 1 epoch and with 50; how often the samples pass by is the
    stream's affair.

    Parameters are those of `FineTuning`.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = Joint(n_classes=2, input_shape=(2,), lr=0.01)
    >>> learner.begin_task({0: 250, 1: 250})
    >>> for _ in range(5):
    ...     learner.learn(x, y)
    >>> learner.end_task()
    >>> bool((learner.scores(x).argmax(axis=1) == y).all())
    True
    """

    finished = False

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Begin the only task."""
        if self.finished:
            raise ValueError(
                "joint training has one task, with all classes (the split joint or 1/C), but "
                f"another began, with the classes {', '.join(map(str, counts))}"
            )
        super().begin_task(counts, passes)

    def end_task(self) -> None:
        """Remember that all has come."""
        self.finished = True
