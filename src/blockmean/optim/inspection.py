"""What an optimizer knows about the dependency between blocks, or about means, in readable form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean._checks import require
from blockmean.optim.decomposition import Means


@dataclass(frozen=True)
class BlockStatistics:
    """One matrix between blocks, as it is after the optimizer's last step.

    `common` and `change` describe the last step in the coordinates in which A is measured (those of Z^½): `common` is
    the length of the uncorrected step along the direction that a block's entries share, and `change` is what the
    correction added to it. With A = I the correction changes nothing; a change of −0.9 times `common` leaves a tenth.
    """

    group: int
    """Index of the parameter group."""
    coupling: str
    """"all", "none", or the name of the module whose blocks these are."""
    names: list[str]
    """Of the blocks."""
    parameters: list[str]
    """The parameter of each block, or the name of the group that merged parameters belong to."""
    sizes: Tensor
    """Entries of each block, (L,)."""
    A: Tensor
    """(L, L), or its diagonal (L,) with coupling "none". A diagonal method assumes the identity."""
    common: Tensor | None
    """The uncorrected step along what a block's entries share, (L,); None before a step."""
    change: Tensor | None
    """What the correction added to it, (L,); None before a step."""
    is_normalised: bool = False
    """Whether A_ii is measured in units of the gradient's own size, entry by entry."""

    @property
    def diagonal(self) -> Tensor:
        """A_ii, (L,)."""
        return self.A if self.A.ndim == 1 else self.A.diagonal()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of A, ascending, (L,)."""
        return self.A.sort().values if self.A.ndim == 1 else torch.linalg.eigvalsh(self.A)

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue of A; infinite if A is singular."""
        smallest = float(self.eigenvalues[0])
        return float(self.eigenvalues[-1]) / smallest if smallest > 0 else float("inf")

    @property
    def correction_share(self) -> float | None:
        """How much of the last step was correction: length of `change` over length of `common`. None before a step."""
        if self.common is None or self.change is None:
            return None
        length = float(self.common.norm())
        return float(self.change.norm()) / length if length > 0 else 0.0

    def _common(self, owner: str) -> Iterator[tuple[str, float, float, int]]:
        """Parameter, common energy, the same by chance, and entries of every block."""
        if not self.is_normalised:
            raise ValueError(
                f"{owner} does not measure the diagonal of A in units of the gradient. "
                "Take about 50 steps with AdamBMA, or with AdaGradBMA(variant='weighted')."
            )
        for name, common, size in zip(self.parameters, self.diagonal.tolist(), self.sizes.tolist(), strict=True):
            yield name, common, 1.0, size

    def describe(self, max_rows: int = 20) -> str:
        """A table of the blocks with the largest A_ii.

        >>> from blockmean import AdamBMA
        >>> layer = torch.nn.Linear(4, 2)
        >>> optimizer = AdamBMA(layer.named_parameters())
        >>> layer(torch.ones(4)).sum().backward()
        >>> optimizer.step()
        >>> print(optimizer.block_statistics()[0].describe())
        block      entries  A_ii  kept of the common step
        weight[0]        4  4.00                      50%
        weight[1]        4  4.00                      50%
        2 blocks, eigenvalues of A from 4 to 4
        """
        order = self.diagonal.argsort(descending=True, stable=True)[:max_rows].tolist()
        rows = [("block", "entries", "A_ii", "kept of the common step")]
        for i in order:
            kept = "-"
            # If other blocks add more to a block than its own step, a share means nothing.
            if self.common is not None and self.change is not None and self.change[i].abs() <= self.common[i].abs() > 0:
                kept = f"{float(1 + self.change[i] / self.common[i]):.0%}"
            rows.append((self.names[i], f"{int(self.sizes[i]):,}", f"{float(self.diagonal[i]):.2f}", kept))
        lines = _aligned(rows)
        span = f"{float(self.eigenvalues[0]):.3g} to {float(self.eigenvalues[-1]):.3g}"
        if len(self.names) > max_rows:
            lines.append(f"... and {len(self.names) - max_rows:,} more")
        return "\n".join([*lines, f"{len(self.names):,} blocks, eigenvalues of A from {span}"])


class Parts(NamedTuple):
    """One number for each part of a two-way analysis of variance."""

    grand: float
    """Grand means."""
    per_unit: float
    per_input: float
    remainder: float

    @property
    def means(self) -> float:
        """All but the remainder."""
        return self.grand + self.per_unit + self.per_input


PART_NAMES = ("grand means", "means per unit", "means per input", "remainder")


