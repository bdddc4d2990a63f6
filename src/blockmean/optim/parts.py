"""Anova's arithmetic for a batch of equal matrices: the four parts of a gradient, their step, and the turn of U and V.

The equations are at the top of anova.py. All matrices have a batch dim in front: G is (n, O, I). V is kept transposed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import orthonormalized

CHUNK = 2**18
"""Entries that a step processes at a time: small enough that its temporaries stay in the cache."""

FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""

WEIGHTS = ("units", "inputs", "units_sketch", "inputs_sketch")
"""U, Vᵀ, and what they follow, the averages of G Gᵀ U and (Gᵀ G V)ᵀ."""
AVERAGES = ("grand_avg", "unit_avg", "input_avg")
"""The parts K, R and L of the average gradient; `exp_avg` has its remainder."""
SQUARES = ("grand_sq", "unit_sq", "input_sq")
"""v_K, v_R and v_L; `exp_avg_sq` is v_E."""

MEANS = (*WEIGHTS, *AVERAGES, *SQUARES)
STATE = ("exp_avg", "exp_avg_sq", *MEANS)
"""All of it, in the order of the compiled kernels."""


class Step(NamedTuple):
    """The numbers of one step of equal matrices."""

    betas: tuple[float, float]
    mean_beta: float
    lr: float
    weight_decay: float
    maximize: bool
    steps: int  # of the matrices, this one included
    age: int  # steps since their means began, this one included
    turns: bool  # whether U and V turn after this step

    @property
    def started(self) -> float:
        """What averages of the gradient have to be divided by."""
        return 1 - self.betas[0] ** self.steps

    @property
    def rate(self) -> float:
        """The learning rate, with that division."""
        return self.lr / self.started

    @property
    def decay(self) -> float:
        return 1 - self.lr * self.weight_decay

    def unbias(self, is_remainder: bool) -> float:
        """The root of v̂ / v."""
        beta, t = (self.betas[1], self.steps) if is_remainder else (self.mean_beta, self.age)
        return float((1 - beta**t) ** -0.5)

    def longest(self, is_remainder: bool) -> float:
        """The bound on the entries of a part's step, before `rate`."""
        beta, t = (self.betas[1], self.steps) if is_remainder else (self.mean_beta, self.age)
        return reach(self.betas[0], beta, t) * self.started


