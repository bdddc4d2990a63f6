"""Anova's arithmetic, in plain functions of tensors: project, precondition, update. Equations: the head of anova.py.

Every tensor has a batch dim in front, for matrices that take a step together: U is (n, O, k), V (n, I, q). G and M come
as parts, one for each shape, (m, O, I); everything else of smaller matrices is padded with zeros, up to the O and I of
the largest. A process may have only some rows and columns of a matrix: then G and M are what it has of them, U, X, MV
and v_E have its rows, V, Y and UM its columns. Whatever is a sum over all rows or columns is completed by `reduce`,
which does nothing where a process has them all. Nothing here branches on values, so an accelerator never waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockmean._linalg import NOISE
from blockmean.optim.base import arithmetic

FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""

LEAST = 2.0**-18
"""Share of a row's square that its remainder has at least: 32 rounding errors of float32."""

FACTORS = (0.7, 20.0)
"""The range of c."""

FACTOR_NEWS = 0.2
"""How much c takes from each measurement: the first ones, of a few gradients, take noise for agreement."""

MAX_RATE, GENTLE = 7e-3, 3e-2
"""c η is at most MAX_RATE, and c at most √(GENTLE / η): a rate still has an effect where c is at its limit."""

Sums = dict[str, list[Tensor]]
"""Sums over the "units", the "inputs" or "both": for each tensor of a kind, one for every batch of matrices."""

Reduce = Callable[[Sums], None]
"""Completes sums in place, where other processes have some of the rows or columns."""


class Squares(NamedTuple):
    """One number for every block of a matrix: a mean square, or an average of those."""

    K: Tensor  # (n, k, q), for every grand mean
    R: Tensor  # (n, q), for every column of R
    L: Tensor  # (n, k), for every row of L
    E: Tensor  # (n, O), for every row of E


class Means(NamedTuple):
    """What a batch of matrices has learned, and M in these coordinates: views of their state."""

    U: Tensor  # (n, O, k)
    V: Tensor  # (n, I, q)
    X: Tensor  # (n, O, k), which U follows
    Y: Tensor  # (n, I, q), which V follows
    K: Tensor  # (n, k, q), Uᵀ M V
    MV: Tensor  # (n, O, q)
    UM: Tensor  # (n, k, I)
    v: Squares
    variance: Tensor  # (n,), average of the mean square of all entries of G
    rest_variance: Tensor  # (n,), the same of E
    factor: Tensor  # (n,), c
    weights: Tensor  # (n, 3), bias corrections of M, of the v of means, and of v_E: what averages of ones would be


def split_state(units: Tensor, inputs: Tensor, grand: Tensor, k: int, q: int) -> Means:
    """The parts of the three tensors in which a matrix keeps its means:

    units   (n, O, 2k+q+1)       U | X | MV | v_E
    inputs  (n, 2q+k, I)         Vᵀ, Yᵀ, UM
    grand   (n, 2kq+q+k+6)       K | v_K | v_R | v_L | the mean squares of G and of E | c | weights
    """
    U, X, MV, v_E = units.split([k, k, q, 1], -1)
    V, Y, UM = inputs.split([q, q, k], -2)
    K, v_K, v_R, v_L, sizes, weights = grand.split([k * q, k * q, q, k, 3, 3], -1)
    variance, rest_variance, factor = sizes.unbind(-1)
    v = Squares(v_K.unflatten(-1, (k, q)), v_R, v_L, v_E.squeeze(-1))
    return Means(U, V.mT, X, Y.mT, K.unflatten(-1, (k, q)), MV, UM, v, variance, rest_variance, factor, weights)


def state_widths(k: int, q: int) -> tuple[int, int, int]:
    """Columns of `units`, rows of `inputs`, and the length of `grand`."""
    return 2 * k + q + 1, 2 * q + k, 2 * k * q + q + k + 6


class Products(NamedTuple):
    """What pass 1 takes from a gradient."""

    GV: Tensor  # (n, O, q)
    UG: Tensor  # (n, k, I)
    K: Tensor  # (n, k, q)
    rows: Tensor  # (n, O), squared lengths
    total: Tensor  # (n,), squared length of all of it


class SumsOfSquares(NamedTuple):
    """What needs complete products."""

    R: Tensor  # (n, q), of every column of R
    LL: Tensor  # (n, k, k), L Lᵀ
    X: Tensor  # (n, O, k), G Gᵀ U where there is no V to follow; else empty
    Y: Tensor  # (n, I, q), Gᵀ G V where there is no U


