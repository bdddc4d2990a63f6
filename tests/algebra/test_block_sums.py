"""Partition: block sums, variances and expansions, their precision and what they cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from blockmean import BlockMean, Partition
from blockmean.blocks import cut, spread_blocks, spread_together, sum_blocks, sum_together
from support import reference
from support.reference import assert_close
from support.strategies import partitions, randn, seeds

# Sums of at most 43 numbers of size one: rounding is below 43 ε.
SUM_TOLERANCE = 1e-14


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)])
@given(partitions(), seeds())
def test_block_sum_and_expand_are_the_loops_over_entries(batch: tuple[int, ...], p: Partition, seed: int) -> None:
    blocks = reference.blocks_of(p.labels.tolist())
    x, y = randn(*batch, p.num_entries, seed=seed), randn(*batch, p.num_blocks, seed=seed)
    assert_close(p.block_sum(x), reference.block_sum(x.numpy(), blocks), SUM_TOLERANCE)
    assert np.array_equal(p.expand(y), reference.expand(y.numpy(), blocks))


@given(partitions(), seeds())
def test_expand_is_the_adjoint_of_block_sum(p: Partition, seed: int) -> None:
    x, y = randn(p.num_entries, seed=seed), randn(p.num_blocks, seed=seed + 1)
    assert_close(p.expand(y) @ x, y @ p.block_sum(x), 1e-12)  # the inner product itself may be small


@given(partitions(), seeds())
def test_block_sum_of_an_expansion_is_the_size_times_the_value(p: Partition, seed: int) -> None:
    y = randn(p.num_blocks, seed=seed)
    assert_close(p.block_sum(p.expand(y)), p.sizes * y, SUM_TOLERANCE)


@given(partitions(), seeds())
def test_block_var_is_the_unbiased_variance_and_0_for_single_entries(p: Partition, seed: int) -> None:
    x = randn(2, p.num_entries, seed=seed)
    expected = [
        x.numpy()[:, block].var(-1, ddof=1) if len(block) > 1 else np.zeros(2)
        for block in reference.blocks_of(p.labels.tolist())
    ]
    assert_close(p.block_var(x), np.stack(expected, -1), 1e-13)


@given(partitions(), seeds())
def test_gradients_of_the_two_maps_are_each_other(p: Partition, seed: int) -> None:
    x, y = (randn(n, seed=seed).requires_grad_() for n in (p.num_entries, p.num_blocks))
    g, h = randn(p.num_blocks, seed=seed + 1), randn(p.num_entries, seed=seed + 2)
    assert torch.equal(torch.autograd.grad(p.block_sum(x), x, g)[0], p.expand(g))
    assert_close(torch.autograd.grad(p.expand(y), y, h)[0], p.block_sum(h), SUM_TOLERANCE)


@given(partitions())
def test_whole_numbers_and_strided_data_are_summed_too(p: Partition) -> None:
    x = torch.arange(3 * p.num_entries).view(p.num_entries, 3)
    blocks = reference.blocks_of(p.labels.tolist())
    assert p.block_sum(x.mT).tolist() == reference.block_sum(x.mT.numpy(), blocks).tolist()


@pytest.mark.parametrize("sizes", [[1, 1, 1], [3], [2, 1]])
def test_results_own_their_memory_whatever_the_partition(sizes: list[int]) -> None:
    p = Partition.from_sizes(sizes)
    y, x = torch.ones(p.num_blocks), torch.ones(p.num_entries)
    p.expand(y).add_(1), p.block_sum(x).add_(1)
    assert y.tolist() == [1] * p.num_blocks and x.tolist() == [1] * p.num_entries


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numbers", [[0] * 4096 + [1], [0, 1] * 2048 + [0] * 2048])
def test_half_precision_is_summed_and_returned_in_float32(dtype: torch.dtype, numbers: list[int]) -> None:
    p = Partition.from_labels(numbers)
    x = torch.ones(p.num_entries, dtype=dtype)
    x[:2] += 2**-7  # the last digit that bfloat16 has at 1; in a sum of 4,096 only float32 keeps it
    sums = p.block_sum(x)
    assert sums.dtype == torch.float32
    assert torch.equal(sums.double(), p.block_sum(x.double()))
    assert p.block_sum(x.double())[0] != p.block_sum(x.double())[0].to(dtype)  # so the test would notice


def test_float64_stays_float64_and_float32_stays_float32() -> None:
    p = Partition.from_sizes([2])
    assert p.block_sum(torch.tensor([1.0, 1e-12], dtype=torch.float64)).item() == 1 + 1e-12
    assert p.block_sum(torch.ones(2)).dtype == torch.float32
    assert p.expand(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_interleaved_sums_of_float32_are_as_exact_as_contiguous_ones() -> None:
    n = 2**20  # added one after the other, tenths would be off by 1e-3 of their sum
    p = Partition.from_labels(torch.arange(2 * n) % 2)
    assert_close(p.block_sum(torch.full((2 * n,), 0.1)), [n * 0.1] * 2, 1e-6)


# ---------------------------------------------------------------- cost


class LargestIndex(TorchDispatchMode):
    """Notices the largest integer tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, Tensor) and x.dtype in (torch.int32, torch.int64):
                self.numel = max(self.numel, x.numel())
        return result


