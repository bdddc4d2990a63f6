"""Small matrices: eigendecompositions, inverses, and functions that can be differentiated where eigenvalues coincide.

Autograd through `torch.linalg.eigh` divides by differences of eigenvalues and gives NaN at A = I. The derivative of
f(A) = Q f(w) Qᵀ itself has no such pole (Daleckii and Krein):

    d f(A) = Q [ K ∘ (Qᵀ dA Q) ] Qᵀ,      K_ij = f[w_i, w_j] = ∫₀¹ f'(w_i + t (w_j − w_i)) dt
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Scalar = Callable[[Tensor], Tensor]
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]

NOISE = 2.0**-19
"""16 rounding errors of float32: what is smaller than this share of a whole counts as noise."""

WITHOUT_FLOAT64 = ("mps",)
"""Devices that have no float64."""

JITTER = 1e-8
"""Added to the diagonal, relative to its mean, when an eigendecomposition fails and is tried again."""

NEGLIGIBLE = torch.finfo(torch.float32).tiny
"""Mean squares below this count as zero: their inverses overflow float32, and so would steps made of them."""

MATMULS = [torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None)]
PRECISION = "fp32_precision"  # from torch 2.9 on

# Gauss-Legendre nodes and weights on [0, 1], exact to degree 7: for a power of x, over a gap of 5%, to 1e-14.
_NODES = (0.06943184420297371, 0.33000947820757187, 0.6699905217924281, 0.9305681557970263)
_WEIGHTS = (0.17392742256872692, 0.32607257743127307, 0.32607257743127307, 0.17392742256872692)


def to_float64(x: Tensor) -> Tensor:
    """x in float64; on devices without float64 (MPS) x itself."""
    return x if x.device.type == "mps" else x.double()


def in_float64(x: Tensor) -> Tensor:
    """In float64, which some devices do not have: then on the CPU."""
    return x.to(float64_device(x.device), torch.float64)


def float64_device(device: torch.device) -> torch.device:
    """Where numbers in float64 about tensors on a device are kept."""
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


def symmetrised(A: Tensor) -> Tensor:
    """The symmetric part of A."""
    return (A + A.mT) / 2


@contextmanager
def exact_products() -> Iterator[None]:
    """Products in full float32, whatever the program has set: TF32 would ruin orthonormal bases."""
    backends = [backend for backend in MATMULS if hasattr(backend, PRECISION)]
    before = [getattr(backend, PRECISION) for backend in backends]
    for backend in backends:
        setattr(backend, PRECISION, "ieee")
    try:
        yield
    finally:
        for backend, kept in zip(backends, before, strict=True):
            setattr(backend, PRECISION, kept)


# ---------------------------------------------------------------- eigenvalues


def eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors, with a second try after a little jitter; `LinAlgError` if that fails too."""
    try:
        w, Q = torch.linalg.eigh(A)
    except LinAlgError:
        size = A.diagonal().abs().mean()
        w, Q = torch.linalg.eigh(A + JITTER * size * torch.eye(len(A), dtype=A.dtype, device=A.device))
    if not math.isfinite(float(w.sum() + Q.sum())):
        raise LinAlgError("the eigendecomposition is not finite")
    return w, Q


def definite_eigh(A: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending) and eigenvectors of a positive definite A, small ones as accurate as large ones.

    `eigh` errs by ε times the largest eigenvalue, which swamps a block 10⁻¹⁶ times smaller. The singular values of a
    Cholesky factor whose rows go from large to small keep their own digits (Demmel and Veselić 1992).
    """
    diagonal, order = A.diagonal(dim1=-2, dim2=-1).sort(-1, descending=True)
    rows, root = order.unsqueeze(-1), diagonal.sqrt().unsqueeze(-1)
    ordered = A.take_along_dim(rows, -2).take_along_dim(rows.mT, -1)
    Q, s, _ = torch.linalg.svd(root * torch.linalg.cholesky(ordered / root / root.mT))
    return s.square().flip(-1), Q.take_along_dim(rows.argsort(-2), -2).flip(-1)


def is_definite(A: Tensor, error: Tensor) -> Tensor:
    """Whether symmetric A (..., L, L) is positive definite, and stays so if its entries move by `error`, (...).

    The diagonal is scaled to one first: blocks may differ by many orders of magnitude, and an eigenvalue that is tiny
    beside the largest need not be a rounding error.
    """
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    root = torch.where(diagonal > 0, diagonal, 1.0).sqrt().unsqueeze(-1)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    factor, info = torch.linalg.cholesky_ex(A / root / root.mT - _arithmetic(A) * eye)
    good: Tensor = (diagonal > 0).all(-1) & (info == 0)
    inverse = torch.cholesky_inverse(torch.where(good[..., None, None], factor, eye))
    return good & (_growth(inverse, error / root / root.mT) < 1)


# ---------------------------------------------------------------- inverses


def scaled_inverse(A: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A⁻¹, whether A stays invertible if its entries move by `error`, and its condition number in the ∞-norm.

    Rows and columns are scaled to one first, so that blocks that differ by many orders of magnitude do not look
    singular.
    """
    with torch.no_grad():
        tiny = torch.finfo(A.dtype).tiny
        rows = A.abs().amax(-1, keepdim=True).clamp(min=tiny)
        columns = (A / rows).abs().amax(-2, keepdim=True).clamp(min=tiny)
    scaled = A / rows / columns
    inverse: Tensor
    inverse, info = torch.linalg.inv_ex(scaled)
    with torch.no_grad():
        condition = scaled.abs().sum(-1).amax(-1) * inverse.abs().sum(-1).amax(-1)
        condition = torch.where((info == 0) & condition.isfinite(), condition, torch.inf)
        good = (_arithmetic(A) * condition < 1) & (_growth(inverse, error / rows / columns) < 1)
    return inverse / columns.mT / rows.mT, good, condition