@dataclass(frozen=True)
class MeanStatistics:
    """How the gradients of one matrix divide into means and remainder, from the state of `Anova`.

    The energy of a part is the sum of its second moments. Those of means remember 1/(1 − mean_beta) steps, and those of
    the remainder 1/(1 − β₂): while gradients shrink, the remainder still counts some of the larger ones, and while they
    grow, it lags behind. What U and V turn away from is forgotten, so noise gives means a little less than chance.
    Where means began after steps of AdamW, the remainder counts whole gradients of that time.
    """

    group: int
    """Index of the parameter group."""
    parameter: str
    """Its name."""
    shape: tuple[int, int]
    """Units and inputs: O, I."""
    num_means: tuple[int, int]
    """Over units and over inputs: k, q."""
    energy: Parts
    """Mean square of the gradient in each part, summed over the part: `grand`, `per_unit`, `per_input`, `remainder`."""

    @property
    def entries(self) -> int:
        """O I."""
        return self.shape[0] * self.shape[1]

    @property
    def degrees_of_freedom(self) -> Parts:
        """The dimensions of each part: kq, (O−k)q, k(I−q), (O−k)(I−q)."""
        (units, inputs), (k, q) = self.shape, self.num_means
        return Parts(k * q, (units - k) * q, k * (inputs - q), (units - k) * (inputs - q))

    @property
    def shares(self) -> Parts:
        """The share of each part in the energy of the gradient; NaN if the gradient was always zero."""
        total = sum(self.energy)
        return Parts(*(energy / total if total > 0 else math.nan for energy in self.energy))

    @property
    def chance(self) -> Parts:
        """What `shares` would be for a gradient of independent noise: the share of each part in the dimensions."""
        return Parts(*(count / self.entries for count in self.degrees_of_freedom))

    def _common(self, _: str) -> Iterator[tuple[str, float, float, int]]:
        """Parameter, energy of means, the same by chance, and entries; nothing if the gradient was always zero."""
        if sum(self.energy) > 0:
            yield self.parameter, self.shares.means * self.entries, self.chance.means * self.entries, self.entries

    def describe(self) -> str:
        """A table of the four parts.

        >>> from blockmean import Anova
        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Anova(layer.named_parameters(), means=1)
        >>> layer(torch.ones(8)).sum().backward()
        >>> optimizer.step()
        >>> print(optimizer.block_statistics()[0].describe())
        part             dimensions   share  by chance
        grand means               1  100.0%       3.1%
        means per unit            3    0.0%       9.4%
        means per input           7    0.0%      21.9%
        remainder                21    0.0%      65.6%
        weight: 4 units, 8 inputs; 1 mean over units, 1 over inputs
        """
        rows = [("part", "dimensions", "share", "by chance")]
        columns = zip(PART_NAMES, self.degrees_of_freedom, self.shares, self.chance, strict=True)
        rows += [
            (part, f"{count:,}", "-" if math.isnan(share) else f"{share:.1%}", f"{chance:.1%}")
            for part, count, share, chance in columns
        ]
        (units, inputs), (k, q) = self.shape, self.num_means
        size = f"{self.parameter}: {units:,} units, {inputs:,} inputs"
        return "\n".join([*_aligned(rows), f"{size}; {k} mean{'s' * (k != 1)} over units, {q} over inputs"])


