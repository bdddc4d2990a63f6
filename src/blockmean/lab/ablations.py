"""Anova in plain torch, one matrix at a time, every part formed: a reference, and what ablations change.

The equations are those of `blockmean.Anova` and docs/analysis-of-variance.md; nothing is shared with its code. With all
switches off both take the same steps to rounding, which a test checks.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = dict[str, Any]

NOISE, LEAST = 2.0**-19, 2.0**-18
"""Shares of a gradient, and of a row's square, that may be rounding errors of float32."""
FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""
INERTIA, CLOSEST = 1e-3, 1e-5
"""How much of the old columns is added to new ones, and how close to parallel columns may be."""


class Parts(NamedTuple):
    """A matrix, or one number per block of it, in four parts."""

    K: Tensor
    R: Tensor
    L: Tensor
    E: Tensor


class PlainAnova(torch.optim.Optimizer):
    """`blockmean.Anova` from its equations, slowly, and with what its ablations change.

    Args:
        params, lr, betas, eps, weight_decay, mean_beta, refresh_every: as in `blockmean.Anova`.
        means: k of every matrix that has means; 0: as with `means="auto"`.
        factor: c of every matrix, instead of the measured one.
        no_lift: no longer steps of grand means that agree.
        remainder_per_entry: one second moment for each entry of E instead of one per row.
        own_sketches: X ← average of G Gᵀ U and Y ← average of Gᵀ G V instead of G V Kᵀ and Gᵀ U K.
        means_everywhere: means for vocabularies too, whose sides differ by more than a factor of 16.
        cautious_decay: weight decay only where the update has the sign of the parameter (arXiv 2510.12402).
    """

    def __init__(
        self,
        params: Any,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        mean_beta: float = 0.95,
        refresh_every: int = 2,
        means: int = 0,
        factor: float | None = None,
        no_lift: bool = False,
        remainder_per_entry: bool = False,
        own_sketches: bool = False,
        means_everywhere: bool = False,
        cautious_decay: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, options)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the lab uses no closures
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, G = self.state[param], param.grad.flatten(1) if param.ndim > 1 else param.grad
                state["t"] = state.get("t", 0) + 1
                k = number_of_means(G.shape, group["means_everywhere"], group["means"])
                update = with_means(state, G, k, group) if k else adam(state, G, group)
                update = update.view_as(param)
                decay = group["weight_decay"] * param
                if group["cautious_decay"]:
                    decay *= update * param >= 0
                param.sub_(group["lr"] * (update + decay))


