"""What the methods share that train a network on the stream, batch by batch."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pecil.methods.buffer import Reservoir
from pecil.methods.learner import Array, scaled
from pecil.methods.networks import INITS, Network, network_for
from pecil.methods.recording import Chance, Recorder
from pecil.pec.machine import device_named

SCHEDULES = ("linear", "constant")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
}
ACTIVE = ("all", "seen")
PADDING = 4  # pixels around a picture of which crops are taken
SCORED = 500  # samples scored at a time
USES = 5  # of the seed; torch looks at its lower 32 bits alone
WEIGHTS, BUFFER, PICTURES, NOISE, SAMPLES = range(USES)


class Trained:
    """A network that learns by cross-entropy and Adam; methods change its loss.

    Unless told otherwise, Adam starts anew with every task, as the schedule always does, and the
    softmax has all classes from the start; a class never seen is never predicted.

    Parameters
    ----------
    n_classes : int
        Outputs of the network.
    input_shape : tuple of int
        Shape of one sample: vectors and grey pictures get a perceptron, colour ones ResNet18.
    hidden : sequence of int
        Widths of the perceptron's hidden layers.
    width : int
        Channels of ResNet18's first stage.
    init : {"xavier", "kaiming"}
        The perceptron's initial values, "kaiming" being PyTorch's default; ResNet18 has these.
    lr : float
        Learning rate.
    optimizer : {"adam", "sgd", "momentum"}
        What takes the steps; "sgd" is plain gradient descent, "momentum" has one of 0.9.
    schedule : {"linear", "constant"}
        Whether the learning rate falls to zero within each task, batch by batch.
    keep_adam : bool
        Whether Adam goes on from task to task with the averages it has.
    batch_size : int
        Samples of a step; what `learn` is given is cut into so many.
    augment : bool
        Whether colour pictures of the stream are cropped at random (4 pixels of black around
        them) and, if ``flip``, mirrored.
    flip : bool
        Whether mirror images belong to the same class.
    labels_trick : bool
        Whether the softmax has the classes of the task alone (Zeno et al. 2018).
    active : {"all", "seen"}
        Else, whether it has all classes or those that have come so far.
    mean, std : float or sequence of float, optional
        Inputs become (x - mean) / std.
    seed : int
        Decides the initial weights and all that is left to chance.
    device : str
        "auto", "cpu", "cuda", ...
    """

    may_mask = True
    """Is the labels trick for this method? Others say themselves which classes compete."""

    lasting = True
    """Can a step that was recorded in one task be played in another one?"""

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        hidden: Sequence[int] = (100, 100),
        width: int = 64,
        init: str = "xavier",
        lr: float = 0.001,
        optimizer: str = "adam",
        schedule: str = "constant",
        keep_adam: bool = False,
        batch_size: int = 10,
        augment: bool = False,
        flip: bool = False,
        labels_trick: bool = False,
        active: str = "all",
        mean: Any = None,
        std: Any = None,
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        for name, given, choice in (
            ("optimizer", optimizer, OPTIMIZERS),
            ("schedule", schedule, SCHEDULES),
            ("init", init, INITS),
            ("active", active, ACTIVE),
        ):
            if given not in choice:
                raise ValueError(f"{name} must be one of {', '.join(choice)}, not {given!r}")
        if type(batch_size) is not int or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number from 1, not {batch_size!r}")
        for name, usual, asked in (
            ("labels_trick", False, labels_trick),
            ("active", "all", active),
        ):
            if asked != usual and not self.may_mask:
                raise ValueError(
                    f"{name}: {type(self).__name__} itself says which classes compete; "
                    f"expected {usual}, got {asked}"
                )
        self.device = device_named(device)
        self.n_classes, self.input_shape = n_classes, tuple(input_shape)
        self.init, self.keep_adam, self.active = init, keep_adam, active
        self.lr, self.schedule, self.batch_size = lr, schedule, batch_size
        self.augment, self.flip, self.labels_trick = augment, flip, labels_trick
        self.mean, self.std = (None if v is None else self._per_channel(v) for v in (mean, std))
        self.seed = seed
        self.pictures = self.generator(PICTURES)
        self.chance = Chance(self.device)
        self.recorder = Recorder(self.chance)
        self.network = self.new_network(n_classes, hidden, width)
        self.seen = torch.zeros(n_classes, dtype=torch.bool, device=self.device)
        self.current = torch.zeros_like(self.seen)  # the classes of the task
        exact = torch.float32 if self.device.type == "cuda" else torch.float64  # as Adam takes it
        self.rate = torch.tensor(lr, dtype=exact, device=self.device)
        self.rule = optimizer
        self.start_optimizer()
        self.begin_task({})

    def new_network(self, n_outputs: int, hidden: Sequence[int], width: int) -> Network:
        """Draw a network for the inputs."""
        chance = self.generator(WEIGHTS)
        made = network_for(
            self.input_shape,
            n_outputs,
            hidden=hidden,
            width=width,
            init=self.init,
            generator=chance,
        )
        return made.to(self.device)

    def generator(self, use: int) -> torch.Generator:
        """Return a generator of one's own, on the CPU, for one use of the seed."""
        return torch.Generator().manual_seed(USES * self.seed + use)

    @property
    def n_parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(p.numel() for p in self.network.parameters())

    # ------------------------------------------------------------------------ learning

    def begin_task(self, counts: Mapping[int, int], passes: Sequence[int] = ()) -> None:
        """Start Adam and its schedule anew."""
        if not self.lasting:
            self.recorder.forget()
        self.current.zero_()
        self.current[list(counts)] = True
        self.of_pass = tuple(passes) or (sum(counts.values()),)  # samples
        self.start_schedule()

    def start_optimizer(self) -> None:
        """Make what changes the network."""
        self.optimizer = self.optimizer_of(self.network)

    def optimizer_of(self, network: nn.Module) -> torch.optim.Optimizer:
        """Make an optimizer; its learning rate is whatever ``rate`` says at each step."""
        make, options = OPTIMIZERS[self.rule]
        if make is torch.optim.Adam:
            options = {"capturable": self.rate.is_cuda}
        made: torch.optim.Optimizer = make(network.parameters(), self.rate, fused=True, **options)
        return made

    def start_schedule(self) -> None:
        """Start Adam anew, in its place, its learning rate to last for the task."""
        self.steps, self.expected = 0, self.steps_with()
        if self.keep_adam:
            return
        for state in self.optimizer.state.values():
            for values in state.values():
                values.zero_()

    def steps_with(self, more: int = 0) -> int:
        """Return the steps of the task if each pass has so many samples more."""
        return max(1, sum(-(-(n + more) // self.batch_size) for n in self.of_pass))

    def of_first_pass(self, came: int, n: int) -> int:
        """Return how many of n samples belong to the first pass, of which so many came before."""
        return n if len(self.of_pass) == 1 else max(0, min(n, self.of_pass[0] - came))

    def learn(self, x: Array, y: Array) -> None:
        """Take a step on every batch."""
        raw, labels = (torch.as_tensor(part, device=self.device) for part in (x, y))
        self.seen[labels] = True
        for some, of in self.batches(raw, labels) if len(raw) else ():
            self.step(some, of)

    def batches(self, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Cut rows into batches."""
        yield from zip(*(part.split(self.batch_size) for part in rows), strict=True)

    def step(self, raw: Tensor, labels: Tensor) -> None:
        """Take one step on a batch of samples as they are."""
        self.recorder(self.shape_of_step(raw), self.take, raw, labels)

    def shape_of_step(self, raw: Tensor) -> Hashable:
        """Return what is the same for steps that handle as many samples in the same way."""
        return len(raw)

    def take(self, raw: Tensor, labels: Tensor) -> None:
        """Do what a step does."""
        if self.schedule == "linear":
            self.rate.copy_(self.chance(self.next_rate))
        self.optimizer.zero_grad()
        torch.autograd.backward(self.loss(raw, labels))
        self.optimizer.step()

    def next_rate(self) -> Tensor:
        """Return the learning rate of the next step of a linear schedule."""
        left = max(0.0, 1 - self.steps / self.expected)
        self.steps += 1
        return torch.tensor(self.lr * left, dtype=self.rate.dtype)

    def loss(self, raw: Tensor, labels: Tensor) -> Tensor:
        """Return what a step makes smaller."""
        return self.cross_entropy(self.network(self.view(raw)), labels)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of -log softmax(f(x))_y, over the classes that compete."""
        return F.cross_entropy(self.masked(logits), labels)

    def masked(self, logits: Tensor) -> Tensor:
        """Return logits, those of classes that do not compete being -inf."""
        if self.labels_trick or self.active == "seen":
            return logits.masked_fill(~self.competing(), -torch.inf)
        return logits

    def competing(self) -> Tensor:
        """Return which classes the softmax has, (n_classes,): all, or those seen or of the task."""
        if self.labels_trick:
            return self.current
        return self.current | (self.seen if self.active == "seen" else True)

    def end_task(self) -> None:
        """Do nothing: nothing is kept."""

    # -------------------------------------------------------------------------- inputs

    def view(self, raw: Tensor, augment: bool | None = None) -> Tensor:
        """Return samples as the network takes them; colour pictures augmented if asked for."""
        x = scaled(raw)
        if len(self.input_shape) == 3:
            x = x.movedim(-1, 1)  # channels first
            if self.augment if augment is None else augment:
                x = self.cropped(x)
        if self.mean is not None:
            x = x - self.mean
        if self.std is not None:
            x = x / self.std
        return x if x.ndim == 4 else x.flatten(1)

    def cropped(self, x: Tensor) -> Tensor:
        """Move each picture (n, c, h, w) by up to 4 pixels, black at the edges; mirror some."""
        n, _, height, width = x.shape
        places = self.chance(
            lambda: torch.randint(2 * PADDING + 1, (2, n, 1), generator=self.pictures)
        )
        rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
        if self.flip:
            mirrored = self.chance(lambda: torch.rand(n, 1, generator=self.pictures) < 0.5)
            columns = torch.where(mirrored, columns.flip(0), columns)
        rows, columns = places[0] + rows, places[1] + columns
        padded = F.pad(x, (PADDING,) * 4).movedim(1, -1)
        each = torch.arange(n, device=x.device).view(-1, 1, 1)
        return padded[each, rows.unsqueeze(2), columns.unsqueeze(1)].movedim(-1, 1)

    def _per_channel(self, value: Any) -> Tensor:
        values = torch.as_tensor(value, dtype=torch.float32, device=self.device)
        return values.view(-1, 1, 1) if len(self.input_shape) == 3 and values.ndim else values

    # ------------------------------------------------------------------------- scoring

    @torch.no_grad()
    def scores(self, x: Array) -> Array:
        """Return the logits, (n, n_classes), -inf for classes never seen."""
        raw = torch.as_tensor(x, device=self.device)
        self.network.eval()
        logits = torch.cat([self.logits(self.view(part, False)) for part in raw.split(SCORED)])
        self.network.train()
        return logits.masked_fill(~self.seen, -torch.inf).cpu().numpy()

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the scores of inputs, the network in evaluation mode."""
        logits: Tensor = self.network(inputs)
        return logits


class Replaying(Trained):
    """A network with a buffer of samples.

    Parameters
    ----------
    n_classes, input_shape, **given
        See `Trained`.
    buffer : int
        The samples that may be kept.
    augment_replayed : bool, optional
        Whether replayed colour pictures are cropped at random and, if ``flip``, mirrored. By
        default they are, as in the paper's released code, even if those of the stream are not.
        Methods that mix old samples with new ones (iCaRL, BiC) treat all as those of the stream.
    """

    def __init__(
        self,
        n_classes: int,
        input_shape: Sequence[int],
        *,
        buffer: int = 500,
        augment_replayed: bool = True,
        **given: Any,
    ) -> None:
        if given.get("active", "all") != "all":
            raise ValueError(
                f"active: in replay all classes compete; expected all, got {given['active']}"
            )
        super().__init__(n_classes, input_shape, **given)
        self.augment_replayed = augment_replayed
        self.buffer = Reservoir(buffer, self.generator(BUFFER).initial_seed(), self.chance)

    def shape_of_step(self, raw: Tensor) -> Hashable:
        """Return the numbers of samples, new and old, that a step handles."""
        return len(raw), min(len(self.buffer), self.batch_size)

    def replayed(self, raw: Tensor) -> Tensor:
        """Return samples from the buffer as the network takes them."""
        return self.view(raw, self.augment_replayed)

    @property
    def n_buffered(self) -> int:
        """The samples that it keeps now."""
        return len(self.buffer)