def everything(p: Partition) -> None:
    x = torch.ones(2, p.num_entries)
    M = BlockMean.from_rows(x, p).damped(1.0)
    p.block_sum(x), p.block_var(x), p.expand(torch.ones(p.num_blocks)), M @ x.mT, x @ M, M.solve(x.mT)
    M.diagonal(), p.coarsen([0] * p.num_blocks), p.refines(p), p == Partition.from_sizes(p.sizes)
    BlockMean.fit(M.to_dense(), p)


def test_contiguous_partitions_never_build_an_index_as_long_as_the_data() -> None:
    with LargestIndex() as contiguous:
        everything(Partition.from_sizes([100, 100, 57]))
    with LargestIndex() as interleaved:
        everything(Partition.from_labels([0, 1, 2] * 80))
    assert contiguous.numel < 10  # only sizes and the like: L numbers
    assert interleaved.numel >= 240  # so the measurement would notice


def test_a_contiguous_partition_of_a_trillion_entries_costs_nothing() -> None:
    p = Partition.from_sizes([10**12, 10**12, 5])  # its labels alone would be 16 terabytes
    x = torch.empty(p.num_entries, device="meta")
    assert p.block_sum(x).shape == (3,)
    assert p.expand(torch.empty(3, device="meta")).shape == x.shape
    assert p.coarsen([0, 0, 1]).sizes.tolist() == [2 * 10**12, 5]
    assert p.refines(p.coarsen([0, 1, 1])) and p == Partition.from_sizes(p.sizes)
    assert "2,000,000,000,005 entries" in p.describe()


def test_sums_of_many_tensors_at_once_are_those_of_each():
    rng = torch.Generator().manual_seed(0)
    shapes = [(4, 6), (5,), (3, 2, 3), (6,), (7, 6), (2, 3), ()]
    values = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    values.append(torch.randn(6, 4, generator=rng, dtype=torch.float64).t())  # not contiguous
    for by in ("unit", "tensor", "element", lambda name, x: torch.arange(x.numel()).remainder(2).view(x.shape)):
        cuts = [cut(f"t{i}", i, x, by) for i, x in enumerate(values)]
        sums = sum_blocks(cuts, values)
        torch.testing.assert_close(sum_together(cuts, values), sums, rtol=0, atol=1e-14)
        found, expected = spread_together(cuts, sums, -sums), spread_blocks(cuts, sums, -sums)
        for together, alone in zip(found, expected, strict=True):
            for a, b, x in zip(together, alone, values, strict=True):
                assert torch.equal(a.expand(x.shape), b.expand(x.shape))
