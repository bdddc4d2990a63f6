"""Gradients: every operation against finite differences, and where autograd through eigh has none."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from blockmean import BlockMean, Partition
from blockmean._linalg import divided_difference
from support.reference import assert_close
from support.strategies import make_definite, randn

PARTITIONS = {
    "contiguous": Partition.from_sizes([2, 1, 3]),
    "interleaved": Partition.from_labels([0, 1, 0, 2, 2, 2]),
    "one block": Partition.from_sizes([6]),
    "single entries": Partition.from_sizes([1] * 6),
}
D = 6  # entries of each


def probe(M: BlockMean) -> Tensor:
    """M times a fixed generic vector: changes with every entry, and has 6 numbers to differentiate instead of 36."""
    return M.to_dense() @ randn(D, seed=5)


Operation = Callable[[BlockMean], Tensor]
OPERATIONS: dict[str, Operation] = {
    "product with a vector": lambda M: M @ randn(D, seed=1),
    "product with a matrix": lambda M: M @ randn(D, 2, seed=1),
    "product from the left": lambda M: randn(2, D, seed=1) @ M,
    "product of two": lambda M: probe(M @ M.T),
    "sum and multiple": lambda M: probe(M + M * 2 - M.damped(0.3) / 3),
    "diagonal": lambda M: M.diagonal(),
    "A": lambda M: M.A,
    "A of an inverse": lambda M: M.inverse().A,
    "solve": lambda M: M.solve(randn(D, seed=1)),
    "inverse": lambda M: probe(M.inverse()),
    "sqrt": lambda M: probe(M.sqrt()),
    "inverse_sqrt": lambda M: probe(M.inverse_sqrt()),
    "power 0.3": lambda M: probe(M.power(0.3)),
    "power -2": lambda M: probe(M.power(-2)),
    "apply exp": lambda M: probe(M.apply(torch.exp)),
    "logdet": lambda M: M.logdet(),
    "trace": lambda M: M.trace(),
    "norm": lambda M: M.norm(),
    "norm nuc": lambda M: M.norm("nuc"),
    "norm 2": lambda M: M.norm(2),
    "cond": lambda M: M.cond(),
    "eigenvalues": lambda M: M.eigenvalues()[0],
}


def symmetric_inputs(M: BlockMean) -> tuple[Callable[[Tensor, Tensor], BlockMean], tuple[Tensor, Tensor]]:
    """A function of free numbers that makes a symmetric matrix, and the numbers that make M."""
    inputs = (M.lam.clone().requires_grad_(), (M.B / 2).clone().requires_grad_())
    return lambda lam, B: BlockMean(M.partition, lam, B + B.mT), inputs


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients_with_respect_to_lam_and_B(operation: str, partition: str) -> None:
    make, inputs = symmetric_inputs(make_definite(PARTITIONS[partition], 3))
    assert gradcheck(lambda lam, B: OPERATIONS[operation](make(lam, B)), inputs)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_gradients_of_a_product_with_respect_to_the_vector(partition: str) -> None:
    M = make_definite(PARTITIONS[partition], 3)
    x = randn(D, seed=2).requires_grad_()
    assert gradcheck(lambda x: (M @ x, x @ M, M.solve(x)), x)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_gradients_of_fit_and_from_rows(partition: str) -> None:
    p = PARTITIONS[partition]
    M, G = randn(D, D, seed=0).requires_grad_(), randn(3, D, seed=1).requires_grad_()
    assert gradcheck(lambda M: BlockMean.fit(M, p).to_dense(), M)
    assert gradcheck(lambda M: (BlockMean.fit(M, p).lam, BlockMean.fit(M, p).B), M)
    assert gradcheck(lambda G: BlockMean.from_rows(G, p, weight=0.5).to_dense(), G)


def test_gradients_reach_through_fit_where_lam_is_rounded_to_zero() -> None:
    p = PARTITIONS["one block"]
    M = torch.full((D, D), 0.1, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(BlockMean.fit(M, p).lam.sum(), M)
    (expected,) = torch.autograd.grad(BlockMean.fit(M + torch.eye(D), p).lam.sum(), M)
    assert BlockMean.fit(M, p).lam == 0
    assert torch.equal(gradient, expected)


def test_gradients_of_a_batch_are_those_of_its_matrices() -> None:
    p = PARTITIONS["contiguous"]
    pair = [make_definite(p, seed) for seed in (0, 1)]
    lam = torch.stack([M.lam for M in pair]).requires_grad_()
    B = torch.stack([M.B for M in pair])
    assert gradcheck(lambda lam: BlockMean(p, lam, B).inverse_sqrt().to_dense(), lam)


def test_damping_and_scaling_are_differentiable_in_the_number() -> None:
    M = make_definite(PARTITIONS["contiguous"], 0)
    c = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda c: (M.damped(c).logdet(), (M * c).to_dense(), M.inverse().damped(c).A), c)


# ---------------------------------------------------------------- repeated eigenvalues


def test_autograd_through_eigh_is_nan_at_the_identity() -> None:
    """Why `_linalg` has a backward of its own."""
    A = torch.eye(3, dtype=torch.float64, requires_grad=True)
    w, Q = torch.linalg.eigh(A)
    (gradient,) = torch.autograd.grad(((Q * w.sqrt()) @ Q.mT).sum(), A)
    assert gradient.isnan().any()


@pytest.mark.parametrize("operation", ["sqrt", "inverse_sqrt", "power 0.3", "apply exp", "inverse", "logdet"])
@pytest.mark.parametrize("partition", PARTITIONS)
def test_gradients_where_all_eigenvalues_are_equal(operation: str, partition: str) -> None:
    p = PARTITIONS[partition]
    L = p.num_blocks
    identity = BlockMean(p, torch.ones(L).double(), torch.zeros(L, L).double())
    make, inputs = symmetric_inputs(identity)
    assert gradcheck(lambda lam, B: OPERATIONS[operation](make(lam, B)), inputs)


@pytest.mark.parametrize("gap", [1e-15, 1e-12, 1e-8, 1e-4, 0.03, 0.06])
@pytest.mark.parametrize("operation", ["sqrt", "inverse_sqrt", "apply exp"])
def test_gradients_where_eigenvalues_nearly_coincide(operation: str, gap: float) -> None:
    p = PARTITIONS["single entries"]
    Q, _ = torch.linalg.qr(randn(D, D, seed=0))
    A = (Q * (1 + gap * torch.arange(D))) @ Q.mT
    A = (A + A.mT) / 2
    make, inputs = symmetric_inputs(BlockMean(p, A.diagonal(), A - A.diagonal().diag()))
    assert gradcheck(lambda lam, B: OPERATIONS[operation](make(lam, B)), inputs)


def test_the_gradient_of_the_norm_at_zero_is_zero() -> None:
    lam = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    M = BlockMean(PARTITIONS["contiguous"], lam, torch.zeros(3, 3).double())
    assert torch.equal(torch.autograd.grad(M.norm(), lam)[0], torch.zeros(3).double())


def test_a_second_derivative_of_a_root_is_refused_and_not_wrong() -> None:
    make, inputs = symmetric_inputs(make_definite(PARTITIONS["contiguous"], 0))
    loss = make(*inputs).sqrt().A.sum() + inputs[1].square().sum()
    with pytest.raises(RuntimeError, match="differentiated once only"):
        torch.autograd.grad(loss, inputs[1], create_graph=True)


# ---------------------------------------------------------------- divided differences

GAPS = [0.0, 1e-17, 1e-16, 1e-12, 1e-9, 1e-6, 1e-3, 0.02, 0.049, 0.051, 0.1, 0.5, 3.0, 100.0]


@pytest.mark.parametrize("x", [1.0, 7.0, 1e-9, 1e9])
@pytest.mark.parametrize("gap", GAPS)
def test_divided_differences_of_powers_near_and_far(x: float, gap: float) -> None:
    a, b = x, x * (1 + gap)
    w = torch.tensor([a, b], dtype=torch.float64)
    exact = {
        "sqrt": (torch.sqrt, 1 / (math.sqrt(a) + math.sqrt(b))),
        "inverse": (torch.reciprocal, -1 / (a * b)),
        "inverse sqrt": (torch.rsqrt, -1 / (math.sqrt(a * b) * (math.sqrt(a) + math.sqrt(b)))),
        "square": (torch.square, a + b),
        "log": (torch.log, math.log1p((b - a) / a) / (b - a) if b > a else 1 / a),
    }
    for name, (f, expected) in exact.items():
        K = divided_difference(f, w)
        # At a gap of 5% the difference of two logarithms of 1e9 loses three digits.
        assert math.isclose(K[0, 1], expected, rel_tol=2e-13), name
        assert math.isclose(K[1, 0], expected, rel_tol=2e-13), name


@pytest.mark.parametrize("x", [0.0, 1e-17, 1e-9, 1.0, -5.0, 30.0, 600.0])
@pytest.mark.parametrize("gap", GAPS)
def test_divided_differences_of_exp_near_and_far_also_at_zero_and_where_it_is_steep(x: float, gap: float) -> None:
    gap = x + gap - x  # what is left of it in floating point
    w = torch.tensor([x, x + gap], dtype=torch.float64)
    expected = math.exp(x) * (math.expm1(gap) / gap if gap else 1.0)
    assert math.isclose(divided_difference(torch.exp, w)[0, 1], expected, rel_tol=1e-13)


@pytest.mark.parametrize("gap", [1e-12, 1e-3, 0.04, 1.0])
def test_divided_differences_of_functions_that_turn_or_have_a_kink(gap: float) -> None:
    w = torch.tensor([1.0, 1.0 + gap], dtype=torch.float64)
    step = w[1].item() - 1
    wave = 2 * math.cos(50 * (2 + step)) * math.sin(50 * step) / step
    assert abs(divided_difference(lambda x: torch.sin(100 * x), w)[0, 1] - wave) <= 1e-10  # sin(100 x) itself: 1e-14
    ramp = divided_difference(lambda x: (x - 1 - gap / 4).clamp(min=0), w)[0, 1]
    assert math.isclose(ramp, 0.75, rel_tol=1e-3)  # 1 + gap/4 has a few digits at a gap of 1e-12
    around = torch.tensor([-1.0, 1.0 + gap], dtype=torch.float64)
    expected = (math.cos(1 + gap) - math.cos(1)) / (2 + gap)
    assert abs(divided_difference(torch.cos, around)[0, 1] - expected) <= 1e-15
    assert torch.equal(divided_difference(torch.ones_like, w), torch.zeros(2, 2).double())


def test_divided_differences_are_a_symmetric_matrix_with_the_derivative_on_its_diagonal() -> None:
    w = randn(2, 5, seed=0).abs()
    K = divided_difference(torch.exp, w)
    assert K.shape == (2, 5, 5)
    assert_close(K, K.mT, 1e-15)
    assert_close(K.diagonal(dim1=-2, dim2=-1), np.exp(w.numpy()), 1e-15)
