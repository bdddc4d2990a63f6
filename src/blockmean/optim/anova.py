"""Adam on the analysis of variance of every gradient matrix: learned block means.

A weight is a matrix of O units and I inputs (of a convolution: input channels times kernel positions). Orthonormal
weights U (O×k) and V (I×k) split its gradient G as a two-way analysis of variance splits a table, into four orthogonal
parts:

    K = Uᵀ G V                grand means,         k×k
    R = G V − U K             means per unit,      O×k
    L = Uᵀ G − K Vᵀ           means per input,     k×I
    E = G − U K Vᵀ − R Vᵀ − U L        remainder,  O×I

Each part P = K, R, L, E has an Adam of its own, whose step is projected back into the part:

    m_P ← average of P with decay β₁;   v_P ← average of P² with decay β_m, and β₂ for E;   bias-corrected
    P' = m_P / (√v_P + ε + ν_P), but no longer than an Adam in fixed coordinates can be
    δ = U K' Vᵀ + (1 − UUᵀ) R' Vᵀ + U L' (1 − VVᵀ) + (1 − UUᵀ) E' (1 − VVᵀ),     θ ← θ − η (weight_decay · θ + δ)

ν_P is the size of rounding errors in P: a mean that is zero but for rounding must not take a full step.

The weights follow the gradients by subspace iteration. Every T steps they turn: the averages m_P are put together and
split with the new weights, and the averages of squares follow the rotation approximately:

    X ← average of G (Gᵀ U),   Y ← average of Gᵀ (G V);      U ← orth(X),   V ← orth(Y)
    v_R ← v_R (Vᵀ V_new)∘²,   v_L ← (U_newᵀ U)∘² v_L,   v_K ← (U_newᵀ U)∘² v_K (Vᵀ V_new)∘²

With k = 1, U = 1/√O and V = 1/√I this is the textbook analysis, and the means per unit are the paper's block means.
With k = O and k = I there is no remainder: Adam in the rotated basis, as SOAP.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_adamw, require_betas, require_number
from blockmean._linalg import NOISE, home_of, in_float64
from blockmean.optim import native, parts
from blockmean.optim.forms import FORMS, Rule
from blockmean.optim.inspection import MeanStatistics, mean_statistics
from blockmean.optim.native.matrices import Matrices, inner_of
from blockmean.optim.optimizer import BlockMeanOptimizer, Work, distinct, given_names, shown_names
from blockmean.optim.parts import AVERAGES, MEANS, SQUARES, STATE, WEIGHTS, Place, Step, join_
from blockmean.optim.passes import NATIVE, Tensors, arithmetic, choose, wants_native
from blockmean.optim.sharding import Request, Sides, add_up, like, local, sides_of
from blockmean.optim.stacks import Stack

# State that is sharded like the rows, and like the columns, of its parameter.
SHARDED = (
    {*STATE[:2], "units", "units_sketch", "unit_avg", "unit_sq"},
    {*STATE[:2], "inputs", "inputs_sketch", "input_avg", "input_sq"},
)

NARROW, MOST = 4, 32
"""means="auto": twice the root of the shorter side of a matrix, up to 32; none for sides shorter than 4."""


class Kind(NamedTuple):
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

    def fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the means of a matrix have begun."""
        shapes = self.shapes()
        return age_of(state) > 0 and all(name in state and state[name].shape == shapes[name] for name in STATE)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every state tensor."""
        (k, q), (units, _) = self.means, self.matrix
        rest = self.shape[1:]  # sides that sharding may cut keep their dims
        sides, parts = ((units, k), (q, *rest)), ((k, q), (units, q), (k, *rest))
        means = (*sides, *sides, *parts, *parts)
        return dict(zip(STATE, (self.shape, self.shape, *means), strict=True))


@dataclass
class Shard:
    """What this process has of a sharded matrix that takes a step."""

    kind: Kind
    param: Tensor
    grad: Tensor
    sides: Sides
    places: tuple[Place, Place]
    products: tuple[Tensor, ...] = ()  # G V, Uᵀ G and Uᵀ G V, if its means have begun


@dataclass
class Plan:
    """How a group takes its steps. Numbers are places in the lists of a step."""

    options: tuple[Any, ...]  # what all of it depends on
    plain: list[int] = field(default_factory=list)  # tensors that take AdamW
    tensors: Tensors | None = None  # these, as lists
    passes: Any = None  # their implementation
    compiled: list[int] = field(default_factory=list)  # matrices that the compiled kernels take
    matrices: Matrices | None = None
    began: list[int] = field(default_factory=list)  # the addresses of their `began`
    ages: list[tuple[int, int]] = field(default_factory=list)  # their steps, and those since their means began
    others: list[int] = field(default_factory=list)  # matrices that the kernels cannot serve, or whose means begin
    sharded: dict[int, Shard] = field(default_factory=dict)  # matrices that other processes have a part of, by tensor
    walks: list[tuple[Iterator[parts.Sums], Sides, str]] = field(default_factory=list)  # their steps, and devices
    serves_again: bool = True
    sums: Tensor = field(default_factory=lambda: torch.zeros(1, 0))  # zeros, one per tensor

    def ages_of(self, work: Work) -> bool:
        """Look up the ages of the compiled matrices; whether the means of all have begun before this step."""
        began = native.read_steps(self.began) if self.began else []
        steps = [work.steps[j] for j in self.compiled]
        self.ages = [(step, step - start) for step, start in zip(steps, began, strict=True)]
        return all(age > 1 for _, age in self.ages)

    def by_torch(self, work: Work) -> list[int]:
        """The matrices that torch's operations take, by their index in the group."""
        return [*(work.indices[j] for j in self.others), *self.sharded]

    @property
    def is_compiled(self) -> bool:
        """Whether the kernels take everything."""
        return not self.others and not self.sharded and (not self.plain or isinstance(self.passes, NATIVE))