SIDES = {
    Products: ("inputs", "units", "both", "inputs", "both"),
    SumsOfSquares: ("units", "inputs", "inputs", "units"),
}
"""What each of these is a sum over."""


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step, equal for a batch of matrices."""

    beta1: float
    mean_beta: float
    beta2: float
    lr: float | Tensor
    weight_decay: float
    eps: float
    step: int  # this one included
    is_first: bool  # whether means start in this step
    refreshes: bool  # whether U and V turn after it
    ok: Tensor | None = None  # 0 on the device if nothing may change, else 1; None: the host has looked

    @property
    def betas(self) -> tuple[float, float, float, float]:
        """Of v_K, v_R, v_L and v_E."""
        return self.mean_beta, self.mean_beta, self.mean_beta, self.beta2

    def news(self, beta: float) -> float | Tensor:
        """How much an average takes from a new value."""
        return (1 - beta) * self.allowed

    @property
    def allowed(self) -> float | Tensor:
        """1, or 0 if nothing may change."""
        return 1.0 if self.ok is None else self.ok

    @property
    def rate(self) -> float | Tensor:
        """The learning rate, or 0 if nothing may change."""
        return self.lr * self.allowed


class Place(NamedTuple):
    """Which rows, or columns, of a matrix a process has."""

    own_index: Tensor | None = None  # None: all
    total: int = 0  # of the whole matrix

    def alive(self, x: Tensor) -> Tensor:
        """Which of what a process has are not zero, (n, own) → (n, all); those of others are 0."""
        own = (x != 0).to(x.dtype)
        return own if self.own_index is None else own.new_zeros(len(x), self.total).index_copy_(1, self.own_index, own)

    def own(self, x: Tensor) -> Tensor:
        """(n, all, …) → (n, own, …)."""
        return x if self.own_index is None else x.index_select(1, self.own_index)


class Part(NamedTuple):
    """The matrices of one shape in a batch."""

    at: slice  # where they are in the batch
    G: Tensor  # (m, O, I)
    averages: list[Tensor]  # M of each, (O, I)

    @property
    def M(self) -> Tensor:
        """(m, O, I), a view of one matrix, or a copy of several."""
        return self.averages[0][None] if len(self.averages) == 1 else torch.stack(self.averages)


class Sizes(NamedTuple):
    """O, I and O I of whole matrices: numbers, or (n, 1), (n, 1) and (n,) if they differ."""

    units: float | Tensor
    inputs: float | Tensor
    entries: float | Tensor


class Matrices(NamedTuple):
    """A batch of matrices that take a step."""

    parts: list[Part]
    means: Means
    sizes: Sizes
    places: tuple[Place, Place]  # of rows and columns
    numbers: Numbers

    @property
    def gradients(self) -> list[tuple[slice, Tensor]]:
        return [(part.at, part.G) for part in self.parts]

    @property
    def averages(self) -> list[tuple[slice, Tensor]]:
        return [(part.at, part.M) for part in self.parts]


# -------------------------------------------------------------------- pass 1


def project(parts: Sequence[tuple[slice, Tensor]], U: Tensor, V: Tensor) -> Products:
    """The thin products of all matrices, and the squared lengths of their rows."""
    AV, UA, rows = [], [], []
    for at, A in parts:
        _, units, inputs = A.shape
        AV.append(A @ V[at, :inputs])
        UA.append(U[at, :units].mT @ A)
        rows.append(torch.linalg.vector_norm(A, dim=-1))
    GV, UG, lengths = joined(AV, -2, U.shape[1]), joined(UA, -1, V.shape[1]), joined(rows, -1, U.shape[1])
    squares = lengths.square()
    return Products(GV, UG, U.mT @ GV, squares, squares.sum(-1))


def joined(parts: Sequence[Tensor], dim: int, size: int) -> Tensor:
    """Parts of a batch as one, padded with zeros along a dim."""
    wide = [F.pad(x, (0, 0) * (-1 - dim) + (0, size - x.shape[dim])) if x.shape[dim] < size else x for x in parts]
    return wide[0] if len(wide) == 1 else torch.cat(wide)


def sums_of_squares(
    U: Tensor, V: Tensor, products: Products, gradients: Sequence[tuple[slice, Tensor]] = ()
) -> SumsOfSquares:
    """Of R and L, which are formed: a difference of squares would cancel. And, from gradients, sketches of one side."""
    GV, UG, K, *_ = products
    (k, q), L = K.shape[1:], UG - K @ V.mT
    X = Y = K.new_zeros(0)
    if gradients and not q:
        X = joined([G @ UG[at, :, : G.shape[2]].mT for at, G in gradients], -2, U.shape[1])
    if gradients and not k:
        Y = joined([G.mT @ GV[at, : G.shape[1]] for at, G in gradients], -2, V.shape[1])
    return SumsOfSquares((GV - U @ K).square().sum(-2), L @ L.mT, X, Y)


def sums_of(found: Sequence[NamedTuple]) -> Sums:
    """These of every batch, by the side that they are sums over."""
    sums: Sums = {"units": [], "inputs": [], "both": []}
    for i, side in enumerate(SIDES[type(found[0])] if found else ()):
        sums[side].extend(one[i] for one in found)
    return sums


# -------------------------------------------------------------------- between the passes


def mean_squares(U: Tensor, products: Products, sums: SumsOfSquares, sizes: Sizes) -> tuple[Squares, Tensor]:
    """The mean square of every block, and of all of E, (n,).

    E is not formed. ‖E‖² = ‖G‖² − ‖K‖² − ‖R‖² − ‖L‖² is exact; its rows are estimated. With F = G − G V Vᵀ, E_i is
    F_i − U_i L, and f_i = ‖F_i‖² = ‖G_i‖² − ‖(GV)_i‖². Where U has the principal directions of F Fᵀ, E_i and U_i L are
    orthogonal on average, so that ‖E_i‖² is near f_i − ‖U_i L‖². If that is negative, E_i is mostly U_i L (rows without
    a gradient). It is at least f_i times the share of E in F, and `LEAST` of ‖G_i‖²: a remainder that cancels must not
    look like none, whose step would be far too long.
    """
    GV, K, LL = products.GV, products.K, sums.LL
    of_L = LL.diagonal(dim1=-2, dim2=-1)
    without_V = products.total - K.square().sum((-2, -1)) - sums.R.sum(-1)
    rest = (without_V - of_L.sum(-1)).clamp_(min=0)
    share = (rest / without_V).nan_to_num_(0.0).clamp_(0, 1).unsqueeze(-1)
    f = products.rows - GV.square().sum(-1)
    rows = (f - ((U @ LL) * U).sum(-1)).abs().maximum(share * f).maximum(LEAST * products.rows)
    return Squares(K.square(), sums.R / sizes.units, of_L / sizes.inputs, rows / sizes.inputs), rest / sizes.entries


def count_(means: Means, numbers: Numbers) -> None:
    """Let the bias corrections follow this step."""
    of_average, of_means, of_rest = means.weights.unbind(-1)
    if numbers.is_first:
        of_means.zero_()
    for weight, beta in ((of_average, numbers.beta1), (of_means, numbers.mean_beta), (of_rest, numbers.beta2)):
        weight.add_((1 - weight) * numbers.news(beta))


def update_moments_(matrices: Matrices, products: Products, sums: SumsOfSquares) -> None:
    """All that a step learns from a gradient but M, which pass 2 updates.

    MV, UM and K follow M by linearity. Each side follows what the means of the other side see of G.
    """
    means, numbers, (GV, UG, K, *_) = matrices.means, matrices.numbers, products
    for average, value in zip((means.MV, means.UM, means.K), (GV, UG, K), strict=True):
        average.lerp_(value, numbers.news(numbers.beta1))
    squares, rest = mean_squares(means.U, products, sums, matrices.sizes)
    for v, square, beta in zip(means.v, squares, numbers.betas, strict=True):
        v.lerp_(square, numbers.news(beta))
    means.variance.lerp_(products.total / matrices.sizes.entries, numbers.news(numbers.beta2))
    means.rest_variance.lerp_(rest, numbers.news(numbers.beta2))
    means.X.lerp_(GV @ K.mT if GV.shape[-1] else sums.X, numbers.news(FORGET))
    means.Y.lerp_(UG.mT @ K if UG.shape[-2] else sums.Y, numbers.news(FORGET))


def roots(means: Means, eps: float, floors: Sequence[Tensor | float] = (0.0,) * 4) -> list[Tensor]:
    """√v̂ + ε of every block, and a floor besides."""
    eps = max(eps, torch.finfo(means.K.dtype).tiny ** 0.5)  # 0 / 0 is 0
    return [
        (v / weight).sqrt_().add_(eps + floor)
        for v, weight, floor in zip(means.v, corrections(means), floors, strict=True)
    ]


def corrections(means: Means) -> list[Tensor]:
    """The bias corrections of v_K, v_R, v_L and v_E, to divide them by. 0 / 0 is 0, before a first good gradient."""
    weights = means.weights.clamp(min=torch.finfo(means.weights.dtype).tiny)
    of_means, of_rest = weights[:, 1, None], weights[:, 2, None]
    return [of_means[..., None], of_means, of_means, of_rest]


def remembered(matrices: Matrices) -> Tensor:
    """The energy of the means of earlier gradients, (n,): M has rounding errors of their size when gradients shrink."""
    v, (units, inputs, _) = matrices.means.v, matrices.sizes
    of_units, of_inputs = (x.sum(-1, keepdim=True) * size for x, size in ((v.R, units), (v.L, inputs)))
    return (of_units + of_inputs).squeeze(-1) + v.K.sum((-2, -1))


def precondition(matrices: Matrices, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """η c δ as a diagonal and a product of low rank: diag(d) M + left · right.

    `total` is the energy of which a part may be rounding errors.
    """
    means, numbers, (units, inputs, _) = matrices.means, matrices.numbers, matrices.sizes
    U, V, K, MV, UM = means.U, means.V, means.K, means.MV, means.UM
    # What is zero but for rounding must not take a full step.
    noise = (NOISE * total.sqrt())[:, None]
    by_units, by_inputs = noise * units**-0.5, inputs**-0.5
    floors = noise[..., None], by_units, noise * by_inputs, by_units * by_inputs
    root_K, root_R, root_L, root_E = roots(means, numbers.eps, floors)
    d = root_E.reciprocal_().unsqueeze(-1)
    c = limited_factor(means.factor, numbers.lr)[:, None, None]
    by_weight = means.weights[:, 0, None, None].clamp(min=torch.finfo(d.dtype).tiny).reciprocal_()
    grand = K / root_K
    grand = grand * lift_of(grand * by_weight, root_K, c, means, numbers.eps)
    of_inputs = U @ grand + (MV - U @ K) / root_R.unsqueeze(-2) - d * MV
    of_units = U / root_L.unsqueeze(-2) - d * U
    rate = by_weight * c * numbers.rate
    return rate * d, rate * torch.cat([of_inputs, of_units], -1), torch.cat([V.mT, UM - K @ V.mT], -2)


def lift_of(ratio: Tensor, root_K: Tensor, c: Tensor, means: Means, eps: float) -> Tensor:
    """How much further grand means move while they agree: as if all entries had one second moment σ², (n, k, q).

    A gradient of rank one, as where all weights have to grow together, is one coordinate here and would move by c η.
    With σ it moves as far as with AdamW. ρ = K̂_m/√v̂_K tells whether gradients agree: ρ² is near 1 then, and about
    (1 − β₁)/(1 + β₁) in noise, which moves no further than with AdamW even where it is taken for agreement.
    """
    tiny = torch.finfo(c.dtype).tiny
    sigma = (means.variance / means.weights[:, 2].clamp(min=tiny)).sqrt_().add_(max(eps, tiny**0.5))
    return (ratio.square().clamp_(max=1) * root_K / (c * sigma[:, None, None])).clamp_(min=1)


def limited_factor(c: Tensor, lr: float | Tensor) -> Tensor:
    """c within its limits at a learning rate; before a first good gradient, it is 0."""
    longest = max_factor(lr)
    return c.clamp(min=FACTORS[0]).minimum(longest) if isinstance(longest, Tensor) else c.clamp(FACTORS[0], longest)


def max_factor(lr: float | Tensor) -> float | Tensor:
    """The largest c at a learning rate: √(GENTLE / η), and no rate is raised above MAX_RATE."""
    least, most = FACTORS
    if isinstance(lr, Tensor):
        lr = lr.clamp(min=GENTLE / most**2)
        return lr.rsqrt().mul_(GENTLE**0.5).minimum(MAX_RATE / lr).clamp_(min=least)
    lr = max(lr, GENTLE / most**2)
    return max(min(math.sqrt(GENTLE / lr), MAX_RATE / lr), least)


# -------------------------------------------------------------------- pass 2


def update_(params: Sequence[Tensor], matrices: Matrices, direction: tuple[Tensor, Tensor, Tensor]) -> None:
    """M ← average of G;  θ ← (1 − η w) θ − η c δ, rounded once to the parameters' own dtype."""
    numbers, (d, left, right) = matrices.numbers, direction
    news = numbers.news(numbers.beta1)
    averages = [average for part in matrices.parts for average in part.averages]
    gradients = [G for part in matrices.parts for G in part.G.unbind()]
    torch._foreach_lerp_(averages, gradients, [news] * len(averages) if isinstance(news, Tensor) else news)
    change: list[Tensor] = []
    for at, M in matrices.averages:
        _, units, inputs = M.shape
        change += torch.baddbmm(M * d[at, :units], left[at, :units], right[at, :, :inputs]).unbind()
    thetas = exact(params)
    if numbers.weight_decay:
        torch._foreach_mul_(thetas, 1 - numbers.rate * numbers.weight_decay)
    torch._foreach_sub_(thetas, [x.view(theta.shape) for x, theta in zip(change, thetas, strict=True)])
    if thetas[0] is not params[0]:
        torch._foreach_copy_(list(params), thetas)


def exact(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors in the dtype of the arithmetic, copies of those that have another one."""
    if all(x.dtype == arithmetic(x.dtype) for x in tensors):
        return list(tensors)
    out = [torch.empty_like(x, dtype=arithmetic(x.dtype)) for x in tensors]
    torch._foreach_copy_(out, list(tensors))
    return out
