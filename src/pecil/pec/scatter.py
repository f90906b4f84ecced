"""Counts, class means and shared scatter of features: exact, additive, in one pass.

For class c with n_c samples of mean m_c, and all classes' samples together,

    S = Σ_c Σ_{h in c} (h − m_c)(h − m_c)ᵀ,

a batch of b samples with mean u changes (Welford; Chan, Golub and LeVeque 1983)

    S   ← S + Σ (h − u)(h − u)ᵀ + n_c b / (n_c + b) · (u − m_c)(u − m_c)ᵀ
    m_c ← m_c + b / (n_c + b) · (u − m_c),

so that the result does not depend on the order of samples or on how they are cut into
batches, and two summaries add up to that of all their samples.

Few rows wait in a short list before they are added to S: single samples then cost O(D) each,
and a million of them round S a few thousand times instead of a million. Solutions with the
shrunk covariance rest on one Cholesky factor of S without the waiting rows, which enter by
Woodbury's identity: one factorisation, O(D³), for max(256, D/8) samples, and some more in the
beginning, while the shrinkage settles.
"""

import copy
import math
from collections.abc import Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from pecil.pec.machine import in_full, linear
from pecil.pec.views import Students, Views

ROWS = 4096  # samples added to the scatter at a time
FEWEST_WAITING = 256
GROWN, GROWN_FEW = 1.2, 1.5  # samples, since a factor was made to measure coming ones; fewer than D
NEARLY = 0.9  # of the classes: when it knows so many, it is not made anew for one that it does not
LEAST = 1e-6  # shrinkage
MANY, BLOCK = 512, 1024  # rows from which on, and rows of the matrix in which, a CPU adds a half
STEP = math.sqrt(2)  # the shrinkage is rounded to powers of it: it changes rarely


