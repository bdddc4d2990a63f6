"""What a curvature matrix is, exactly: its scaling as an equation, and how sure its numbers are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockmean.curvature._norm import Products
from blockmean.curvature._problem import Problem
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
        probes: how many random probes (or labels per sample) stand behind what is estimated, 0 where nothing is.
        estimated: (L,), the blocks whose λ_i is an estimate.
        exact_A: whether A is exact; it is not where labels were sampled.
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
    exact_A: bool
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
        exact = "A is exact" if self.exact_A else "A is estimated"
        drawn = f"{self.probes} draws" if self.probes > 1 else "1 draw"
        told = f"{exact}, λ of {count:,} of {self.partition.num_blocks:,} blocks is estimated from {drawn}"
        if self.lam_error.isnan().any():
            return f"{told}; its standard error is not known"
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


def finish(
    problem: Problem,
    products: Products,
    matrix: str,
    term: str,
    A: Tensor,
    lam: Tensor,
    *,
    probes: int = 0,
    estimated: Tensor | None = None,
    exact_A: bool = True,
    lam_error: Tensor | None = None,
) -> Curvature:
    """The matrix with its report, from A (L, L) and λ (L,) summed over all samples."""
    partition, weight = problem.partition, problem.weight
    several = partition.nonsingleton.to(lam.device)
    # Products of vectors and matrices in another order leave A symmetric up to rounding only.
    made = Curvature._from_A(partition, weight * lam[several], weight * (A + A.mT) / 2, problem.dtype)
    lam_error = torch.zeros_like(made.lam) if lam_error is None else (weight * lam_error).to(made.lam)
    explained, explained_error = products.explained(made, weight, lam_error)
    made._report = Report(
        matrix=matrix,
        equation=problem.equation(term),
        samples=problem.samples,
        partition=partition,
        probes=probes,
        estimated=torch.zeros(partition.num_blocks, dtype=torch.bool) if estimated is None else estimated.cpu(),
        exact_A=exact_A,
        lam_error=lam_error,
        explained=explained,
        explained_error=explained_error,
    )
    return made
