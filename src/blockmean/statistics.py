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

from blockmean._linalg import NEGLIGIBLE, LinAlgError, damped_solve, inverse_root_minus_identity, times

__all__ = [
    "NEGLIGIBLE",
    "LinAlgError",
    "accumulate_",
    "average_",
    "average_outer_",
    "damped_solve",
    "inverse_root_minus_identity",
    "normalised",
    "times",
]


def accumulate_(U: Tensor, u: Tensor) -> None:
    """U += u uᵀ, or its diagonal where U is a vector."""
    if U.ndim == 1:
        U.addcmul_(u, u)
    else:
        U.addr_(u, u)


def average_(x: Tensor, value: Tensor | float, beta: float, present: Tensor) -> None:
    """x ← β x + (1 − β) value where a block takes part; elsewhere x stays as it is, (L,)."""
    x.copy_(torch.where(present, x * beta + (1 - beta) * value, x))


def average_outer_(U: Tensor, u: Tensor, beta: float, present: Tensor) -> None:
    """U ← E U E + (1 − β) u uᵀ, where E is √β for the blocks that take part and 1 for the others.

    Where all do, this is the usual average. Where some sit out (u_i = 0), it leaves their entries as they are and U
    positive semi-definite, which keeping whole rows would not.
    """
    if U.ndim == 1:
        average_(U, u.square(), beta, present)
        return
    keep = torch.ones_like(u).masked_fill_(present, beta**0.5)
    U.mul_(keep).mul_(keep.unsqueeze(-1)).addr_(u, u, alpha=1 - beta)


def normalised(U: Tensor, n: Tensor, keep_diagonal: bool) -> Tensor:
    """A = U / (n nᵀ), with the rows and columns of the identity where n_i = 0; (L, L) or its diagonal (L,)."""
    on = n > 0
    inverse = torch.where(on, 1 / n, 0.0)
    if U.ndim == 1:
        return torch.where(on, U * inverse * inverse, 1.0) if keep_diagonal else torch.ones_like(U)
    A = U * inverse[:, None] * inverse  # one after the other: n_i n_j alone may underflow
    diagonal = torch.where(on, A.diagonal(), 1.0) if keep_diagonal else torch.ones_like(n)
    return A.diagonal_scatter(diagonal)