class Anova(BlockMeanOptimizer):
    """AdamW for the parts of every gradient matrix: its learned means per unit and per input, and the remainder.

    What many units, or many inputs, have in common is a small part of the entries and a large part of the curvature.
    Adam scales entries one by one and cannot see it; here every such mean has a scale of its own. Memory is that of
    Adam plus O(k (O + I)) per matrix. Tensors with one dim, and matrices with a single unit or input, take AdamW.

    The gradient G (O units, I inputs) of a weight is split with orthonormal U (O×k) and V (I×k), which it learns, into
    grand means K, means per unit R, means per input L and the remainder E:

        G = U K Vᵀ + R Vᵀ + U L + E

    Each of the four parts takes the step m / (√v + ε) of an Adam of its own, projected back into the part.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element.
        betas: β₁, β₂, decay of the averages of the gradient and of the square of its remainder.
        mean_beta: β_m, decay of the averages of squared means.
        means: k, columns of U (taken over the units, which gives means per input) and of V (over the inputs: means
            per unit), one number for both or a pair; "auto" takes twice the root of the shorter side, 32 at most, and
            none for sides shorter than 4. 0 gives torch's AdamW. A new number starts the means over.
        refresh_every: T, turn U and V once in this many steps; they see every gradient.
        eps: ε, added to the root of every average square.
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        maximize: step uphill.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.

    `fused=None` takes compiled kernels wherever they can serve, `fused=False` torch's operations, in batches of equal
    shapes; `foreach` then concerns the tensors that take AdamW. `amsgrad` must be False.

    Cost O(k d) per step; state 2d + O(k (O + I)) numbers.

    >>> model = torch.nn.Linear(8, 4)
    >>> optimizer = Anova(model.parameters(), lr=1e-3)
    >>> model(torch.ones(8)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = ("exp_avg", "exp_avg_sq")
    further_state = MEANS
    statistics_kept = MappingProxyType({})
    counters = ("step", "began")
    default_blocks = ("tensor", "none")
    works_in_pieces = False
    keeps_lists = True
    has_kernels = True
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
        self._stacks: dict[Kind, Stack] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stacks = {}  # the next step builds them

    def check_kinds(self, group: dict[str, Any]) -> None:
        super().check_kinds(group)
        require_adamw(group, type(self).__name__)
        self._require_decays(group)

    def _require_decays(self, group: dict[str, Any]) -> None:
        """Raise unless the options that a step divides by, or takes roots with, are in range."""
        owner, means, every = type(self).__name__, group["means"], group["refresh_every"]
        require_betas(group["betas"], owner)
        require_number(group["mean_beta"], "mean_beta", owner)
        require(group["mean_beta"] < 1, "mean_beta", owner, "below 1", group["mean_beta"])
        require(isinstance(every, int) and every >= 1, "refresh_every", owner, "a whole number >= 1", every)
        counts = means if isinstance(means, tuple | list) else (means, means)
        whole = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in counts)
        good = means == "auto" or (whole and len(counts) == 2)
        expected = "'auto', a whole number >= 0, or two of them (units, inputs)"
        require(good, "means", owner, expected, means)

    def collect(self, number: int, at_rest: bool = False) -> Work | None:
        self._require_decays(self.param_groups[number])  # set by hand, perhaps, or by a schedule
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

    def sharded_dims(self, name: str, value: Tensor) -> list[int]:
        return [dim for dim in range(value.ndim) if name in SHARDED[dim > 0]]

    # ---------------------------------------------------------------- the hooks

    def _plan(self, work: Work) -> Plan:
        """What takes which way, or the same as in the last step."""
        group = work.group
        means = group["means"]
        options = tuple(means) if isinstance(means, list) else means, group["foreach"], group["fused"]
        if work.plan is not None and work.plan.options == options and work.plan.ages_of(work):
            return self._again(work, work.plan)
        wanted = wants_native(group["foreach"], group["fused"])
        shared = native.overlapping([(j, param) for j, param in enumerate(work.params)]) if wanted else set()
        plan, begun = Plan(options), set()
        if work.is_sharded:
            plan.sharded = self._shards(work)
        for j, i in enumerate(work.indices):
            kind = self._kind(work, i)
            if i in plan.sharded:
                continue
            if kind.means == (0, 0):
                plan.plain.append(j)
            elif not (wanted and self._can_compile(work, j, j in shared)):
                plan.others.append(j)
            elif kind.fits(work.states[i]):
                plan.compiled.append(j)
                begun.add(kind)
            else:
                plan.others.append(j)
                plan.serves_again = False  # from the next step on the kernels take it
        for kind in begun:
            self._stack(work, kind, [i for j in plan.compiled if self._kind(work, i := work.indices[j]) == kind])
        if plan.compiled:
            states = [work.states[work.indices[j]] for j in plan.compiled]
            plan.matrices = Matrices([work.params[j] for j in plan.compiled], states)
            plan.began = [state["began"].data_ptr() for state in states]
            plan.ages_of(work)
        if plan.plain:
            plan.tensors = self._plain(work, plan)
            alone = all(self._can_compile(work, j, j in shared) for j in plan.plain if j in shared)
            plan.passes = choose(plan.tensors, group["foreach"], group["fused"] if alone else False)
        plan.sums = torch.zeros(1, len(work.params), dtype=torch.float64, device=home_of(work.tensors[0].device))
        return plan

    @staticmethod
    def _again(work: Work, plan: Plan) -> Plan:
        """The plan of the last step with the gradients and step counts of this one."""
        if plan.tensors is not None:
            grads, steps = [work.grads[j] for j in plan.plain], [work.steps[j] for j in plan.plain]
            plan.tensors = plan.tensors._replace(grads=grads, steps=steps)
        return plan

    def _kind(self, work: Work, i: int) -> Kind:
        param = work.tensors[i]
        return Kind(work.number, param.shape, param.dtype, means_of(param.shape, work.group["means"]))

    def _shards(self, work: Work) -> dict[int, Shard]:
        """The sharded matrices with means that take part, also those of which this process has no entry."""
        found = {}
        for i in work.states:
            box, kind = work.layout.boxes[i], self._kind(work, i)
            if box is None or kind.means == (0, 0):
                continue
            param, grad = work.tensors[i], work.gradient(i)
            assert grad is not None
            for name in self.entry_state:  # that of a convolution may come with its channels last
                if name in (state := work.states[i]) and not local(state[name]).is_contiguous():
                    state[name] = like(param, local(state[name]).contiguous(), range(param.ndim))
            units, inputs = kind.matrix
            columns = (
                torch.arange(inputs, device=grad.device)
                .view(kind.shape[1:])[tuple(slice(*span) for span in box[1:])]
                .flatten()
            )
            places = Place(torch.arange(*box[0], device=grad.device), units), Place(columns, inputs)
            found[i] = Shard(kind, local(param), grad, sides_of(param), places)
        return found

    def _plain(self, work: Work, plan: Plan) -> Tensors:
        """The tensors that take AdamW."""
        states = [work.states[work.indices[j]] for j in plan.plain]
        for j, state in zip(plan.plain, states, strict=True):
            if "units" in state and work.layout.boxes[work.indices[j]] is None:
                # Means were switched off. Their stacks have rows in order, a convolution perhaps its channels last.
                for key in self.entry_state:
                    state[key] = torch.empty_like(work.params[j], dtype=state[key].dtype).copy_(state[key])
        first, second = ([local(state[key]) for state in states] for key in self.entry_state)
        params, grads, steps, cuts = (
            [values[j] for j in plan.plain] for values in (work.params, work.grads, work.steps, work.cuts)
        )
        return Tensors(params, grads, first, second, steps, cuts)  # type: ignore[arg-type]

    def _can_compile(self, work: Work, j: int, shares_memory: bool) -> bool:
        """Whether the kernels can serve a matrix; if they must and cannot, raise."""
        param = work.params[j]
        reason = native.refusal(param, work.grads[j], [], work.cuts[j])
        if shares_memory:  # and threads would write to it at the same time
            reason = reason or "shares memory with another"
        if reason is None and inner_of(param) is None:
            reason = "does not have its rows in order in memory"
        if reason and work.group["fused"]:
            name = shown_names(work.group)[work.indices[j]]
            raise RuntimeError(
                f"{type(self).__name__}(fused=True) takes native kernels, which cannot serve {name}: it {reason}. "
                "Take fused=None."
            )
        return reason is None

    def num_rows(self, group: dict[str, Any]) -> int:
        return 1

    def exchange_dtype(self) -> torch.dtype:
        sharded = [
            arithmetic(distinct(group)[i].dtype)
            for group, layout in zip(self.param_groups, self._layouts, strict=True)
            for i in layout.sharded
        ]
        return reduce(torch.promote_types, sharded, torch.float32)

    def requests(self, number: int, work: Work | None) -> list[Request]:
        """G V, Uᵀ G and Uᵀ G V of every sharded matrix with means, or zeros in their place."""
        group, found = self.param_groups[number], []
        shards: Mapping[int, Shard] = {} if work is None or work.plan is None else work.plan.sharded
        for i, param in enumerate(distinct(group)):
            k, q = means_of(param.shape, group["means"])
            if self._layouts[number].boxes[i] is None or (k, q) == (0, 0):
                continue
            own, sides = local(param), sides_of(param)
            products = shards[i].products if i in shards else ()
            if not products:
                rows, columns = own.shape[0], own.shape[1:].numel()
                products = tuple(torch.zeros(1, *shape) for shape in ((rows, q), (k, columns), (k, q)))
            found += [Request(x, getattr(sides, side)) for x, side in parts.around(products)]
        return found

    def block_sums(self, work: Work) -> Tensor:
        """Whether gradients are finite, and how large their rounding errors are: the squared length of every matrix."""
        plan = work.plan = self._plan(work)
        grads: Any = work.grads
        for i, shard in plan.sharded.items():
            coming = {**work.states[i], "step": work.states[i]["step"] + 1}
            if shard.kind.fits(coming) and age_of(coming) > 1:
                state = _batched(work.states[i])
                U, Vt = (state[name].flatten(2) for name in WEIGHTS[:2])
                with torch.autocast(shard.grad.device.type, enabled=False):
                    G = parts.gradient([shard.grad], state, work.group["maximize"])
                    shard.products = parts.thin(G, U, Vt.mT)
        work.is_finite = plan.matrices is None or plan.matrices.sums([grads[j] for j in plan.compiled])
        if plan.is_compiled and plan.plain:
            plan.passes.block_sums(self._rule(work.group), plan.tensors)
            work.is_finite = work.is_finite and plan.passes.is_finite
        if (plan.is_compiled and work.is_finite) or not grads:
            return plan.sums  # nobody needs them: the kernels keep their own
        work.is_finite = None
        if all(arithmetic(grad.dtype) == grad.dtype for grad in grads):
            lengths = torch._foreach_norm(grads)
        else:  # one by one: never a copy of all gradients
            lengths = tuple(torch.linalg.vector_norm(grad, dtype=arithmetic(grad.dtype)) for grad in grads)
        return torch.stack([in_float64(length) for length in lengths]).square_()[None]

    def solve(self, work: Work) -> Tensor | None:
        """What is added to the roots of v_K, v_R, v_L and v_E: ε, and rounding errors of G, (4, n).

        None if compiled kernels take all matrices: they know it themselves.
        """
        layout, taking_part = work.layout, work.plan.by_torch(work)
        if not taking_part:
            return None
        errors = rounding(tuple(layout.shapes[i] for i in taking_part), work.sums.device)
        squares = work.sums[:, [layout.starts[i] for i in taking_part]]
        floors: Tensor = squares.sqrt() * errors + work.group["eps"]
        smallest = max(torch.finfo(arithmetic(work.tensors[i].dtype)).tiny for i in taking_part) ** 0.5
        return floors if work.group["eps"] > smallest else floors.clamp_(min=smallest)  # smaller squares vanish

    def apply_(self, work: Work, solution: Tensor | None) -> None:
        group, plan = work.group, work.plan
        self._apply_plain(work, plan)
        if plan.matrices is not None:
            numbers = {age: self._numbers(group, *age) for age in set(plan.ages)}
            for place in plan.matrices.apply_([numbers[age] for age in plan.ages], group["eps"]):
                state = work.states[work.indices[plan.compiled[place]]]
                parts.turn_({name: state[name][None] for name in STATE})
        kinds: dict[Kind, list[int]] = {}
        column = {i: place for place, i in enumerate(plan.by_torch(work))}
        for j in plan.others:
            kinds.setdefault(self._kind(work, work.indices[j]), []).append(j)
        for kind, positions in kinds.items():
            where = {work.indices[j]: j for j in positions}
            for i in where:
                if age_of(work.states[i]) == 1:  # `step` was set back to where its means had begun
                    _forget(work.states[i], group)
            known, stack = self._stacks.get(kind), self._stack(work, kind, list(where))
            plan.serves_again &= stack is known  # or else state of compiled matrices may have moved
            steps = {i: (work.steps[j], age_of(work.states[i])) for i, j in where.items()}
            for run in stack.runs(steps):
                for batch in run.pieces(max(1, parts.CHUNK // kind.shape.numel())):
                    at = [where[i] for i in batch.members]
                    grads = [grad for j in at if (grad := work.grads[j]) is not None]
                    step = self._numbers(group, *steps[batch.members[0]])
                    assert solution is not None
                    with torch.autocast(solution.device.type, enabled=False):  # products keep their precision
                        floors = solution[:, [column[i] for i in batch.members]]
                        parts.apply_(step, [work.params[j] for j in at], grads, batch.buffers, floors)
        if plan.sharded:
            assert solution is not None
            self._start_walks(work, plan, {i: solution[:, [column[i]]] for i in plan.sharded})
        if not plan.serves_again and not plan.sharded:
            work.plan = None

    def _start_walks(self, work: Work, plan: Plan, floors: Mapping[int, Tensor]) -> None:
        """Let the steps of the sharded matrices of a group begin."""
        for i, shard in plan.sharded.items():
            state = work.states[i]
            if not shard.products:
                self._begin(work.tensors[i], state, shard.kind, work.group)
            step = self._numbers(work.group, int(state["step"]), age_of(state))
            own = [shard.param], [shard.grad], _batched(state), floors[i]
            walk = parts.walk_(step, *own, shard.products, shard.places)
            plan.walks.append((walk, shard.sides, shard.param.device.type))

    def finish_(self, works: list[Work]) -> None:
        """The steps of the sharded matrices of all groups, side by side: one collective serves all of them."""
        walks = [walk for work in works if work.plan is not None for walk in work.plan.walks]
        while walks:
            requests, going = [], []
            for walk, sides, device in walks:
                with torch.autocast(device, enabled=False):
                    sums = next(walk, None)
                if sums is not None:
                    going.append((walk, sides, device))
                    requests += [Request(x, getattr(sides, side)) for x, side in sums]
            add_up(requests)
            walks = going

    def _begin(self, param: Tensor, state: dict[str, Any], kind: Kind, group: dict[str, Any]) -> None:
        """Let the means of a sharded matrix begin in this step."""
        _forget(state, group)
        state["began"] = torch.tensor(float(state["step"]) - 1, dtype=torch.float32)
        own, dtype = local(param), kind.dtype
        for name, shape in kind.shapes().items():
            if name in state:
                continue
            dims = self.sharded_dims(name, torch.empty(shape, device="meta"))
            size = [own.shape[dim] if dim in dims else count for dim, count in enumerate(shape)]
            state[name] = like(param, torch.zeros(size, dtype=dtype, device=own.device), dims)

    def _numbers(self, group: dict[str, Any], steps: int, age: int) -> Step:
        turns = age % group["refresh_every"] == 0
        lr, decay, maximize = float(group["lr"]), group["weight_decay"], group["maximize"]
        return Step(tuple(group["betas"]), group["mean_beta"], lr, decay, maximize, steps, age, turns)

    @torch.no_grad()
    def block_statistics(self) -> list[MeanStatistics]:  # type: ignore[override]  # means in place of blocks
        """How much of the gradient is means: one entry per matrix with means, in order.

        Costs one pass over the second moments, and only when called. If parameters are sharded, all processes call it.

        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Anova(layer.named_parameters(), means=1)
        >>> layer(torch.ones(8)).sum().backward()  # a gradient of ones is its own mean
        >>> optimizer.step()
        >>> [(matrix.parameter, round(matrix.shares.grand, 6)) for matrix in optimizer.block_statistics()]
        [('weight', 1.0)]
        """
        found, energies = [], []
        for number, group in enumerate(self.param_groups):
            for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True)):
                state = self.state.get(param, {})
                if means_of(param.shape, group["means"]) == (0, 0) or "units" not in state:
                    continue
                sides = sides_of(param)
                over = ((), sides.units, sides.inputs, sides.both)
                own = [in_float64(local(state[key]).sum()) for key in (*SQUARES, "exp_avg_sq")]
                energies.append([Request(x, groups) for x, groups in zip(own, over, strict=True)])
                found.append((number, name or f"param{i}", state, group))
        add_up([request for own in energies for request in own], torch.float64)
        return [
            mean_statistics(*one, [float(request.value) for request in own])
            for one, own in zip(found, energies, strict=True)
        ]

    def _rule(self, group: dict[str, Any]) -> Rule:
        decay, maximize = group["weight_decay"], group["maximize"]
        return Rule(FORMS["none"], group["betas"], group["eps"], decay, maximize, float(group["lr"]))

    def _apply_plain(self, work: Work, plan: Plan) -> None:
        """AdamW."""
        for i, state in work.states.items():
            if "units" in state and self._kind(work, i).means == (0, 0):  # the means were switched off
                _forget(state, work.group)
        if plan.tensors is not None:
            plan.passes.apply_(self._rule(work.group), plan.tensors, [], [])
            plan.tensors = plan.tensors._replace(grads=[])  # whoever frees gradients frees their memory

    def _stack(self, work: Work, kind: Kind, members: list[int]) -> Stack:
        """The state of all matrices of one kind, with room for these members; means that are new have begun."""
        stack = self._stacks.get(kind)
        if stack is not None and all(stack.holds(i, work.states[i]) and age_of(work.states[i]) for i in members):
            return stack
        shapes = kind.shapes()
        for i in members:
            state = work.states[i]
            if not age_of(state) or any(name not in state or state[name].shape != shapes[name] for name in MEANS):
                _forget(state, work.group)  # there were none, or another number of them
                state["began"] = torch.tensor(float(state["step"]) - 1, dtype=torch.float32)
        states = {i: work.states[i] for i in members}
        for i, param in enumerate(work.tensors):  # and those without a gradient: batches must not depend on who has one
            belongs = param.dtype == kind.param_dtype and work.layout.boxes[i] is None
            state = self.state.get(param, {}) if belongs else {}
            if i not in states and all(name in state and state[name].shape == shapes[name] for name in shapes):
                states[i] = state
        like = torch.empty(0, dtype=kind.dtype, device=work.tensors[members[0]].device)
        made = Stack.of(shapes, states, like)
        taken = set(made.members)
        kept = {
            key: own for key, own in self._stacks.items() if key.group != kind.group or not taken & set(own.members)
        }
        self._stacks = {**kept, kind: made}
        return made


def age_of(state: Mapping[str, Any]) -> int:
    """Steps since the means of a matrix began, this one included; 0 if they have not, or if `step` was set back."""
    return max(0, int(state["step"]) - int(state["began"])) if "began" in state else 0


def _batched(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """What this process has of the state of a matrix, as a batch of one."""
    return {name: local(state[name])[None] for name in STATE}


def _forget(state: dict[str, Any], group: dict[str, Any]) -> None:
    """Drop the means of a matrix; its average gradient and, as if all parts were independent, square become whole."""
    if all(name in state for name in STATE):
        own, (_, beta2) = _batched(state), group["betas"]
        units, inputs = (own[name].flatten(2) for name in WEIGHTS[:2])
        before, age = max(1, int(state["step"]) - 1), max(1, age_of(state) - 1)
        share = (1 - beta2**before) / (1 - group["mean_beta"] ** age)
        averages = [own[name].flatten(2) for name in AVERAGES]
        squares = [share * own[name].flatten(2) for name in SQUARES]
        for name, U, Vt, of_means in (
            ("exp_avg", units, inputs, averages),
            ("exp_avg_sq", units.square(), inputs.square(), squares),
        ):
            whole = own[name].flatten(2)  # a copy, if its channels are last
            join_(whole, U, Vt, of_means)
            own[name].copy_(whole.view(own[name].shape))
    for name in (*MEANS, "began"):
        state.pop(name, None)


@lru_cache(maxsize=64)
def rounding(shapes: tuple[torch.Size, ...], device: torch.device) -> Tensor:
    """The size of rounding errors in K, R, L and E for gradients of length 1, (4, tensors)."""
    sides = [(shape[0], shape[1:].numel()) if shape else (1, 1) for shape in shapes]
    columns = [(1.0, units**-0.5, inputs**-0.5, (units * inputs) ** -0.5) for units, inputs in sides]
    return NOISE * torch.tensor(columns, dtype=torch.float64, device=device).T


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
