"""What an optimizer knows about the dependency between blocks, in readable form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from blockmean._checks import require


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
    parameters: list[str]
    """The parameter of each block, or the name of the group that merged parameters belong to."""
    sizes: Tensor
    """Entries of each block, (L,)."""
    A: Tensor
    """(L, L), or its diagonal (L,) with coupling "none". A diagonal method assumes the identity."""
    eigenvalues: Tensor
    """Of A, ascending, (L,)."""
    common: Tensor | None
    change: Tensor | None
    is_normalised: bool = False
    """Whether A_ii is measured in units of the gradient's own size, entry by entry."""

    @property
    def diagonal(self) -> Tensor:
        """A_ii, (L,)."""
        return self.A if self.A.ndim == 1 else self.A.diagonal()

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
        width = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width[c]) if c == 0 else cell.rjust(width[c]) for c, cell in enumerate(row))
            for row in rows
        ]
        span = f"{float(self.eigenvalues[0]):.3g} to {float(self.eigenvalues[-1]):.3g}"
        if len(self.names) > max_rows:
            lines.append(f"... and {len(self.names) - max_rows:,} more")
        return "\n".join([*lines, f"{len(self.names):,} blocks, eigenvalues of A from {span}"])


def eigenvalues_of(A: Tensor) -> Tensor:
    """Ascending eigenvalues of a symmetric matrix, or of the diagonal matrix that a vector represents."""
    if A.ndim == 1:
        return A.sort().values
    values: Tensor = torch.linalg.eigvalsh(A)
    return values


FEW_STEPS = 20
# Shares of gradient energy: thresholds between tasks measured with and without the correction (docs/optimizers.md).
LITTLE, MUCH = 0.1, 0.2


@dataclass(frozen=True)
class Diagnosis:
    """How much of the gradient the entries of a block have in common.

    In units of its own root mean square, the gradient of a block of s entries has energy s. A_ii of that lies along the
    one direction that all entries share, and a diagonal method steps too far along it by a factor of √A_ii. If
    Σ A_ii / Σ s is small, that direction is a small part of training, however large A_ii is.
    """

    share: float
    """Σ A_ii / Σ s over all blocks: between 0 and 1."""
    chance: float
    """What `share` would be for gradients with random signs: one direction in s."""
    by_parameter: dict[str, float]
    """The same for the blocks of each parameter."""
    steps: int

    @property
    def matters(self) -> bool:
        """Whether the correction should make a visible difference."""
        return self.share >= MUCH and self.share > 2 * self.chance

    def __str__(self) -> str:
        width = max(len(name) for name in self.by_parameter)
        lines = [f"{'parameter':{max(width, 9)}}  common share of the gradient"]
        lines += [f"{name:{max(width, 9)}}  {share:.1%}" for name, share in self.by_parameter.items()]
        lines.append(f"overall {self.share:.1%} after {self.steps} steps (by chance: {self.chance:.1%})")
        if self.steps < FEW_STEPS:
            lines.append(f"Too early to tell: take {FEW_STEPS} to 50 steps first.")
        elif self.matters:
            lines.append("The correction should matter: compare it with correction=False at the best lr of each.")
        elif self.share >= LITTLE:
            lines.append("The correction may help a little.")
        else:
            lines.append("The correction has little to work on: the plain method is just as good, and cheaper.")
        return "\n".join(lines)


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside wrappers such as accelerate's, which store it as `optimizer`; anything else unchanged."""
    inner = optimizer
    for _ in range(10):  # a wrapper may contain itself
        if hasattr(inner, "block_statistics"):
            return inner
        inner = getattr(inner, "optimizer", None)
    return optimizer


def diagnose(optimizer: Any) -> Diagnosis:
    """Predict whether the correction will matter, from about 50 steps of `AdamBMA` or `AdaGradBMA(variant="weighted")`.

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
    require(ours, "optimizer", "diagnose", "AdamBMA or AdaGradBMA", type(optimizer).__name__, TypeError)
    energy: dict[str, float] = {}
    entries: dict[str, int] = {}
    blocks = 0
    for statistics in optimizer.block_statistics():
        if not statistics.is_normalised:
            raise ValueError(
                f"{type(optimizer).__name__} does not measure the diagonal of A in units of the gradient. "
                "Take about 50 steps with AdamBMA, or with AdaGradBMA(variant='weighted')."
            )
        blocks += len(statistics.names)
        prefix = f"group {statistics.group}: " if len(optimizer.param_groups) > 1 else ""
        rows = zip(statistics.parameters, statistics.diagonal.tolist(), statistics.sizes.tolist(), strict=True)
        for name, common, size in rows:
            parameter = prefix + name
            energy[parameter] = energy.get(parameter, 0.0) + common
            entries[parameter] = entries.get(parameter, 0) + size
    if not entries:
        raise ValueError("There is nothing to diagnose yet: take some steps with correction=True first.")
    total = sum(entries.values())
    return Diagnosis(
        share=sum(energy.values()) / total,
        chance=blocks / total,
        by_parameter={name: energy[name] / entries[name] for name in entries},
        steps=int(max(float(state["step"]) for state in optimizer.state.values() if "step" in state)),
    )