def _arithmetic(A: Tensor) -> float:
    """How far arithmetic with an L×L matrix of size one may be off."""
    return 4 * A.shape[-1] * torch.finfo(A.dtype).eps


def _growth(inverse: Tensor, error: Tensor) -> Tensor:
    """‖ |A⁻¹| E ‖_∞, (...). Below 1, no change of A by at most E, entry by entry, makes it singular."""
    return (inverse.abs() @ error.sum(-1, keepdim=True)).squeeze(-1).amax(-1)


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


def inverse_roots(A: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """w^-½ and Q of A^-½ = Q diag(w^-½) Qᵀ, with eigenvalues of A below `floor` raised to it.

    Eigenvalues below the rounding error of the largest are rounding errors themselves, and are raised to it as well.
    Raises `LinAlgError` if the eigendecomposition fails even with a little jitter.
    """
    w, Q = eigh(A)
    noise = torch.finfo(A.dtype).eps * float(w[-1])  # they ascend
    return w.clamp(min=max(floor, noise)).rsqrt(), Q


# ---------------------------------------------------------------- functions of symmetric matrices


def symmetric_function(A: Tensor, f: Scalar, w: Tensor, Q: Tensor) -> Tensor:
    """f(A) = Q f(w) Qᵀ for symmetric A = Q diag(w) Qᵀ, (..., L, L); f acts elementwise on eigenvalues."""
    value: Tensor = _SymmetricFunction.apply(A, w, Q, f)  # type: ignore[no-untyped-call]
    return value


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


INERTIA = 1e-3
"""How much of the old columns `orthonormalized` adds to new ones of unit length: it keeps parallel columns apart."""

CLOSEST = 1e-5
"""Smallest diagonal entry of the Cholesky factor of unit columns that `orthonormalized` trusts."""


def orthonormalized(
    sketches: Sequence[Tensor],
    columns: Sequence[Tensor],
    reduce: Callable[[list[Tensor]], None] = lambda sums: None,
) -> list[Tensor]:
    """Orthonormal columns that span what those of each sketch span, one by one: Cholesky-QR in float64, twice.

    A little of `columns`, those so far, is added to the sketch; columns of a sketch that are noise beside its longest
    one count as zero. A column that is zero in both stays zero. Where columns are nearly parallel, those so far are
    returned. All are batches of tall matrices, (…, n, k). Where others have some of the rows, `reduce` completes sums
    over rows in place.
    """
    both = [torch.cat([in_float64(Y), in_float64(V)], -1) for Y, V in zip(sketches, columns, strict=True)]
    grams = [x.mT @ x for x in both]
    reduce(grams)
    first = [first_coefficients(gram) for gram in grams]
    Z = [x @ C for x, (C, _) in zip(both, first, strict=True)]
    grams = [z.mT @ z for z in Z]
    reduce(grams)
    second = [second_coefficients(gram) for gram in grams]
    return [
        torch.where((good & fine)[..., None, None].to(V.device), (z @ T).to(V), V)
        for z, V, (_, good), (T, fine) in zip(Z, columns, first, second, strict=True)
    ]


def first_coefficients(gram: Tensor) -> tuple[Tensor, Tensor]:
    """C, (…, 2k, k), for which the columns of [Y, V] C are nearly orthonormal, and whether to trust it, (…).

    From the products of all columns of [Y, V], (…, 2k, 2k). Loses as many digits as the square of the condition has.
    """
    k = gram.shape[-1] // 2
    length = gram.diagonal(dim1=-2, dim2=-1)[..., :k].sqrt()
    # What is noise beside the longest column must not decide where a column points.
    signal = length > NOISE * length.amax(-1, keepdim=True) if k else length > 0
    unit = torch.diag_embed(torch.where(signal, 1 / length, 0.0))
    eye = torch.eye(k, dtype=gram.dtype, device=gram.device).expand_as(unit)
    mixed = torch.cat([unit, INERTIA * eye], -2)  # columns of length 1, and a little of the old ones
    T, good = second_coefficients(mixed.mT @ gram @ mixed)
    return mixed @ T, good


def second_coefficients(gram: Tensor) -> tuple[Tensor, Tensor]:
    """T, (…, k, k), for which the columns of Z T are orthonormal, or zero, and whether to trust it, from Zᵀ Z."""
    empty = torch.diag_embed((gram.diagonal(dim1=-2, dim2=-1) == 0).to(gram.dtype))
    factor, failed = torch.linalg.cholesky_ex(gram + empty)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand_as(gram)
    inverse = torch.linalg.solve_triangular(factor, eye, upper=False)
    return inverse.mT, (failed == 0) & (factor.diagonal(dim1=-2, dim2=-1) > CLOSEST).all(-1)
