"""Adam on the analysis of variance of every gradient matrix: learned block means.

A weight is a matrix G of O units and I inputs (a convolution is O × c_in·k·k). Orthonormal weights U (O×k) and V (I×k)
split every gradient as a two-way analysis of variance splits a table, into four orthogonal parts:

    K = Uᵀ G V                grand means,         k×k
    R = G V − U K             means per unit,      O×k
    L = Uᵀ G − K Vᵀ           means per input,     k×I
    E = G − U K Vᵀ − R Vᵀ − U L        remainder,  O×I

Each part X has an Adam of its own, whose step is projected back into the part:

    m_X ← average of X with decay β₁;   v_X ← average of X² with decay β_m, and β₂ for E;   bias-corrected
    X' = m_X / (√v_X + ε + ν_X), but no longer than an Adam in fixed coordinates can be
    δ = U K' Vᵀ + (I − UUᵀ) R' Vᵀ + U L' (I − VVᵀ) + (I − UUᵀ) E' (I − VVᵀ),     θ ← θ − η (weight_decay · θ + δ)

ν_X is the size of rounding errors in X: a mean that is zero but for rounding must not take a full step.

The weights follow the gradients by subspace iteration. Every T steps they are made orthonormal again, the averages m_X
are put together and split anew, and the averages of squares follow the rotation approximately:

    X ← average of G (Gᵀ U),   Y ← average of Gᵀ (G V);      U ← orth(X),   V ← orth(Y)
    v_R ← v_R (Vᵀ V_new)∘²,   v_L ← (U_newᵀ U)∘² v_L,   v_K ← (U_newᵀ U)∘² v_K (Vᵀ V_new)∘²

With k = 1, U = 1/√O and V = 1/√I this is the textbook analysis, and the means per unit are the paper's block means.
With k = O and k = I there is no remainder: Adam in the rotated basis, as SOAP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_adamw, require_betas, require_number
from blockmean._linalg import followed
from blockmean.optim.forms import FORMS, Rule
from blockmean.optim.inspection import MeanStatistics, mean_statistics
from blockmean.optim.optimizer import BlockMeanOptimizer, Work, distinct, given_names
from blockmean.optim.passes import Tensors, arithmetic, choose
from blockmean.optim.stacks import Run, Stack

NARROW, MOST = 4, 32
"""means="auto": twice the root of the shorter side of a matrix, up to 32; none for sides shorter than 4."""

CHUNK = 2**18
"""Entries that a step processes at a time: small enough that its temporaries stay in the cache."""

FORGET = 0.95
"""ρ: decay of the averages that U and V follow."""

NOISE = 2.0**-19
"""ν: 16 rounding errors of float32. Entries smaller than this share of the gradient take no full step."""

WEIGHTS = ("units", "inputs", "units_followed", "inputs_followed")
"""U, Vᵀ, X and Yᵀ of a matrix."""
AVERAGES = ("grand_avg", "unit_avg", "input_avg")
"""The parts K, R and L of the average gradient; `exp_avg` has its remainder."""
SQUARES = ("grand_sq", "unit_sq", "input_sq")
"""v_K, v_R and v_L; `exp_avg_sq` is v_E."""
MEANS_STATE = (*WEIGHTS, *AVERAGES, *SQUARES)


class Table(NamedTuple):
    """Matrices of one kind, which a step processes as a batch."""

    group: int
    shape: torch.Size
    param_dtype: torch.dtype
    means: tuple[int, int]

    @property
    def dtype(self) -> torch.dtype:
        """Of state and arithmetic."""
        return arithmetic(self.param_dtype)

    @property
    def matrix(self) -> tuple[int, int]:
        """Units and inputs."""
        return self.shape[0], self.shape[1:].numel()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every state tensor."""
        (k, q), (units, inputs) = self.means, self.matrix
        sides, parts = ((units, k), (q, inputs)), ((k, q), (units, q), (k, inputs))
        means = (*sides, *sides, *parts, *parts)
        return {"exp_avg": self.shape, "exp_avg_sq": self.shape, **dict(zip(MEANS_STATE, means, strict=True))}


