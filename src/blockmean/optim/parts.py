"""Anova's arithmetic for a batch of equal matrices: the four parts of a gradient, their step, and the turn of U and V.

The equations are at the top of anova.py. All matrices have a batch dim in front: G is (n, O, I). V is kept transposed.

A process may have only some rows and columns of a matrix: then G, m and v_E are what it has of them, U, R and X have
its rows, and V, L and Y its columns. So functions that need sums over all rows or columns are generators: they yield
what they have of such a sum, with the side that it runs over, and go on when it is complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import in_float64, orthonormalization

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


Sums = list[tuple[Tensor, str]]
"""Tensors that are to become sums over the "units" (rows), the "inputs" (columns) or "both", in place."""


class Place(NamedTuple):
    """Which rows, or columns, of a matrix a process has."""

    own_index: Tensor | None = None  # None: all
    total: int = 0  # of the whole matrix

    def widened(self, x: Tensor) -> Tensor:
        """(n, own) → (n, all), with zeros for what others have."""
        if self.own_index is None:
            return x
        return x.new_zeros(len(x), self.total).index_copy_(1, self.own_index, x)

    def own(self, x: Tensor) -> Tensor:
        """(n, all, …) → (n, own, …)."""
        return x if self.own_index is None else x.index_select(1, self.own_index)


ALL = (Place(), Place())


def apply_(
    step: Step, params: list[Tensor], grads: Sequence[Tensor], state: Mapping[str, Tensor], floors: Tensor
) -> None:
    """One step of equal matrices that are whole; `floors` are added to the roots of v_K, v_R, v_L and v_E, (4, n)."""
    for _ in walk_(step, params, grads, state, floors):
        pass


def walk_(
    step: Step,
    params: list[Tensor],
    grads: Sequence[Tensor],
    state: Mapping[str, Tensor],
    floors: Tensor,
    products: Sequence[Tensor] = (),
    places: tuple[Place, Place] = ALL,
) -> Iterator[Sums]:
    """One step of equal matrices. `products` are G V, Uᵀ G and Uᵀ G V, if somebody has completed them already."""
    n, O, I = len(params), params[0].shape[0], params[0].shape[1:].numel()
    (beta1, beta2), dtype = step.betas, state["units"].dtype
    G = gradient(grads, state, step.maximize)
    m, v = (state[key].view(n, O, I) for key in STATE[:2])
    U, Vt, unit_sketch, input_sketch = (state[key].flatten(2) for key in WEIGHTS)
    averages, squares = ([state[key].flatten(2) for key in keys] for keys in (AVERAGES, SQUARES))
    V = Vt.mT
    if step.age == 1:
        yield from _start_(U, V, G, places)
        if step.steps > 1:  # the momentum is older than the means
            yield from _split_(m, U, Vt, averages)
    if not products:
        products = thin(G, U, V)
        yield around(products)
    *mean_floors, floor = floors.to(G).view(4, n, 1, 1).unbind()

    GV, UG, _ = products
    parts = means(U, V, *products)
    torch._foreach_lerp_(averages, parts, 1 - beta1)
    torch._foreach_lerp_(squares, torch._foreach_mul(parts, parts), 1 - step.mean_beta)
    roots = torch._foreach_add(mean_floors, torch._foreach_sqrt(squares), alpha=step.unbias(is_remainder=False))
    K, R, L = steps = torch._foreach_div(averages, roots)
    longest, longest_rest = step.longest(is_remainder=False), step.longest(is_remainder=True)
    torch._foreach_clamp_min_(steps, -longest)
    torch._foreach_clamp_max_(steps, longest)

    unbias, rate, decay = step.unbias(is_remainder=True), step.rate, step.decay
    left, right = torch.cat([GV, U], 2), torch.cat([Vt, parts[2]], 1)  # left · right: G without its remainder
    in_place = n == 1 and params[0].dtype == dtype and params[0].is_contiguous()
    height = max(1, CHUNK // max(I, 1)) if in_place else O
    early = in_place and (height < O or places is not ALL)  # nobody waits for others with a remainder in hand
    EV, UE, E = torch.zeros_like(R), torch.zeros_like(L), G
    for top in range(0, O, max(1, height)):
        rows = slice(top, top + height)
        mean, square, g, l, u, ev = (x[:, rows] if height < O else x for x in (m, v, G, left, U, EV))
        E = torch.baddbmm(g, l, right, alpha=-1)
        square.mul_(beta2).addcmul_(E, E, value=1 - beta2)
        mean.lerp_(E, 1 - beta1)
        root = square.sqrt()
        torch.div(mean, torch.add(floor, root, alpha=unbias, out=root), out=E).clamp_(-longest_rest, longest_rest)
        ev.baddbmm_(E, V)
        UE.baddbmm_(u.mT, E)
        if early:
            params[0].view(1, O, I)[:, rows].mul_(decay).sub_(E, alpha=rate)
    LV, UR, UEV = torch.bmm(L, V), torch.bmm(U.mT, R), torch.bmm(U.mT, EV)
    GGU, GGV = torch.bmm(G, UG.mT), torch.bmm(GV.mT, G)
    alive = _alive(U, V) if step.turns else []
    if early:
        E = GGU
    del G, left, right, GV, UG, products  # others may take long
    if O:
        del root, mean, square, g, l, u, ev
    over_inputs, over_units = (EV, LV, GGU), (UE, UR, GGV)
    yield [*((x, "inputs") for x in over_inputs), *((x, "units") for x in over_units), (UEV, "both"), *alive]
    R.sub_(EV)  # R', L' and K' minus what E' has of them: P(E')
    L.sub_(UE)
    K.sub_(LV).sub_(UR).add_(UEV)
    left, right = torch.cat([R.baddbmm_(U, K), U], 2), torch.cat([Vt, L], 1)
    if early:
        params[0].view(1, O, I).baddbmm_(left, right, alpha=-rate)
    else:
        _move_(params, E.baddbmm_(left, right), rate, decay)  # the only E there was
    unit_sketch.lerp_(GGU, 1 - FORGET)
    input_sketch.lerp_(GGV, 1 - FORGET)
    if step.turns:
        yield from _turn_(state, [count for count, _ in alive], places)


def gradient(grads: Sequence[Tensor], state: Mapping[str, Tensor], maximize: bool) -> Tensor:
    """The gradients as (n, O, I)."""
    dtype = state["units"].dtype
    matrices = [grad.reshape(grad.shape[0], grad.shape[1:].numel()) for grad in grads]
    G = (matrices[0][None] if len(matrices) == 1 else torch.stack(matrices)).to(dtype)
    return -G if maximize else G


def turn_(state: Mapping[str, Tensor]) -> None:
    """Turn U and V towards what they follow, for matrices that are whole."""
    U, Vt = (state[key].flatten(2) for key in WEIGHTS[:2])
    for _ in _turn_(state, [count for count, _ in _alive(U, Vt.mT)], ALL):
        pass


def _turn_(state: Mapping[str, Tensor], alive: list[Tensor], places: tuple[Place, Place]) -> Iterator[Sums]:
    """Turn U and V towards what they follow. The average gradient is put together and split with the new ones."""
    U, Vt, unit_sketch, input_sketch = (state[key].flatten(2) for key in WEIGHTS)
    averages, (v_K, v_R, v_L) = ([state[key].flatten(2) for key in keys] for keys in (AVERAGES, SQUARES))
    V, m = Vt.mT, state["exp_avg"].flatten(2)
    join_(m, U, Vt, averages)
    new: list[Tensor] = []
    for W, sketch, A, side, count, place in (
        (U, unit_sketch, m, "units", alive[0], places[0]),
        (V, input_sketch.mT, m.mT, "inputs", alive[1], places[1]),
    ):
        revived = [W]
        if torch.compiler.is_compiling() or (count == 0).any():  # a graph cannot branch on values
            yield from _revive(W, A, count == 0, place, revived)
        for sums in orthonormalization(sketch, revived[-1], W, new):
            yield [(x, side) for x in sums]
    new_U, new_V = new
    by_U, by_V = torch.bmm(U.mT, new_U), torch.bmm(V.mT, new_V)
    kept_U, kept_V = torch.bmm(new_U.mT, unit_sketch), torch.bmm(new_V.mT, input_sketch.mT)
    products = thin(m, new_U, new_V)
    yield [(by_U, "units"), (by_V, "inputs"), (kept_U, "units"), (kept_V, "inputs"), *around(products)]
    by_U.square_()
    by_V.square_()
    v_K.copy_(torch.bmm(torch.bmm(by_U.mT, v_K), by_V))
    v_R.copy_(torch.bmm(v_R, by_V))
    v_L.copy_(torch.bmm(by_U.mT, v_L))
    U.copy_(new_U)
    V.copy_(new_V)
    unit_sketch.copy_(torch.bmm(new_U, kept_U))
    input_sketch.copy_(torch.bmm(new_V, kept_V).mT)
    _take_out_(m, U, Vt, averages, products)


def thin(G: Tensor, U: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """G V, Uᵀ G and Uᵀ G V."""
    GV = torch.bmm(G, V)
    return GV, torch.bmm(U.mT, G), torch.bmm(U.mT, GV)


def around(products: Sequence[Tensor]) -> Sums:
    """The sides that `thin` sums over."""
    return list(zip(products, ("inputs", "units", "both"), strict=True))


def means(U: Tensor, V: Tensor, GV: Tensor, UG: Tensor, K: Tensor) -> list[Tensor]:
    """K, R and L of a gradient, from what `thin` returns."""
    return [K, torch.baddbmm(GV, U, K, alpha=-1), torch.baddbmm(UG, K, V.mT, alpha=-1)]


def _split_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> Iterator[Sums]:
    """Move K, R and L of a matrix out of it: what stays is its remainder."""
    products = thin(m, U, Vt.mT)
    yield around(products)
    _take_out_(m, U, Vt, parts, products)


def _take_out_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor], products: Sequence[Tensor]) -> None:
    torch._foreach_copy_(parts, means(U, Vt.mT, *products))
    m.baddbmm_(torch.cat([products[0], U], 2), torch.cat([Vt, parts[2]], 1), alpha=-1)


def join_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> None:
    """Put a matrix together again."""
    K, R, L = parts
    m.baddbmm_(torch.cat([torch.baddbmm(R, U, K), U], 2), torch.cat([Vt, L], 1))


def _start_(U: Tensor, V: Tensor, G: Tensor, places: tuple[Place, Place]) -> Iterator[Sums]:
    """Cosines, the first of which is the plain mean, and two iterations on the first gradient."""
    for W, A, side, other, place in (
        (U, G, "units", "inputs", places[0]),
        (V, G.mT, "inputs", "units", places[1]),
    ):
        yield from _wave_(W, A, place)
        for _ in range(2):
            AW = A.mT @ W
            yield [(AW, side)]
            sketch = A @ AW
            yield [(sketch, other)]
            found: list[Tensor] = []
            for sums in orthonormalization(sketch, W, W, found):
                yield [(x, side) for x in sums]
            W.copy_(found[0])


def _wave_(W: Tensor, A: Tensor, place: Place) -> Iterator[Sums]:
    """W becomes cosines over the rows of A that are not zero."""
    alive = place.widened((A != 0).any(-1).to(A.dtype))
    yield [(alive, "both")]
    W.copy_(place.own(cosines(alive > 0, W.shape[-1]).to(W)))


def _alive(U: Tensor, V: Tensor) -> Sums:
    """For every column of U and V, how many entries are not zero."""
    return [((W != 0).sum(-2, keepdim=True).to(W.dtype), side) for W, side in ((U, "units"), (V, "inputs"))]


def _revive(W: Tensor, A: Tensor, empty: Tensor, place: Place, found: list[Tensor]) -> Iterator[Sums]:
    """Cosines for columns that are zero, because fewer units or inputs had a gradient when the means began."""
    waves = torch.empty_like(W)
    yield from _wave_(waves, A, place)
    found.append(W + waves * empty)


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
