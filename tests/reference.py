"""Dense, slow, obviously-correct twins of the library in numpy and scipy. They share no code with src/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.linalg
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

# Algebra of matrices whose condition number is a few hundred, through different but backward stable algorithms (and
# scipy's sqrtm and logm): 1e-16 · cond · d stays below this in float64, with two digits to spare.
TOLERANCE = 1e-10


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Equal shapes, and no entry further off than `tolerance` times the largest entry of what is expected."""
    a, b = (x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x) for x in (actual, expected))
    assert a.shape == b.shape, f"shape {a.shape} where {b.shape} is expected"
    if b.size:
        error, size = np.abs(a - b).max(), np.abs(b).max()
        assert error <= tolerance * (size or 1.0), f"off by {error:.3g} beside {size:.3g}"


# ---------------------------------------------------------------- partitions


def blocks_of(labels: Sequence[int]) -> list[list[int]]:
    """The entries of each block."""
    return [[k for k, label in enumerate(labels) if label == i] for i in range(max(labels) + 1)]


def block_sum(x: Array, blocks: list[list[int]]) -> Array:
    """Σ of the entries of each block, (..., d) → (..., L)."""
    return np.stack([sum(x[..., k] for k in block) for block in blocks], -1)


def expand(y: Array, blocks: list[list[int]]) -> Array:
    """Each block's value at each of its entries, (..., L) → (..., d)."""
    x = np.empty((*y.shape[:-1], sum(map(len, blocks))), y.dtype)
    for i, block in enumerate(blocks):
        for k in block:
            x[..., k] = y[..., i]
    return x


# ---------------------------------------------------------------- the paper's expansion matrices and Proposition 1


def diagonal_expansion(lam: Array, blocks: list[list[int]]) -> Array:
    """Λ̄: λ_i at the diagonal entries of block i."""
    return np.diag(expand(lam, blocks))


def full_expansion(B: Array, blocks: list[list[int]]) -> Array:
    """B̄: b_ij at every entry of block ij."""
    d = sum(map(len, blocks))
    M = np.empty((d, d))
    for i, rows in enumerate(blocks):
        for j, columns in enumerate(blocks):
            for m in rows:
                for n in columns:
                    M[m, n] = B[i, j]
    return M


def block_mean(lam: Array, B: Array, blocks: list[list[int]]) -> Array:
    """Λ̄ + B̄."""
    return diagonal_expansion(lam, blocks) + full_expansion(B, blocks)


def dense(M: Any) -> Array:
    """A BlockMean, or a batch of them, as dense matrices, from its λ, its B and the label of each entry alone."""
    blocks, L = blocks_of(M.partition.labels.tolist()), M.partition.num_blocks
    lam, B = (x.detach().double().numpy() for x in (M.lam, M.B))
    batch = [block_mean(l, b, blocks) for l, b in zip(lam.reshape(-1, L), B.reshape(-1, L, L), strict=True)]
    d = M.partition.num_entries
    return np.array(batch).reshape(*lam.shape[:-1], d, d)


def proposition_1(M: Array, blocks: list[list[int]]) -> tuple[Array, Array]:
    """λ and B of the nearest block-mean matrix, letter by letter as the paper's equations (b_ij) and (λ_i)."""
    L = len(blocks)
    s = [len(block) for block in blocks]
    lam, B = np.zeros(L), np.zeros((L, L))
    for i in range(L):
        for j in range(L):
            total = sum(M[m, n] for m in blocks[i] for n in blocks[j])
            if i != j:
                B[i, j] = total / (s[i] * s[j])
            elif s[i] == 1:
                B[i, i] = 0
            else:
                B[i, i] = (total - sum(M[m, m] for m in blocks[i])) / (s[i] * (s[i] - 1))
    for i in range(L):
        lam[i] = sum(M[m, m] for m in blocks[i]) / s[i] - B[i, i]
    return lam, B


def canonical(lam: Array, B: Array, blocks: list[list[int]]) -> Array:
    """A = Λ + S^½ B S^½."""
    root_s = np.diag([len(block) ** 0.5 for block in blocks])
    return np.diag(lam) + root_s @ B @ root_s


# ---------------------------------------------------------------- functions of dense matrices


def power(M: Array, p: float) -> Array:
    """M^p of a symmetric positive definite matrix."""
    return np.real(scipy.linalg.fractional_matrix_power(M, p))


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "inverse": scipy.linalg.inv,
    "sqrt": lambda M: np.real(scipy.linalg.sqrtm(M)),
    "inverse_sqrt": lambda M: scipy.linalg.inv(np.real(scipy.linalg.sqrtm(M))),
}
"""The paper's Theorem 1, Lemma 1 and Theorem 2, by the name of the method."""

ELEMENTWISE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[Array], Array]]] = {
    "exp": (torch.exp, scipy.linalg.expm),
    "log": (torch.log, lambda M: np.real(scipy.linalg.logm(M))),
    "cos": (torch.cos, scipy.linalg.cosm),
    "sign": (torch.sign, lambda M: np.real(scipy.linalg.signm(M))),
    "cube": (lambda x: x**3, lambda M: M @ M @ M),
}
"""f as it acts on eigenvalues, and f of a dense matrix."""
