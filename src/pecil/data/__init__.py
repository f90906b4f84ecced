"""Datasets and streams of tasks.

`load` finds a dataset by its name in `DATASETS`, or reads the user's own files;
`stream` turns it into tasks. Class order, shuffling and seed are decided here and
nowhere else. `Features` puts a frozen network before a learner.

Examples
--------
>>> from pecil.data import load, stream
>>> digits = load("digits")
>>> for task in stream(digits, "5/2", seed=0, batch_size=100):
...     print(task.classes, [len(y) for _, y in task.batches()])
(0, 1) [100, 100, 89]
(2, 3) [100, 100, 89]
(4, 5) [100, 100, 91]
(6, 7) [100, 100, 89]
(8, 9) [100, 100, 84]
"""

from typing import TYPE_CHECKING, Any

from pecil.data.images import ImageFiles
from pecil.data.registry import DATASETS, Dataset, DatasetInfo, load
from pecil.data.stream import Stream, Task, stream

if TYPE_CHECKING:
    from pecil.data.features import Features, StreamPipeline

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetInfo",
    "Features",
    "ImageFiles",
    "Stream",
    "StreamPipeline",
    "Task",
    "load",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Import torch and scikit-learn only when features are asked for."""
    if name not in __all__:
        raise AttributeError(f"module 'pecil.data' has no attribute {name!r}")
    from pecil.data import features

    return getattr(features, name)
