"""Anova's arithmetic, in plain functions of tensors: project, precondition, refresh. Equations: the head of anova.py.

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

from blockmean._linalg import NOISE, first_coefficients, in_float64, orthonormalized, second_coefficients
from blockmean.optim.base import exact

FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""

LEAST = 2.0**-18
"""Share of a row's square that its remainder has at least: 32 rounding errors of float32."""

FACTORS = (0.7, 20.0)
"""The range of c, which lifts no learning rate above `LIFT`."""

LIFT = 3e-3

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


class Waking(NamedTuple):
    """Which rows and columns of a matrix have had a gradient, and which columns of U and V are not zero."""

    rows: Tensor  # (n, O), of the whole matrix
    columns: Tensor  # (n, I), of the whole matrix
    of_U: Tensor  # (n, 1, k)
    of_V: Tensor  # (n, 1, q)


SIDES = {
    Products: ("inputs", "units", "both", "inputs", "both"),
    SumsOfSquares: ("units", "inputs"),
    Waking: ("units", "inputs", "units", "inputs"),
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
        """How much an average takes from a new value: all of it with a decay of 0."""
        return 1 - beta if self.ok is None else (1 - beta) * self.ok

    @property
    def rate(self) -> float | Tensor:
        """The learning rate, or 0 if nothing may change."""
        return self.lr if self.ok is None else self.lr * self.ok


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


def sums_of_squares(U: Tensor, V: Tensor, products: Products) -> SumsOfSquares:
    """Of R and L, which are formed: a difference of squares would cancel."""
    GV, UG, K, *_ = products
    L = UG - K @ V.mT
    return SumsOfSquares((GV - U @ K).square().sum(-2), L @ L.mT)


def sums_of(found: Sequence[Products] | Sequence[SumsOfSquares] | Sequence[Waking]) -> Sums:
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
    means.X.lerp_(GV @ K.mT, numbers.news(FORGET))
    means.Y.lerp_(UG.mT @ K, numbers.news(FORGET))


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


def precondition(matrices: Matrices, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """η c δ as a diagonal and a product of low rank: diag(d) M + left · right."""
    means, numbers, (units, inputs, _) = matrices.means, matrices.numbers, matrices.sizes
    U, V, K, MV, UM = means.U, means.V, means.K, means.MV, means.UM
    # What is zero but for rounding must not take a full step.
    noise = (NOISE * total.sqrt())[:, None]
    floors = noise[..., None], noise * units**-0.5, noise * inputs**-0.5, noise * (units * inputs) ** -0.5
    root_K, root_R, root_L, root_E = roots(means, numbers.eps, floors)
    d = root_E.reciprocal_().unsqueeze(-1)
    rate = numbers.rate * means.factor.clamp(max=longest_factor(numbers.lr))
    rate = (rate / means.weights[:, 0].clamp(min=torch.finfo(d.dtype).tiny))[:, None, None]
    of_inputs = U @ (K / root_K) + (MV - U @ K) / root_R.unsqueeze(-2) - d * MV
    of_units = U / root_L.unsqueeze(-2) - d * U
    return rate * d, rate * torch.cat([of_inputs, of_units], -1), torch.cat([V.mT, UM - K @ V.mT], -2)


def longest_factor(lr: float | Tensor) -> float | Tensor:
    """The largest c that does not lift a learning rate above `LIFT`."""
    least, most = FACTORS
    if isinstance(lr, Tensor):
        return (LIFT / lr.clamp(min=LIFT / most)).clamp(min=least)
    return max(LIFT / max(lr, LIFT / most), least)


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


# -------------------------------------------------------------------- start and refresh


def start_(batches: Sequence[Matrices], reduce: Reduce) -> None:
    """U and V become cosines, the first of which is the plain mean, and take two iterations on the first gradient."""
    count, seen = len(batches), []
    for b in batches:
        sizes, (rows, columns) = [part.G.abs() for part in b.parts], b.places
        of_rows = joined([x.sum(-1) for x in sizes], -1, b.means.U.shape[1])
        of_columns = joined([x.sum(-2) for x in sizes], -1, b.means.V.shape[1])
        seen.append((rows.alive(of_rows), columns.alive(of_columns)))
    reduce({"both": _sides(seen)})
    bases = _cosines(batches, _sides(seen))
    for _ in range(2):
        pairs = zip(batches, bases[:count], bases[count:], strict=True)
        thin = [project(b.gradients, U, V) for b, U, V in pairs]
        reduce(sums_of(thin))
        found = [project(b.gradients, p.GV, p.UG.mT) for b, p in zip(batches, thin, strict=True)]
        reduce(sums_of(found))
        sketches = _sides([(p.GV, p.UG.mT) for p in found])
        bases = orthonormalized(sketches, bases, lambda sums: reduce(_by_side(sums)))
    for b, U, V in zip(batches, bases[:count], bases[count:], strict=True):
        b.means.U.copy_(U)
        b.means.V.copy_(V)


def waking(b: Matrices, products: Products) -> Waking:
    """What a refresh has to know of all rows and columns; a zero in the sketches means no gradient so far."""
    seen = b.means.X.abs().sum(-1) + products.GV.abs().sum(-1), b.means.Y.abs().sum(-1) + products.UG.abs().sum(-2)
    rows, columns = (place.alive(x) for place, x in zip(b.places, seen, strict=True))
    return Waking(rows, columns, *((W != 0).sum(-2, keepdim=True).to(W.dtype) for W in b.means[:2]))


def refresh_(batches: Sequence[Matrices], awake: Sequence[Waking], reduce: Reduce) -> None:
    """U and V turn to what they follow; M is projected anew, and second moments follow the rotation roughly."""
    count, means = len(batches), [b.means for b in batches]
    sketches, bases = _sides([(m.X, m.Y) for m in means]), _sides([(m.U, m.V) for m in means])
    filled = _sides([(a.of_U > 0, a.of_V > 0) for a in awake])
    # Columns are zero if fewer rows than columns had a gradient at the start: cosines over those that have one now.
    waves = _cosines(batches, _sides([(a.rows, a.columns) for a in awake]))
    revived = [torch.where(full, W, wave) for W, wave, full in zip(bases, waves, filled, strict=True)]
    both = [torch.cat([in_float64(S), in_float64(W)], -1) for S, W in zip(sketches, revived, strict=True)]
    grams = [x.mT @ x for x in both]
    reduce(_by_side(grams))
    first = [first_coefficients(gram) for gram in grams]
    Z = [x @ C for x, (C, _) in zip(both, first, strict=True)]
    seconds = [z.mT @ z for z in Z]
    pairs = zip(batches, Z[:count], Z[count:], strict=True)
    products = [project(b.averages, U.to(b.means.U), V.to(b.means.U)) for b, U, V in pairs]
    sums = sums_of(products)
    for side, values in _by_side(seconds).items():
        sums[side] += values
    reduce(sums)
    # All that is linear in the new columns Z T needs no further sums.
    second = [second_coefficients(gram) for gram in seconds]
    good = [x & y for (_, x), (_, y) in zip(first, second, strict=True)]
    for i, (b, p) in enumerate(zip(batches, products, strict=True)):
        fine = (good[i] & good[count + i]).to(b.means.U.device)[:, None, None]
        if b.numbers.ok is not None:
            fine = fine & (b.numbers.ok > 0)
        T_U, T_V = (second[j][0].to(b.means.U) for j in (i, count + i))
        turns, kept = [], []
        for j, T in ((i, second[i][0]), (count + i, second[count + i][0])):
            k, C = T.shape[-1], first[j][0] @ T
            turns.append(((grams[j] @ C)[:, k:] * filled[j].mT.to(C.device)).to(b.means.U).square())
            kept.append((C.mT @ grams[j][..., :k]).to(b.means.U))
        U, V = (Z[i] @ second[i][0]).to(b.means.U), (Z[count + i] @ second[count + i][0]).to(b.means.U)
        own, (by_U, by_V) = b.means, turns
        changes = [
            (own.v.K, by_U.mT @ own.v.K @ by_V),
            (own.v.R.unsqueeze(-2), own.v.R.unsqueeze(-2) @ by_V),
            (own.v.L.unsqueeze(-2), own.v.L.unsqueeze(-2) @ by_U),
            (own.U, U),
            (own.V, V),
            (own.X, U @ kept[0]),
            (own.Y, V @ kept[1]),
            (own.MV, p.GV @ T_V),
            (own.UM, T_U.mT @ p.UG),
            (own.K, T_U.mT @ p.K @ T_V),
        ]
        for old, new in changes:  # nearly parallel columns: everything stays
            old.copy_(torch.where(fine, new, old))
    taken = zip(batches, products, strict=True)
    bound_(batches, [Products(b.means.MV, b.means.UM, b.means.K, p.rows, p.total) for b, p in taken], reduce)


def bound_(batches: Sequence[Matrices], products: Sequence[Products], reduce: Reduce) -> None:
    """Bound the steps that follow from M in new coordinates, and choose their factor.

    In fixed coordinates |m̂| ≤ b √v̂ holds for every average, by Cauchy and Schwarz. After a turn second moments know
    little of the new coordinates. They are raised until it holds again, and then it does until the next turn.
    """
    found = [sums_of_squares(b.means.U, b.means.V, p) for b, p in zip(batches, products, strict=True)]
    reduce(sums_of(found))
    for b, p, sums in zip(batches, products, found, strict=True):
        numbers, (squares, rest) = b.numbers, mean_squares(b.means.U, p, sums, b.sizes)
        of_M, (of_means, of_rest) = b.means.weights[:, 0].square(), bounds_of(numbers)
        bounds = of_means, of_means, of_means, of_rest
        for v, square, bound, weight in zip(b.means.v, squares, bounds, corrections(b.means), strict=True):
            raised = square * (weight / (bound**2 * of_M.view_as(weight)) * numbers.news(0))
            v.copy_(v.maximum(raised))
        set_factor_(b, p.total, squares, rest)


def set_factor_(b: Matrices, total: Tensor, squares: Squares, rest: Tensor) -> None:
    """c: what a step with one second moment for all entries of a matrix promises to gain, over what δ does.

    A mean is one coordinate for many entries: while gradients agree, it would move less at AdamW's rates than they do
    under AdamW. Gains are to first order, ⟨A, A/σ⟩ and ⟨A, δ⟩, for the average gradient or the first one, A. All rows
    of E count alike here, which needs no sum over them. What may be rounding counts as no gain.
    """
    (units, inputs, entries), means = b.sizes, b.means
    root_K, root_R, root_L, _ = roots(means, b.numbers.eps)
    of_means = (squares.K / root_K).sum((-2, -1)) + (squares.R / root_R * units).sum(-1)
    sigma, root_E = ((v / means.weights[:, 2]).sqrt() for v in (means.variance, means.rest_variance))
    of_rest = ((entries * rest - LEAST * total).clamp(min=0) / root_E).nan_to_num(0.0)
    gain = of_means + (squares.L / root_L * inputs).sum(-1) + of_rest
    means.factor.lerp_((total / sigma / gain).nan_to_num(FACTORS[0]).clamp(*FACTORS), b.numbers.news(0))


def _sides(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What belongs to the units of all matrices, then what belongs to their inputs."""
    return [unit for unit, _ in pairs] + [inputs for _, inputs in pairs]


def _by_side(values: list[Tensor]) -> Sums:
    """Sums over units, then sums over inputs, of all matrices."""
    return {"units": values[: len(values) // 2], "inputs": values[len(values) // 2 :]}


def _cosines(batches: Sequence[Matrices], alive: Sequence[Tensor]) -> list[Tensor]:
    """Cosines over the rows that are alive, then over the columns, of every matrix."""
    bases = _sides([(b.means.U, b.means.V) for b in batches])
    places = [b.places[0] for b in batches] + [b.places[1] for b in batches]
    return [place.own(cosines(x > 0, W.shape[-1]).to(W)) for x, W, place in zip(alive, bases, places, strict=True)]


def cosines(alive: Tensor, k: int) -> Tensor:
    """k orthonormal columns over the rows that are alive: their plain mean, then cosines of growing frequency.

    (…, n) → (…, n, k). Where fewer than k rows are alive, columns are left over, and zero.
    """
    alive = in_float64(alive)
    count, column = alive.sum(-1, keepdim=True)[..., None], torch.arange(k, device=alive.device)
    angle = (alive.cumsum(-1) - 0.5)[..., None] * (math.pi / count.clamp(min=1)) * column
    waves = torch.cos(angle) * alive[..., None] * (2 / count.clamp(min=1)).sqrt() * (column < count)
    waves[..., :1] *= 0.5**0.5
    return waves


def bounds_of(numbers: Numbers) -> tuple[float, float]:
    """`adam_bound` of means, and of the remainder."""
    return (
        adam_bound(numbers.beta1, numbers.mean_beta, numbers.step),
        adam_bound(numbers.beta1, numbers.beta2, numbers.step),
    )


def adam_bound(beta1: float, beta2: float, t: int) -> float:
    """The most that |m̂| / √v̂ of an Adam can be after t steps, by Cauchy and Schwarz.

    It grows without end unless β₁² < β₂; then t is at most three times the memory of m, which has 95% of its weight.
    """
    if beta2 == 0:
        return math.inf
    ratio = beta1**2 / beta2
    if ratio >= 1:
        t = min(t, math.ceil(3 / (1 - beta1)))
    if t * math.log(ratio or 1) > 700:  # more than a float can hold
        return math.inf
    powers = float(t) if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    return (1 - beta1) / (1 - beta1**t) * math.sqrt((1 - beta2**t) / (1 - beta2) * powers)
