"""Proposition 1 is a projection: its consequences, over partitions of every kind (docs/theory.md)."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockmean import BlockMean, Partition
from support.reference import assert_close, blocks_of
from support.strategies import make_definite, make_general, partitions, randn, seeds


def project(M: Tensor, p: Partition) -> Tensor:
    """E(M), dense."""
    return BlockMean.fit(M, p).to_dense()


def random_square(p: Partition, seed: int) -> Tensor:
    return randn(p.num_entries, p.num_entries, seed=seed)


def random_gram(p: Partition, seed: int, rank: int) -> Tensor:
    G = randn(rank, p.num_entries, seed=seed)
    return G.mT @ G


@given(partitions(), seeds())
def test_the_projection_leaves_block_mean_matrices_as_they_are(p: Partition, seed: int) -> None:
    M = make_general(p, seed).to_dense()
    assert_close(project(M, p), M, 1e-13)


@given(partitions(), seeds())
def test_the_projection_is_idempotent(p: Partition, seed: int) -> None:
    E = project(random_square(p, seed), p)
    assert_close(project(E, p), E, 1e-13)


@given(partitions(), seeds(), st.floats(-3, 3), st.floats(-3, 3))
def test_the_projection_is_linear(p: Partition, seed: int, a: float, b: float) -> None:
    M, N = random_square(p, seed), random_square(p, seed + 1)
    # Relative to the largest entry of M and N, since a M + b N may cancel.
    assert (project(a * M + b * N, p) - a * project(M, p) - b * project(N, p)).abs().max() <= 1e-12


@given(partitions(), seeds())
def test_the_projection_is_self_adjoint(p: Partition, seed: int) -> None:
    M, N = random_square(p, seed), random_square(p, seed + 1)
    size = M.norm() * N.norm()
    assert abs((project(M, p) * N).sum() - (M * project(N, p)).sum()) <= 1e-13 * size


@given(partitions(), seeds())
def test_the_projection_commutes_with_the_transpose(p: Partition, seed: int) -> None:
    M = random_square(p, seed)
    assert_close(project(M.mT, p), project(M, p).mT, 1e-13)


@given(partitions(), seeds())
def test_the_projection_keeps_the_trace_and_the_sum_of_all_entries(p: Partition, seed: int) -> None:
    M = random_square(p, seed)
    fitted = BlockMean.fit(M, p)
    assert abs(fitted.trace() - M.trace()) <= 1e-13 * M.abs().sum()
    assert abs(fitted.to_dense().sum() - M.sum()) <= 1e-13 * M.abs().sum()


@given(partitions(), seeds(), st.integers(1, 4))
def test_the_projection_keeps_positive_semidefiniteness(p: Partition, seed: int, rank: int) -> None:
    M = random_gram(p, seed, rank)
    fitted = BlockMean.fit(M, p)
    assert torch.linalg.eigvalsh(fitted.to_dense())[0] >= -1e-12 * M.trace()
    assert_close((fitted.sqrt() @ fitted.sqrt()).to_dense(), fitted.to_dense(), 1e-7)  # √ε at zero eigenvalues


@given(partitions(), seeds())
def test_conditioning_of_a_definite_matrix_never_gets_worse(p: Partition, seed: int) -> None:
    M = random_gram(p, seed, 2 * p.num_entries) + 0.1 * torch.eye(p.num_entries)
    fitted = BlockMean.fit(M, p)
    values, _ = fitted.eigenvalues()
    assert fitted.is_positive_definite()
    assert fitted.cond() <= np.linalg.cond(M.numpy()) * (1 + 1e-10)
    exact = torch.linalg.eigvalsh(M)
    assert exact[0] - 1e-10 <= values.min() and values.max() <= exact[-1] + 1e-10 * exact[-1]


@given(partitions(), seeds())
def test_the_error_and_the_projection_are_orthogonal(p: Partition, seed: int) -> None:
    M = random_square(p, seed)
    fitted = BlockMean.fit(M, p)
    error = (M - fitted.to_dense()).norm() ** 2
    assert_close(error + fitted.norm() ** 2, M.norm() ** 2, 1e-13)  # Pythagoras


@given(partitions(), seeds())
def test_no_other_block_mean_matrix_is_nearer(p: Partition, seed: int) -> None:
    M = random_square(p, seed)
    fitted, other = BlockMean.fit(M, p), make_definite(p, seed)
    best = (M - fitted.to_dense()).norm()
    for step in (1e-3, 1.0):
        assert best <= (M - (fitted + other * step).to_dense()).norm()


@st.composite
def nested(draw: st.DrawFn) -> tuple[Partition, Partition]:
    """A partition, and one that merges some of its blocks."""
    fine = draw(partitions())
    groups = draw(st.lists(st.integers(0, 2), min_size=fine.num_blocks, max_size=fine.num_blocks))
    numbers = sorted(set(groups))
    return fine, fine.coarsen([numbers.index(group) for group in groups])


@given(nested(), seeds())
def test_a_coarse_projection_of_a_fine_one_is_the_coarse_one(pair: tuple[Partition, Partition], seed: int) -> None:
    fine, coarse = pair
    M = random_square(fine, seed)
    assert_close(project(project(M, fine), coarse), project(M, coarse), 1e-12)
    assert_close(project(project(M, coarse), fine), project(M, coarse), 1e-12)


@given(nested(), seeds())
def test_the_error_of_a_finer_partition_is_never_larger(pair: tuple[Partition, Partition], seed: int) -> None:
    fine, coarse = pair
    M = random_square(fine, seed)
    assert (M - project(M, fine)).norm() <= (M - project(M, coarse)).norm() * (1 + 1e-13)


@given(partitions(max_blocks=3, max_size=3).filter(lambda p: p.num_entries <= 6), seeds())
def test_the_projection_is_the_average_over_all_permutations_inside_blocks(p: Partition, seed: int) -> None:
    M = random_square(p, seed).numpy()
    blocks = blocks_of(p.labels.tolist())
    total, count = np.zeros_like(M), 0
    for permuted in itertools.product(*(itertools.permutations(block) for block in blocks)):
        order = np.empty(len(M), dtype=int)
        for block, images in zip(blocks, permuted, strict=True):
            order[block] = images
        total += M[np.ix_(order, order)]
        count += 1
    assert_close(project(torch.from_numpy(M), p), total / count, 1e-13)


@given(partitions(), seeds())
def test_the_projection_of_a_hadamard_product_with_a_block_mean_matrix_is_taken_blockwise(
    p: Partition, seed: int
) -> None:
    M, N = random_square(p, seed), make_general(p, seed).to_dense()
    assert_close(project(M * N, p), project(M, p) * N, 1e-12)
