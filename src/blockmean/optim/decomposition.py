"""Anova's arithmetic, in plain functions of tensors: project, precondition, refresh. Equations: the head of anova.py.

Every tensor has a batch dim in front, for equal matrices that take a step together: G is (n, O, I), U (n, O, k),
V (n, I, q). A process may have only some rows and columns of a matrix: then G and M are what it has of them, U, X, MV
and v_E have its rows, V, Y and UM its columns. What is a sum over all rows or columns is completed by `reduce` between
these functions, or inside those that take it as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import NOISE, in_float64, orthonormalized

FACTOR = 2.0
"""c: a mean is one coordinate for many entries, so at AdamW's rates it would move less than they do under AdamW."""

FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""

Sums = dict[str, list[Tensor]]
"""Sums over the "units", the "inputs" or "both": for each tensor of a kind, one for every batch of matrices."""

Reduce = Callable[[Sums], None]
"""Completes sums in place, where other processes have some of the rows or columns."""


class Squares(NamedTuple):
    """Mean squares of the blocks of a matrix, or averages of them."""

    K: Tensor  # (n, k, q)
    R: Tensor  # (n, q)
    L: Tensor  # (n, k)
    E: Tensor  # (n, O)


class Means(NamedTuple):
    """The state of a batch of matrices besides M, in the order of the state's keys."""

    U: Tensor  # (n, O, k)
    V: Tensor  # (n, I, q), a view: the state has Vᵀ
    X: Tensor  # (n, O, k), the sketch that U follows
    Y: Tensor  # (n, I, q)
    K: Tensor  # (n, k, q), Uᵀ M V
    MV: Tensor  # (n, O, q)
    UM: Tensor  # (n, k, I)
    squares: Squares  # v_K, v_R, v_L, v_E


class Products(NamedTuple):
    """What pass 1 takes from a gradient."""

    GV: Tensor  # (n, O, q), a sum over inputs
    UG: Tensor  # (n, k, I), a sum over units
    K: Tensor  # (n, k, q), a sum over both
    rows: Tensor  # (n, O), squared lengths: a sum over inputs
    total: Tensor  # (n,), of the whole matrix: a sum over both

    sides = ("inputs", "units", "both", "inputs", "both")


class Sketches(NamedTuple):
    """What needs complete products: sketches of a matrix, and the squares of its means."""

    X: Tensor  # (n, O, k), G (Uᵀ G)ᵀ: a sum over inputs
    Y: Tensor  # (n, I, q), Gᵀ (G V): a sum over units
    LL: Tensor  # (n, k, k), L Lᵀ: a sum over inputs
    RR: Tensor  # (n, q), squared lengths of the columns of R: a sum over units

    sides = ("inputs", "units", "inputs", "units")


@dataclass(frozen=True)
class Numbers:
    """The numbers of one step, equal for a batch of matrices."""

    beta1: float
    beta2: float
    mean_beta: float
    lr: float
    weight_decay: float
    eps: float
    step: int  # this one included
    age: int  # steps since the means started, this one included
    refreshes: bool  # whether U and V turn after this step

    @property
    def bias_correction1(self) -> float:
        return float(1 - self.beta1**self.step)

    @property
    def betas(self) -> tuple[float, float, float, float]:
        """Of v_K, v_R, v_L and v_E."""
        return self.mean_beta, self.mean_beta, self.mean_beta, self.beta2

    @property
    def bias_corrections(self) -> list[float]:
        """Of v_K, v_R, v_L and v_E."""
        return [1 - beta**age for beta, age in zip(self.betas, (self.age, self.age, self.age, self.step), strict=True)]


# -------------------------------------------------------------------- pass 1


def project(G: Tensor, U: Tensor, V: Tensor) -> Products:
    """The thin products of a gradient, and the squared lengths of its rows."""
    GV, UG = G @ V, U.mT @ G
    rows = torch.linalg.vector_norm(G, dim=-1).square()
    return Products(GV, UG, U.mT @ GV, rows, rows.sum(-1))


def sums_of(found: Sequence[Products] | Sequence[Sketches]) -> Sums:
    """These of every batch, by the side that they are sums over."""
    sums: Sums = {}
    for i, side in enumerate(found[0].sides if found else ()):
        sums.setdefault(side, []).extend(one[i] for one in found)
    return sums


# -------------------------------------------------------------------- between the passes


def average_(means: Means, products: Products, beta1: float) -> None:
    """MV, UM and K follow by linearity: averages of what they are for the gradient."""
    weight = 1 - beta1
    means.MV.lerp_(products.GV, weight)
    means.UM.lerp_(products.UG, weight)
    means.K.lerp_(products.K, weight)


def sketch(A: Tensor, U: Tensor, V: Tensor, products: Products) -> Sketches:
    """Second products of a matrix, for complete first ones."""
    AV, UA, K, *_ = products
    L = UA - K @ V.mT
    return Sketches(A @ UA.mT, A.mT @ AV, L @ L.mT, (AV - U @ K).square().sum(-2))


