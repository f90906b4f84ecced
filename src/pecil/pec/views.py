"""Linear students: what a few views of a sample say of its features, in one class unlike in others.

A constant student of class c predicts the mean m_c. A linear one also looks at k views of the
sample, random mixtures Vᵀh of its D features h, and predicts how all of them go along with these
in its class. How they go along in all classes together, A, the shared covariance knows already;
so with class c's scatter S_c, all classes' S of n samples, and (as in Σ̃) S̃ = S + ρI::

    C_c = VᵀS_c,  G_c = C_cV      C = VᵀS̃,  G = CV      A = G⁻¹C
    B_c = (G_c + λ/n·G)⁻¹ (C_c − G_cA)
    g_c(x) = m_c + w·B_cᵀ Vᵀ(h − m_c)

λ is the number of samples that a class needs to be believed half, and w how far it is trusted
then. The whitened error, with u = h − m_c and z = Vᵀu, differs from the constant student's by

    −2w·z·(B_cΣ̃⁻¹)u + w²·zᵀ(B_cΣ̃⁻¹B_cᵀ)z,      where AΣ̃⁻¹ ∝ G⁻¹Vᵀ.

All of it follows from C_c, which is a sum over samples: exact, additive, in one pass. It lies
between linear and quadratic discriminant analysis, whose covariance of its own for each class
takes D/2k times the room and has far more to get wrong.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pecil.pec.machine import in_full

PRIOR = 300  # λ
PROBES = 32  # numbers that tell views apart
ROOM = 2**22  # numbers of views of samples, by all classes, that are held at a time


class Views:
    """What classes' scatters look like through fixed views: VᵀS_c of each, VᵀS of all.

    Parameters
    ----------
    views : Tensor
        V, (D, k).
    device : torch.device

    Attributes
    ----------
    own : Tensor
        (classes, k, D).
    shared : Tensor
        (k, D); what forgotten classes did to it stays.
    """

    def __init__(self, views: Tensor, device: torch.device) -> None:
        self.views = views.to(device)
        self.shared = torch.zeros_like(self.views.T, dtype=torch.float64)
        self.own = self.shared.new_zeros(0, *self.shared.shape)

    @property
    def n(self) -> int:
        """How many views there are (k)."""
        return self.views.shape[1]

    @property
    def checksum(self) -> list[float]:
        """Tells whether two are through the same views; V's numbers brought to the order of one."""
        return (self.views.flatten()[:PROBES] * len(self.views) ** 0.5).tolist()

    def copied(self) -> "Views":
        """Return a copy that learns by itself."""
        other = copy.copy(self)
        other.shared, other.own = self.shared.clone(), self.own.clone()
        return other

    def grow(self, classes: int) -> None:
        """Make room for new classes."""
        self.own = torch.cat([self.own, self.own.new_zeros(classes, *self.shared.shape)])

    def add(self, slot: int, rows: Tensor, sign: int = 1) -> None:
        """Take in rows (b, D) of which a class's scatter is the sum of products r rᵀ."""
        if self.n and len(rows):
            with in_full:
                seen = ((rows @ self.views).T @ rows).double()
            self.own[slot] += sign * seen
            self.shared += sign * seen

    def merge(self, other: "Views", slots: Sequence[int], sign: int) -> None:
        """Add what another summary saw, whose k-th class is class ``slots[k]`` here."""
        for own, slot in zip(other.own, slots, strict=True):
            self.own[slot] += sign * own.to(self.own.device)
        self.shared += sign * other.shared.to(self.shared.device)

    def remove(self, slot: int) -> None:
        """Delete what is known of a class alone."""
        self.own = torch.cat([self.own[:slot], self.own[slot + 1 :]])

    @in_full
    def restore(self, own: Tensor, matrix: Tensor) -> None:
        """Take over what a file holds; ``matrix`` is S."""
        self.own = own.to(self.own.device, torch.float64)
        self.shared = (self.views.T @ matrix).double()


@dataclass(frozen=True)
class Students:
    """Linear students of all classes as they were at one time, ready to be asked."""

    views: Tensor
    """V, (D, k)."""
    pulls: Tensor
    """B_cΣ̃⁻¹, (classes, k, D)."""
    bends: Tensor
    """B_cΣ̃⁻¹B_cᵀ, (classes, k, k)."""

    @classmethod
    def of(cls, seen: Views, solved: Tensor, rho: float, scale: float, total: int) -> "Students":
        """Make the students of all classes.

        Parameters
        ----------
        seen : Views
        solved : Tensor
            C_c S̃⁻¹ of each class, (classes, k, D).
        rho, scale : float
            S̃ = S + ρI and Σ̃⁻¹ = scale·S̃⁻¹.
        total : int
            n.
        """
        views = seen.views.double()
        shared = seen.shared + rho * views.T  # C
        gram = shared @ views  # G
        grams = seen.own @ views  # G_c
        law, white = torch.linalg.solve(gram, torch.cat([shared, views.T], 1)).chunk(2, 1)
        less = torch.linalg.inv(grams + PRIOR / max(total, 1) * gram)
        predicted = less @ (seen.own - grams @ law)  # B_c
        pulls = less @ (solved - grams @ white) * scale
        bends = pulls @ predicted.mT
        return cls(seen.views, pulls.float(), bends.float())

    @in_full
    def changes(self, features: Tensor, means: Tensor, trust: float) -> Tensor:
        """Return by how much errors differ from those of constant students, (n, classes).

        Features (n, D) and means (classes, D) are told from one centre; ``trust`` is w. Classes
        that came after these students were made have constant ones.
        """
        known, k = len(self.pulls), self.views.shape[1]
        out = torch.zeros(len(features), len(means), device=features.device)
        features, means = features.float(), means[:known].float()
        rows, places = self.pulls.flatten(0, 1), means @ self.views
        own = (self.pulls @ means.unsqueeze(2)).squeeze(2)
        held = max(1, ROOM // (known * k + 1))
        for part, target in zip(features.split(held), out.split(held), strict=True):
            z = (part @ self.views).unsqueeze(1) - places  # (rows, classes, k)
            pulled = (part @ rows.T).view(len(part), known, k) - own
            bent = torch.einsum("nci,cij->ncj", z, self.bends)
            target[:, :known] = (z * (trust**2 * bent - 2 * trust * pulled)).sum(2)
        return out
