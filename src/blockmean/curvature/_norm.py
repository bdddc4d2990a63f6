"""How much of a matrix its block mean keeps: ‖E(M)‖²_F / ‖M‖²_F, from a few products with random signs.

E is an orthogonal projection, so ‖M‖² = ‖E(M)‖² + ‖M − E(M)‖². The first is known; the second is the mean of
‖(M − E(M)) z‖² over random signs z. (Estimating ‖M‖² itself would be noisy just where the block mean is good.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from blockmean.curvature._problem import Problem, require_count
from blockmean.matrix import BlockMean


class Products:
    """Random signs Z (p, d), and Y = Z M, summed over the data. Memory 2 p d."""

    def __init__(self, problem: Problem, count: int) -> None:
        require_count(count, 0, "norm_probes", problem.owner)
        self.Z = problem.signs(count, problem.partition.num_entries).to(problem.device, problem.dtype)
        self._Y = torch.zeros_like(self.Z)

    def __bool__(self) -> bool:
        return len(self.Z) > 0

    def add(self, Y: Tensor) -> None:
        """Add Z times a part of M."""
        self._Y += Y

    def add_rows(self, rows: Tensor) -> None:
        """Add Z Σ g gᵀ over rows g (n, d)."""
        self._Y += self.Z @ rows.mT @ rows

    def explained(self, M: BlockMean, weight: float, lam_error: Tensor) -> tuple[float | None, float | None]:
        """The share of ‖weight · M‖²_F that its block mean keeps, and its standard error.

        Errors e_i of estimated λ_i add Σ (s_i − 1) e_i² to the expectation of both parts; it is subtracted here.
        """
        count = len(self.Z)
        if not count:
            return None, None
        inner = (M.partition.sizes - 1).to(lam_error.device).double()
        noise = float((inner * lam_error.double().nan_to_num().square()).sum())
        squares = (weight * self._Y - self.Z @ M).double().square().sum(-1)
        kept = max(float(M.norm()) ** 2 - noise, 0.0)
        lost = max(float(squares.mean()) - noise, 0.0)
        total = kept + lost
        if total == 0:
            return 1.0, 0.0  # M = 0 is its own block mean
        kept_error = float((2 * inner * M.lam.double() * lam_error.double()).norm())
        lost_error = float(squares.std() / count**0.5) if count > 1 else math.nan
        return kept / total, math.hypot(kept * lost_error, lost * kept_error) / total**2
