"""Where Anova's means come from: their start, the refresh of U and V, and what second moments know after it.

Equations: the head of anova.py; how matrices are batched and what `reduce` does: decomposition.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import first_coefficients, in_float64, orthonormalized, second_coefficients
from blockmean.optim.batches import Batch
from blockmean.optim.decomposition import (
    FACTOR_NEWS,
    FACTORS,
    LEAST,
    SIDES,
    Matrices,
    Numbers,
    Products,
    Reduce,
    Squares,
    Sums,
    corrections,
    joined,
    mean_squares,
    project,
    roots,
    sums_of,
    sums_of_squares,
)


class Waking(NamedTuple):
    """Which rows and columns of a matrix have had a gradient, and which columns of U and V are not zero."""

    rows: Tensor  # (n, O), of the whole matrix
    columns: Tensor  # (n, I), of the whole matrix
    of_U: Tensor  # (n, 1, k)
    of_V: Tensor  # (n, 1, q)


SIDES[Waking] = "units", "inputs", "units", "inputs"


def start_(batches: Sequence[Batch], reduce: Reduce) -> None:
    """Let means start in this step, unless a gradient is zero: nothing can be learned from it."""
    matrices = [batch.matrices for batch in batches]
    _start_bases_(matrices, reduce)
    products = [project(m.gradients, m.means.U, m.means.V) for m in matrices]
    products += [project(m.averages, m.means.U, m.means.V) for m in matrices]
    squares = [batch.adamw_squares() for batch in batches]
    totals = [rows.sum(-1) for rows in squares]
    sums = sums_of(products)
    reduce({**sums, "inputs": sums["inputs"] + squares, "both": sums["both"] + totals})
    for batch, own, rows, total in zip(batches, products, squares, totals, strict=False):
        batch.products = own
        means, sizes = batch.matrices.means, batch.matrices.sizes
        means.v.E.add_(rows / sizes.inputs)  # zero so far, or AdamW's of an earlier try to start
        for variance in (means.variance, means.rest_variance):
            variance.add_(total / sizes.entries)
        for state, length in zip(batch.states, own.total.unbind(), strict=True):
            state.pop("exp_avg_sq", None)
            if not bool(length > 0):
                state["means_start_step"].fill_(batch.matrices.numbers.step)
    if any(m.numbers.step > 1 for m in matrices):
        of_averages = products[len(batches) :]
        for m, (MV, UM, K, *_) in zip(matrices, of_averages, strict=True):
            m.means.MV.copy_(MV)
            m.means.UM.copy_(UM)
            m.means.K.copy_(K)
        bound_(matrices, of_averages, reduce)


def _start_bases_(batches: Sequence[Matrices], reduce: Reduce) -> None:
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
    """Bound the steps that follow from M in new coordinates, and measure their factor.

    In fixed coordinates |m̂| ≤ b √v̂ holds for every average, by Cauchy and Schwarz. After a turn second moments know
    little of the new coordinates. They are raised until it holds again, and then it does until the next turn.
    """
    found = [sums_of_squares(b.means.U, b.means.V, p) for b, p in zip(batches, products, strict=True)]
    reduce(sums_of(found))
    for b, p, sums in zip(batches, products, found, strict=True):
        numbers, (squares, rest) = b.numbers, mean_squares(b.means.U, p, sums, b.sizes)
        tiny, (of_means, of_rest) = torch.finfo(rest.dtype).tiny, bounds_of(numbers)
        of_M = b.means.weights[:, 0].square().clamp_(min=tiny)  # 0 before a first good gradient
        bounds = of_means, of_means, of_means, of_rest
        for v, square, bound, weight in zip(b.means.v, squares, bounds, corrections(b.means), strict=True):
            raised = square * (weight / (bound**2 * of_M.view_as(weight)) * numbers.allowed)
            v.copy_(v.maximum(raised))
        measure_factor_(b, p.total, squares, rest)


def measure_factor_(b: Matrices, total: Tensor, squares: Squares, rest: Tensor) -> None:
    """c: what a step with one second moment for all entries of a matrix promises to gain, over what δ does.

    A mean is one coordinate for many entries: while gradients agree, it would move less at AdamW's rates than they do
    under AdamW. Gains are to first order, ⟨M, M/σ⟩ and ⟨M, δ⟩. All rows of E count alike here, which needs no sum over
    them. What may be rounding counts as no gain.
    """
    (units, inputs, entries), means = b.sizes, b.means
    root_K, root_R, root_L, _ = roots(means, b.numbers.eps)
    of_means = (squares.K / root_K).sum((-2, -1)) + (squares.R / root_R * units).sum(-1)
    sigma, root_E = ((v / means.weights[:, 2]).sqrt() for v in (means.variance, means.rest_variance))
    of_rest = ((entries * rest - LEAST * total).clamp(min=0) / root_E).nan_to_num(0.0)
    gain = of_means + (squares.L / root_L * inputs).sum(-1) + of_rest
    measured = (total / sigma / gain).nan_to_num(FACTORS[0]).clamp(*FACTORS)
    means.factor.lerp_(measured, (total > 0).to(total) * b.numbers.news(1 - FACTOR_NEWS))


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
