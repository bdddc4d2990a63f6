"""The matrix A between blocks that pictures show, from any source: a matrix, a curvature or an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._checks import require
from blockmean.curvature import Curvature
from blockmean.matrix import BlockMean
from blockmean.optim import Anova, BlockStatistics, MeanStatistics
from blockmean.optim.block_mean import BlockMeanOptimizer
from blockmean.optim.inspection import unwrap
from blockmean.plot._axes import LARGEST

Source = BlockMean | Curvature | BlockStatistics | Sequence[BlockStatistics] | BlockMeanOptimizer
"""An optimizer may be wrapped: any object whose `optimizer` attribute leads to one of blockmean's."""

LARGEST_DIAGONAL = 100_000
"""Blocks above which not even their A_ii are drawn one by one."""

ZERO = 1e-12
"""An optimizer's A_ii below this share of the largest is a rounding error of float32 gradients, squared."""


class BlockMatrix(NamedTuple):
    """A, the names of its blocks, and which of its entries mean something."""

    names: list[str]
    A: Tensor  # (L, L), or (L,) where no two blocks are coupled; float64 on the CPU
    coupled: Tensor  # (L, L) or (L,) of bool: the pairs of blocks that A has a number for
    no_data: Tensor  # (L,) of bool: A_ii is 0 up to rounding, or not finite

    @property
    def diagonal(self) -> Tensor:
        return self.A if self.A.ndim == 1 else self.A.diagonal()

    @property
    def unknown(self) -> Tensor:
        """Coupled pairs without data."""
        no_data = self.no_data if self.A.ndim == 1 else self.no_data | self.no_data.unsqueeze(-1)
        return self.coupled & (no_data | ~self.A.isfinite())

    def correlation(self) -> Tensor:
        """As the function below."""
        if self.A.ndim == 1:
            return torch.where(self.no_data, torch.nan, self.A.sign())
        root = self.diagonal.abs().rsqrt()  # one after the other: a product of two may underflow
        return (self.A * root * root.unsqueeze(-1)).where(self.coupled & ~self.unknown, torch.nan)


def correlation(source: Source) -> Tensor:
    """A_ij / √|A_ii A_jj|, how much blocks depend on each other whatever their scales, (L, L).

    Between −1 and 1 where A is positive semi-definite, as Fisher matrices and those of optimizers are. A Hessian may
    have negative A_ii: its diagonal is then −1, and nothing bounds the rest. It is NaN where A_ii is 0 up to rounding
    (the gradients of a last linear layer under cross-entropy sum to zero), and between blocks that an optimizer does
    not couple. With coupling "none" there is only a diagonal, (L,).

    Args:
        source: a BlockMean, a Curvature, an optimizer (wrapped or not), its `block_statistics()`, or one entry of them.

    >>> from blockmean import Partition
    >>> M = BlockMean(Partition.from_sizes([1, 1]), lam=[4.0, 9.0], B=[[0.0, 3.0], [3.0, 0.0]])
    >>> correlation(M)
    tensor([[1.0000, 0.5000],
            [0.5000, 1.0000]], dtype=torch.float64)
    """
    return block_matrix(source, "plot.correlation").correlation()


def block_matrix(source: Source, owner: str) -> BlockMatrix:
    """A and its names; a source without A, or with too many blocks, is refused."""
    if isinstance(source, Curvature):
        source = source.matrix
    found = unwrap(source)
    refuse_means(found, owner)
    if isinstance(found, BlockMean):
        require(found.lam.ndim == 1, "source", owner, "a single matrix", f"a batch of {list(found.lam.shape[:-1])}")
        _require_few(found.partition.num_blocks, LARGEST, owner)
        return _from_matrix(found)
    if isinstance(found, BlockMeanOptimizer):
        found = found.block_statistics()
        if not found:
            raise ValueError(f"{owner}: the optimizer knows nothing yet. Take a step with correction=True first.")
    elif isinstance(found, BlockStatistics):
        found = [found]
    known = isinstance(found, Sequence) and bool(found) and all(isinstance(s, BlockStatistics) for s in found)
    wanted = "a BlockMean, an optimizer of blockmean or its block_statistics(), or a Curvature"
    require(known, "source", owner, wanted, found if isinstance(found, Sequence) else type(found), TypeError)
    is_diagonal = all(statistics.A.ndim == 1 for statistics in found)
    _require_few(sum(len(s.names) for s in found), LARGEST_DIAGONAL if is_diagonal else LARGEST, owner)
    return _from_statistics(found)


def refuse_means(source: object, owner: str) -> None:
    """Raise if the source is an `Anova`, or statistics of one."""
    first = source[0] if isinstance(source, Sequence) and source else source
    if isinstance(first, Anova | MeanStatistics):
        raise TypeError(
            f"{owner} is about matrices between blocks, and Anova has means instead. "
            "plot.shares(optimizer) draws them, and optimizer.block_statistics() returns them."
        )


def _require_few(L: int, limit: int, owner: str) -> None:
    few = f"of at most {limit:,} blocks (take a coarser partition, or one entry of block_statistics())"
    require(limit >= L, "source", owner, few, f"{L:,} blocks")


def _from_matrix(matrix: BlockMean) -> BlockMatrix:
    A, lam = (x.detach().cpu().double() for x in (matrix.A, matrix.lam))
    own = A.diagonal().abs()
    # A_ii is rounded like all numbers of its block; a block of one entry has no others.
    rest = torch.where(matrix.partition.sizes > 1, (matrix.partition.sizes - 1) * lam.abs(), 0.0)
    no_data = ~(own > torch.finfo(matrix.dtype).eps / 8 * rest)
    return BlockMatrix(list(matrix.partition.names), A, torch.ones_like(A, dtype=torch.bool), no_data)


def _from_statistics(found: Sequence[BlockStatistics]) -> BlockMatrix:
    """All matrices along one diagonal: blocks of different ones are not coupled."""
    several = len({s.group for s in found}) > 1
    names = [f"group {s.group}: {name}" if several else name for s in found for name in s.names]
    diagonal = torch.cat([s.diagonal.detach().cpu().double() for s in found])
    no_data = ~(diagonal.abs() > ZERO * diagonal.nan_to_num(0, 0, 0).abs().max())
    if all(s.A.ndim == 1 for s in found):
        return BlockMatrix(names, diagonal, torch.ones_like(diagonal, dtype=torch.bool), no_data)
    parts = [torch.diag(s.A) if s.A.ndim == 1 else s.A for s in found]
    masks = [torch.eye(len(s.A)) if s.A.ndim == 1 else torch.ones_like(s.A) for s in found]
    A, coupled = (torch.block_diag(*(x.detach().cpu().double() for x in matrices)) for matrices in (parts, masks))
    return BlockMatrix(names, A, coupled.bool(), no_data)