def apply_(
    step: Step, params: list[Tensor], grads: Sequence[Tensor], state: Mapping[str, Tensor], floors: Tensor
) -> None:
    """One step of equal matrices; `floors` are added to the roots of v_K, v_R, v_L and v_E, (4, n)."""
    n, O, I = len(params), params[0].shape[0], params[0].shape[1:].numel()
    (beta1, beta2), dtype = step.betas, state["units"].dtype
    G = _batch(grads, O, I, dtype)
    if step.maximize:
        G = -G
    m, v = (state[key].view(n, O, I) for key in STATE[:2])
    U, Vt, unit_sketch, input_sketch = (state[key] for key in WEIGHTS)
    averages, squares = ([state[key] for key in keys] for keys in (AVERAGES, SQUARES))
    V = Vt.mT
    if step.age == 1:
        start_(U, V, G)
        if step.steps > 1:  # the momentum is older than the means
            split_(m, U, Vt, averages)
    *mean_floors, floor = floors.to(dtype).view(4, n, 1, 1).unbind()

    GV, UG = torch.bmm(G, V), torch.bmm(U.mT, G)
    parts = means(U, V, GV, UG)
    torch._foreach_lerp_(averages, parts, 1 - beta1)
    torch._foreach_lerp_(squares, torch._foreach_mul(parts, parts), 1 - step.mean_beta)
    roots = torch._foreach_add(mean_floors, torch._foreach_sqrt(squares), alpha=step.unbias(is_remainder=False))
    K, R, L = steps = torch._foreach_div(averages, roots)
    longest, longest_rest = step.longest(is_remainder=False), step.longest(is_remainder=True)
    torch._foreach_clamp_min_(steps, -longest)
    torch._foreach_clamp_max_(steps, longest)

    unbias, rate, decay = step.unbias(is_remainder=True), step.rate, step.decay
    left, right = torch.cat([GV, U], 2), torch.cat([Vt, parts[2]], 1)  # left · right: G without its remainder
    K.baddbmm_(L, V, alpha=-1)
    in_place = n == 1 and params[0].dtype == dtype and params[0].is_contiguous()
    height = max(1, CHUNK // I) if in_place else O
    for top in range(0, O, height):
        rows = slice(top, top + height)
        mean, square, g, l, u, r = (x[:, rows] if height < O else x for x in (m, v, G, left, U, R))
        E = torch.baddbmm(g, l, right, alpha=-1)
        square.mul_(beta2).addcmul_(E, E, value=1 - beta2)
        mean.lerp_(E, 1 - beta1)
        root = square.sqrt()
        torch.div(mean, torch.add(floor, root, alpha=unbias, out=root), out=E).clamp_(-longest_rest, longest_rest)
        r.baddbmm_(E, V, alpha=-1)  # R', L' and K' minus what E' has of them: P(E')
        L.baddbmm_(u.mT, E, alpha=-1)
        if height < O:
            params[0].view(1, O, I)[:, rows].mul_(decay).sub_(E, alpha=rate)
    K.baddbmm_(U.mT, R, alpha=-1)
    left, right = torch.cat([R.baddbmm_(U, K), U], 2), torch.cat([Vt, L], 1)
    if height < O:
        params[0].view(1, O, I).baddbmm_(left, right, alpha=-rate)
    else:
        _move_(params, E.baddbmm_(left, right), rate, decay)  # the only E there was
    unit_sketch.baddbmm_(G, UG.mT, beta=FORGET, alpha=1 - FORGET)
    input_sketch.baddbmm_(GV.mT, G, beta=FORGET, alpha=1 - FORGET)
    if step.turns:
        turn_(state)


def turn_(state: Mapping[str, Tensor]) -> None:
    """Turn U and V towards what they follow. The average gradient is put together and split with the new ones."""
    U, Vt, unit_sketch, input_sketch = (state[key] for key in WEIGHTS)
    averages, (v_K, v_R, v_L) = ([state[key] for key in keys] for keys in (AVERAGES, SQUARES))
    V, m = Vt.mT, state["exp_avg"].flatten(2)
    join_(m, U, Vt, averages)
    new_U = orthonormalized(unit_sketch, _revived(U, m), U)
    new_V = orthonormalized(input_sketch.mT, _revived(V, m.mT), V)
    by_U, by_V = torch.bmm(U.mT, new_U).square_(), torch.bmm(V.mT, new_V).square_()
    v_K.copy_(torch.bmm(torch.bmm(by_U.mT, v_K), by_V))
    v_R.copy_(torch.bmm(v_R, by_V))
    v_L.copy_(torch.bmm(by_U.mT, v_L))
    for W, new, sketch in ((U, new_U, unit_sketch), (V, new_V, input_sketch.mT)):
        W.copy_(new)
        sketch.copy_(torch.bmm(new, torch.bmm(new.mT, sketch)))
    split_(m, U, Vt, averages)


def means(U: Tensor, V: Tensor, GV: Tensor, UG: Tensor) -> list[Tensor]:
    """K, R and L of a gradient, from G V and Uᵀ G."""
    K = torch.bmm(U.mT, GV)
    return [K, torch.baddbmm(GV, U, K, alpha=-1), torch.baddbmm(UG, K, V.mT, alpha=-1)]


def split_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> None:
    """Move K, R and L of a matrix out of it: what stays is its remainder."""
    mV = torch.bmm(m, Vt.mT)
    torch._foreach_copy_(parts, means(U, Vt.mT, mV, torch.bmm(U.mT, m)))
    m.baddbmm_(torch.cat([mV, U], 2), torch.cat([Vt, parts[2]], 1), alpha=-1)


def join_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> None:
    """The inverse of `split_`."""
    K, R, L = parts
    m.baddbmm_(torch.cat([torch.baddbmm(R, U, K), U], 2), torch.cat([Vt, L], 1))


def start_(U: Tensor, V: Tensor, G: Tensor) -> None:
    """Cosines, the first of which is the plain mean, and two iterations on the first gradient."""
    for W, A in ((U, G), (V, G.mT)):
        W.copy_(cosines((A != 0).any(-1), W.shape[-1]))
        for _ in range(2):
            W.copy_(orthonormalized(A @ (A.mT @ W), W, W))


def _revived(W: Tensor, m: Tensor) -> Tensor:
    """With cosines for columns that are zero, because fewer units or inputs had a gradient when the means began."""
    empty = (W == 0).all(-2, keepdim=True)
    if not torch.compiler.is_compiling() and not empty.any():  # a graph cannot branch on values
        return W
    return W + cosines((m != 0).any(-1), W.shape[-1]).to(W.dtype) * empty


def cosines(alive: Tensor, k: int) -> Tensor:
    """k orthonormal columns over the rows that are alive: their plain mean, then cosines of growing frequency.

    (…, n) → (…, n, k). Where fewer than k rows are alive, columns are left over, and zero.
    """
    alive = alive.double()
    count, column = alive.sum(-1, keepdim=True)[..., None], torch.arange(k, device=alive.device)
    angle = (alive.cumsum(-1) - 0.5)[..., None] * (math.pi / count.clamp(min=1)) * column
    waves = torch.cos(angle) * alive[..., None] * (2 / count.clamp(min=1)).sqrt() * (column < count)
    waves[..., :1] *= 0.5**0.5
    return waves


def reach(beta1: float, beta2: float, t: int) -> float:
    """The most that |m̂| / √v̂ of an Adam can be after t steps, by Cauchy and Schwarz.

    When coordinates turn, v knows little of the new ones, and only this bound keeps the step from exploding. It grows
    without end unless β₁² < β₂; then t is at most three times the memory of m, which has 95% of its weight.
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


def _batch(grads: Sequence[Tensor], O: int, I: int, dtype: torch.dtype) -> Tensor:
    """The gradients as (n, O, I)."""
    matrices = [grad.reshape(O, I) for grad in grads]
    return (matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)).to(dtype)


def _move_(params: list[Tensor], delta: Tensor, rate: float, decay: float) -> None:
    """θ ← decay · θ − rate · δ, rounded once to the parameters' own dtype."""
    steps = list(delta.view(len(params), *params[0].shape).unbind())
    if params[0].dtype == delta.dtype:
        if decay != 1:
            torch._foreach_mul_(params, decay)
        torch._foreach_add_(params, steps, alpha=-rate)
        return
    for param, step in zip(params, steps, strict=True):
        param.copy_(param.to(delta.dtype).mul_(decay).sub_(step, alpha=rate))
