"""The L×L part of a step: from block sums to one number per block.

All three forms of the correction are one formula. With u the block sums of the gradient and U = Σ u uᵀ,

    A = U / (n nᵀ)  (its diagonal kept, or set to 1)      c = N [A^-½ − I] N b

where n is what blocks are measured by, b the block sums of the scaled gradient, and N = diag(scale). A block with
n_i = 0 (no gradient in this step, or never one) takes no part: its row of A is that of the identity, so what is left is
exactly the step of the principal submatrix without it.

With coupling "none" only the diagonals exist; U, A and the root are then vectors, and nothing is decomposed.
"""

from __future__ import annotations

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

JITTER = 1e-8
"""What is added to the diagonal, relative to its mean, before an eigendecomposition is tried a second time."""


def accumulate_(U: Tensor, u: Tensor) -> None:
    """U += u uᵀ, or its diagonal where U is a vector."""
    if U.ndim == 1:
        U.addcmul_(u, u)
    else:
        U.addr_(u, u)


def normalised(U: Tensor, n: Tensor, keep_diagonal: bool) -> Tensor:
    """A = U / (n nᵀ), with the rows and columns of the identity where n_i = 0; (L, L) or its diagonal (L,)."""
    on = n > 0
    inverse = torch.where(on, 1 / n, 0.0)
    if U.ndim == 1:
        return torch.where(on, U * inverse.square(), 1.0) if keep_diagonal else torch.ones_like(U)
    A = U * torch.outer(inverse, inverse)
    diagonal = torch.where(on, A.diagonal(), 1.0) if keep_diagonal else torch.ones_like(n)
    return A.diagonal_scatter(diagonal)


def inverse_root_minus_identity(A: Tensor, floor: float) -> Tensor:
    """A^-½ − I with eigenvalues below `floor` raised to it; (L, L) or the diagonal (L,).

    Raises `LinAlgError` where even a second try with a little jitter does not converge.
    """
    if A.ndim == 1:
        return A.clamp(min=floor).rsqrt() - 1
    try:
        w, Q = torch.linalg.eigh(A)
    except LinAlgError:
        size = A.diagonal().abs().mean()
        w, Q = torch.linalg.eigh(A + JITTER * size * torch.eye(len(A), dtype=A.dtype, device=A.device))
    root: Tensor = (Q * (w.clamp(min=floor).rsqrt() - 1)) @ Q.mT
    if not root.isfinite().all():
        raise LinAlgError("the eigendecomposition is not finite")
    return root


def coefficients(root: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """c = N [A^-½ − I] N b, one number per block, (L,)."""
    scaled = scale * b
    return scale * (root * scaled if root.ndim == 1 else root @ scaled)
