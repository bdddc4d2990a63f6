"""Sums over rows of single samples: A and λ of Σ_n g_n g_nᵀ holding the rows of one pass at a time.

A is the Gram matrix of the block sums over √s, λ_i the variance inside block i (computed as a variance: the difference
of two nearly equal sums would lose the digits). Both are summed in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from blockmean._linalg import to_float64
from blockmean.curvature._problem import Chunk, Problem, Tensors, single

Factor = Callable[[Tensor, Any, Tensor], tuple[Tensor, Tensor]]
"""(outputs of a sample, its target, its random numbers) → V (k, C) and signs σ (k,) with Σ_k σ_k v_k v_kᵀ = H_n."""


class RowSums:
    """A and λ of Σ σ g gᵀ over rows g with signs σ, where the rows of a sample may be random draws."""

    def __init__(self, problem: Problem) -> None:
        L = problem.partition.num_blocks
        zeros = to_float64(torch.zeros(L, device=problem.device))
        self._partition = problem.partition
        self._root = to_float64(problem.partition.sizes.to(problem.device)).sqrt()
        self.A, self.lam = torch.diag_embed(zeros), zeros.clone()
        self._squares = zeros.clone()  # Σ of squared deviations of draws, for `error`
        self._drawn = zeros.clone()  # the part of λ that was drawn
        self._single_draws = 0

    def add(self, rows: Tensor, signs: Tensor | None = None, weight: float = 1.0) -> Tensor:
        """Add rows (n, d). Return their signed variances inside blocks, (n, L)."""
        u = to_float64(self._partition.block_sum(rows)) / self._root  # (n, L)
        inside = to_float64(self._partition.block_var(rows))
        if signs is not None:
            inside = inside * signs.unsqueeze(-1)
        self.A += weight * (u.mT @ (u if signs is None else u * signs.unsqueeze(-1)))
        self.lam += weight * inside.sum(0)
        return inside

    def add_draws(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Add the mean over k of rows (n, k, d) whose k draws per sample are independent, and their spread."""
        n, k, _ = rows.shape
        inside = self.add(rows.flatten(0, 1), signs.flatten(), 1 / k).view(n, k, -1)
        spread = inside - inside.mean(1, keepdim=True) if k > 1 else inside
        self._squares += spread.square().sum((0, 1)) / (k * max(k - 1, 1))
        self._drawn += inside.mean(1).sum(0)
        self._single_draws += n if k == 1 else 0
        return inside

    def error(self) -> Tensor:
        """The standard error of λ after `add_draws`, (L,).

        With several draws per sample it is that of the draws. With one each it includes the differences between
        samples, which are no error: it is then too large rather than too small, and NaN for a single sample.
        """
        n = self._single_draws
        if n == 0:
            return self._squares.sqrt()
        if n == 1:
            return torch.full_like(self._squares, torch.nan)
        return ((self._squares - self._drawn.square() / n).clamp(min=0) * n / (n - 1)).sqrt()


def pull_back(
    problem: Problem,
    chunk: Chunk,
    factor: Factor,
    count: int,
    noise: Tensor | None,
    add: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Call `add(rows, signs)` with the rows J_nᵀ v_k (n, k, d) of the samples of a chunk, J_n the Jacobian of outputs.

    `add` returns the variances inside blocks, which are not finite where any entry of a row is not. A sample has
    `count` rows. At most `problem.rows_per_pass` are computed at a time, but draws of one sample, those with noise
    (n, count, ...), stay together.
    """
    at_once = max(1, problem.rows_per_pass // count)
    step = count if noise is not None else min(count, problem.rows_per_pass)
    empty = torch.empty(chunk.size, 0)
    for part, own in zip(chunk.split(at_once), (empty if noise is None else noise).split(at_once), strict=True):
        for first in range(0, count, step):

            def of_sample(inputs: Any, target: Any, own: Tensor, first: int = first) -> tuple[Tensors, Tensor]:
                def outputs(params: Tensors) -> Tensor:
                    out: Tensor = problem.output(params, single(inputs))
                    return out[0]

                found: Any = vjp(outputs, problem.params)
                out, pull = found
                V, signs = factor(out, target, own)
                V, signs = V[first : first + step], signs[first : first + step]
                return problem.each(lambda v: pull(v.to(out).view_as(out))[0], V), signs

            problem.reseed()
            pulled, signs = problem.each(of_sample, part.inputs, part.targets, own)
            inside = add(problem.flat(pulled, batch_dims=2), to_float64(signs))
            problem.refuse_nonfinite(inside, "a derivative of the outputs", part)
            del pulled  # free the memory before the next ones
