"""Small matrices."""

from __future__ import annotations

import torch
from torch import Tensor

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

JITTER = 1e-8
"""What is added to the diagonal, relative to its mean, before an eigendecomposition is tried a second time."""

NEGLIGIBLE = torch.finfo(torch.float32).tiny
"""Mean squares below this are taken for zero: their inverses overflow float32, and so do steps made of them."""


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, tried a second time with a little jitter; `LinAlgError` where that fails too."""
    try:
        w, Q = torch.linalg.eigh(A)
    except LinAlgError:
        size = A.diagonal().abs().mean()
        w, Q = torch.linalg.eigh(A + JITTER * size * torch.eye(len(A), dtype=A.dtype, device=A.device))
    if not (w.isfinite().all() and Q.isfinite().all()):
        raise LinAlgError("the eigendecomposition is not finite")
    return w, Q


def damped_solve(A: Tensor, damping: float, b: Tensor) -> Tensor:
    """(A + δI)⁻¹ b for positive semi-definite A, (L, L) or its diagonal; without damping the pseudo-inverse.

    The diagonal is scaled to one first, so that the scale of blocks does not decide which of them count as singular.
    """
    if A.ndim == 1:
        A = A + damping
        return torch.where(A > NEGLIGIBLE, b / A, 0.0)
    A = A + damping * torch.eye(len(A), dtype=A.dtype, device=A.device)
    root = torch.where(A.diagonal() > NEGLIGIBLE, A.diagonal().rsqrt(), 0.0)
    w, Q = eigh(A * root * root.unsqueeze(-1))
    inverse = torch.where(w > len(w) * torch.finfo(A.dtype).eps, 1 / w, 0.0)
    solution: Tensor = root * (Q @ (inverse * (Q.mT @ (root * b))))
    return solution
