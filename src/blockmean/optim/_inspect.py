"""What an optimizer knows about the dependency between blocks, put into a form that a person can read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockStatistics:
    """One matrix between blocks, as an optimizer has it after its last step.

    `common` and `change` are about the last step in the coordinates in which A is measured (those of Z^½): how long the
    step would have been along the direction that a block's entries have in common, and what the correction added to
    it. With A = I nothing is changed; a change of −0.9 times `common` leaves a tenth of it.
    """

    group: int
    """Index of the parameter group."""
    coupling: str
    """"all", "none", or the name of the module whose blocks these are."""
    names: list[str]
    parameters: list[str]
    """The parameter of each block, or what merged ones go by."""
    sizes: Tensor
    """Entries of each block, (L,)."""
    A: Tensor
    """(L, L), or its diagonal (L,) with coupling "none". A diagonal method takes it for the identity."""
    eigenvalues: Tensor
    """Of A, ascending, (L,)."""
    common: Tensor | None
    change: Tensor | None

    @property
    def diagonal(self) -> Tensor:
        """A_ii, (L,)."""
        return self.A if self.A.ndim == 1 else self.A.diagonal()

    @property
    def condition(self) -> float:
        """Largest over smallest eigenvalue of A; infinite where A is singular."""
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
        bias             2  2.00                      71%
        3 blocks, eigenvalues of A from 2 to 4
        """
        order = self.diagonal.argsort(descending=True, stable=True)[:max_rows].tolist()
        rows = [("block", "entries", "A_ii", "kept of the common step")]
        for i in order:
            kept = "-"
            if self.common is not None and self.change is not None and self.common[i] != 0:
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
    """Ascending eigenvalues of a symmetric matrix, or of the diagonal matrix that a vector stands for."""
    if A.ndim == 1:
        return A.sort().values
    values: Tensor = torch.linalg.eigvalsh(A)
    return values
