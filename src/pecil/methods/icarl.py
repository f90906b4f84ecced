"""iCaRL: exemplars chosen by herding, old outputs distilled, the nearest mean names the class.

Rebuffi, Kolesnikov, Sperl and Lampert (2017), "iCaRL: Incremental Classifier and Representation
Learning", CVPR. The buffer has the same number of exemplars for each class seen. Each pass over a
task goes over the task's samples and the exemplars, mixed; every output of a class seen is a yes
or no of its own, and for the classes of earlier tasks the answer of the network as it was before
the task is the target:

    loss(x, y) = mean_c BCE(f_c(x), t_c),    t_c = σ(f_c^old(x)) for old classes, else [y = c]

When the task ends, exemplars are chosen one by one so that their mean stays close to the class's,
in the features φ of the network; classes are named by the means of their exemplars:

    p_k = argmin_x ‖ μ − (φ(x) + Σ_{j<k} φ(p_j)) / k ‖,    predict argmin_c ‖ φ(x) − μ_c ‖²

Here, too, is what BiC and X-DER share with it: a task's samples held until the task ends.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pecil.methods.buffer import Reservoir
from pecil.methods.learner import Array
from pecil.methods.networks import Network
from pecil.methods.trained import SCORED, Replaying

Rows = dict[str, Tensor]


class Revisiting(Replaying):
    """A network with a buffer that is filled when a task ends; its first pass is held until then.

    Parameters
    ----------
    n_classes, input_shape, **given
        See `pecil.methods.trained.Trained`.
    buffer : int
        Samples that may be kept.
    """

    may_mask = False
    lasting = False

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew, remember which classes came before."""
        super().begin_task(counts, passes)
        self.past = self.seen.clone()
        self.known = self.past | self.current
        self.held: list[Rows] = []
        self.came = 0

    def hold(self, x: Array, y: Array) -> bool:
        """Hold samples of the first pass; say whether these begin the task or are a whole pass."""
        begun, first = self.came, self.of_first_pass(self.came, len(y))
        self.came += len(y)
        if first:
            raw, labels = (torch.as_tensor(part, device=self.device) for part in (x, y))
            self.held.append({"x": raw[:first].clone(), "y": labels[:first].clone()})
        starts = accumulate(self.of_pass, initial=0)
        return begun == 0 or (begun, len(y)) in zip(starts, self.of_pass, strict=False)

    @property
    def n_held(self) -> int:
        """The samples of the task that are held."""
        return sum(len(part["y"]) for part in self.held)

    def mixed(self, parts: Sequence[Rows]) -> Rows:
        """Return the rows of all parts together, in random order."""
        rows = together(parts)
        order = torch.randperm(len(rows["y"]), generator=self.buffer.generator).to(self.device)
        return {name: values[order] for name, values in rows.items()}


class Merging(Revisiting, ABC):
    """Goes over a task's samples and those of the buffer together, mixed.

    What `learn` is given is a pass, and the buffer is merged into it. In smaller portions the
    buffer comes with the first one of a task. The schedule counts what was merged.
    """

    old_network: Network | None = None

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew; nothing is merged yet."""
        super().begin_task(counts, passes)
        self.extra = 0

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch of the samples and the buffer."""
        if not len(y):
            return
        given: Any = x, y
        if self.hold(x, y):
            rows = self.merged()
            self.extra = len(rows["y"]) - self.n_held
            self.expected = self.steps_with(self.extra)
            given = (rows[name][: len(y) + self.extra] for name in ("x", "y"))
        super().learn(*given)

    def merged(self) -> Rows:
        """Return the task's samples and those of the buffer, mixed."""
        return self.mixed(self.parts())

    def parts(self) -> list[Rows]:
        """Return the task's samples, portion by portion, and then those of the buffer."""
        return [*self.held, self.buffer.fields] if len(self.buffer) else self.held

    def end_task(self) -> None:
        """Remember the network, fill the buffer, let go of the task's samples."""
        self.optimizer.zero_grad()
        self.old_network = deepcopy(self.network).eval()
        if self.held:
            self.fill()
        self.held = []

    @abstractmethod
    def fill(self) -> None:
        """Put samples of the task into the buffer."""


