"""Functions of small symmetric matrices, differentiable where eigenvalues coincide.

Autograd through `torch.linalg.eigh` divides by differences of eigenvalues and gives NaN at A = I. The derivative of
f(A) = Q f(w) Qᵀ itself has no such pole (Daleckii and Krein):

    d f(A) = Q [ K ∘ (Qᵀ dA Q) ] Qᵀ,      K_ij = f[w_i, w_j] = ∫₀¹ f'(w_i + t (w_j − w_i)) dt
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]

# Gauss-Legendre nodes and weights on [0, 1], exact to degree 7: for a power of x, over a gap of 5%, to 1e-14.
_NODES = (0.06943184420297371, 0.33000947820757187, 0.6699905217924281, 0.9305681557970263)
_WEIGHTS = (0.17392742256872692, 0.32607257743127307, 0.32607257743127307, 0.17392742256872692)


def symmetric_function(A: Tensor, f: Scalar, w: Tensor, Q: Tensor) -> Tensor:
    """f(A) = Q f(w) Qᵀ for symmetric A = Q diag(w) Qᵀ, (..., L, L); f acts elementwise on eigenvalues."""
    value: Tensor = _SymmetricFunction.apply(A, w, Q, f)  # type: ignore[no-untyped-call]
    return value


def symmetrised(A: Tensor) -> Tensor:
    """The symmetric part of A."""
    return (A + A.mT) / 2


def definite_when_scaled(A: Tensor, tolerance: float) -> Tensor:
    """Whether A (..., L, L) is positive definite, judged with its diagonal scaled to one, (...).

    Blocks may differ by many orders of magnitude; what is small beside the largest is then no rounding error.
    """
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    root = torch.where(diagonal > 0, diagonal, 1.0).sqrt().unsqueeze(-1)
    values: Tensor = torch.linalg.eigvalsh(A / root / root.mT)
    return (diagonal > 0).all(-1) & (values[..., 0] > tolerance)


def definite_eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors of a positive definite A, small ones as accurate as large ones.

    `eigh` errs by ε times the largest eigenvalue, which is all there is of a block 10⁻¹⁶ times smaller. The singular
    values of a Cholesky factor whose rows go from large to small keep their own digits (Demmel and Veselić 1992).
    """
    diagonal, order = A.diagonal(dim1=-2, dim2=-1).sort(-1, descending=True)
    rows, root = order.unsqueeze(-1), diagonal.sqrt().unsqueeze(-1)
    ordered = A.take_along_dim(rows, -2).take_along_dim(rows.mT, -1)
    Q, s, _ = torch.linalg.svd(root * torch.linalg.cholesky(ordered / root / root.mT))
    return s.square().flip(-1), Q.take_along_dim(rows.argsort(-2), -2).flip(-1)


def scaled_inverse(A: Tensor) -> tuple[Tensor, Tensor]:
    """A⁻¹ and the condition number of A in the ∞-norm, rows and columns scaled to one first.

    Scaling keeps blocks that differ by many orders of magnitude from looking singular.
    """
    with torch.no_grad():
        tiny = torch.finfo(A.dtype).tiny
        rows = A.abs().amax(-1, keepdim=True).clamp(min=tiny)
        columns = (A / rows).abs().amax(-2, keepdim=True).clamp(min=tiny)
    scaled = A / rows / columns
    inverse: Tensor
    inverse, info = torch.linalg.inv_ex(scaled)
    condition = scaled.abs().sum(-1).amax(-1) * inverse.abs().sum(-1).amax(-1)
    condition = torch.where((info == 0) & condition.isfinite(), condition, torch.inf)
    return inverse / columns.mT / rows.mT, condition.detach()


def divided_difference(f: Scalar, w: Tensor) -> Tensor:
    """K_ij = (f(w_i) − f(w_j)) / (w_i − w_j), or the average of f' over the gap where that loses digits."""
    a, b = torch.broadcast_tensors(w.unsqueeze(-1), w.unsqueeze(-2))
    gap, f_a, f_b = b - a, f(a), f(b)
    difference = (f_b - f_a) / gap
    average = torch.zeros_like(gap)
    for node, weight in zip(_NODES, _WEIGHTS, strict=True):
        average += weight * _derivative(f, a + node * gap)
    # Over a small gap the difference cancels; over a large one, or for a steep f, the average has too few nodes. Where
    # it stays within the rounding error of the difference it is the better of the two, whatever the scale of f.
    size = f_a.abs().maximum(f_b.abs()) + a.abs().maximum(b.abs()) * average.abs()  # f, and x f' for rounding of x
    rounding = 8 * torch.finfo(w.dtype).eps * size / gap.abs()
    return torch.where((gap == 0) | ((average - difference).abs() <= rounding), average, difference)


def _derivative(f: Scalar, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = f(x)
        if not y.requires_grad:  # a constant function
            return torch.zeros_like(x)
        return torch.autograd.grad(y.sum(), x)[0]


class _SymmetricFunction(torch.autograd.Function):
    @staticmethod
    def forward(A: Tensor, w: Tensor, Q: Tensor, f: Scalar) -> Tensor:
        return (Q * f(w).unsqueeze(-2)) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, w, Q, ctx.f = inputs
        ctx.save_for_backward(w, Q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # w and Q are constants here, so a second derivative would be silently wrong
            raise RuntimeError("A function of a BlockMean can be differentiated once only, without create_graph=True.")
        w, Q = ctx.saved_tensors
        K = divided_difference(ctx.f, w)
        return Q @ (K * (Q.mT @ grad @ Q)) @ Q.mT, None, None, None
