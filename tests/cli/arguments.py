"""Arguments for small models, and samples."""

import numpy as np

SMALL = [
    *("--method", "pec", "--teacher-width", "60", "--student-width", "4"),
    *("--set", "output_dim=10"),
]


WHITENED = ["--memory", "2000"]


def samples(labels, n=30, seed=0):
    """Draw vectors around a different corner for each label."""
    random = np.random.default_rng(seed)
    y = np.array(labels).repeat(n)
    corners = {label: 6 * np.eye(8)[k] for k, label in enumerate("abcdefgh")}
    x = np.stack([corners[label] for label in y]) + random.normal(size=(len(y), 8))
    return x.astype(np.float32), y
