"""Steps of a GPU, recorded once and then played: one launch instead of hundreds of small ones.

A step of a small batch costs a GPU less time than its hundreds of launches cost Python. A CUDA
graph plays a step's launches in one go, on the same addresses every time: so the inputs of a
recorded step are copied into its own, and so are the random numbers that it needs. They are drawn
on the CPU, in the same order on every device.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from pecil.pec.machine import side_stream

ROOM = 2**20  # bytes for what one step draws
ALIGN = 64  # bytes
KEPT = 4  # recorded steps; each holds memory for its temporaries

Draw = Callable[[], Tensor]


class Chance:
    """Draws on the CPU, and brings what was drawn to the device.

    Examples
    --------
    >>> chance = Chance(torch.device("cpu"))
    >>> generator = torch.Generator().manual_seed(0)
    >>> chance(lambda: torch.randint(9, (3,), generator=generator)).shape
    torch.Size([3])
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.places: Places | None = None  # of the step that is being recorded

    @property
    def recording(self) -> bool:
        """Whether a step is being recorded, so that it has to do all that it may ever do."""
        return self.places is not None

    def __call__(self, draw: Draw) -> Tensor:
        """Return what ``draw`` returns, on the device.

        In a recorded step ``draw`` is called again whenever the step is played, and has to return
        as many numbers.
        """
        if self.places is None:
            return draw().to(self.device)
        return self.places.add(draw)

    @contextmanager
    def recorded(self, places: "Places") -> Iterator[None]:
        """Give what is drawn a place of its own."""
        self.places = places
        try:
            yield
        finally:
            self.places = None


class Places:
    """Room on a device for what a step draws, filled anew, in one copy, for every step."""

    def __init__(self, device: torch.device) -> None:
        self.here = torch.empty(ROOM, dtype=torch.uint8)
        self.there = torch.empty(ROOM, dtype=torch.uint8, device=device)
        self.used = 0
        self.draws: list[tuple[Draw, Tensor]] = []

    def add(self, draw: Draw) -> Tensor:
        """Draw, and return where it will be found on the device once `send` was called."""
        drawn = draw()
        start, stop = self.used, self.used + drawn.nbytes
        if stop > ROOM:
            raise ValueError(f"a recorded step may draw {ROOM} bytes, but it draws {stop} or more")
        here, there = (
            room[start:stop].view(drawn.dtype).view(drawn.shape) for room in (self.here, self.there)
        )
        here.copy_(drawn)
        self.draws.append((draw, here))
        self.used = -(-stop // ALIGN) * ALIGN
        return there

    def draw(self) -> None:
        """Draw all anew."""
        for draw, here in self.draws:
            here.copy_(draw())

    def send(self) -> None:
        """Bring what was drawn to the device."""
        # from memory that is not pinned: it is read before the call returns
        self.there[: self.used].copy_(self.here[: self.used], non_blocking=True)


class Recorder:
    """Runs steps; on a GPU those that come again and again are recorded and played.

    Parameters
    ----------
    chance : Chance
        Whence the steps have what they draw.
    """

    def __init__(self, chance: Chance) -> None:
        self.chance = chance
        self.records = chance.device.type == "cuda"
        self.rehearsed: set[Hashable] = set()
        self.recorded: dict[Hashable, Recording] = {}

    def forget(self) -> None:
        """Forget all steps: from now on they do something else."""
        self.rehearsed.clear()
        self._drop(len(self.recorded))

    def _drop(self, n: int) -> None:
        """Drop the n oldest recordings, and give their memory back: no recording could take it."""
        for key in list(self.recorded)[:n]:
            del self.recorded[key]
        if n:
            torch.cuda.empty_cache()

    def __call__(self, key: Hashable, step: Callable[..., None], *inputs: Tensor) -> None:
        """Run ``step(*inputs)``.

        Parameters
        ----------
        key : hashable
            Steps of the same key do the same, in the same places, with inputs of the same shape.
        step : callable
            Waits for nothing on the GPU, draws through ``chance`` alone, and returns nothing.
        *inputs : Tensor
        """
        if not self.records or key not in self.rehearsed:
            step(*inputs)
            self.rehearsed.add(key)
            return
        if key not in self.recorded:
            self._drop(len(self.recorded) // KEPT)  # one if they are as many as may be
            self.recorded[key] = Recording(step, inputs, self.chance)
        else:
            self.recorded[key].prepare(*inputs)
        self.recorded[key].play()


class Recording:
    """One step as a CUDA graph; recording it does not run it, `play` does."""

    def __init__(
        self, step: Callable[..., None], inputs: tuple[Tensor, ...], chance: Chance
    ) -> None:
        self.inputs = [values.clone() for values in inputs]
        self.places = Places(chance.device)
        self.graph = torch.cuda.CUDAGraph()
        stream, now = side_stream(chance.device), torch.cuda.current_stream(chance.device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream), chance.recorded(self.places):
            self.graph.capture_begin()
            try:
                step(*self.inputs)
            finally:
                self.graph.capture_end()
        now.wait_stream(stream)

    def prepare(self, *inputs: Tensor) -> None:
        """Take other inputs, draw anew."""
        for mine, values in zip(self.inputs, inputs, strict=True):
            mine.copy_(values)
        self.places.draw()

    def play(self) -> None:
        """Run the step."""
        self.places.send()
        self.graph.replay()