class ICaRL(Merging):
    """Herded exemplars, distilled sigmoids, nearest class mean (Rebuffi et al. 2017).

    The buffer has capacity // classes seen exemplars of each class, in the order in which herding
    chose them; when classes are added, the last ones go. Chance decides the order of samples
    and exemplars within a pass.

    The paper's results were obtained with code that departs from iCaRL, and so does this class
    unless ``released`` is False: the mean of a class is not that of its exemplars, but a ← (a + b)
    / 2 over the means b of batches of them, so that the last ones count the most; and features
    are not brought to length 1, neither for means nor for herding.

    Parameters
    ----------
    n_classes, input_shape, **given
        See `pecil.methods.trained.Trained`.
    buffer : int
        Exemplars that may be kept, of all classes together.
    released : bool
        Whether to do as the paper's released code; if not, as iCaRL's authors.

    Examples
    --------
    >>> import numpy as np
    >>> x, y = np.eye(2, dtype=np.float32).repeat(50, axis=0), np.arange(2).repeat(50)
    >>> x += np.random.default_rng(0).normal(0, 0.1, x.shape).astype(np.float32)
    >>> learner = ICaRL(n_classes=3, input_shape=(2,), lr=0.01, buffer=10)
    >>> for label in (0, 1):
    ...     learner.begin_task({label: 50})
    ...     learner.learn(x[y == label], y[y == label])
    ...     learner.end_task()
    >>> learner.n_buffered, bool((learner.scores(x).argmax(axis=1) == y).all())
    (10, True)
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        released: bool = True,
        **given: Any,
    ) -> None:
        if buffer < n_classes:
            raise ValueError(
                f"buffer: expected an exemplar of each class at least, {n_classes}, got {buffer}"
            )
        super().__init__(n_classes, input_shape, buffer=buffer, **given)
        self.released = released
        self.answers = torch.eye(n_classes, device=self.device)

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start anew; the outputs of classes that do not come in the task are distilled."""
        super().begin_task(counts, passes)
        self.distilled = self.past & ~self.current
        self.outputs = self.known.nonzero()[:, 0]
        self.means: Tensor | None = None

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch of the samples and the buffer."""
        super().learn(x, y)
        self.means = None

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return the binary cross-entropy of the outputs of the classes that came."""
        inputs = self.view(raw)
        targets = self.answers[labels]
        if self.old_network is not None:
            with torch.no_grad():
                targets = torch.where(self.distilled, self.old_network(inputs).sigmoid(), targets)
        logits = self.network(inputs)[:, self.outputs]
        return F.binary_cross_entropy_with_logits(logits, targets[:, self.outputs])

    def fill(self) -> None:
        """Shorten the lists of old exemplars, herd new ones."""
        share = self.buffer.capacity // int(self.seen.sum())
        rows = together(self.held)
        came = rows["y"].unique()
        keep_first(self.buffer, share, but=came)
        for label in came:
            own = (rows["y"] == label).nonzero()[:, 0]
            chosen = own[herded(self.features(rows["x"][own]), share)]
            self.buffer.add(x=rows["x"][chosen], y=rows["y"][chosen])
        self.means = None

    @torch.no_grad()
    def features(self, raw: Tensor) -> Tensor:
        """Return what the network's body makes of samples, in evaluation mode."""
        training = self.network.training
        self.network.eval()
        parts = [self.network.body(self.view(part, False)) for part in raw.split(SCORED)]
        self.network.train(training)
        return self.scaled(torch.cat(parts))

    def scaled(self, features: Tensor) -> Tensor:
        """Bring features to length 1, unless told not to."""
        return features if self.released else F.normalize(features)

    def class_means(self) -> Tensor:
        """Return the means of the exemplars, (n_classes, features), infinite where are none.

        Within a task, its samples stand for exemplars of classes that have none yet.
        """
        width = self.network.head.in_features
        means = torch.full((self.n_classes, width), torch.inf, device=self.device)
        parts = [together(self.held)] if self.held else []
        parts += [self.buffer.fields] if len(self.buffer) else []
        for rows in parts:
            for label in rows["y"].unique():
                means[label] = self.centre(self.features(rows["x"][rows["y"] == label]))
        return means

    def centre(self, features: Tensor) -> Tensor:
        """Return the mean of features, or what the released code takes for it."""
        if not self.released:
            return self.scaled(features.mean(0, keepdim=True))[0]
        first, *others = (part.mean(0) for part in features.split(self.batch_size))
        for other in others:
            first = (first + other) / 2
        return first

    def logits(self, inputs: Tensor) -> Tensor:
        """Return minus the squared distances of the features to the means."""
        features = self.scaled(self.network.body(inputs))
        if self.means is None:
            self.means = self.class_means()
        mode = "donot_use_mm_for_euclid_dist"  # the same, however inputs are split
        return -torch.cdist(features, self.means, compute_mode=mode).square()


def herded(features: Tensor, n: int) -> Tensor:
    """Choose rows one by one so that their mean stays as close as can be to that of all.

    Parameters
    ----------
    features : Tensor, (rows, features)
    n : int
        How many to choose; all if there are fewer.

    Returns
    -------
    Tensor
        The rows chosen, in the order in which they were.

    Examples
    --------
    >>> herded(torch.tensor([[0.0], [1.0], [4.0], [7.0]]), 3).tolist()
    [2, 1, 3]
    """
    mean, sizes = features.mean(0), features.square().sum(1)
    lacking = torch.zeros_like(mean)  # k times the mean, less the sum of those chosen
    chosen = torch.zeros(min(n, len(features)), dtype=torch.long, device=features.device)
    for k in range(len(chosen)):
        lacking = lacking + mean
        # the squared distance of (row + sum chosen) from k times the mean, but for a constant
        best = (sizes - 2 * features @ lacking).argmin()
        chosen[k] = best
        lacking = lacking - features[best]
        sizes = sizes.index_fill(0, best, torch.inf)
    return chosen


def keep_first(buffer: Reservoir, share: int, by: str = "y", but: Tensor | None = None) -> None:
    """Keep the first rows of each group alone, in their order.

    Parameters
    ----------
    buffer : Reservoir
    share : int
        The most to keep of a group.
    by : str
        The field that tells the group.
    but : Tensor, optional
        Groups of which none is to be kept.
    """
    if not len(buffer):
        return
    groups = buffer.fields[by]
    rows = first_of_each(groups, share)
    if but is not None:
        rows = rows[~torch.isin(groups[rows], but)]
    kept = {name: values[rows] for name, values in buffer.fields.items()}
    buffer.seen = 0
    buffer.add(**kept)


def first_of_each(groups: Tensor, share: int) -> Tensor:
    """Return the rows that are among the first of their group, group by group.

    Examples
    --------
    >>> first_of_each(torch.tensor([5, 3, 5, 5, 3, 4]), 2).tolist()
    [1, 4, 5, 0, 2]
    """
    rows = [(groups == group).nonzero()[:share, 0] for group in groups.unique()]
    return torch.cat(rows)


def together(parts: Sequence[Rows]) -> Rows:
    """Return samples and labels of all parts, one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in ("x", "y")}