class Scatter:
    """A summary of features by class, from which all of whitened PEC follows.

    Parameters
    ----------
    dim : int
        Features (D).
    device : torch.device
    views : Tensor, optional
        (D, k): classes have linear students that look at a sample through them.

    Attributes
    ----------
    counts : list of int
        Samples of each class.
    means : Tensor
        (classes, D).
    total : int
        Samples in the scatter; those of forgotten classes stay.
    seen : Views
        What classes' scatters look like through the views, of which there may be none.
    """

    def __init__(self, dim: int, device: torch.device, views: Tensor | None = None) -> None:
        self.dim = dim
        self.seen = Views(torch.zeros(dim, 0) if views is None else views, device)
        self.counts: list[int] = []
        self.means = torch.zeros(0, dim, device=device, dtype=torch.float64)
        self.total = 0
        self._matrix = torch.zeros(dim, dim, device=device)
        self._waiting = torch.zeros(max(FEWEST_WAITING, dim // 8), dim, device=device)
        self._rows = 0  # that wait
        self._lock = Lock()  # of what is made for scoring, which several threads may do
        self._gauge: Factor | None = None
        self.gauged = 0  # samples when coming ones were first measured as they are now
        self._forget_factors()

    def _forget_factors(self) -> None:
        self._trace = float(self._matrix.diagonal().sum(dtype=torch.float64))
        self._squares: float | None = None  # tr(S²), when it is known
        self._measured = 0  # waiting rows that these two include
        self._factors: dict[int, Factor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave factors out of pickles: they are made again when needed."""
        own = {name: value for name, value in vars(self).items() if name != "_lock"}
        return own | {"_factors": {}, "_gauge": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds."""
        vars(self).update(state)
        self._lock = Lock()

    def handed_on(self) -> "Scatter":
        """Return a copy that takes the factors along; this one would make them anew."""
        other = copy.copy(self)
        other.counts, other.means = list(self.counts), self.means.clone()
        other._matrix, other._waiting = self._matrix.clone(), self._waiting.clone()
        other.seen = self.seen.copied()
        other._factors, self._factors = self._factors, {}
        other._gauge, self._gauge = self._gauge, None
        return other

    # ------------------------------------------------------------------------ learning

    def grow(self, classes: int = 1) -> None:
        """Make room for new classes."""
        self.counts += [0] * classes
        self.means = torch.cat([self.means, self.means.new_zeros(classes, self.dim)])
        self.seen.grow(classes)

    def add(self, slot: int, features: Tensor) -> None:
        """Take in samples (b, D) of one class; none are fine."""
        for part in features.split(ROWS) if len(features) else ():
            n, b = self.counts[slot], len(part)
            if b == 1:
                step = part[0] - self.means[slot]
                moved = part.new_empty(0, self.dim)
            else:
                centre = part.mean(0, dtype=torch.float64)
                step, moved = centre - self.means[slot], part - centre.to(part.dtype)
            if n:
                between = (step * math.sqrt(n * b / (n + b))).to(part.dtype)
                moved = torch.cat([moved, between.unsqueeze(0)])
            self._take(moved)
            self.seen.add(slot, moved)
            self.means[slot] += step * (b / (n + b))
            self.counts[slot] += b
            self.total += b
            for factor in (*self._factors.values(), *([self._gauge] if self._gauge else [])):
                factor.learned(slot)

    def _take(self, rows: Tensor) -> None:
        """Add Σ r rᵀ over the rows, now or later."""
        if self._rows + len(rows) <= len(self._waiting):
            self._waiting[self._rows : self._rows + len(rows)] = rows
            self._rows += len(rows)
            return
        self._settle()
        _add_products(self._matrix, rows)
        self._forget_factors()

    def _settle(self) -> None:
        """Add the waiting rows to the matrix."""
        if self._rows:
            _add_products(self._matrix, self.waiting)
            self._rows = 0
            self._forget_factors()

    @property
    def waiting(self) -> Tensor:
        """Rows that are not in the matrix yet, (k, D)."""
        return self._waiting[: self._rows]

    @property
    def matrix(self) -> Tensor:
        """The scatter S, (D, D)."""
        self._settle()
        return self._matrix

    def remove(self, slot: int) -> None:
        """Delete a class's mean and count; what it did to the scatter stays."""
        keep = [k for k in range(len(self.counts)) if k != slot]
        self.means = self.means[keep]
        del self.counts[slot]
        self.seen.remove(slot)
        self._factors, self._gauge = {}, None

    @in_full
    def merge(self, other: "Scatter", slots: Sequence[int], sign: int = 1) -> None:
        """Add another summary, whose k-th class is this one's class ``slots[k]``.

        With ``sign`` −1 take it away again.
        """
        self.seen.merge(other.seen, slots, sign)
        moved = []
        for theirs, slot in enumerate(slots):
            n, b = self.counts[slot], sign * other.counts[theirs]
            step = other.means[theirs].to(self.means.device) - self.means[slot]
            if n + b:
                moved.append(step * math.sqrt(abs(n * b / (n + b))))
                self.means[slot] += step * (b / (n + b))
                self.seen.add(slot, moved[-1].to(self._matrix.dtype).unsqueeze(0), sign)
            else:
                self.means[slot] = 0
            self.counts[slot] += b
        rows = (torch.stack(moved) if moved else self.means[:0]).to(self._matrix.dtype)
        self.matrix.add_(other.matrix.to(self._matrix.device), alpha=sign)
        self._matrix.addmm_(rows.T, rows, alpha=sign)
        self.total += sign * other.total
        self.gauged = min(self.gauged + max(0, sign) * other.gauged, self.total)
        self._gauge = None
        self._forget_factors()

    def restore(self, counts: list[int], means: Tensor, matrix: Tensor, total: int) -> None:
        """Take over what a file holds, but for what is seen."""
        self.counts, self.total = list(counts), total
        self.means, self._matrix = means.clone(), matrix.clone()
        self._forget_factors()

    # ------------------------------------------------------------------------- solving

    def factor(self, shrinkage: float | None) -> "Factor":
        """Return the inverse of the shrunk covariance, ready to be applied.

        Σ̃ = (1 − a)·S/n + a·tr(S)/(nD)·I is (S + ρI)·(1 − a)/n with ρ = a/(1 − a)·tr(S)/D. The
        shrinkage a is given or, if None, the oracle-approximating one (Chen, Wiesel, Eldar and
        Hero 2010), which follows from n, tr(S) and tr(S²). ρ is rounded to a power of √2.
        What is returned stays as it is, whatever is learned or asked for later.
        """
        with self._lock:
            return self._factor(shrinkage)

    def _factor(self, shrinkage: float | None) -> "Factor":
        trace, squares = self._moments()
        a = _oas(self.total, self.dim, trace, squares) if shrinkage is None else shrinkage
        a = min(max(a, LEAST), 1 - LEAST)
        key = round(math.log(a / (1 - a) * trace / self.dim, STEP)) if trace > 0 else 0
        if key not in self._factors:
            while len(self._factors) > 1:  # two at most: the shrinkage may waver between two
                self._factors.pop(next(iter(self._factors)))
            self._factors[key] = Factor(self._matrix, STEP**key)
        factor = self._factors[key] = self._factors[key].handed_on()
        factor.update_rows(self.waiting)
        factor.update_means(self.means)
        factor.total, factor.counts = self.total, list(self.counts)
        share = factor.rho * self.dim / trace if trace > 0 else 0.0  # a / (1 − a)
        factor.scale = self.total * (1 + share)
        factor.shrinkage = share / (1 + share) if trace > 0 else 1.0
        factor.update_students(self.seen)
        return factor

    def gauge(self, shrinkage: float | None, slot: int) -> tuple["Factor", float]:
        """Return a factor to measure coming samples with, and what earlier measures still count.

        The factor may rest on only five sixths of the samples, so that it is rarely made anew;
        its means are those of now. It is also made anew for a class that it does not know at all,
        unless it knows nearly all others. When it is, earlier measures count in proportion to the
        samples that they rested on.
        """
        grown = GROWN if self.total > self.dim else GROWN_FEW
        new, counts = grown * self.gauged < self.total, 1.0
        if self._gauge is not None and not new and not self._gauge.known(slot):
            new = sum(n > 0 for n in self._gauge.counts) <= NEARLY * len(self.counts)
        if self._gauge is None or new:
            self._gauge = self.factor(shrinkage).handed_on()
        if new:
            counts, self.gauged = self.gauged / self.total, self.total
        self._gauge.update_means(self.means)
        return self._gauge, counts

    @in_full
    def _moments(self) -> tuple[float, float]:
        """tr(S) and tr(S²), waiting rows included; each new row costs O(D²) once."""
        squares = _sum_of_squares(self._matrix) if self._squares is None else self._squares
        old, new = self.waiting[: self._measured], self.waiting[self._measured :]
        if len(new):
            self._trace += float(new.square().sum(dtype=torch.float64))
            squares += 2 * float(((new @ self._matrix) * new).sum(dtype=torch.float64))
            squares += 2 * _sum_of_squares(new @ old.T) + _sum_of_squares(new @ new.T)
            self._measured = self._rows
        self._squares = squares
        return self._trace, squares


class Factor:
    """The inverse of A + UᵀU, with A = S + ρI factorised and U the rows that came since.

    Woodbury: (A + UᵀU)⁻¹ = A⁻¹ − V (I + UV)⁻¹ Vᵀ with V = A⁻¹Uᵀ. Each new row costs one solve,
    O(D²); V and UV are kept.
    """

    def __init__(self, matrix: Tensor, rho: float) -> None:
        self.lower, self.rho = _cholesky(matrix, rho)
        self.total, self.shrinkage = 0, 1.0
        self.scale = 0.0  # what makes of (S + ρI)⁻¹ the inverse of Σ̃: n / (1 − a)
        self.counts: list[int] = []
        dim = len(matrix)
        self.rows = self.lower.new_empty(0, dim)  # U
        self.solved = self.lower.new_empty(0, dim)  # Vᵀ
        self.small = self.lower.new_empty(0, 0)  # UV
        self.means = self.lower.new_empty(0, dim)  # M A⁻¹
        self.seen = self.lower.new_empty(0, 0, dim)  # C_c A⁻¹, (classes, views, D)
        self.students: Students | None = None
        self.stale: set[int] = set()  # classes that have learned since means were taken in
        self.unseen: set[int] = set()  # since what views see of them was

    def handed_on(self) -> "Factor":
        """Return one to be updated in the place of this one, which stays as it is."""
        other = copy.copy(self)
        other.stale, other.unseen = set(self.stale), set(self.unseen)
        return other

    def known(self, slot: int) -> int:
        """Return the samples of a class that it rests on."""
        return self.counts[slot] if slot < len(self.counts) else 0

    def learned(self, slot: int) -> None:
        """Take note that a class has learned."""
        self.stale.add(slot)
        self.unseen.add(slot)

    def update_rows(self, waiting: Tensor) -> None:
        """Take in the rows that have come, the last of those that wait."""
        old, new = len(self.rows), waiting[len(self.rows) :].double()
        if not len(new):
            return
        self.rows = torch.cat([self.rows, new])
        self.solved = torch.cat([self.solved, self._solve(new)])
        small = self.small.new_empty(len(self.rows), len(self.rows))
        small[:old, :old] = self.small
        small[old:] = new @ self.solved.T
        small[:old, old:] = small[old:, :old].T
        self.small = small

    def update_means(self, means: Tensor) -> None:
        """Take in means that are new or have changed."""
        known = len(self.means)
        changed = sorted(self.stale | set(range(known, len(means))))
        if changed:
            self.means = torch.cat([self.means, self.means.new_empty(means[known:].shape)])
            self.means[changed] = self._solve(means[changed])
            self.stale.clear()

    def update_students(self, seen: Views) -> None:
        """Take in what views see of classes that are new or have changed."""
        known = len(self.seen)
        changed = sorted(self.unseen | set(range(known, len(seen.own))))
        if not seen.n or not changed:  # if no class has learned no rows have come either
            return
        room = self.lower.new_empty(len(seen.own), *seen.shared.shape)
        room[:known] = self.seen.view(known, *seen.shared.shape)
        room[changed] = self._solve(seen.own[changed].flatten(0, 1)).view(room[changed].shape)
        self.seen = room
        self.unseen.clear()
        rows = room.flatten(0, 1)
        solved = self._corrected(rows, rows @ self.rows.T).view(room.shape)
        self.students = Students.of(seen, solved, self.rho, self.scale, self.total)

    def _solve(self, x: Tensor) -> Tensor:
        """Return x A⁻¹ for rows x."""
        return torch.cholesky_solve(x.T, self.lower).T

    def weights(self) -> Tensor:
        """Return M (A + UᵀU)⁻¹, (classes, D)."""
        return self._corrected(self.means, self.means @ self.rows.T)

    def _corrected(self, x: Tensor, seen: Tensor) -> Tensor:
        """Subtract from x = y A⁻¹ what the rows U change, given ``seen`` = y A⁻¹ Uᵀ."""
        if not len(self.rows):
            return x
        inner = self.small + torch.eye(len(self.small), dtype=x.dtype, device=x.device)
        return x - torch.linalg.solve(inner, seen.T).T @ self.solved

    def quadratic(self, x: Tensor) -> Tensor:
        """Return x (A + UᵀU)⁻¹ xᵀ for each row of x (n, D)."""
        x = x.double()
        half = torch.linalg.solve_triangular(self.lower, x.T, upper=False)  # (D, n)
        value = half.square().sum(0)
        if len(self.rows):
            seen = x @ self.solved.T  # (n, k)
            inner = self.small + torch.eye(len(self.small), dtype=x.dtype, device=x.device)
            value -= (seen * torch.linalg.solve(inner, seen.T).T).sum(1)
        return value


def _cholesky(matrix: Tensor, rho: float) -> tuple[Tensor, float]:
    """Factorise S + ρI in float64; ρ grows where rounding has made S indefinite."""
    for _ in range(40):
        shifted = matrix.double()
        shifted.diagonal().add_(rho)
        lower, failed = torch.linalg.cholesky_ex(shifted)
        if not int(failed):
            return lower, rho
        rho *= STEP
    raise ValueError("the scatter of the features is not finite: are the teacher's outputs?")


def _sum_of_squares(matrix: Tensor) -> float:
    return sum(float(part.square().sum(dtype=torch.float64)) for part in matrix.split(1024))


def _oas(n: int, p: int, trace: float, squares: float) -> float:
    """Return the oracle-approximating shrinkage of a scatter of n samples in p dimensions."""
    spread = squares - trace**2 / p
    if p == 1 or spread <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / p) * squares + trace**2) / ((n + 1 - 2 / p) * spread))


@in_full
def _add_products(matrix: Tensor, rows: Tensor) -> None:
    """Add Σ r rᵀ over the rows (n, D) to a symmetric matrix; of many, on a CPU, one half twice."""
    dim = len(matrix)
    if matrix.device.type != "cpu" or len(rows) < MANY or dim < 2 * BLOCK:
        matrix.addmm_(rows.T, rows)
        return
    columns = rows.T.contiguous()
    for start in range(0, dim, BLOCK):
        stop = min(start + BLOCK, dim)
        products = linear(columns[start:stop], columns[:stop])
        matrix[start:stop, :stop].add_(products)
        matrix[:start, start:stop].add_(products[:, :start].T)