def mean_squares(U: Tensor, products: Products, found: Sketches, shape: tuple[int, int]) -> Squares:
    """The mean square of every block: entries of K, columns of R, rows of L and of E."""
    units, inputs = shape
    rows = remainder_rows(U, products, found)
    return Squares(products.K.square(), found.RR / units, found.LL.diagonal(dim1=-2, dim2=-1) / inputs, rows / inputs)


def remainder_rows(U: Tensor, products: Products, found: Sketches) -> Tensor:
    """‖E_i‖² of every row without E: ‖G_i‖² − ‖(GV)_i‖² − 2 U_i·(G Lᵀ)_i + ‖U_i L‖², (n, O).

    At least the rounding error of that difference: a smaller remainder must not count as none, or its step would be
    far too long.
    """
    GV, K = products.GV, products.K
    GL = found.X - GV @ K.mT
    rows = products.rows - GV.square().sum(-1) - 2 * (U * GL).sum(-1) + ((U @ found.LL) * U).sum(-1)
    return rows.maximum(8 * torch.finfo(rows.dtype).eps * products.rows)


def precondition(
    means: Means, products: Products, found: Sketches, shape: tuple[int, int], numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Update second moments; the step as a diagonal and a product of low rank, δ = diag(d) M + left · right."""
    U, V, (O, I) = means.U, means.V, shape
    squares = mean_squares(U, products, found, shape)
    for v, square, beta in zip(means.squares, squares, numbers.betas, strict=True):
        v.lerp_(square, 1 - beta)

    # What is zero but for rounding must not take a full step, and 0 / 0 is 0.
    smallest = torch.finfo(U.dtype).tiny ** 0.5
    noise = (NOISE * products.total.sqrt())[:, None]
    scales = 1.0, O**-0.5, I**-0.5, (O * I) ** -0.5
    floors = [(noise * scale + numbers.eps).clamp(min=smallest) for scale in scales]
    root_K, root_R, root_L, root_E = (
        (v / correction).sqrt() + (floor[..., None] if v.ndim > floor.ndim else floor)
        for v, correction, floor in zip(means.squares, numbers.bias_corrections, floors, strict=True)
    )

    R, L = means.MV - U @ means.K, means.UM - means.K @ V.mT
    d = root_E.reciprocal().unsqueeze(-1)
    left = [U @ (means.K / root_K) + R / root_R.unsqueeze(-2) - d * means.MV, U / root_L.unsqueeze(-2) - d * U]
    return d, torch.cat(left, -1), torch.cat([V.mT, L], -2)


# -------------------------------------------------------------------- pass 2


def update_(
    params: Sequence[Tensor], M: Tensor, G: Tensor, direction: tuple[Tensor, Tensor, Tensor], numbers: Numbers
) -> None:
    """M ← average of G;  θ ← (1 − η w) θ − η c δ, rounded once to the parameters' own dtype."""
    M.lerp_(G, 1 - numbers.beta1)
    d, left, right = direction
    rate, decay = FACTOR * numbers.lr / numbers.bias_correction1, 1 - numbers.lr * numbers.weight_decay
    if len(params) == 1 and params[0].dtype == M.dtype and params[0].is_contiguous():
        params[0].view(M.shape).baddbmm_(left, right, beta=decay, alpha=-rate).addcmul_(M, d, value=-rate)
        return
    for param, delta in zip(params, torch.baddbmm(M * d, left, right).unbind(), strict=True):
        param.copy_((param.to(M.dtype) * decay).sub_(delta.view(param.shape), alpha=rate))


# -------------------------------------------------------------------- start and refresh


class Place(NamedTuple):
    """Which rows, or columns, of a matrix a process has."""

    index: Tensor | None = None  # None: all
    total: int = 0  # of the whole matrix

    def alive(self, x: Tensor) -> Tensor:
        """Which rows of what a process has are not zero, (n, own, …) → (n, all); the rows of others are 0."""
        own = (x != 0).any(-1).to(x.dtype)
        return own if self.index is None else own.new_zeros(len(x), self.total).index_copy_(1, self.index, own)

    def own(self, x: Tensor) -> Tensor:
        """(n, all, …) → (n, own, …)."""
        return x if self.index is None else x.index_select(1, self.index)


Places = tuple[Place, Place]


def start_(gradients: Sequence[Tensor], means: Sequence[Means], places: Sequence[Places], reduce: Reduce) -> None:
    """U and V become cosines, the first of which is the plain mean, and take two iterations on the first gradient."""
    count, sides = len(means), _sides([(G, G.mT) for G in gradients])
    alive = _alive(gradients, places)
    reduce({"both": alive})
    bases = _cosines(alive, means, places)
    for _ in range(2):
        thin = [A.mT @ W for A, W in zip(sides, bases, strict=True)]
        reduce(_by_side(thin))
        found = [A @ x for A, x in zip(sides, thin, strict=True)]
        reduce(_by_side(found[count:] + found[:count]))
        bases = orthonormalized(found, bases, bases, lambda sums: reduce(_by_side(sums)))
    for own, U, V in zip(means, bases[:count], bases[count:], strict=True):
        own.U.copy_(U)
        own.V.copy_(V)


def refresh_(
    averages: Sequence[Tensor],
    means: Sequence[Means],
    places: Sequence[Places],
    shapes: Sequence[tuple[int, int]],
    numbers: Sequence[Numbers],
    reduce: Reduce,
) -> None:
    """U and V turn to what they follow; the average gradient is projected anew, and second moments follow roughly."""
    count, sketches, bases = len(means), _sides([(m.X, m.Y) for m in means]), _sides([(m.U, m.V) for m in means])
    lengths, alive = [W.square().sum(-2, keepdim=True) for W in bases], _alive(averages, places)
    reduce({"both": alive, **_by_side(lengths)})
    # Columns are zero if fewer rows than columns had a gradient at the start: cosines over those that have one now.
    waves = _cosines(alive, means, places)
    revived = [W + wave * (length == 0) for W, wave, length in zip(bases, waves, lengths, strict=True)]
    new = orthonormalized(sketches, revived, bases, lambda sums: reduce(_by_side(sums)))
    turns = [W.mT @ N for W, N in zip(bases, new, strict=True)]
    kept = [N.mT @ S for N, S in zip(new, sketches, strict=True)]
    products = [project(M, U, V) for M, U, V in zip(averages, new[:count], new[count:], strict=True)]
    sums = sums_of(products)
    for side, values in (*_by_side(turns).items(), *_by_side(kept).items()):
        sums[side] += values
    reduce(sums)
    for i, own in enumerate(means):
        by_U, by_V = turns[i].square(), turns[count + i].square()
        v_K, v_R, v_L, _ = own.squares
        v_K.copy_(by_U.mT @ v_K @ by_V)
        v_R.copy_((v_R.unsqueeze(-2) @ by_V).squeeze(-2))
        v_L.copy_((v_L.unsqueeze(-2) @ by_U).squeeze(-2))
        own.U.copy_(new[i])
        own.V.copy_(new[count + i])
        own.X.copy_(new[i] @ kept[i])
        own.Y.copy_(new[count + i] @ kept[count + i])
    adopt_average_(averages, products, means, shapes, numbers, reduce)


def adopt_average_(
    averages: Sequence[Tensor],
    products: Sequence[Products],
    means: Sequence[Means],
    shapes: Sequence[tuple[int, int]],
    numbers: Sequence[Numbers],
    reduce: Reduce,
) -> None:
    """Take over the products of the average gradient in new coordinates, and bound the steps that follow from it.

    In fixed coordinates |m̂| ≤ b √v̂ for every average, by Cauchy and Schwarz. After a turn second moments know little of
    the new coordinates; they are raised until it holds again, and then it does until the next turn.
    """
    found = [sketch(M, own.U, own.V, p) for M, own, p in zip(averages, means, products, strict=True)]
    reduce(sums_of(found))
    for own, p, s, shape, n in zip(means, products, found, shapes, numbers, strict=True):
        own.MV.copy_(p.GV)
        own.UM.copy_(p.UG)
        own.K.copy_(p.K)
        least = mean_squares(own.U, p, s, shape)
        for v, square, beta, correction in zip(own.squares, least, n.betas, n.bias_corrections, strict=True):
            v.copy_(v.maximum(square * (correction / (adam_bound(n.beta1, beta, n.step) * n.bias_correction1) ** 2)))


def _sides(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """What belongs to the units of all matrices, then what belongs to their inputs."""
    return [unit for unit, _ in pairs] + [inputs for _, inputs in pairs]


def _by_side(values: list[Tensor]) -> Sums:
    """Sums over units, then sums over inputs, of all matrices."""
    return {"units": values[: len(values) // 2], "inputs": values[len(values) // 2 :]}


def _alive(matrices: Sequence[Tensor], places: Sequence[Places]) -> list[Tensor]:
    """Which rows, then which columns, of every matrix are not zero: sums over both."""
    return _sides([(rows.alive(A), columns.alive(A.mT)) for A, (rows, columns) in zip(matrices, places, strict=True)])


def _cosines(alive: Sequence[Tensor], means: Sequence[Means], places: Sequence[Places]) -> list[Tensor]:
    """Cosines over the rows that are alive, then over the columns, of every matrix."""
    bases, own = (
        _sides([(m.U, m.V) for m in means]),
        [*(rows for rows, _ in places), *(columns for _, columns in places)],
    )
    return [place.own(cosines(x > 0, W.shape[-1]).to(W)) for x, W, place in zip(alive, bases, own, strict=True)]


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
