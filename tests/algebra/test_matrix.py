"""BlockMean against dense matrices: how it is made, what it says about itself, its arithmetic."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg
import torch
from hypothesis import given
from torch import Tensor

from blockmean import BlockMean, Partition
from support import reference
from support.reference import assert_close, dense
from support.strategies import definite, general, make_definite, make_general, partitions, randn, seeds

MIXED = Partition.from_labels([0, 1, 0, 2, 2, 1, 2])  # interleaved, without single entries
SINGLES = Partition.from_sizes([3, 1, 2, 1])


def batch_of(make: object, partition: Partition, count: int) -> tuple[BlockMean, list[BlockMean]]:
    """A batch of matrices, and the same ones apart."""
    apart = [make(partition, seed) for seed in range(count)]  # type: ignore[operator]
    return BlockMean(partition, torch.stack([M.lam for M in apart]), torch.stack([M.B for M in apart])), apart


# ---------------------------------------------------------------- making one


@given(partitions(), seeds())
def test_fit_is_proposition_1_by_loops(p: Partition, seed: int) -> None:
    M = randn(p.num_entries, p.num_entries, seed=seed)
    fitted = BlockMean.fit(M, p)
    lam, B = reference.proposition_1(M.numpy(), reference.blocks_of(p.labels.tolist()))
    assert_close(fitted.lam, lam)
    assert_close(fitted.B, B)


@given(partitions(), seeds())
def test_from_rows_is_fit_of_the_gram_matrix(p: Partition, seed: int) -> None:
    G = randn(3, p.num_entries, seed=seed)
    rows, gram = BlockMean.from_rows(G, p, weight=0.7), BlockMean.fit(0.7 * G.mT @ G, p)
    assert_close(rows.lam, gram.lam)
    assert_close(rows.B, gram.B)
    assert_close(rows.A, gram.A)


def test_from_rows_takes_no_rows_one_row_and_batches_of_rows() -> None:
    assert not BlockMean.from_rows(torch.zeros(0, 7), MIXED).to_dense().any()
    G = randn(4, 2, 7, seed=0)
    batch = BlockMean.from_rows(G, MIXED)
    assert batch.shape == (4, 7, 7)
    for g, M in zip(G, batch.to_dense(), strict=True):
        assert_close(M, BlockMean.fit(g.mT @ g, MIXED).to_dense())


def test_the_empirical_fisher_of_a_single_gradient_keeps_small_variances_in_float32() -> None:
    p = Partition.from_sizes([1000])
    g = (1000 + 0.01 * randn(1000, seed=0)).float()  # variance 1e-4 beside squares of 1e6
    exact = g.double().var().item()
    difference = (g.square().sum() - g.sum().square() / 1000).item() / 999
    # Rounding moves the mean by 1000 ε = 6e-5, and so the variance by its square.
    assert_close(BlockMean.from_rows(g[None], p).lam, [exact], 1e-4)
    assert abs(difference - exact) > 100 * exact  # t − U/s in float32: all digits are lost


@pytest.mark.parametrize("partition", [MIXED, SINGLES])
def test_fit_takes_a_batch_of_matrices(partition: Partition) -> None:
    M = randn(2, 3, 7, 7, seed=1)
    batch = BlockMean.fit(M, partition)
    assert batch.shape == (2, 3, 7, 7)
    assert_close(batch.to_dense()[1, 2], BlockMean.fit(M[1, 2], partition).to_dense(), 1e-15)


def test_the_two_arrays_of_the_paper_are_kept_as_given() -> None:
    lam, B = randn(4, seed=0), randn(4, 4, seed=1)
    M = BlockMean(SINGLES, lam, B)
    assert torch.equal(M.lam, lam) and torch.equal(M.B, B) and M.partition is SINGLES


def test_python_numbers_take_the_dtype_of_the_tensor_beside_them() -> None:
    p = Partition.from_sizes([2])
    tenth = torch.tensor([0.1], dtype=torch.float64)
    assert BlockMean(p, [0.1], tenth[None]).lam.item() == 0.1
    assert BlockMean(p, tenth, [[0.1]]).B.item() == 0.1
    assert BlockMean(p, [1], [[2]]).dtype == torch.get_default_dtype()
    assert BlockMean(p, tenth, torch.ones(1, 1)).dtype == torch.float64


def test_lam_and_B_are_broadcast_to_one_batch() -> None:
    M = BlockMean(SINGLES, randn(5, 1, 4, seed=0), randn(2, 4, 4, seed=1))
    assert M.shape == (5, 2, 7, 7) and M.lam.shape == (5, 2, 4) and M.B.shape == (5, 2, 4, 4)


# ---------------------------------------------------------------- what it is


@given(general())
def test_to_dense_diagonal_trace_and_A_are_those_of_the_expansion_matrices(M: BlockMean) -> None:
    D, blocks = dense(M), reference.blocks_of(M.partition.labels.tolist())
    assert_close(M.to_dense(), D, 1e-15)
    assert_close(M.diagonal(), np.diag(D), 1e-15)
    assert_close(M.trace(), np.trace(D), 1e-12)  # λ of both signs may cancel in the sum
    assert_close(M.A, reference.canonical(M.lam.numpy(), M.B.numpy(), blocks))
    assert_close(M.T.to_dense(), D.T, 1e-15)
    assert M.shape == D.shape and M.dtype == torch.float64 and M.device == torch.device("cpu")


@given(general())
def test_norms_and_condition_number_are_those_of_the_dense_matrix(M: BlockMean) -> None:
    D = dense(M)
    assert_close(M.norm(), np.linalg.norm(D))
    assert_close(M.norm("fro"), np.linalg.norm(D))
    assert_close(M.norm("nuc"), np.linalg.norm(D, "nuc"))
    assert_close(M.norm(2), np.linalg.norm(D, 2))
    assert_close(M.cond(), np.linalg.cond(D))


@given(definite())
def test_eigenvalues_with_multiplicities_are_those_of_the_dense_matrix(M: BlockMean) -> None:
    values, counts = M.eigenvalues()
    assert counts.sum() == M.partition.num_entries
    assert_close(values.repeat_interleave(counts).sort().values, np.linalg.eigvalsh(dense(M)))


@given(general())
def test_eigenvalues_of_a_matrix_that_is_not_symmetric_are_complex(M: BlockMean) -> None:
    values, counts = M.eigenvalues()
    if torch.equal(M.B, M.B.mT):  # L = 1
        values = values.to(torch.complex128)
    assert values.dtype == torch.complex128
    # The characteristic polynomial at two points says the same as a matching of complex numbers.
    for point in (0.3, 6 + 1j):
        expected = np.linalg.det(point * np.eye(M.shape[-1]) - dense(M))
        assert_close(((point - values) ** counts).prod(), expected, 1e-8)  # a product of up to 43 factors


@given(definite())
def test_logdet_is_that_of_the_dense_matrix(M: BlockMean) -> None:
    assert_close(M.logdet(), np.linalg.slogdet(dense(M))[1], 1e-9)  # a sum of logarithms of both signs
    assert M.is_positive_definite()


@given(general())
def test_positive_definite_means_symmetric_with_positive_eigenvalues(M: BlockMean) -> None:
    symmetric = BlockMean(M.partition, M.lam, M.B + M.B.mT)
    assert symmetric.is_positive_definite() == bool((np.linalg.eigvalsh(dense(symmetric)) > 1e-12).all())
    if M.partition.num_blocks > 1:
        assert not M.is_positive_definite()


def test_cond_of_a_singular_matrix_is_infinite() -> None:
    p = Partition.from_sizes([2])
    assert BlockMean(p, [0.0], [[0.0]]).cond() == torch.inf
    assert BlockMean(p, [0.0], [[1.0]]).cond() == torch.inf
    assert BlockMean(p, [2.0], [[-1.0]]).cond() == torch.inf


def test_numbers_of_a_batch_are_those_of_its_matrices() -> None:
    batch, apart = batch_of(make_definite, SINGLES, 3)
    for name in ("trace", "logdet", "norm", "cond", "diagonal", "to_dense"):
        expected = torch.stack([getattr(M, name)() for M in apart])
        assert_close(getattr(batch, name)(), expected, 1e-14)
    values, counts = batch.eigenvalues()
    assert_close(values, torch.stack([M.eigenvalues()[0] for M in apart]), 1e-14)
    assert counts.tolist() == apart[0].eigenvalues()[1].tolist() == [1, 1, 1, 1, 2, 1]
    assert batch.is_positive_definite() and not (-batch).is_positive_definite()


def test_repr_names_partition_dtype_device_and_batch() -> None:
    p = Partition.from_sizes([2])
    assert repr(BlockMean(p, [1.0], [[0.0]])) == f"BlockMean({p!r}, dtype=float32, device='cpu')"
    assert repr(BlockMean(p, torch.ones(3, 1), torch.ones(1, 1))).endswith("device='cpu', batch=[3])")


# ---------------------------------------------------------------- arithmetic


@given(general(), seeds())
def test_products_with_vectors_and_matrices_from_both_sides(M: BlockMean, seed: int) -> None:
    D, d = dense(M), M.shape[-1]
    v, X, Y = randn(d, seed=seed), randn(d, 3, seed=seed), randn(2, 3, d, seed=seed)
    assert_close(M @ v, D @ v.numpy())
    assert_close(v @ M, v.numpy() @ D)
    assert_close(M @ X, D @ X.numpy())
    assert_close(M @ Y.mT, D @ Y.mT.numpy())
    assert_close(Y @ M, Y.numpy() @ D)


@given(partitions(), seeds())
def test_sums_products_and_multiples_stay_block_mean_matrices(p: Partition, seed: int) -> None:
    M, N = make_general(p, seed), make_general(p, seed + 9)
    C, D = dense(M), dense(N)
    assert_close((M @ N).to_dense(), C @ D)
    assert_close((M @ N).A, M.A @ N.A)
    assert_close((M + N).to_dense(), C + D)
    assert_close((M - N).to_dense(), C - D)
    assert_close((M * 2).to_dense(), 2 * C)
    assert_close((0.1 * M).to_dense(), 0.1 * C, 1e-15)
    assert_close((M / 3).to_dense(), C / 3, 1e-15)
    assert_close((-M).to_dense(), -C, 1e-15)
    assert_close((torch.tensor(2.0) * M).to_dense(), 2 * C, 1e-15)
    assert_close(M.damped(0.1).to_dense(), C + 0.1 * np.eye(len(C)), 1e-15)


@given(partitions(), seeds())
def test_the_transpose_of_a_product_is_the_product_of_transposes(p: Partition, seed: int) -> None:
    M, N = make_general(p, seed), make_general(p, seed + 9)
    assert_close((M @ N).T.to_dense(), (N.T @ M.T).to_dense())
    assert_close((M @ N).T.A, (N.T @ M.T).A)


@pytest.mark.parametrize("partition", [MIXED, SINGLES])
def test_arithmetic_of_a_batch_is_that_of_its_matrices(partition: Partition) -> None:
    batch, apart = batch_of(make_general, partition, 3)
    other = make_general(partition, 11)
    v, X, Y = randn(7, seed=1), randn(7, 2, seed=2), randn(3, 7, 2, seed=3)
    c = torch.tensor([1.0, 2.0, 3.0])
    for i, M in enumerate(apart):
        for actual, expected in (
            (batch @ v, M @ v),
            (v @ batch, v @ M),
            (batch @ X, M @ X),
            (X.mT @ batch, X.mT @ M),
            (batch @ Y, M @ Y[i]),
            ((batch @ other).to_dense(), (M @ other).to_dense()),
            ((other @ batch).to_dense(), (other @ M).to_dense()),
            ((batch + other).to_dense(), (M + other).to_dense()),
            ((batch * c).to_dense(), (M * c[i]).to_dense()),
            ((batch / c).to_dense(), (M / c[i]).to_dense()),
            ((other * c).to_dense(), (other * c[i]).to_dense()),
            (batch.damped(c).to_dense(), M.damped(c[i]).to_dense()),
            ((batch @ other).damped(c).A, (M @ other).damped(c[i]).A),
            (batch.T.to_dense(), M.T.to_dense()),
        ):
            assert_close(actual[i], expected, 1e-14)


def test_numbers_keep_the_dtype_of_the_matrix_and_all_their_digits() -> None:
    M = make_general(SINGLES, 0)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert torch.equal(M.damped(0.1).lam, M.lam + 0.1)
    assert torch.equal((M * third).lam, M.lam * (1 / 3))
    assert (M.to(torch.float32) * third).dtype == (M.to(torch.float32).damped(third)).dtype == torch.float32
    assert (M.to(torch.float32) + M).dtype == (M @ M.to(torch.float32)).dtype == torch.float64


@pytest.mark.parametrize("other", ["text", None, 1j, np.eye(2), [1.0, 2.0]])
def test_operators_leave_foreign_operands_to_python(other: object) -> None:
    M = BlockMean(Partition.from_sizes([2]), [1.0], [[0.0]])
    for name in ("__matmul__", "__rmatmul__", "__mul__", "__truediv__", "__add__", "__sub__"):
        assert getattr(M, name)(other) is NotImplemented
    with pytest.raises(TypeError, match="unsupported operand"):
        M + 1
    with pytest.raises(TypeError, match="unsupported operand"):
        torch.ones(2) + M


# ---------------------------------------------------------------- moving, saving, scipy


def same(M: BlockMean, N: BlockMean) -> bool:
    """Equal in every bit, A included."""
    pairs: list[tuple[Tensor, Tensor]] = [(M.lam, N.lam), (M.B, N.B), (M.A, N.A)]
    return M.partition == N.partition and all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@given(definite())
def test_saving_and_copying_keep_every_bit(M: BlockMean) -> None:
    for matrix in (M, M.inverse_sqrt(), M.to(torch.float32), M.inverse().to(torch.float32)):
        file = io.BytesIO()
        torch.save(matrix.state_dict(), file)
        file.seek(0)
        loaded = BlockMean.from_state_dict(torch.load(file, weights_only=True))
        for other in (loaded, pickle.loads(pickle.dumps(matrix)), copy.deepcopy(matrix)):
            assert same(matrix, other)
            assert torch.equal(matrix.inverse().to_dense(), other.inverse().to_dense())


def test_a_state_holds_plain_tensors_outside_of_the_graph() -> None:
    lam = torch.ones(4, requires_grad=True)
    state = BlockMean(SINGLES, lam, torch.eye(4)).inverse().state_dict()
    assert set(state) == {"sizes", "lam", "B", "A"} and not any(value.requires_grad for value in state.values())
    assert set(make_definite(MIXED, 0).state_dict()) == {"sizes", "labels", "lam", "B"}
    assert not BlockMean(SINGLES, lam, torch.eye(4)).detach().lam.requires_grad
    assert not BlockMean(SINGLES, lam, torch.eye(4)).inverse().detach().A.requires_grad


def test_to_converts_all_arrays() -> None:
    M = make_definite(SINGLES, 0).sqrt()
    N = M.to(torch.float32)
    assert N.lam.dtype == N.B.dtype == N.A.dtype == N.dtype == torch.float32
    assert_close(N.to_dense().double(), M.to_dense(), 1e-6)  # float32
    assert M.to("meta").device.type == "meta"


@given(definite(), seeds())
def test_scipy_solves_with_the_linear_operator(M: BlockMean, seed: int) -> None:
    b = randn(M.shape[-1], seed=seed).numpy()
    x, failed = scipy.sparse.linalg.cg(M.to_scipy(), b, rtol=1e-13)
    assert not failed
    assert_close(x, scipy.linalg.solve(dense(M), b))


def test_the_linear_operator_multiplies_from_both_sides() -> None:
    M = make_general(MIXED, 3)
    operator, X = M.to_scipy(), randn(7, 2, seed=0).numpy()
    assert operator.shape == (7, 7) and operator.dtype == np.float64
    assert_close(operator @ X, dense(M) @ X)
    assert_close(operator @ X[:, :1], dense(M) @ X[:, :1])
    assert_close(operator.T @ X, dense(M).T @ X)
    assert_close(operator.rmatvec(X[:, 0]), dense(M).T @ X[:, 0])
    single = M.to(torch.float32).to_scipy()
    assert (single @ X[:, 0]).dtype == np.float32