def number_of_means(shape: tuple[int, ...], everywhere: bool, asked: int) -> int:
    """Half of the shorter side, up to 32, or as asked; none for short sides, nor for very long ones."""
    short, long = min(shape), max(shape)
    if len(shape) < 2 or short <= 8 or (long > 16 * short and not everywhere):
        return 0
    return min(asked, short) if asked else min(short // 2, 32)


def adam(state: State, G: Tensor, group: dict[str, Any]) -> Tensor:
    """AdamW's update, without rate and decay."""
    (beta1, beta2), t = group["betas"], state["t"]
    m = state["m"] = average(state.get("m", torch.zeros_like(G)), G, beta1)
    v = state["v"] = average(state.get("v", torch.zeros_like(G)), G.square(), beta2)
    update: Tensor = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
    return update


def with_means(state: State, G: Tensor, k: int, group: dict[str, Any]) -> Tensor:
    """c δ of a matrix; its state follows."""
    (beta1, beta2), beta_m, t = group["betas"], group["mean_beta"], state["t"]
    if "U" not in state:
        if not G.any():  # nothing can be learned from it
            return torch.zeros_like(G)
        start(state, G, k, group["remainder_per_entry"])
    age, per_entry = t - state["start"], group["remainder_per_entry"]
    weights = Parts(*(1 - beta_m**age,) * 3, 1 - beta2**t)
    U, V, (units, inputs) = state["U"], state["V"], G.shape
    parts = split(G, U, V)
    squares, v = mean_squares(G, U, V, parts, per_entry), state["v"]
    energy = G.square().sum() + v.K.sum() + units * v.R.sum() + inputs * v.L.sum()  # of which a part may be rounding
    seen = state["X"].abs().sum(1) + (G @ V).abs().sum(1), state["Y"].abs().sum(1) + (G.T @ U).abs().sum(1)
    M = state["M"] = average(state["M"], G, beta1)
    state["v"] = Parts(*map(average, v, squares, (beta_m, beta_m, beta_m, beta2)))
    for name, part in (("variance", G), ("rest_variance", parts.E)):
        state[name] = average(state[name], part.square().mean(), beta2)
    own = group["own_sketches"]
    state["X"] = average(state["X"], G @ (G.T @ U) if own else G @ V @ parts.K.T, FORGET)
    state["Y"] = average(state["Y"], G.T @ (G @ V) if own else G.T @ U @ parts.K, FORGET)
    floors = [NOISE * (energy / size) ** 0.5 for size in (1, units, inputs, units * inputs)]
    roots = [(v / w).sqrt() + group["eps"] + floor for v, w, floor in zip(state["v"], weights, floors, strict=True)]
    K, R, L, E = split(M / (1 - beta1**t), U, V)
    root_E = roots[3] if per_entry else roots[3][:, None]
    c = state["c"].clamp(0.7, largest_factor(group["lr"])) if group["factor"] is None else group["factor"]
    K = K / roots[0]
    sigma = (state["variance"] / weights.E).sqrt() + group["eps"]
    K = K if group["no_lift"] else K * (K.square().clamp(max=1) * roots[0] / (c * sigma)).clamp(min=1)
    delta = U @ K @ V.T + R / roots[1] @ V.T + U @ (L / roots[2][:, None]) + E / root_E
    if age % group["refresh_every"] == 0:
        refresh(state, seen, weights, group)
    update: Tensor = c * delta
    return update


def split(A: Tensor, U: Tensor, V: Tensor) -> Parts:
    """K = Uᵀ A V, R = A V − U K, L = Uᵀ A − K Vᵀ, E = A − U K Vᵀ − R Vᵀ − U L."""
    K = U.T @ A @ V
    R, L = A @ V - U @ K, U.T @ A - K @ V.T
    return Parts(K, R, L, A - U @ K @ V.T - R @ V.T - U @ L)


def mean_squares(A: Tensor, U: Tensor, V: Tensor, parts: Parts, per_entry: bool) -> Parts:
    """The mean square of every block.

    Anova estimates those of the rows of E, which it does not form: ‖E_i‖² from ‖A_i‖² − ‖(AV)_i‖² − ‖U_i L‖².
    """
    K, R, L, E = parts
    if per_entry:
        of_E = E.square().maximum(LEAST * A.square())
    else:
        rows = A.square().sum(1)
        without_V = rows - (A @ V).square().sum(1)
        share = (E.square().sum() / (E.square().sum() + L.square().sum())).nan_to_num(0.0)
        estimate = (without_V - (U @ L).square().sum(1)).abs().maximum(share * without_V)
        of_E = estimate.maximum(LEAST * rows) / A.shape[1]
    return Parts(K.square(), R.square().mean(0), L.square().mean(1), of_E)


def factor(state: State, A: Tensor, parts: Parts, weights: Parts, group: dict[str, Any]) -> Tensor:
    """c: the gain ⟨A, A/σ⟩ of a step with one second moment for the whole matrix, over the gain ⟨A, δ⟩."""
    roots = [(v / weight).sqrt() + group["eps"] for v, weight in zip(state["v"], weights, strict=True)]
    sigma, root_E = ((state[name] / weights.E).sqrt() for name in ("variance", "rest_variance"))
    K, R, L, E = (part.square() for part in parts)
    rest = ((E.sum() - LEAST * A.square().sum()).clamp(min=0) / root_E).nan_to_num(0.0)
    gain = (K / roots[0]).sum() + (R / roots[1]).sum() + (L / roots[2][:, None]).sum() + rest
    c: Tensor = (A.square().sum() / sigma / gain).nan_to_num(0.7).clamp(0.7, 20.0)
    return c


def largest_factor(lr: float) -> float:
    """c raises no rate above 7e-3, and is at most √(3e-2 / η)."""
    lr = max(lr, 3e-2 / 20.0**2)
    return max(min(math.sqrt(3e-2 / lr), 7e-3 / lr), 0.7)


def start(state: State, G: Tensor, k: int, per_entry: bool) -> None:
    """U and V: cosines over the rows and columns that have a gradient, after two subspace iterations."""
    U, V = cosines(G.abs().sum(1) > 0, k, G), cosines(G.abs().sum(0) > 0, k, G)
    for _ in range(2):
        U, V = orthonormal(G @ (G.T @ U), U)[0], orthonormal(G.T @ (G @ V), V)[0]
    of_E = G.shape if per_entry else G.shape[:1]
    state["v"] = Parts(G.new_zeros(k, k), G.new_zeros(k), G.new_zeros(k), G.new_zeros(of_E))
    state.update(U=U, V=V, X=torch.zeros_like(U), Y=torch.zeros_like(V), M=torch.zeros_like(G))
    state.update(start=state["t"] - 1, variance=G.new_zeros(()), rest_variance=G.new_zeros(()), c=G.new_zeros(()))


def refresh(state: State, seen: tuple[Tensor, Tensor], weights: Parts, group: dict[str, Any]) -> None:
    """U ← orth(X), V ← orth(Y); second moments follow the rotation, and are raised to what M allows."""
    U, V, M, (beta1, beta2), t = state["U"], state["V"], state["M"], group["betas"], state["t"]
    # Columns without a direction so far take cosines over the rows that have had a gradient.
    bases = [torch.where(W.any(0), W, cosines(x > 0, W.shape[1], W)) for W, x in zip((U, V), seen, strict=True)]
    (new_U, fine), (new_V, good) = map(orthonormal, (state["X"], state["Y"]), bases)
    if fine and good:
        by_U, by_V = (U.T @ new_U).square(), (V.T @ new_V).square()
        v = state["v"]
        state["v"] = Parts(by_U.T @ v.K @ by_V, v.R @ by_V, v.L @ by_U, v.E)
        state.update(U=new_U, V=new_V, X=new_U @ new_U.T @ state["X"], Y=new_V @ new_V.T @ state["Y"])
    parts = split(M, state["U"], state["V"])
    squares = mean_squares(M, state["U"], state["V"], parts, group["remainder_per_entry"])
    bounds = [adam_bound(beta1, beta, t) for beta in (*(group["mean_beta"],) * 3, beta2)]
    raised = [
        square * w / (bound * (1 - beta1**t)) ** 2 for square, w, bound in zip(squares, weights, bounds, strict=True)
    ]
    state["v"] = Parts(*map(torch.maximum, state["v"], raised))
    state["c"] = 0.8 * state["c"] + 0.2 * factor(state, M, parts, weights, group)


def adam_bound(beta1: float, beta2: float, t: int) -> float:
    """The most that |m̂| / √v̂ can be after t steps; t counts up to three times the memory of m unless β₁² < β₂."""
    ratio = beta1**2 / beta2
    t = t if ratio < 1 else min(t, math.ceil(3 / (1 - beta1)))
    powers = float(t) if ratio == 1 else (1 - ratio**t) / (1 - ratio)
    return (1 - beta1) / (1 - beta1**t) * math.sqrt((1 - beta2**t) / (1 - beta2) * powers)


def orthonormal(X: Tensor, W: Tensor) -> tuple[Tensor, bool]:
    """Orthonormal columns that span those of X, scaled to length one, plus a little of W; W if they are parallel."""
    length = X.double().norm(dim=0)
    unit = torch.where(length > NOISE * length.max(), X / length, 0.0) + INERTIA * W.double()
    empty = ~unit.any(0)  # the last ones, if any
    Q, R = torch.linalg.qr(unit)
    size = R.diagonal()
    fine = bool((empty | (size.abs() > CLOSEST)).all())
    Q = Q * (size.sign() * ~empty) * unit.any(1, keepdim=True)  # rows without a gradient stay exactly zero
    return Q.to(W) if fine else W, fine


def cosines(alive: Tensor, k: int, like: Tensor) -> Tensor:
    """The plain mean over the rows that are alive, then cosines of growing frequency; zero beyond their number."""
    count, column = int(alive.sum()), torch.arange(k)
    place = (alive.cumsum(0) - 0.5)[:, None].double()
    waves = torch.cos(place * math.pi / max(count, 1) * column) * math.sqrt(2 / max(count, 1))
    waves[:, 0] *= math.sqrt(0.5)
    return (waves * alive[:, None] * (column < count)).to(like)


def average(old: Tensor, new: Tensor, beta: float) -> Tensor:
    return old + (1 - beta) * (new - old)
