"""What a curvature matrix is, exactly: its scaling as an equation, and how sure its numbers are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockmean.matrix import BlockMean
from blockmean.partition import Partition


@dataclass(frozen=True)
class Report:
    """How a curvature matrix came about; `print` it.

    Attributes:
        matrix: what it is of.
        equation: the matrix M whose block mean was taken, with every factor.
        samples: N, the number of samples seen.
        partition: its blocks.
        probes: how many random probes (or labels) stand behind an estimated λ_i, 0 where all are exact.
        estimated: (L,), the blocks whose λ_i is an estimate.
        lam_error: (L,), the standard error of λ_i; 0 where it is exact, NaN where one draw alone cannot tell.
        explained: ‖E(M)‖²_F / ‖M‖²_F, what the block mean keeps of M; None where `norm_probes` was 0.
        explained_error: the standard error of `explained`, NaN from a single probe, None where that is.
    """

    matrix: str
    equation: str
    samples: int
    partition: Partition
    probes: int
    estimated: Tensor
    lam_error: Tensor
    explained: float | None
    explained_error: float | None

    def __str__(self) -> str:
        p = self.partition
        blocks = f"{p.num_blocks:,} blocks" if p.num_blocks > 1 else "1 block"
        head = f"{self.matrix} over {self.samples:,} samples: {p.num_entries:,} parameters in {blocks}"
        return "\n".join([head, f"  {self.equation}", f"  {self._lam()}", f"  {self._explained()}"])

    def _lam(self) -> str:
        count = int(self.estimated.sum())
        if not count:
            return "A and λ are exact"
        told = f"λ of {count:,} of {self.partition.num_blocks:,} blocks is estimated from {self.probes} draws"
        if self.lam_error.isnan().any():
            return f"{told}; their standard error is not known"
        worst = int(self.lam_error.argmax())
        name = self.partition.names[worst]
        return f"{told}; the largest standard error is {float(self.lam_error[worst]):.3g} (block '{name}')"

    def _explained(self) -> str:
        if self.explained is None:
            return "share of ‖M‖²_F in the block mean: not measured (norm_probes=0)"
        return f"share of ‖M‖²_F in the block mean: {self.explained:.3g} ± {self.explained_error:.1g}"


class Curvature(BlockMean):
    """A `BlockMean` that also carries the report of how it came about.

    Matrices computed from it (its inverse, its sum with another, ...) are ordinary block-mean matrices without one.
    """

    _report: Report | None = None

    @property
    def report(self) -> Report:
        if self._report is None:
            raise AttributeError("This matrix was computed from a curvature matrix: only the latter has a report.")
        return self._report

    @classmethod
    def of(
        cls, partition: Partition, lam: Tensor, A: Tensor, dtype: torch.dtype, report: Report
    ) -> Curvature:
        """The matrix with canonical coordinates A (L, L) and λ (L,), read where blocks have several entries."""
        made = cls._from_A(partition, lam[partition.multiple.to(lam.device)], (A + A.mT) / 2, dtype)
        made._report = report
        return made
