"""Adam on a two-way analysis of variance of every gradient matrix, with one second moment per block.

A weight is a matrix of O units and I inputs (of a convolution: input channels times kernel positions). Orthonormal U
(O×k) and V (I×q) split its gradient G as a two-way analysis of variance splits a table, into four orthogonal parts:

    K = Uᵀ G V                grand means,         k×q
    R = G V − U K             means per unit,      O×q
    L = Uᵀ G − K Vᵀ           means per input,     k×I
    E = G − U K Vᵀ − R Vᵀ − U L        remainder,  O×I

The average gradient M is split in the same way. Second moments have one number per block, as the paper has for its
matrices: one per grand mean, one per column of R (shared by all units), per row of L, and per row of E:

    M ← average of G with decay β₁;      K_m, R_m, L_m, E_m: its parts, which follow by linearity
    v_K, v_R, v_L ← averages of K², mean over units of R², mean over inputs of L², with decay β_m
    v_E ← average of the mean over inputs of E², with decay β₂;      D_P = 1 / (√v̂_P + ε + ν_P)
    δ = U (D_K K_m) Vᵀ + R_m D_R Vᵀ + U D_L L_m + D_E E_m,      θ ← θ − η (c δ + weight_decay · θ)

So δ is linear in M, and needs no second moment per entry: D_E M plus a matrix of rank k + q. ν_P is the size of
rounding errors in P: a mean that is zero but for rounding must not take a full step. D_K, D_R and D_L keep a part's
step, in its root mean square, below what an Adam in fixed coordinates can reach.

The bases follow the gradients by subspace iteration. Every T steps they turn; the average gradient is projected anew,
and second moments follow the rotation approximately:

    X ← average of G (Gᵀ U),   Y ← average of Gᵀ (G V);      U ← orth(X),   V ← orth(Y)
    v_R ← v_R (Vᵀ V_new)∘²,   v_L ← (U_newᵀ U)∘² v_L,   v_K ← (U_newᵀ U)∘² v_K (Vᵀ V_new)∘²

With k = 1, U = 1/√O and V = 1/√I this is the textbook analysis, and the means per unit are the paper's block means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_adamw, require_betas, require_number
from blockmean._linalg import in_float64
from blockmean.optim import sharding
from blockmean.optim.base import (
    BaseOptimizer,
    GroupStep,
    State,
    arithmetic,
    distinct,
    given_names,
    require_state,
    shown_names,
)
from blockmean.optim.decomposition import (
    FORGET,
    Means,
    Numbers,
    Place,
    Places,
    Products,
    Reduce,
    Squares,
    Sums,
    adopt_average_,
    average_,
    precondition,
    project,
    refresh_,
    sketch,
    start_,
    sums_of,
    update_,
)
from blockmean.optim.inspection import MeanStatistics, mean_statistics
from blockmean.optim.sharding import Sides, Sum, local

NARROW, MOST = 4, 32
"""means="auto": twice the root of the shorter side of a matrix, up to 32; none for sides shorter than 4."""

SMALL = 2**14
"""Entries up to which equal matrices are stacked on a CPU: larger ones do not gain from it."""

# State of the means, in the order of `Means`; V, Y and UM have the dims of their parameter behind the first.
UNIT_STATE = ("unit_basis", "unit_sketch", "unit_avg", "rest_sq")  # U, X, MV, v_E: one row per unit
INPUT_STATE = ("input_basis", "input_sketch", "input_avg")  # Vᵀ, Yᵀ, UM: one column per input
SMALL_STATE = ("grand_avg", "grand_sq", "unit_sq", "input_sq")  # K, v_K, v_R, v_L
MEANS = (*UNIT_STATE, *INPUT_STATE, *SMALL_STATE)


class Anova(BaseOptimizer):
    """AdamW, plus separate step sizes for the low-rank part of each weight's gradient.

    What many units, or many inputs, have in common is a small part of the entries and a large part of the curvature.
    Adam scales entries one by one and cannot see it; here every such mean has a scale of its own. The gradient G (O
    units, I inputs) of a weight is split with orthonormal U (O×k) and V (I×q), which it learns, into grand means K,
    means per unit R, means per input L and the remainder E:

        G = U K Vᵀ + R Vᵀ + U L + E

    Each part of the average gradient is divided by the root of its second moments: one for each grand mean, for each
    column of R, for each row of L and for each row of E. Tensors with one dim, and matrices with a single unit or
    input, take AdamW.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element.
        betas: β₁, β₂, decay of the averages of the gradient and of the square of its remainder.
        mean_beta: β_m, decay of the averages of squared means.
        means: k and q, columns of U (taken over the units, which gives means per input) and of V (over the inputs:
            means per unit), one number for both or a pair; "auto" takes twice the root of the shorter side, 32 at most,
            and none for sides shorter than 4. 0 gives torch's AdamW.
        refresh_every: T, turn U and V once in this many steps; they see every gradient.
        eps: ε, added to the root of every second moment.
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        maximize: step uphill.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.
        foreach, fused: how tensors that take AdamW are computed, as in torch.

    `amsgrad`, `capturable` and `differentiable` must be False. Cost O((k + q) d) per step; state d + O(k O + q I)
    numbers, half of AdamW's in wide layers.

    >>> model = torch.nn.Linear(8, 4)
    >>> optimizer = Anova(model.parameters(), lr=1e-3)
    >>> model(torch.ones(8)).square().sum().backward()
    >>> optimizer.step()
    """

    counters = ("step", "means_start_step")

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
        capturable: bool = False,
        differentiable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "means": means,
            "mean_beta": mean_beta,
            "refresh_every": refresh_every,
            "maximize": maximize,
            "nonfinite": nonfinite,
            "capturable": capturable,
            "differentiable": differentiable,
            "foreach": foreach,
            "fused": fused,
        }
        super().__init__(params, defaults)

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner = type(self).__name__
        if ranges:
            require_number(group["eps"], "eps", owner)
        require_adamw(group, owner)
        self._check_decays(group)

    def _check_decays(self, group: dict[str, Any]) -> None:
        """Raise unless the options that a step divides by, or takes roots with, are in range."""
        owner, means, every = type(self).__name__, group["means"], group["refresh_every"]
        require_betas(group["betas"], owner)
        require_number(group["mean_beta"], "mean_beta", owner)
        require(group["mean_beta"] < 1, "mean_beta", owner, "below 1", group["mean_beta"])
        whole = isinstance(every, int) and not isinstance(every, bool)
        require(whole and every >= 1, "refresh_every", owner, "a whole number >= 1", every)
        counts = means if isinstance(means, tuple | list) else (means, means)
        whole = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in counts)
        expected = "'auto', a whole number >= 0, or two of them (units, inputs)"
        require(means == "auto" or (whole and len(counts) == 2), "means", owner, expected, means)

    # ---------------------------------------------------------------- state

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        state: State = {"step": torch.tensor(0.0, dtype=torch.float32)}
        dtype = arithmetic(param.dtype)
        if means_of(param.shape, group["means"]) == (0, 0):
            return state | {key: torch.zeros_like(param, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        average = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        return self._with_means(param, group, state | {"exp_avg": average})

    def _with_means(self, param: Tensor, group: dict[str, Any], state: State) -> State:
        """The state of a matrix whose means start in its next step; what else AdamW has kept is dropped."""
        own, (k, q) = local(param), means_of(param.shape, group["means"])
        rows, columns = own.shape[:1], own.shape[1:]
        shapes = {
            **dict(zip(UNIT_STATE, ((*rows, k), (*rows, k), (*rows, q), rows), strict=True)),
            **dict(zip(INPUT_STATE, ((q, *columns), (q, *columns), (k, *columns)), strict=True)),
            **dict(zip(SMALL_STATE, ((k, q), (k, q), (q,), (k,)), strict=True)),
        }
        zeros = {name: own.new_zeros(shape, dtype=arithmetic(own.dtype)) for name, shape in shapes.items()}
        average = sharding.like(param, local(state["exp_avg"]).contiguous(), range(param.ndim))
        return {
            "step": state["step"],
            "exp_avg": average,
            "means_start_step": state["step"].detach().clone().to("cpu", torch.float32),
            **{name: sharding.like(param, x, sharded_dims(name, x.ndim)) for name, x in zeros.items()},
        }

    def check_state(self, number: int, group: dict[str, Any], states: Mapping[int, State]) -> None:
        current, owner = self.param_groups[number], type(self).__name__
        params = distinct(current)
        if any("units" in state or "began" in state for state in states.values()):
            raise ValueError(
                f"The checkpoint is one of {owner}'s first form, which kept second moments per entry; learning rates "
                "meant something else there. Keep the version it was made with, or start with fresh optimizer state."
            )
        wanted = {}
        for i, state in states.items():
            has_means = means_of(params[i].shape, group["means"]) != (0, 0)
            wanted[i] = ("exp_avg",) if has_means else ("exp_avg", "exp_avg_sq")
            self._require_means({**group, "params": current["params"]}, i, params[i], state)
        require_state(current, states, wanted, owner)

    def _require_means(self, group: dict[str, Any], i: int, param: Tensor, state: State) -> None:
        """Raise if a state has means, and not as many as the options say."""
        if "unit_basis" not in state:
            return
        kept = state["unit_basis"].shape[-1], state["input_basis"].shape[0]
        asked = means_of(param.shape, group["means"])
        if kept != asked:
            raise ValueError(
                f"{shown_names(group)[i]} has {kept[0]} means over units and {kept[1]} over inputs, and means={group['means']!r} asks "
                f"for {asked[0]} and {asked[1]}. Construct {type(self).__name__} anew to change them."
            )

    def adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        if name not in MEANS:
            return super().adopt(param, name, value)
        value = sharding.placed_like(param, value.detach(), sharded_dims(name, value.ndim))
        return value.to(param.device, arithmetic(param.dtype), copy=True)

    # ---------------------------------------------------------------- the step

    def read(self, step: GroupStep) -> None:
        """Pass 1: thin products of every matrix, squared lengths of all other gradients."""
        self._check_decays(step.group)  # set by hand, perhaps, or by a schedule
        for i, state in step.states.items():
            self._require_means(step.group, i, step.params[i], state)
        matrices = [i for i in step.grads if means_of(step.params[i].shape, step.group["means"]) != (0, 0)]
        plain = [i for i in step.grads if i not in matrices]
        batches = self._batches(step, matrices)
        for batch in batches:
            batch.products = project(batch.G, batch.means.U, batch.means.V)
        grads = [step.grads[i] for i in plain]
        lengths = [torch.linalg.vector_norm(grad, dtype=arithmetic(grad.dtype)).square() for grad in grads]
        step.evidence = [*(batch.products.total for batch in batches), *lengths]
        step.sums = sharded_sums(step, batches)
        step.work = plain, batches

    def write(self, steps: list[GroupStep]) -> None:
        """The arithmetic between the passes, and pass 2, for all groups at once: one collective serves all of them."""
        for step in steps:
            self._apply_adamw(step)
        batches = [batch for step in steps for batch in step.work[1]]
        reduce = reducer(batches)
        if starting := [batch for batch in batches if batch.numbers.age == 1]:
            self._start(starting)
        for batch in batches:
            average_(batch.means, batch.products, batch.numbers.beta1)
        found = [sketch(batch.G, batch.means.U, batch.means.V, batch.products) for batch in batches]
        reduce(sums_of(found))
        for batch, sketches in zip(batches, found, strict=True):
            direction = precondition(batch.means, batch.products, sketches, batch.shape, batch.numbers)
            update_(batch.params, batch.M, batch.G, direction, batch.numbers)
            batch.means.X.lerp_(sketches.X, 1 - FORGET)
            batch.means.Y.lerp_(sketches.Y, 1 - FORGET)
        if due := [batch for batch in batches if batch.numbers.refreshes]:
            columns = zip(*((b.M, b.means, b.places, b.shape, b.numbers) for b in due), strict=True)
            refresh_(*columns, reducer(due))
        for batch in batches:
            batch.store()

    def _apply_adamw(self, step: GroupStep) -> None:
        """torch's AdamW for all tensors without means. It counts their steps, too."""
        group, plain = step.group, step.work[0]
        states = [step.states[i] for i in plain]
        params = [local(step.params[i]) for i in plain]
        exact = [x if x.dtype == arithmetic(x.dtype) else x.to(torch.float32) for x in params]
        first, second = ([local(state[key]) for state in states] for key in ("exp_avg", "exp_avg_sq"))
        foreach, fused = group["foreach"], group["fused"]
        if foreach is None and fused is None:  # torch's own choice on a CPU is its slowest
            fused = all(x.device.type == "cpu" for x in params)
        adamw(
            exact,
            [step.grads[i].to(x.dtype) for i, x in zip(plain, exact, strict=True)],
            first,
            second,
            [],
            [state["step"] for state in states],
            foreach=foreach,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for param, x in zip(params, exact, strict=True):
            if param is not x:
                param.copy_(x)

    def _batches(self, step: GroupStep, matrices: Sequence[int]) -> list[Batch]:
        """Equal matrices, at the same step, together; large ones, which do not gain from it, alone."""
        together: dict[Any, list[int]] = {}
        for i in matrices:
            param, state = step.params[i], step.states[i]
            if state["exp_avg"].shape != param.shape:
                raise ValueError(
                    f"{type(self).__name__} has moments of shape {tuple(state['exp_avg'].shape)} for a parameter whose "
                    f"shape is now {tuple(param.shape)}. Construct the optimizer anew."
                )
            if "unit_basis" not in state:
                step.states[i] = state = self._with_means(param, step.group, state)
            steps = int(state["step"]) + 1
            kind = (
                param.shape,
                param.dtype,
                sharding.placement_of(param),
                steps,
                steps - int(state["means_start_step"]),
            )
            alone = i if param.device.type == "cpu" and param.numel() > SMALL else -1
            together.setdefault((*kind, alone), []).append(i)
        return [Batch.of(step, indices, *kind[-3:-1]) for kind, indices in together.items()]

    def _start(self, batches: list[Batch]) -> None:
        """Let means start in this step, unless a gradient is zero: nothing can be learned from it."""
        reduce = reducer(batches)
        G, M, means, places, shapes, numbers = zip(
            *((b.G, b.M, b.means, b.places, b.shape, b.numbers) for b in batches), strict=True
        )
        start_(G, means, places, reduce)
        products, of_average = ([project(A, own.U, own.V) for A, own in zip(As, means, strict=True)] for As in (G, M))
        squares = [batch.adamw_squares() for batch in batches]
        sums = sums_of([*products, *of_average])
        sums["inputs"] += squares
        reduce(sums)
        for batch, found, rows in zip(batches, products, squares, strict=True):
            batch.products = found
            batch.means.squares.E.copy_(rows / batch.shape[1])
            for state, total in zip(batch.states, found.total.tolist(), strict=True):
                state.pop("exp_avg_sq", None)
                if total == 0:
                    state["means_start_step"].fill_(batch.numbers.step)
        if any(one.step > 1 for one in numbers):
            adopt_average_(M, of_average, means, shapes, numbers, reduce)

    @torch.no_grad()
    def block_statistics(self) -> list[MeanStatistics]:
        """How much of the gradient is means: one entry per matrix with means, in order.

        Costs one pass over the second moments, and only when called. If parameters are sharded, all processes call it.

        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Anova(layer.named_parameters(), means=1)
        >>> layer(torch.ones(8)).sum().backward()  # a gradient of ones is its own mean
        >>> optimizer.step()
        >>> [(matrix.parameter, round(matrix.shares.grand, 6)) for matrix in optimizer.block_statistics()]
        [('weight', 1.0)]
        """
        found, rests = [], []
        for number, group in enumerate(self.param_groups):
            for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True)):
                state = self.state.get(param, {})
                if "unit_basis" in state:
                    rests.append(Sum(in_float64(local(state["rest_sq"]).sum()), sharding.sides_of(param).units))
                    found.append((number, name or f"param{i}", param, state, group))
        sharding.reduce(rests)
        return [mean_statistics(*one, float(rest.value)) for one, rest in zip(found, rests, strict=True)]


