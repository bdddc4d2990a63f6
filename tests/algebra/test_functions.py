"""Functions of a BlockMean (inverse, roots, powers, any f) against dense matrices, and where numbers get difficult."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockmean import BlockMean, Partition
from support import reference
from support.reference import ELEMENTWISE, FUNCTIONS, assert_close, dense, proposition_1
from support.strategies import definite, general, make_definite, make_general, partitions, randn, seeds

# ---------------------------------------------------------------- against scipy


@pytest.mark.parametrize("name", FUNCTIONS)
@given(definite())
def test_theorems_1_and_2_and_lemma_1_give_the_dense_function(name: str, M: BlockMean) -> None:
    result, expected = getattr(M, name)(), FUNCTIONS[name](dense(M))
    assert_close(result.to_dense(), expected)
    assert_close(dense(result), expected)


@given(general(), seeds())
def test_inverse_and_solve_take_any_invertible_matrix(M: BlockMean, seed: int) -> None:
    D, b, C = dense(M), randn(M.shape[-1], seed=seed), randn(2, M.shape[-1], 3, seed=seed)
    assert_close(M.inverse().to_dense(), scipy.linalg.inv(D))
    assert_close(M.solve(b), scipy.linalg.solve(D, b.numpy()))
    assert_close(M.solve(C)[1], scipy.linalg.solve(D, C[1].numpy()))


@given(general(), st.integers(-3, 4))
def test_whole_powers_take_any_invertible_matrix(M: BlockMean, n: int) -> None:
    # Conditioning of up to 17 per factor, to the third power.
    assert_close(M.power(n).to_dense(), np.linalg.matrix_power(dense(M), n), 1e-9)


@given(definite(), st.floats(-2.5, 2.5))
def test_any_power_of_a_definite_matrix(M: BlockMean, p: float) -> None:
    assert_close(M.power(p).to_dense(), reference.power(dense(M), p))


@pytest.mark.parametrize("name", ELEMENTWISE)
@given(M=definite())
def test_any_function_of_a_symmetric_matrix(name: str, M: BlockMean) -> None:
    f, of_dense = ELEMENTWISE[name]
    M = M if name in ("log", "sign") else M - 2 * identity(M.partition)  # indefinite, where that is allowed
    assert_close(M.apply(f).to_dense(), of_dense(dense(M)))


def identity(p: Partition) -> BlockMean:
    return BlockMean(p, torch.ones(p.num_blocks).double(), torch.zeros(p.num_blocks, p.num_blocks).double())


@given(definite())
def test_roots_and_inverses_undo_each_other(M: BlockMean) -> None:
    D, eye = M.to_dense(), torch.eye(M.shape[-1]).double()
    assert_close((M.sqrt() @ M.sqrt()).to_dense(), D)
    assert_close((M.inverse() @ M).to_dense(), eye)
    assert_close((M.inverse_sqrt() @ M @ M.inverse_sqrt()).to_dense(), eye)
    assert_close(M.inverse().inverse().to_dense(), D)
    assert_close(M.apply(torch.log).apply(torch.exp).to_dense(), D)
    assert_close((M.power(0.3) @ M.power(0.7)).to_dense(), D)
    assert_close(M.power(0).to_dense(), eye, 1e-15)
    assert_close(M.power(-0.5).to_dense(), M.inverse_sqrt().to_dense(), 1e-15)


@pytest.mark.parametrize("name", ["inverse", "sqrt", "inverse_sqrt"])
def test_functions_of_a_batch_are_those_of_its_matrices(name: str) -> None:
    p = Partition.from_labels([0, 1, 0, 2, 2, 3, 2])
    apart = [make_definite(p, seed) for seed in range(4)]
    batch = BlockMean(p, torch.stack([M.lam for M in apart]), torch.stack([M.B for M in apart]))
    for result, M in zip(getattr(batch, name)().to_dense(), apart, strict=True):
        assert_close(result, getattr(M, name)().to_dense(), 1e-14)


def test_a_function_may_have_steps() -> None:
    M = make_definite(Partition.from_sizes([2, 3, 1]), 0)
    values, counts = M.eigenvalues()
    above = M.apply(lambda x: x > 1)  # the projection on the eigenvectors above 1
    assert_close((above @ above).to_dense(), above.to_dense())
    assert_close(above.trace(), counts[values > 1].sum().double())


@given(definite())
def test_float32_is_as_good_as_float32_can_be(M: BlockMean) -> None:
    single = M.to(torch.float32)
    for name, of_dense in FUNCTIONS.items():
        result = getattr(single, name)()
        assert result.dtype == result.A.dtype == torch.float32
        assert_close(result.to_dense().double(), of_dense(dense(single)), 2e-6)  # cond 17 · ε 1.2e-7
    assert_close(single.logdet().double(), M.logdet(), 1e-4)
    assert_close(single.norm().double(), M.norm(), 1e-6)


# ---------------------------------------------------------------- single entries


@pytest.mark.parametrize("lam", [0.0, -3.0, 1e-300, 5.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_lam_of_a_single_entry_means_nothing_on_its_own(name: str, lam: float) -> None:
    """Theorem 1 as printed divides by λ_i; for s_i = 1 only λ_i + b_ii exists."""
    p = Partition.from_labels([0, 1, 0, 2])
    B = torch.tensor([[0.2, 0.1, -0.3], [0.1, 1.5 - lam, 0.2], [-0.3, 0.2, 2.0]]).double()
    M = BlockMean(p, torch.tensor([1.0, lam, 0.0]).double(), B)
    assert M.is_positive_definite()
    assert_close(getattr(M, name)().to_dense(), FUNCTIONS[name](dense(M)))
    assert_close(M.logdet(), np.linalg.slogdet(dense(M))[1])
    assert_close(M.cond(), np.linalg.cond(dense(M)))
    assert_close(M.norm("nuc"), np.linalg.norm(dense(M), "nuc"))


@given(definite())
def test_results_give_single_entries_no_B_of_their_own_as_proposition_1_does(M: BlockMean) -> None:
    single = M.partition.sizes == 1
    assert not M.inverse().B.diagonal()[single].any()
    lam, B = proposition_1(M.sqrt().to_dense().numpy(), reference.blocks_of(M.partition.labels.tolist()))
    assert_close(M.sqrt().lam, lam)
    assert_close(M.sqrt().B, B)


# ---------------------------------------------------------------- blocks of very different size


def graded(L: int, seed: int, *, coupled: bool = True) -> tuple[Partition, Tensor, Tensor, Tensor]:
    """A partition, λ, A = D C D with D from 1e-6 to 1e3, and D: eigenvalues from 1e-12 to 1e6, in no order."""
    p = Partition.from_sizes([2 + i % 3 for i in range(L)])
    D = 10.0 ** (torch.linspace(-6, 3, L).double()[torch.randperm(L, generator=torch.Generator().manual_seed(seed))])
    X = randn(L, 3 * L, seed=seed)
    C = X @ X.mT / (3 * L) if coupled else torch.eye(L).double()
    return p, D.square(), D[:, None] * C * D, D


def from_coordinates(p: Partition, lam: Tensor, A: Tensor) -> BlockMean:
    root = p.sizes.double().sqrt()
    return BlockMean(p, lam, (A - lam.diag()) / torch.outer(root, root))


@pytest.mark.parametrize("L", [2, 8, 40])
@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_blocks_of_1e_minus_12_and_1e6_are_inverted_each_to_its_own_precision(L: int, coupled: bool, seed: int) -> None:
    p, lam, A, D = graded(L, seed, coupled=coupled)
    M = from_coordinates(p, lam, A)
    assert M.is_positive_definite()
    # Scaled by the size of its blocks, the product with the inverse is the identity: every block has all its digits.
    scaled = M.inverse().A * torch.outer(D, D)
    assert_close(scaled @ (A / torch.outer(D, D)), torch.eye(L).double(), 1e-11)  # C has a condition of about 20
    root = M.inverse_sqrt().A
    assert_close(root @ root * torch.outer(D, D), scaled, 1e-11)
    sqrt = M.sqrt().A
    assert_close(sqrt @ sqrt / torch.outer(D, D), A / torch.outer(D, D), 1e-11)
    assert_close(M.apply(torch.log).trace(), M.logdet(), 1e-12)
    assert torch.equal(M.inverse().lam, 1 / lam)


def test_eigh_alone_would_lose_the_small_blocks() -> None:
    """Why definite matrices are decomposed through their Cholesky factor."""
    _, _, A, D = graded(40, 0)
    w, Q = torch.linalg.eigh(A)
    root = (Q * w.abs() ** -0.5) @ Q.mT
    exact = torch.linalg.inv(A / torch.outer(D, D))
    assert (root @ root * torch.outer(D, D) - exact).abs().max() > 0.01 * exact.abs().max()


def test_what_an_inverse_knows_is_not_lost_in_multiples_sums_and_damping() -> None:
    """In float32, λ = 1e3 and A = 2e-5 do not survive in λ and B = (A − λ)/s; A is carried along."""
    p = Partition.from_sizes([50])
    N = BlockMean(p, torch.tensor([1e-3]), torch.tensor([[1e3]])).inverse()
    assert (N.lam + 50 * N.B[0] - 2e-5).abs() > 1e-5  # A from λ and B
    made = ((N * 2, 4e-5), (N / 2, 1e-5), (N + N, 4e-5), (N.damped(1e-5), 3e-5), (-N, -2e-5), (N - N * 3, -4e-5))
    for matrix, A in made:
        assert_close(matrix.A.double(), [[A]], 1e-6)


# ---------------------------------------------------------------- singular to working precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(p=partitions(), seed=seeds())
def test_a_semidefinite_matrix_has_a_root_although_rounding_makes_zeros_negative(
    dtype: torch.dtype, p: Partition, seed: int
) -> None:
    G = randn(2, p.num_entries, seed=seed)
    constant = p.expand(p.block_sum(G) / p.sizes)  # on each block: λ = 0
    for rows in (G, constant, G - constant):  # the last has block sums 0, as under a softmax: A = 0
        M = (rows.mT @ rows).to(dtype)
        root = BlockMean.fit(M, p).sqrt()
        # The root of a rounding error ε is √ε.
        tolerance = 8 * torch.finfo(dtype).eps ** 0.5
        assert_close((root @ root).to_dense().double(), BlockMean.fit(M.double(), p).to_dense(), tolerance)


def test_a_lam_that_arithmetic_left_just_below_zero_counts_as_zero_in_a_root() -> None:
    p = Partition.from_sizes([2])
    M = BlockMean(p, torch.tensor([0.3], dtype=torch.float64), torch.ones(1, 1).double()).damped(-0.1).damped(-0.2)
    assert M.lam < 0  # 0.3 − 0.1 − 0.2 = −3e-17
    assert M.sqrt().lam == 0
    assert_close(M.sqrt().A, [[2**0.5]], 1e-15)
    assert not M.is_positive_definite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.1])
@pytest.mark.parametrize("s", [2, 3, 5, 7, 30, 300])
def test_what_rounding_leaves_of_a_singular_matrix_is_not_taken_for_a_definite_one(
    dtype: torch.dtype, value: float, s: int
) -> None:
    p = Partition.from_sizes([s])
    constant = torch.full((s, s), value, dtype=dtype)  # λ = 0
    centred = torch.eye(s, dtype=dtype) * value - value / s  # A = 0
    for M in (constant, centred):
        fitted = BlockMean.fit(M, p)
        assert not fitted.is_positive_definite()
        for name in ("inverse", "inverse_sqrt", "logdet"):
            with pytest.raises(ValueError, match=r"singular|not positive definite"):
                getattr(fitted, name)()
        assert fitted.damped(0.01).is_positive_definite()


def test_a_lam_far_below_B_is_taken_at_its_word() -> None:
    """λ and B are two numbers, not the difference of dense entries: 1e-20 beside 1 is no rounding error here."""
    M = BlockMean(Partition.from_sizes([2]), torch.tensor([1e-20], dtype=torch.float64), torch.ones(1, 1).double())
    inverse = M.inverse()
    assert_close(inverse.lam, [1e20], 1e-15)
    assert_close(inverse.A, [[0.5]], 1e-15)


def test_singular_blocks_between_are_refused_however_blocks_are_scaled() -> None:
    p = Partition.from_sizes([2, 2, 2])
    D = torch.tensor([1e-6, 1.0, 1e3]).double()
    C = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]).double()  # rank 2
    M = from_coordinates(p, D.square(), D[:, None] * C * D)
    assert not M.is_positive_definite()
    with pytest.raises(ValueError, match="singular"):
        M.inverse()


def test_indefinite_matrices_that_are_not_symmetric_positive_still_have_inverses() -> None:
    p = Partition.from_sizes([2, 2])
    swap = from_coordinates(p, torch.tensor([1.0, -1.0]).double(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]).double())
    assert_close(swap.inverse().to_dense(), scipy.linalg.inv(dense(swap)))
    assert_close(make_general(p, 5).power(-2).to_dense(), np.linalg.matrix_power(dense(make_general(p, 5)), -2))
