"""float32 matrices against float64: no direction of a product is lost, and only singular matrices are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import assume, given
from torch import Tensor

from blockmean import BlockMean, Partition
from support.reference import assert_close, blocks_of, expand
from support.strategies import make_definite, make_general, partitions, randn, seeds

SMALL, LARGE = 1e-5, 1e3
TOLERANCE = 2e-6  # 16 ε of float32: λ, the vector and the result are rounded once each, A not at all


def by_eigenvalues(A: np.ndarray, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    w, Q = np.linalg.eigh(A)
    return (Q * f(w)) @ Q.T


FUNCTIONS: dict[str, tuple[Callable[[BlockMean], BlockMean], Callable[[np.ndarray], np.ndarray]]] = {
    "the matrix itself": (lambda M: M, lambda A: A),
    "inverse": (lambda M: M.inverse(), scipy.linalg.inv),
    "sqrt": (lambda M: M.sqrt(), lambda A: by_eigenvalues(A, np.sqrt)),
    "inverse_sqrt": (lambda M: M.inverse_sqrt(), lambda A: by_eigenvalues(A, lambda w: w**-0.5)),
    "power -2": (lambda M: M.power(-2), lambda A: scipy.linalg.inv(A @ A)),
    "power 0.3": (lambda M: M.power(0.3), lambda A: by_eigenvalues(A, lambda w: w**0.3)),
    "apply log": (lambda M: M.apply(torch.log), lambda A: by_eigenvalues(A, np.log)),
}


def separated(p: Partition, seed: int, *, small_inside: bool = True) -> BlockMean:
    """A float32 matrix with λ near 1e-5 and A near 1e3, or the other way round."""
    M = make_definite(p, seed)
    lam = torch.where(p.sizes > 1, M.lam * SMALL, 0.0).float()
    root = p.sizes.double().sqrt()
    inside = BlockMean(p, lam, (M.A * LARGE / torch.outer(root, root)).float())
    return inside if small_inside else inside.inverse() * (SMALL * LARGE)


def coordinates(M: BlockMean) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """λ, A and the d×L matrix R with orthonormal columns, in float64, from what the matrix was made of."""
    p = M.partition
    one = torch.nn.functional.one_hot(p.labels).double()
    root = p.sizes.double().sqrt()
    A = M.lam.double().diag() + M.B.double() * torch.outer(root, root) if M._A is None else M._A.double()
    return M.lam.double().numpy(), A.numpy(), (one / root).numpy()


def product(f: Callable[[np.ndarray], np.ndarray], M: BlockMean, v: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """f(M) v from dense projections: what it is inside blocks, and what it is between them."""
    lam, A, R = coordinates(M)
    x = v.double().numpy()
    blocks = blocks_of(M.partition.labels.tolist())
    # Summed exactly: 1e-16 of a mean, times λ⁻² = 1e10, would be more than A⁻² = 1e-6 leaves of it.
    common = expand(np.array([math.fsum(x[block]) / len(block) for block in blocks]), blocks)
    singles = M.partition.sizes.numpy() == 1
    inner = np.array(
        [0.0 if single else f(np.array([[value]]))[0, 0] for single, value in zip(singles, lam, strict=True)]
    )
    return inner[M.partition.labels.numpy()] * (x - common), R @ (f(A) @ (R.T @ x))


def assert_exact(actual: Tensor, p: Partition, inside: np.ndarray, between: np.ndarray) -> None:
    """Close on every block, relative to what is on that block: an error of one block must not hide behind another."""
    error = np.abs(actual.double().numpy() - inside - between)
    size = np.abs(inside) + np.abs(between)
    # A between blocks mixes them, so a small block is as exact as the sum it is made of.
    between_blocks = np.abs(between).max()
    for block in range(p.num_blocks):
        of = (p.labels == block).numpy()
        assert error[of].max() <= TOLERANCE * max(size[of].max(), between_blocks), block


@pytest.mark.parametrize("small_inside", [True, False])
@pytest.mark.parametrize("name", FUNCTIONS)
@given(p=partitions(), seed=seeds())
def test_products_in_float32_keep_the_common_direction(name: str, small_inside: bool, p: Partition, seed: int) -> None:
    M = separated(p, seed, small_inside=small_inside)
    of_matrix, of_dense = FUNCTIONS[name]
    result = of_matrix(M)
    constant = p.expand(randn(p.num_blocks, seed=seed)).float()
    generic = randn(p.num_entries, seed=seed + 1).float()
    for v in (constant, generic, generic + 1000 * constant):
        inside, between = product(of_dense, M, v)
        assert_exact(result @ v, p, inside, between)
        assert_exact(v @ result, p, inside, between)
        assert_exact((result @ torch.stack([v, 2 * v], 1))[:, 0], p, inside, between)
    inside, between = product(scipy.linalg.inv, M, constant)
    assert_exact(M.solve(constant), p, inside, between)


@pytest.mark.parametrize("value", [1.0, 0.1, -3.7, 1e-20])
@pytest.mark.parametrize("s", [2, 1000, 10**6])
def test_a_constant_vector_is_solved_for_by_its_block_mean(s: int, value: float) -> None:
    """λ = 1e-5 and A = s: in λ⁻¹ v + D u two numbers of 1e5 cancel to 1/s."""
    M = BlockMean(Partition.from_sizes([s]), torch.tensor([SMALL]), torch.ones(1, 1))
    v = torch.full((s,), value)
    assert_close((M.solve(v) / v).double(), np.full(s, 1 / (s + SMALL)), 1e-6)


@given(partitions(), seeds())
def test_products_with_matrices_that_are_not_symmetric_keep_it_too(p: Partition, seed: int) -> None:
    M, root = make_general(p, seed), p.sizes.double().sqrt()
    N = BlockMean(p, (M.lam * SMALL).float(), (M.A * LARGE / torch.outer(root, root)).float()).inverse()
    v = p.expand(randn(p.num_blocks, seed=seed)).float()
    inside, between = product(lambda A: A, N, v)
    assert_exact(N @ v, p, inside, between)
    inside, between = product(lambda A: A, N.T, v)
    assert_exact(v @ N, p, inside, between)


def test_an_outlier_at_the_start_of_a_block_does_not_spoil_the_others() -> None:
    """Deviations are taken from the mean of the first entries; here these are all that is large."""
    p = Partition.from_sizes([1600])
    M = BlockMean(p, torch.tensor([3.0]), torch.tensor([[0.1]]))
    for outliers in (1, 100):
        v = randn(1600, seed=0).float()
        v[:outliers] += 1e6
        exact = 3 * v.double() + 0.1 * v.double().sum()
        assert (M @ v - exact).norm() <= 1e-6 * exact.norm()  # 8 ε


def test_a_product_that_is_finished_in_pieces_is_the_one_that_is_not() -> None:
    p = Partition.from_sizes([100_000] * 5)  # more than stays in the cache
    M, v = make_general(p, 0), randn(2, p.num_entries, seed=1)
    whole = BlockMean(p, M.lam.clone().requires_grad_(), M.B)  # autograd needs it in one piece
    assert torch.equal(v @ M, (v @ whole).detach())
    exact = p.expand(M.lam) * v + p.expand(p.block_sum(v) @ M.B)
    assert_close(v @ M, exact, 1e-12)


def test_gradients_of_a_product_do_not_depend_on_where_deviations_are_taken_from() -> None:
    p = Partition.from_sizes([40, 2, 1])  # 3 of 40 entries are the sample
    make = make_definite(p, 0)
    lam, B = make.lam.clone().requires_grad_(), make.B.clone().requires_grad_()
    v = randn(43, seed=1).requires_grad_()
    dense = p.expand(p.expand(B).mT).mT + torch.diag_embed(p.expand(lam))
    weight = randn(43, seed=2)
    expected = torch.autograd.grad(weight @ (dense @ v), (lam, B, v))
    for actual, wanted in zip(
        torch.autograd.grad(weight @ (BlockMean(p, lam, B) @ v), (lam, B, v)), expected, strict=True
    ):
        assert_close(actual, wanted, 1e-13)


# ---------------------------------------------------------------- what counts as singular


def strongly_coupled(L: int) -> tuple[BlockMean, Tensor]:
    """The Fisher matrix of rows with one common number and one per block, well conditioned for its size."""
    p = Partition.from_sizes([3] * L)
    common = randn(4 * L, L, seed=1) + 3 * randn(4 * L, 1, seed=2)
    G = (randn(4 * L, 3 * L, seed=0) + p.expand(common)).float()
    return BlockMean.from_rows(G, p, 1 / len(G)), G.mean(0)


@pytest.mark.parametrize("damping", [0.0, 0.05])
def test_a_healthy_matrix_of_many_blocks_is_inverted_in_float32(damping: float) -> None:
    F, g = strongly_coupled(300)
    as_given = BlockMean(F.partition, F.lam, F.B)  # from λ and B alone
    for M in (F.damped(damping), as_given.damped(damping)):
        lam, A, R = coordinates(M)
        assert np.linalg.cond(A) > 5000
        x = g.double().numpy()
        exact = (x - R @ (R.T @ x)) / lam[M.partition.labels.numpy()] + R @ np.linalg.solve(A, R.T @ x)
        assert_close(M.solve(g).double(), exact, 1e-6)
        assert M.is_positive_definite()
        M.inverse_sqrt(), M.logdet(), M.power(-2)


@given(partitions().filter(lambda p: p.num_blocks > 1), seeds())
def test_float32_roundings_of_singular_matrices_are_refused(p: Partition, seed: int) -> None:
    G = randn(p.num_blocks - 1, p.num_entries, seed=seed)  # the block sums have one dimension too few
    fitted = BlockMean.fit((G.mT @ G).float(), p)
    for M in (
        fitted,
        fitted * 0.3,
        BlockMean.from_rows(G.float(), p),
        fitted.T,
        BlockMean.fit(G.mT @ G, p),
    ):
        assert not M.is_positive_definite()
        with pytest.raises(ValueError, match=r"singular to the precision|is singular\. λ = 0"):
            M.inverse()


@given(partitions().filter(lambda p: p.num_blocks > 1), seeds())
def test_the_advice_for_a_singular_matrix_helps(p: Partition, seed: int) -> None:
    G = randn(p.num_blocks - 1, p.num_entries, seed=seed)
    fitted = BlockMean.fit((G.mT @ G).float(), p)
    assume(bool((fitted._inner() > 0).all()))
    with pytest.raises(ValueError, match=r"Compute λ and B in float64, or use damped\(δ\) with a δ above") as caught:
        fitted.inverse()
    above = float(str(caught.value).partition("δ above ")[2].partition(",")[0])
    damped = fitted.damped(10 * above)
    assert damped.is_positive_definite()
    damped.inverse()


def test_float64_is_not_advised_where_it_is_used_already() -> None:
    p = Partition.from_sizes([2, 2])
    M = BlockMean(p, torch.ones(2).double(), torch.full((2, 2), -0.5).double().fill_diagonal_(0))
    with pytest.raises(ValueError, match=r"precision of its numbers, torch.float64.*\. Use damped\(δ\)"):
        M.inverse()
    zero = BlockMean(Partition.from_sizes([1]), [0.0], [[0.0]])
    with pytest.raises(ValueError, match=r"or use damped\(δ\) to add δ"):
        zero.inverse()


def test_a_root_of_a_rounded_singular_matrix_is_refused_with_the_same_advice() -> None:
    p = Partition.from_sizes([2, 2])
    barely = torch.tensor([[0.0, -0.5], [-0.5, 2e-7]])  # A has the eigenvalue 2e-7 beside errors of 8 ε = 1e-6
    M = BlockMean(p, torch.ones(2), barely)
    with pytest.raises(
        ValueError, match=r"not positive definite to the precision.*float32.* λ and B in float64, or use"
    ):
        M.inverse_sqrt()
    M.to(torch.float64).inverse_sqrt()  # the same numbers, now taken at their word
