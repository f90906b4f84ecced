"""A reservoir of samples: each that ever came has the same chance to be in it (Vitter 1985)."""

import torch
from torch import Tensor

from pecil.methods.recording import Chance

MANY = 2**62  # against which any number of rows is small


class Reservoir:
    """Keeps at most ``capacity`` rows of named fields.

    Parameters
    ----------
    capacity : int
    seed : int
    chance : Chance
        Brings what is drawn to the device on which the rows are kept.

    Examples
    --------
    >>> kept = Reservoir(3, seed=0, chance=Chance(torch.device("cpu")))
    >>> for k in range(10):
    ...     kept.add(x=torch.tensor([[float(k)]]), y=torch.tensor([k]))
    >>> len(kept), kept.fields["y"].shape
    (3, torch.Size([3]))
    >>> sorted(kept.draw(2))
    ['x', 'y']
    """

    def __init__(self, capacity: int, seed: int, chance: Chance) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"buffer: expected a whole number of at least 1, got {capacity!r}")
        self.capacity, self.chance = capacity, chance
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0  # rows that ever came
        self._fields: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Rows in it now."""
        return min(self.seen, self.capacity)

    @property
    def fields(self) -> dict[str, Tensor]:
        """The rows in it, by field."""
        return {name: values[: len(self)] for name, values in self._fields.items()}

    def add(self, **rows: Tensor) -> None:
        """Offer rows, in their order; each takes the place of a random one, or of none."""
        for name, values in rows.items():
            if name not in self._fields:
                shape = (self.capacity + 1, *values.shape[1:])  # one for those that get no place
                self._fields[name] = values.new_zeros(shape, device=self.chance.device)
        n = len(next(iter(rows.values())))
        if self.chance.recording:
            places = self.chance(lambda: torch.tensor(self._places(n)))
        elif min(found := self._places(n), default=self.capacity) == self.capacity:
            return
        else:
            places = torch.tensor(found, device=self.chance.device)
        for name, values in rows.items():
            self._fields[name].index_copy_(0, places, values.detach())

    def _places(self, n: int) -> list[int]:
        """Return the places that n new rows get; the last one to get a place has it."""
        places = [self.capacity] * n
        taken: dict[int, int] = {}
        chance = torch.randint(MANY, (n,), generator=self.generator).tolist()
        for k, drawn in enumerate(chance):
            place = self.seen if self.seen < self.capacity else drawn % (self.seen + 1)
            if place < self.capacity:
                places[taken.get(place, k)] = self.capacity
                places[k], taken[place] = place, k
            self.seen += 1
        return places

    def pick(self, n: int) -> Tensor:
        """Return the places of min(n, filled) rows, drawn without replacement."""
        return self.chance(lambda: torch.randperm(len(self), generator=self.generator)[:n])

    def draw(self, n: int) -> dict[str, Tensor]:
        """Return min(n, filled) rows, drawn without replacement."""
        places = self.pick(n)
        return {name: values.index_select(0, places) for name, values in self._fields.items()}