# -------------------------------------------------------------------- batches


@dataclass
class Batch:
    """Equal matrices that take a step together, as this process has them."""

    indices: list[int]  # in their group
    params: list[Tensor]
    states: list[State]
    stacked: dict[str, Tensor]  # their state, (n, …) each
    G: Tensor  # (n, O, I)
    shape: tuple[int, int]  # of the whole matrix
    numbers: Numbers
    sides: Sides
    places: Places
    products: Products = field(init=False)

    @staticmethod
    def of(step: GroupStep, indices: list[int], steps: int, age: int) -> Batch:
        first, group = step.params[indices[0]], step.group
        params, states = [local(step.params[i]) for i in indices], [step.states[i] for i in indices]
        stacked = {name: _stack([local(state[name]) for state in states]) for name in ("exp_avg", *MEANS)}
        O, I = first.shape[0], first.shape[1:].numel()
        grads = [grad.reshape(grad.shape[0], grad.shape[1:].numel()) for grad in map(step.grads.__getitem__, indices)]
        G = _stack(grads).to(stacked["exp_avg"].dtype)
        betas, refreshes = group["betas"], age % group["refresh_every"] == 0
        numbers = Numbers(
            *betas, group["mean_beta"], float(group["lr"]), group["weight_decay"], group["eps"], steps, age, refreshes
        )
        places = places_of(first)
        return Batch(
            indices,
            params,
            states,
            stacked,
            -G if group["maximize"] else G,
            (O, I),
            numbers,
            sharding.sides_of(first),
            places,
        )

    @cached_property
    def M(self) -> Tensor:
        return self.stacked["exp_avg"].view(self.G.shape)

    @cached_property
    def means(self) -> Means:
        s = self.stacked
        V, Y, UM = (s[name].flatten(2) for name in INPUT_STATE)
        U, X, MV, v_E = (s[name] for name in UNIT_STATE)
        squares = Squares(s["grand_sq"], s["unit_sq"], s["input_sq"], v_E)
        return Means(U, V.mT, X, Y.mT, s["grand_avg"], MV, UM, squares)

    def adamw_squares(self) -> Tensor:
        """Sums over inputs of AdamW's second moments, where it has trained so far; else 0, (n, O)."""
        kept = [state.get("exp_avg_sq") for state in self.states]
        rows = [None if x is None else local(x).flatten(1).sum(1) for x in kept]
        return torch.stack([self.G.new_zeros(self.G.shape[1]) if x is None else x for x in rows])

    def store(self) -> None:
        """Write state back where it was stacked, and count the step."""
        torch._foreach_add_([state["step"] for state in self.states], 1)
        if len(self.states) > 1:
            for name, values in self.stacked.items():
                torch._foreach_copy_([local(state[name]) for state in self.states], list(values.unbind()))


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """A view of one tensor, or a copy of several."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def places_of(param: Tensor) -> Places:
    """Which units and inputs of a matrix this process has."""
    box = sharding.box_of(param)
    if box is None:
        return Place(), Place()
    device, inputs = param.device, param.shape[1:].numel()
    columns = torch.arange(inputs, device=device).view(param.shape[1:])[tuple(slice(*span) for span in box[1:])]
    return Place(torch.arange(*box[0], device=device), param.shape[0]), Place(columns.flatten(), inputs)


def reducer(batches: Sequence[Batch]) -> Reduce:
    """The callable that completes sums over the processes that share these matrices."""

    def reduce(sums: Sums) -> None:
        found = [
            Sum(value, getattr(batches[i % len(batches)].sides, side))
            for side, values in sums.items()
            for i, value in enumerate(values)
        ]
        sharding.reduce(found)

    return reduce


def sharded_sums(step: GroupStep, batches: Sequence[Batch]) -> list[Sum]:
    """The products of every sharded matrix of a group, in order; zeros for those without a gradient."""
    found = {i: (batch, j) for batch in batches for j, i in enumerate(batch.indices)}
    sums = []
    for i, param in enumerate(step.params):
        k, q = means_of(param.shape, step.group["means"])
        if not sharding.is_distributed(param) or (k, q) == (0, 0):
            continue
        if i in found:
            batch, j = found[i]
            products = Products(*(x[j] for x in batch.products))
        else:
            (rows, *columns), dtype = local(param).shape, arithmetic(param.dtype)
            shapes = (rows, q), (k, math.prod(columns)), (k, q), (rows,), ()
            products = Products(*(torch.zeros(shape, dtype=dtype, device=param.device) for shape in shapes))
        sides = sharding.sides_of(param)
        sums += [Sum(value, getattr(sides, side)) for value, side in zip(products, Products.sides, strict=True)]
    return sums


def sharded_dims(name: str, ndim: int) -> list[int]:
    """The dims along which the state of means is sharded if its parameter is."""
    return [0] if name in UNIT_STATE else list(range(1, ndim)) if name in INPUT_STATE else []


def means_of(shape: Sequence[int], means: int | Sequence[int] | str) -> tuple[int, int]:
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
