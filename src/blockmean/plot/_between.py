"""The numbers between blocks, wherever they come from: a matrix, one matrix of an optimizer, or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._checks import require
from blockmean.matrix import BlockMean
from blockmean.optim import BlockStatistics
from blockmean.optim.optimizer import BlockMeanOptimizer
from blockmean.plot._axes import LARGEST

Source = BlockMean | BlockStatistics | Sequence[BlockStatistics] | BlockMeanOptimizer

LARGEST_DIAGONAL = 100_000
"""Blocks above which not even their A_ii are drawn one by one."""

SILENT = 1e-12
"""An optimizer's A_ii below this share of the largest is a rounding error of float32 gradients, squared."""


class Between(NamedTuple):
    """What a picture of blocks shows."""

    names: list[str]
    A: Tensor  # (L, L), or (L,) where no two blocks are coupled; float64 on the CPU
    coupled: Tensor  # (L, L) or (L,) of bool: which pairs of blocks A is about
    silent: Tensor  # (L,) of bool: A_ii is 0 up to rounding (or not finite), so nothing can be said of the block

    @property
    def diagonal(self) -> Tensor:
        return self.A if self.A.ndim == 1 else self.A.diagonal()

    @property
    def unknown(self) -> Tensor:
        """Pairs that are coupled and of which nothing can be said."""
        silent = self.silent if self.A.ndim == 1 else self.silent | self.silent.unsqueeze(-1)
        return self.coupled & (silent | ~self.A.isfinite())

    def correlation(self) -> Tensor:
        """As the function below."""
        if self.A.ndim == 1:
            return torch.where(self.silent, torch.nan, self.A.sign())
        root = self.diagonal.abs().rsqrt()  # one after the other: a product of two may underflow
        return (self.A * root * root.unsqueeze(-1)).where(self.coupled & ~self.unknown, torch.nan)


def correlation(source: Source) -> Tensor:
    """A_ij / √|A_ii A_jj|, how much blocks depend on each other whatever their scales, (L, L).

    Between −1 and 1 where A is positive semi-definite, as Fisher matrices and those of optimizers are. A Hessian may
    have negative A_ii: its diagonal is then −1, and nothing bounds the rest. NaN stands where A_ii is 0 up to rounding
    (the gradients of a last linear layer under cross-entropy sum to zero), and between blocks that an optimizer does
    not couple. With coupling "none" there is only a diagonal, (L,).

    Args:
        source: a BlockMean, what `block_statistics()` returns, one entry of it, or an optimizer.

    >>> from blockmean import Partition
    >>> M = BlockMean(Partition.from_sizes([1, 1]), lam=[4.0, 9.0], B=[[0.0, 3.0], [3.0, 0.0]])
    >>> correlation(M)
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    return between(source, "plot.correlation").correlation()


def between(source: Source, owner: str) -> Between:
    """The numbers between blocks; what has none, or too many, is refused."""
    if isinstance(source, BlockMean):
        require(source.lam.ndim == 1, "source", owner, "a single matrix", f"a batch of {list(source.lam.shape[:-1])}")
        _require_few(source.partition.num_blocks, LARGEST, owner)
        return _of_matrix(source)
    if isinstance(source, BlockMeanOptimizer):
        found: Sequence[BlockStatistics] = source.block_statistics()
        if not found:
            raise ValueError(f"{owner}: the optimizer knows nothing yet. Take a step with correction=True first.")
    else:
        found = [source] if isinstance(source, BlockStatistics) else source
        known = isinstance(found, Sequence) and bool(found) and all(isinstance(s, BlockStatistics) for s in found)
        wanted = "a BlockMean, an optimizer of blockmean or its block_statistics()"
        require(known, "source", owner, wanted, source if isinstance(source, Sequence) else type(source), TypeError)
    diagonal = all(statistics.A.ndim == 1 for statistics in found)
    _require_few(sum(len(s.names) for s in found), LARGEST_DIAGONAL if diagonal else LARGEST, owner)
    return _of_statistics(found)


def _require_few(L: int, limit: int, owner: str) -> None:
    few = f"of at most {limit:,} blocks (take a coarser partition, or one entry of block_statistics())"
    require(limit >= L, "source", owner, few, f"{L:,} blocks")


def _of_matrix(matrix: BlockMean) -> Between:
    A, lam = (x.detach().cpu().double() for x in (matrix.A, matrix.lam))
    own = A.diagonal().abs()
    # The rounding error of A_ii is one of the whole block's numbers; a block of one entry has no others.
    rest = torch.where(matrix.partition.sizes > 1, (matrix.partition.sizes - 1) * lam.abs(), 0.0)
    silent = ~(own > torch.finfo(matrix.dtype).eps / 8 * rest)
    return Between(list(matrix.partition.names), A, torch.ones_like(A, dtype=torch.bool), silent)


def _of_statistics(found: Sequence[BlockStatistics]) -> Between:
    """All matrices along one diagonal: blocks of different ones are not coupled."""
    several = len({s.group for s in found}) > 1
    names = [f"group {s.group}: {name}" if several else name for s in found for name in s.names]
    diagonal = torch.cat([s.diagonal.detach().cpu().double() for s in found])
    silent = ~(diagonal.abs() > SILENT * diagonal.nan_to_num(0, 0, 0).abs().max())
    if all(s.A.ndim == 1 for s in found):
        return Between(names, diagonal, torch.ones_like(diagonal, dtype=torch.bool), silent)
    parts = [torch.diag(s.A) if s.A.ndim == 1 else s.A for s in found]
    masks = [torch.eye(len(s.A)) if s.A.ndim == 1 else torch.ones_like(s.A) for s in found]
    A, coupled = (torch.block_diag(*(x.detach().cpu().double() for x in matrices)) for matrices in (parts, masks))
    return Between(names, A, coupled.bool(), silent)