def mean_statistics(number: int, name: str, shape: tuple[int, int], means: Means) -> MeanStatistics:
    """From the state of a matrix with means."""
    (units, inputs), (of_means, of_rest) = shape, means.weights[0, 1:].double().clamp(min=math.ulp(0.0)).tolist()
    # The average of ‖E‖² is exact; v_E has estimates for its rows.
    v_K, v_R, v_L, v_E = (float(v.double().sum()) for v in (*means.v[:3], means.rest_variance))
    rest = units * inputs * v_E / of_rest
    energy = Parts(v_K / of_means, units * v_R / of_means, inputs * v_L / of_means, rest)
    return MeanStatistics(number, name, shape, (means.U.shape[-1], means.V.shape[-1]), energy)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table: the first column to the left, the others to the right."""
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first.ljust(width[0]), *map(str.rjust, others, width[1:])]) for first, *others in rows]


FEW_STEPS = 20
# Shares of gradient energy: thresholds between tasks measured with and without the correction (optimizers/adam-bma.md).
LITTLE, MUCH = 0.1, 0.2


@dataclass(frozen=True)
class Diagnosis:
    """How much of the gradient is block means: what the entries of a block, or the units of a layer, have in common.

    Every block or matrix counts in units of its own root mean square, so that s entries have energy s. For `AdamBMA`
    and `AdaGradBMA`, A_ii of that lies along the one direction that all entries of a block share, and a diagonal method
    steps too far along it by a factor of √A_ii. If Σ A_ii / Σ s is small, that direction is a small part of training,
    however large A_ii is. For `Anova` it is the energy of all means: of every part but the remainder.
    """

    share: float
    """Of all blocks or matrices: between 0 and 1."""
    chance: float
    """What `share` would be for gradients of independent noise: the directions of means over all directions."""
    by_parameter: dict[str, float]
    """`share` of each parameter."""
    chance_by_parameter: dict[str, float]
    """`chance` of each parameter."""
    steps: int
    """Steps taken so far."""
    switch: str = "correction=False"
    """The option to compare with: it switches off what uses this share."""

    @property
    def matters(self) -> bool | None:
        """Whether the correction should make a visible difference. None for `Anova`: there, no threshold is known."""
        return self.share >= MUCH and self.share > 2 * self.chance if self.switch == "correction=False" else None

    def __str__(self) -> str:
        what = "common share of the gradient" if self.matters is not None else "share of means in the gradient"
        rows = [("parameter", what, "by chance")]
        shares = self.by_parameter.items()
        rows += [(name, f"{share:.1%}", f"{self.chance_by_parameter[name]:.1%}") for name, share in shares]
        lines = _aligned(rows)
        lines.append(f"overall {self.share:.1%} after {self.steps} steps (by chance: {self.chance:.1%})")
        if self.steps < FEW_STEPS:
            lines.append(f"Too early to tell: take {FEW_STEPS} to 50 steps first.")
        elif self.matters is None:
            lines.append(
                f"The means hold {self.share / self.chance:.1f} times the energy that they would hold by chance.\n"
                f"To see whether that helps, compare with {self.switch} at the best lr of each."
            )
        elif self.matters:
            lines.append(f"The correction should matter: compare it with {self.switch} at the best lr of each.")
        elif self.share >= LITTLE:
            lines.append("The correction may help a little.")
        else:
            lines.append("The correction has little to work on: the plain method is just as good, and cheaper.")
        return "\n".join(lines)


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as accelerate's, which store it as `optimizer`; anything else unchanged."""
    inner = optimizer
    for _ in range(10):  # a wrapper may contain itself
        if not hasattr(inner, "block_statistics"):
            inner = getattr(inner, "optimizer", optimizer)
    return inner


def diagnose(optimizer: Any) -> Diagnosis:
    """How much of the gradient is block means, after about 50 steps of `AdamBMA`, `AdaGradBMA` or `Anova`.

    For `AdamBMA` and `AdaGradBMA(variant="weighted")` it predicts whether the correction will matter. For `Anova` it
    compares the share of all means with chance.

    >>> import torch
    >>> from blockmean import AdamBMA
    >>> layer = torch.nn.Linear(50, 1)
    >>> optimizer = AdamBMA(layer.named_parameters())
    >>> for _ in range(30):
    ...     optimizer.zero_grad()
    ...     layer(torch.rand(8, 50)).square().mean().backward()  # inputs that are never negative
    ...     optimizer.step()
    >>> diagnose(optimizer).matters
    True
    """
    optimizer = unwrap(optimizer)
    ours = hasattr(optimizer, "block_statistics")
    require(ours, "optimizer", "diagnose", "Anova, AdamBMA or AdaGradBMA", type(optimizer).__name__, TypeError)
    found: list[BlockStatistics | MeanStatistics] = optimizer.block_statistics()
    totals: dict[str, list[float]] = {}  # energy, the same by chance, entries
    for statistics in found:
        prefix = f"group {statistics.group}: " if len(optimizer.param_groups) > 1 else ""
        for name, *numbers in statistics._common(type(optimizer).__name__):
            before = totals.get(prefix + name, [0.0, 0.0, 0])
            totals[prefix + name] = [a + b for a, b in zip(before, numbers, strict=True)]
    has_means = "means" in optimizer.defaults
    if not totals:
        option = (
            "means other than 0 for a matrix" if has_means else "correction=True for a tensor with two dims or more"
        )
        raise ValueError(
            f"There is nothing to diagnose yet: take some steps with gradients other than zero, with {option}."
        )
    energy, by_chance, entries = (sum(column) for column in zip(*totals.values(), strict=True))
    return Diagnosis(
        share=energy / entries,
        chance=by_chance / entries,
        by_parameter={name: common / count for name, (common, _, count) in totals.items()},
        chance_by_parameter={name: chance / count for name, (_, chance, count) in totals.items()},
        steps=int(max(float(state["step"]) for state in optimizer.state.values() if "step" in state)),
        switch="means=0" if has_means else "correction=False",
    )
