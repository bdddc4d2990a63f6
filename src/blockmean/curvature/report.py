"""The result of every curvature function: a matrix, and a report of its scaling and accuracy."""

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
    """How a curvature matrix was computed; `print` it.

    Attributes:
        matrix: which one it is, "Hessian" for instance.
        equation: the matrix M whose block mean was taken, with every factor.
        samples: N, the number of samples seen.
        partition: its blocks.
        probes: the number of random probes (or labels per sample) of the estimates; 0 if everything is exact.
        estimated: (L,), the blocks whose λ_i is an estimate.
        exact_A: whether A is exact; it is not if labels were sampled.
        lam_error: (L,), the standard error of λ_i; 0 where it is exact, NaN from a single draw.
        explained: ‖E(M)‖²_F / ‖M‖²_F, the share of M that the block mean keeps; None if `norm_probes` was 0.
        explained_error: the standard error of `explained`; NaN from a single probe, None if `explained` is None.
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
        text = f"{exact}, λ of {count:,} of {self.partition.num_blocks:,} blocks is estimated from {drawn}"
        if self.lam_error.isnan().any():
            return f"{text}; its standard error is not known"
        worst = int(self.lam_error.argmax())
        name = self.partition.names[worst]
        return f"{text}; the largest standard error is {float(self.lam_error[worst]):.3g} (block '{name}')"

    def _explained(self) -> str:
        if self.explained is None:
            return "share of ‖M‖²_F in the block mean: not measured (norm_probes=0)"
        return f"share of ‖M‖²_F in the block mean: {self.explained:.3g} ± {self.explained_error:.1g}"


@dataclass(frozen=True, eq=False)
class Curvature:
    """A curvature matrix in block-mean form, and a report of how it was computed. `print` shows the report.

    Attributes:
        matrix: the block mean, with the whole algebra: `F.matrix.damped(1e-2).solve(g)`.
        report: scaling, standard errors, and how much of the matrix its block mean keeps.
    """

    matrix: BlockMean
    report: Report

    @property
    def partition(self) -> Partition:
        """The blocks of the matrix."""
        return self.matrix.partition

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return self.partition.names

    def __repr__(self) -> str:
        return f"Curvature({self.report.matrix}, {self.matrix!r})"

    def __str__(self) -> str:
        return str(self.report)


def finish(
    problem: Problem,
    products: Products,
    kind: str,
    term: str,
    A: Tensor,
    lam: Tensor,
    *,
    probes: int = 0,
    estimated: Tensor | None = None,
    exact_A: bool = True,
    lam_error: Tensor | None = None,
) -> Curvature:
    """The curvature and its report, from A (L, L) and λ (L,) summed over all samples."""
    partition, weight = problem.partition, problem.weight
    several = partition.nonsingleton.to(lam.device)
    # Products are summed in different orders, so A is symmetric only up to rounding.
    matrix = BlockMean._from_A(partition, weight * lam[several], weight * (A + A.mT) / 2, problem.dtype)
    lam_error = torch.zeros_like(matrix.lam) if lam_error is None else (weight * lam_error).to(matrix.lam)
    explained, explained_error = products.explained(matrix, weight, lam_error)
    report = Report(
        matrix=kind,
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
    return Curvature(matrix, report)