class Anova(BlockMeanOptimizer):
    """AdamW for the parts of every gradient matrix: its learned means per unit and per input, and the remainder.

    What many units, or many inputs, have in common is a small part of the entries and a large part of the curvature.
    Adam scales entries one by one and cannot see it; here every such mean has a scale of its own. Memory is that of
    Adam plus O(k (O + I)) per matrix. Tensors with one dim, and matrices with a single unit or input, take AdamW.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate, a number or a tensor with one element.  # η
        betas: decay of the averages of the gradient and of the square of its remainder.  # β₁, β₂
        mean_beta: decay of the averages of squared means.  # β_m
        means: number of means over units and over inputs of a matrix, one number for both or a pair; "auto" takes
            twice the root of the shorter side, 32 at most, and none for sides shorter than 4. 0 gives torch's AdamW.
            A new number starts the means over.  # k
        refresh_every: make U and V orthonormal once in this many steps; they see every gradient.  # T
        eps: added to the root of every average square.  # ε
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        maximize: step uphill.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.

    `foreach` concerns the tensors that take AdamW. There is no `amsgrad`, and no `fused` yet.

    Cost O(k d) per step; state 2d + O(k (O + I)) numbers.

    >>> model = torch.nn.Linear(8, 4)
    >>> optimizer = Anova(model.parameters(), lr=1e-3)
    >>> model(torch.ones(8)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = ("exp_avg", "exp_avg_sq")
    further_state = MEANS_STATE
    statistics_kept = MappingProxyType({})
    counters = ("step", "began")
    default_blocks = ("tensor", "none")
    works_in_pieces = False
    not_negative = ("lr", "weight_decay", "eps")

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        means: int | tuple[int, int] | str = "auto",
        mean_beta: float = 0.95,
        refresh_every: int = 5,
        maximize: bool = False,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "amsgrad": amsgrad,
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "means": means,
            "mean_beta": mean_beta,
            "refresh_every": refresh_every,
            "maximize": maximize,
            "nonfinite": nonfinite,
            "foreach": foreach,
            "fused": fused,
        }
        self._stacks: dict[Table, Stack] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}  # the next step builds them

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        owner = type(self).__name__
        require_betas(group["betas"], owner)
        require_number(group["mean_beta"], "mean_beta", owner)
        require(group["mean_beta"] < 1, "mean_beta", owner, "below 1", group["mean_beta"])

    def check_kinds(self, group: dict[str, Any]) -> None:
        super().check_kinds(group)
        require_adamw(group, type(self).__name__)
        self._require_means(group["means"])

    def _require_means(self, means: object) -> None:
        counts = means if isinstance(means, tuple | list) else (means, means)
        whole = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in counts)
        good = means == "auto" or (whole and len(counts) == 2)
        expected = "'auto', a whole number >= 0, or two of them (units, inputs)"
        require(good, "means", type(self).__name__, expected, means)

    def collect(self, number: int, at_rest: bool = False) -> Work | None:
        self._require_means(self.param_groups[number]["means"])  # set by hand, perhaps
        return super().collect(number, at_rest)

    def init_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": torch.tensor(0.0, dtype=torch.float32)}
        if means_of(param.shape, group["means"]) == (0, 0):  # the others get their state from a stack
            state |= {key: torch.zeros_like(param, dtype=arithmetic(param.dtype)) for key in self.entry_state}
        return state

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._state_of(param, group)
        shape = state.get("exp_avg", param).shape
        if shape != param.shape:
            raise ValueError(
                f"{type(self).__name__} has moments of shape {tuple(shape)} for a parameter whose shape is now "
                f"{tuple(param.shape)}. Delete its state to start over."
            )
        return state

    def block_sums(self, work: Work) -> Tensor:
        """The length of every gradient: whether it is finite, and how large its rounding errors are."""
        grads = [grad for grad in work.grads if grad is not None]
        return torch.stack(torch._foreach_norm([grad.to(arithmetic(grad.dtype)) for grad in grads])).double()[None]

    def solve(self, work: Work) -> Tensor:
        """What is added to the roots of v_K, v_R, v_L and v_E of every tensor: ε, and rounding errors of G, (4, n)."""
        errors = rounding(tuple(param.shape for param in work.params), work.sums.device)
        lengths = work.sums if work.in_order else work.sums[:, [blocks.start for blocks in work.blocks]]
        floors: Tensor = lengths * errors + work.group["eps"]
        smallest = max(torch.finfo(arithmetic(param.dtype)).tiny for param in work.params) ** 0.5
        return floors if work.group["eps"] > smallest else floors.clamp_(min=smallest)  # smaller squares vanish

    def apply_(self, work: Work, solution: Tensor) -> None:
        group, plain = work.group, []
        tables: dict[Table, list[int]] = {}
        for j, param in enumerate(work.params):
            k = means_of(param.shape, group["means"])
            if k == (0, 0):
                plain.append(j)
            else:
                tables.setdefault(Table(work.number, param.shape, param.dtype, k), []).append(j)
        self._apply_plain(work, plain)
        for table, positions in tables.items():
            where = {work.indices[j]: j for j in positions}
            stack = self._stack(work, table, list(where))
            ages = {i: (work.steps[j], work.steps[j] - int(work.states[i]["began"])) for i, j in where.items()}
            for run in stack.runs(ages):
                for part in run.pieces(max(1, CHUNK // table.shape.numel())):
                    first = part.members[0]
                    self._apply_means(work, part, table, [where[i] for i in part.members], *ages[first], solution)

    @torch.no_grad()
    def block_statistics(self) -> list[MeanStatistics]:  # type: ignore[override]  # means in place of blocks
        """How much of the gradient is means: one entry per matrix with means, in order.

        Costs one pass over the second moments, and only when called.
        """
        return [
            mean_statistics(number, name or f"param{i}", self.state[param], group)
            for number, group in enumerate(self.param_groups)
            for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True))
            if means_of(param.shape, group["means"]) != (0, 0) and "units" in self.state.get(param, {})
        ]

    def _apply_plain(self, work: Work, positions: Sequence[int]) -> None:
        """AdamW."""
        if not positions:
            return
        group = work.group
        for j in positions:
            state = work.states[work.indices[j]]
            if "units" in state:  # the means were switched off
                _forget(state, group, with_squares=True)
        rule = Rule(
            FORMS["none"], group["betas"], group["eps"], group["weight_decay"], group["maximize"], float(group["lr"])
        )
        first, second = (work.moments[key] for key in self.entry_state)
        lists: Any = (work.params, work.grads, first, second, work.steps, work.cuts)
        tensors = Tensors(*([values[j] for j in positions] for values in lists))
        choose(tensors, group["foreach"]).apply_(rule, tensors, [], [])

    def _stack(self, work: Work, table: Table, members: list[int]) -> Stack:
        """The state of all matrices of one kind, with room for these members; means that are new have begun."""
        stack = self._stacks.get(table)
        if stack is not None and all(stack.holds(i, work.states[i]) for i in members):
            return stack
        shapes = table.shapes()
        for i in members:
            state = work.states[i]
            if any(name not in state or state[name].shape != shapes[name] for name in MEANS_STATE):
                if all(name in state for name in MEANS_STATE):  # there was another number of means
                    _forget(state, work.group, with_squares=False)
                state["began"] = torch.tensor(float(state["step"]) - 1, dtype=torch.float32)
        states = {i: work.states[i] for i in members}
        for i, param in enumerate(work.tensors):  # and those without a gradient: batches must not depend on who has one
            state = self.state.get(param, {}) if param.dtype == table.param_dtype else {}
            if i not in states and all(name in state and state[name].shape == shapes[name] for name in shapes):
                states[i] = state
        like = torch.empty(0, dtype=table.dtype, device=work.tensors[members[0]].device)
        made = Stack.of(shapes, states, like)
        taken = set(made.members)
        kept = {
            key: own for key, own in self._stacks.items() if key.group != table.group or not taken & set(own.members)
        }
        self._stacks = {**kept, table: made}
        return made

    def _apply_means(
        self, work: Work, run: Run, table: Table, places: Sequence[int], step: int, age: int, floor_of: Tensor
    ) -> None:
        """One step of equal matrices, as a batch. `age`: steps since their means began, this one included."""
        group, n = work.group, len(places)
        (O, I), (beta1, beta2), mean_beta = table.matrix, group["betas"], group["mean_beta"]
        params = [work.params[j] for j in places]
        G = _batch([work.grads[j] for j in places], O, I, table.dtype)
        if group["maximize"]:
            G = -G
        m, v = (run.buffers[key].view(n, O, I) for key in self.entry_state)
        U, Vt, X, Yt = (run.buffers[key] for key in WEIGHTS)
        averages, squares = ([run.buffers[key] for key in keys] for keys in (AVERAGES, SQUARES))
        V = Vt.mT
        if age == 1:
            _start_(U, V, G)
            if step > 1:  # the momentum is older than the means
                _split_(m, U, Vt, averages)
        *floors, floor = floor_of[:, places].to(table.dtype).view(4, n, 1, 1).unbind()

        GV, UG = torch.bmm(G, V), torch.bmm(U.mT, G)
        parts = _means(U, V, GV, UG)
        torch._foreach_lerp_(averages, parts, 1 - beta1)
        torch._foreach_lerp_(squares, torch._foreach_mul(parts, parts), 1 - mean_beta)
        roots = torch._foreach_add(floors, torch._foreach_sqrt(squares), alpha=(1 - mean_beta**age) ** -0.5)
        K, R, L = steps = torch._foreach_div(averages, roots)
        started = 1 - beta1**step  # to divide averages by; `rate` does
        longest, longest_rest = reach(beta1, mean_beta, age) * started, reach(beta1, beta2, step) * started
        torch._foreach_clamp_min_(steps, -longest)
        torch._foreach_clamp_max_(steps, longest)

        lr, unbias = float(group["lr"]), (1 - beta2**step) ** -0.5
        rate, decay = lr / started, 1 - lr * group["weight_decay"]
        left, right = torch.cat([GV, U], 2), torch.cat([Vt, parts[2]], 1)  # left · right: G without its remainder
        K.baddbmm_(L, V, alpha=-1)
        in_place = n == 1 and table.param_dtype == table.dtype and params[0].is_contiguous()
        height = max(1, CHUNK // I) if in_place else O
        for top in range(0, O, height):
            part = slice(top, top + height)
            mean, square, g, l, u, r = (x[:, part] if height < O else x for x in (m, v, G, left, U, R))
            E = torch.baddbmm(g, l, right, alpha=-1)
            square.mul_(beta2).addcmul_(E, E, value=1 - beta2)
            mean.lerp_(E, 1 - beta1)
            root = square.sqrt()
            torch.div(mean, torch.add(floor, root, alpha=unbias, out=root), out=E).clamp_(-longest_rest, longest_rest)
            r.baddbmm_(E, V, alpha=-1)  # R', L' and K' minus what E' has of them: P(E')
            L.baddbmm_(u.mT, E, alpha=-1)
            if height < O:
                params[0].view(1, O, I)[:, part].mul_(decay).sub_(E, alpha=rate)
        K.baddbmm_(U.mT, R, alpha=-1)
        left, right = torch.cat([R.baddbmm_(U, K), U], 2), torch.cat([Vt, L], 1)
        if height < O:
            params[0].view(1, O, I).baddbmm_(left, right, alpha=-rate)
        else:
            _move_(params, E.baddbmm_(left, right), rate, decay)  # the only E there was
        X.baddbmm_(G, UG.mT, beta=FORGET, alpha=1 - FORGET)
        Yt.baddbmm_(GV.mT, G, beta=FORGET, alpha=1 - FORGET)
        if age % group["refresh_every"] == 0:
            _join_(m, U, Vt, averages)
            _revive_(U, m)
            _revive_(V, m.mT)
            _refresh_(U, V, X, Yt.mT, *squares)
            _split_(m, U, Vt, averages)


def _split_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> None:
    """Move K, R and L of a matrix out of it: what stays is its remainder."""
    mV = torch.bmm(m, Vt.mT)
    torch._foreach_copy_(parts, _means(U, Vt.mT, mV, torch.bmm(U.mT, m)))
    m.baddbmm_(torch.cat([mV, U], 2), torch.cat([Vt, parts[2]], 1), alpha=-1)


def _join_(m: Tensor, U: Tensor, Vt: Tensor, parts: list[Tensor]) -> None:
    """The inverse of `_split_`."""
    K, R, L = parts
    m.baddbmm_(torch.cat([torch.baddbmm(R, U, K), U], 2), torch.cat([Vt, L], 1))


def _means(U: Tensor, V: Tensor, GV: Tensor, UG: Tensor) -> list[Tensor]:
    """K, R and L of a gradient, from G V and Uᵀ G."""
    K = torch.bmm(U.mT, GV)
    return [K, torch.baddbmm(GV, U, K, alpha=-1), torch.baddbmm(UG, K, V.mT, alpha=-1)]


def _start_(U: Tensor, V: Tensor, G: Tensor) -> None:
    """Cosines, the first of which is the plain mean, and two iterations on the first gradient."""
    for W, A in ((U, G), (V, G.mT)):
        W.copy_(cosines((A != 0).any(-1), W.shape[-1]))
        for _ in range(2):
            W.copy_(followed(W, A @ (A.mT @ W)))


def _revive_(W: Tensor, m: Tensor) -> None:
    """Cosines for columns that are zero, because fewer units or inputs had a gradient when the means began."""
    empty = (W == 0).all(-2, keepdim=True)
    if empty.any():
        W.add_(cosines((m != 0).any(-1), W.shape[-1]).to(W.dtype) * empty)


def _forget(state: dict[str, Any], group: dict[str, Any], with_squares: bool) -> None:
    """Drop the means of a matrix; its average gradient, and with them its average square, become whole again."""
    shape, step = state["exp_avg"].shape, int(state["step"])
    units, inputs, _, _, *averages = (state[name][None] for name in (*WEIGHTS, *AVERAGES))
    _join_(state["exp_avg"].view(1, shape[0], -1), units, inputs, averages)
    if with_squares:  # as if all parts were independent
        squares = [state[name][None] for name in SQUARES]
        share = (1 - group["betas"][1] ** (step - 1)) / (1 - group["mean_beta"] ** (step - 1 - int(state["began"])))
        own = [units.square(), inputs.square(), [share * x for x in squares]]
        _join_(state["exp_avg_sq"].view(1, shape[0], -1), *own)
    for name in (*MEANS_STATE, "began"):
        state.pop(name, None)


def _refresh_(U: Tensor, V: Tensor, X: Tensor, Y: Tensor, v_K: Tensor, v_R: Tensor, v_L: Tensor) -> None:
    """Orthonormal weights that span X and Y; second moments follow the rotation approximately."""
    new_U, new_V = followed(U, X), followed(V, Y)
    turn_U, turn_V = torch.bmm(U.mT, new_U).square_(), torch.bmm(V.mT, new_V).square_()
    v_K.copy_(torch.bmm(torch.bmm(turn_U.mT, v_K), turn_V))
    v_R.copy_(torch.bmm(v_R, turn_V))
    v_L.copy_(torch.bmm(turn_U.mT, v_L))
    for W, new, S in ((U, new_U, X), (V, new_V, Y)):
        W.copy_(new)
        S.copy_(torch.bmm(new, torch.bmm(new.mT, S)))


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
    """The most that |m̂| / √v̂ of an Adam can be after t steps, by Cauchy and Schwarz; infinite unless β₁² < β₂.

    When coordinates turn, v knows little of the new ones, and only this bound keeps the step from exploding.
    """
    if beta1**2 >= beta2:
        return math.inf
    ratio = beta1**2 / beta2
    sums = (1 - beta2**t) / (1 - beta2) * (1 - ratio**t) / (1 - ratio)
    return (1 - beta1) / (1 - beta1**t) * math.sqrt(sums)


@lru_cache(maxsize=64)
def rounding(shapes: tuple[torch.Size, ...], device: torch.device) -> Tensor:
    """The size of rounding errors in K, R, L and E for gradients of length 1, (4, tensors)."""
    sides = [(shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes]
    columns = [(1.0, units**-0.5, inputs**-0.5, (units * inputs) ** -0.5) for units, inputs in sides]
    return NOISE * torch.tensor(columns, dtype=torch.float64, device=device).T


def _batch(grads: Sequence[Tensor | None], O: int, I: int, dtype: torch.dtype) -> Tensor:
    """The gradients as (n, O, I)."""
    matrices = [grad.reshape(O, I) for grad in grads if grad is not None]
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


def means_of(shape: Sequence[int], means: int | tuple[int, int] | str) -> tuple[int, int]:
    """The number of means over the units and over the inputs of a tensor; (0, 0) if it is too narrow for any."""
    if len(shape) < 2:
        return 0, 0
    units, inputs = shape[0], math.prod(shape[1:])
    narrow = min(units, inputs)
    if narrow < 2:
        return 0, 0
    if isinstance(means, str):
        k = min(round(2 * narrow**0.5), MOST) if narrow >= NARROW else 0
        return k, k
    first, second = (means, means) if isinstance(means, int) else means
    return min(first, units), min(second, inputs)
