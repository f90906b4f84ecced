"""Fine-tuning: one network, trained on the stream as it comes.

McCloskey and Cohen (1989): what it learned about earlier classes is overwritten
as soon as they stop coming. The lower end of every class-incremental benchmark.

    loss(x, y) = -log softmax(f(x))_y    over all classes, those to come included

With the *labels trick* (Zeno, Golan, Hoffer and Soudry 2018) the softmax has the classes of the
task alone, so that learning them takes nothing from the scores of others. With one class a task
nothing is left to learn.
"""

from pecil.methods.trained import Trained


class FineTuning(Trained):
    """A network trained by cross-entropy on what comes; forgets (McCloskey and Cohen 1989).

    Parameters are those of `pecil.methods.trained.Trained`.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> learner = FineTuning(n_classes=3, input_shape=(2,), lr=0.01)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 1000})
    ...     for _ in range(20):
    ...         learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> learner.scores(x).argmax(axis=1).tolist() == [1] * 100  # class 0 is forgotten
    True
    """
