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
    δ = U (ℓ D_K K_m) Vᵀ + R_m D_R Vᵀ + U D_L L_m + D_E E_m,      θ ← θ − η (c δ + weight_decay · θ)

So δ needs no second moment per entry: it is D_E M plus a matrix of rank k + q. ν_P is the size of rounding errors in
P: a mean that is zero but for rounding must not take a full step. c is measured (`measure_factor_`); ℓ ≥ 1 lets grand
means that agree over steps move as far as with AdamW (`lift_of`). D_K, D_R and D_L keep a part's step, in its root mean
square, below what an Adam in fixed coordinates can reach.

The bases follow the gradients by subspace iteration, and are refreshed every T steps: the average gradient is projected
anew, and second moments follow the rotation approximately:

    X ← average of G V Kᵀ,   Y ← average of Gᵀ U K;      U ← orth(X),   V ← orth(Y)      (alone: G Gᵀ U, Gᵀ G V)
    v_R ← v_R (Vᵀ V_new)∘²,   v_L ← (U_newᵀ U)∘² v_L,   v_K ← (U_newᵀ U)∘² v_K (Vᵀ V_new)∘²

With k = 1, U = 1/√O and V = 1/√I this is the textbook analysis, and the means per unit are the paper's block means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_adamw, require_betas, require_number
from blockmean.optim import sharding
from blockmean.optim.base import (
    NOT_OPTIONS,
    BaseOptimizer,
    GroupStep,
    State,
    arithmetic,
    count_steps,
    distinct,
    given_names,
    incomplete,
    require_state,
    shown_names,
)
from blockmean.optim.batches import (
    MEANS,
    Batch,
    batches_of,
    counts,
    mean_shapes,
    mean_state,
    means_in,
    means_of,
    numbers_of,
    over_processes,
    rate_of,
    reducer,
    sharded_dims,
    sharded_sums,
)
from blockmean.optim.decomposition import (
    count_,
    exact,
    precondition,
    remembered,
    sums_of,
    sums_of_squares,
    update_,
    update_moments_,
)
from blockmean.optim.inspection import MeanStatistics, mean_statistics
from blockmean.optim.kernels.anova import NativeMatrices, of_device, serves, why_not
from blockmean.optim.kernels.triton_anova import TritonStep
from blockmean.optim.refresh import bounds_of, refresh_, start_, waking
from blockmean.optim.sharding import local

WITH_MEANS = frozenset(("means_start_step", *MEANS))
"""State of a matrix with means, besides the average gradient."""


class Anova(BaseOptimizer):
    """AdamW, plus separate step sizes for the low-rank part of each weight's gradient.

    What many units, or many inputs, have in common takes few numbers and holds much of the curvature. Adam scales
    entries one by one and cannot use it; here every such mean has a scale of its own. The gradient G of a weight
    (O units, I inputs) is split with orthonormal U (O×k) and V (I×q), which are learned, into grand means K, means per
    unit R, means per input L and the remainder E:

        G = U K Vᵀ + R Vᵀ + U L + E

    Each part of the average gradient is divided by the root of its second moments: one for each grand mean, for each
    column of R, for each row of L and for each row of E. Tensors with one dim, and matrices with a single unit or
    input, take AdamW.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element. Start with AdamW's.
        betas: β₁, β₂, decay of the averages of the gradient and of the square of its remainder.
        mean_beta: β_m, decay of the averages of squared means.
        means: k and q, columns of U (taken over the units, which gives means per input) and of V (over the inputs:
            means per unit), one number for both or a pair. "auto" takes half of the shorter side, 32 at most,
            but none if a side is 8 or less, or more than 16 times the other (vocabularies, LoRA). 0 is torch's AdamW.
        refresh_every: T, steps between two refreshes of U and V, which follow every gradient.
        eps: ε, added to the root of every second moment.
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        maximize: step uphill.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.
        capturable: never wait for the device, so that steps can be captured in a CUDA graph: `refresh_every` of them in
            one graph, after two outside. Bad gradients are then skipped, and counted on the device.
        foreach, fused: with neither, kernels where they work. `fused=True` raises an error where they do not; anything
            else uses torch's operations. Tensors that take AdamW are computed as in torch.

    `amsgrad` and `differentiable` must be False. Cost O((k + q) d) per step; state d + O(k O + q I)
    numbers, half of AdamW's in wide layers.

    >>> model = torch.nn.Linear(8, 4)
    >>> optimizer = Anova(model.parameters())
    >>> model(torch.ones(8)).square().sum().backward()
    >>> optimizer.step()
    """

    counters = ("step", "means_start_step")
    entry_state = ("exp_avg",)

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        means: int | tuple[int, int] | str = "auto",
        mean_beta: float = 0.95,
        refresh_every: int = 2,
        maximize: bool = False,
        nonfinite: str = "raise",
        capturable: bool = False,
        differentiable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
        super().__init__(params, options)

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner = type(self).__name__
        if ranges:
            require_number(group["eps"], "eps", owner)
        require_adamw(group, owner)
        capturable = group["capturable"]
        require(isinstance(capturable, bool), "capturable", owner, "True or False", capturable, TypeError)
        self._check_decays(group)

    def _check_decays(self, group: dict[str, Any]) -> None:
        """Raise unless the options that a step divides by, or takes roots with, are in range. Called in every step."""
        betas, mean_beta, every, means = (group[name] for name in ("betas", "mean_beta", "refresh_every", "means"))
        if isinstance(means, list):
            group["means"] = tuple(means)
        counts = means if isinstance(means, tuple | list) else (means, means)
        whole = all(type(k) is int and k >= 0 for k in counts) and len(counts) == 2
        owner = type(self).__name__
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not (pair and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)):
            require_betas(betas, owner)
        if not (isinstance(mean_beta, int | float) and 0 <= mean_beta < 1):
            require_number(mean_beta, "mean_beta", owner)
            require(False, "mean_beta", owner, "below 1", mean_beta)
        if not (type(every) is int and every >= 1):
            require(False, "refresh_every", owner, "a whole number >= 1", every)
        if not (means == "auto" or whole):
            require(False, "means", owner, "'auto', a whole number >= 0, or two of them (units, inputs)", means)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, or a module, optionally with options of its own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for i, param in enumerate(distinct(group) if group["fused"] else ()):
            k, q = means_of(param.shape, group["means"])
            # Sharded ones take torch's operations: containers that shard put fused=True into every group.
            if (k or q) and not sharding.is_distributed(param) and (reason := why_not(param, k, q)):
                self.param_groups.pop()
                raise RuntimeError(
                    f"{type(self).__name__}(fused=True) uses kernels, which do not support {shown_names(group)[i]}: it "
                    f"{reason}. Use fused=None."
                )

    # ---------------------------------------------------------------- state

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        state: State = {"step": torch.tensor(0.0, dtype=torch.float32)}
        dtype = arithmetic(param.dtype)
        if means_of(param.shape, group["means"]) == (0, 0):
            return state | {key: torch.zeros_like(param, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}
        average = torch.zeros_like(param, dtype=dtype, memory_format=torch.contiguous_format)
        return self._with_means(param, group, state | {"exp_avg": average})

    def _with_means(self, param: Tensor, group: dict[str, Any], state: State) -> State:
        """The state of a matrix whose means start in its next step. AdamW may have trained it so far."""
        average = sharding.like(param, local(state["exp_avg"]).contiguous(), range(param.ndim))
        start = state["step"].detach().to("cpu", torch.float32, copy=True)
        means = mean_state(param, *means_of(param.shape, group["means"]))
        if steps := int(start):  # of AdamW
            of_average, _, of_rest = local(means["grand_means"])[-3:].unbind()
            of_average.fill_(1 - group["betas"][0] ** steps)
            of_rest.fill_(1 - group["betas"][1] ** steps)
        return {**state, "step": start.clone(), "exp_avg": average, "means_start_step": start, **means}

    def check_state(self, number: int, group: dict[str, Any], states: Mapping[int, State]) -> None:
        current, owner = self.param_groups[number], type(self).__name__
        params = distinct(current)
        if any(state.keys() & {"units", "began", "unit_basis"} for state in states.values()):
            raise ValueError(
                f"The checkpoint is one of {owner}'s first form, which kept second moments per entry; learning rates "
                "meant something else there. Keep the version it was made with, or start with fresh optimizer state."
            )
        for i, state in states.items():
            asked = means_of(params[i].shape, group["means"])
            if not any(asked) or "exp_avg_sq" in state:  # AdamW's: if it has means, they start in the next step
                require_state(current, i, state, owner, ("exp_avg", "exp_avg_sq"))
                continue
            require_state(current, i, state, owner, ("exp_avg",), tuple(WITH_MEANS))
            if counts(state) != asked:
                raise ValueError(other_means({**group, "params": current["params"]}, i, state, asked, owner))
            if [tuple(state[name].shape) for name in MEANS] != mean_shapes(params[i].shape, *asked):
                raise ValueError(f"The means of {shown_names(current)[i]} in the checkpoint are of another shape.")

    def adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        if name in MEANS:
            value = sharding.placed_like(param, value.detach(), sharded_dims(name, value.ndim))
            return value.to(param.device, arithmetic(param.dtype), copy=True).contiguous()
        value = super().adopt(param, name, value)
        return value.contiguous() if "unit_means" in self.state.get(param, {}) else value

    # ---------------------------------------------------------------- the step

    def read(self, step: GroupStep) -> None:
        """Pass 1: thin products of every matrix, squared lengths of all other gradients."""
        group, params = step.group, step.params
        self._check_decays(group)  # set by hand, perhaps, or by a schedule
        plain: list[int] = []
        matrices: list[int] = []
        native: list[int] = []
        wanted = group["fused"] or (group["fused"] is None and group["foreach"] is None)
        wanted = wanted and not (group["capturable"] and params[0].is_cpu)  # C++ has no masks
        for i, state in step.states.items():
            shape = params[i].shape
            if state["exp_avg"].shape != shape:
                raise ValueError(
                    f"{type(self).__name__} has moments of shape {tuple(state['exp_avg'].shape)} for "
                    f"{shown_names(group)[i]}. Construct the optimizer anew."
                )
            asked = means_of(shape, group["means"])
            if "means_start_step" in state or "unit_means" in state:
                if not state.keys() >= WITH_MEANS:
                    raise ValueError(incomplete(self, state, WITH_MEANS))
                if counts(state) != asked:
                    raise ValueError(other_means(group, i, state, asked, type(self).__name__))
            elif asked == (0, 0):
                plain.append(i)
                continue
            else:
                state = step.states[i] = self._with_means(params[i], group, state)
            has_started = state["step"].item() > state["means_start_step"].item()
            served = wanted and has_started and serves(params[i], step.grads[i], state)
            (native if served else matrices).append(i)
        if group["capturable"]:
            self._check_capturable(step, plain)
        batches = batches_of(step, matrices)
        step.evidence = [batch.products.total for batch in batches]
        kernels = self._kernels(step, native) if native else None
        if kernels:
            step.evidence.append(kernels.read())
        if grads := [step.grads[i] for i in plain]:
            dtype = torch.float64 if torch.float64 in {grad.dtype for grad in grads} else torch.float32
            step.evidence.append(torch.stack(torch._foreach_norm(grads, dtype=dtype)).square())
        step.sums = sharded_sums(step, batches) if step.is_sharded else []
        step.work = plain, batches, native, kernels

    def _check_capturable(self, step: GroupStep, plain: list[int]) -> None:
        owner = f"{type(self).__name__}(capturable=True)"
        if step.is_sharded:
            raise ValueError(f"{owner} does not support sharded parameters.")
        for i in plain:  # masks are those of torch's fused AdamW, which takes memory as it lies
            if not (step.params[i].is_contiguous() and step.grads[i].is_contiguous()):
                raise ValueError(
                    f"{owner} needs contiguous tensors. {shown_names(step.group)[i]} or its gradient is not."
                )

    def _kernels(self, step: GroupStep, indices: list[int]) -> NativeMatrices | TritonStep:
        """Matrices that kernels take through a step: C++ on a CPU, Triton on a GPU."""
        group, states, (beta1, beta2) = step.group, [step.states[i] for i in indices], step.group["betas"]
        ages = [(state["step"].item(), state["means_start_step"].item()) for state in states]
        known = {age: numbers_of(group, state) for age, state in dict(zip(ages, states, strict=True)).items()}
        bounds = {age: bounds_of(one) if one.refreshes else (math.inf, math.inf) for age, one in known.items()}
        sign = -1.0 if group["maximize"] else 1.0
        rule = {"beta1": beta1, "beta2": beta2, "lr": known[ages[0]].lr, "sign": sign}
        kept = self.__dict__.setdefault("_kept", {}).setdefault(step.number, {})  # no copy of an optimizer has it
        return of_device(step.params[indices[0]].device)(
            [step.params[i] for i in indices],
            [step.grads[i] for i in indices],
            states,
            {**rule, **{name: group[name] for name in ("mean_beta", "weight_decay", "eps")}},
            [known[age].refreshes for age in ages],
            [bounds[age] for age in ages],
            kept,
        )

    def write(self, steps: list[GroupStep]) -> None:
        """The arithmetic between the passes, and pass 2, for all groups at once: one collective serves all of them."""
        for step in steps:
            self._apply_adamw(step)
            if step.ok is not None:
                for batch in step.work[1]:
                    batch.mask(step.ok)
        batches = [batch for step in steps for batch in step.work[1]]
        late = [batch for step in steps for batch in self._run_kernels(step)]
        if not (batches or late):
            return
        for batch in batches:
            count_(batch.matrices.means, batch.matrices.numbers)
        starting = [batch for batch in batches if batch.matrices.numbers.is_first]
        if starting:
            start_(starting, reducer(starting))
        found = [
            sums_of_squares(b.matrices.means.U, b.matrices.means.V, b.products, b.matrices.gradients) for b in batches
        ]
        due = [batch for batch in batches if batch.matrices.numbers.refreshes]
        awake = [waking(batch.matrices, batch.products) for batch in due]
        sharding.reduce(over_processes(batches, sums_of(found)) + over_processes(due, sums_of(awake)))
        for batch, sums in zip(batches, found, strict=True):
            matrices, products = batch.matrices, batch.products
            total = products.total + remembered(matrices)
            update_moments_(matrices, products, sums)
            update_(batch.params, matrices, precondition(matrices, total))
        due += late
        awake += [waking(batch.matrices, batch.products) for batch in late]
        if due:
            refresh_([batch.matrices for batch in due], awake, reducer(due))
        for batch in [*batches, *late]:
            batch.store()

    def _run_kernels(self, step: GroupStep) -> list[Batch]:
        """Steps of kernels. Returns those that torch has to refresh: in C++ only where columns of U or V are zero."""
        *_, native, kernels = step.work
        if kernels is None:
            return []
        left = [native[i] for i in kernels.write(step.ok)]
        if taken := [step.states[i] for i in native if i not in left]:
            count_steps(taken)
        return batches_of(step, left)

    def _apply_adamw(self, step: GroupStep) -> None:
        """torch's AdamW for all tensors without means. It counts their steps, too."""
        group, plain = step.group, step.work[0]
        if not plain:
            return
        states = [step.states[i] for i in plain]
        params = [local(step.params[i]) for i in plain] if step.is_sharded else [step.params[i] for i in plain]
        device = params[0].device
        asked = group["fused"] or (group["fused"] is None and group["foreach"] is None) or group["capturable"]
        if asked and device.type != "cpu":  # torch's fused form counts where it computes
            for state in states:
                state["step"] = state["step"].to(device)
        lists = [
            params,
            [step.grads[i] for i in plain],
            *([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq")),
        ]
        if step.is_sharded:
            lists = [[local(x) for x in values] for values in lists]
        dtypes = {x.dtype for x in params}
        if not dtypes <= {torch.float32, torch.float64}:
            lists[:2] = map(exact, lists[:2])
        # torch's fused form takes memory as it lies, so only what lies alike may go there.
        fused = bool(asked) and all(all(map(Tensor.is_contiguous, values)) for values in lists)
        thetas, grads, first, second = lists
        counters = [state["step"] for state in states]
        options: dict[str, Any] = {
            "amsgrad": False,
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            "lr": rate_of(group),
            "weight_decay": group["weight_decay"],
            "eps": max(group["eps"], torch.finfo(torch.float32).tiny ** 0.5),  # 0 / 0 is 0
            "maximize": group["maximize"],
        }
        if fused and device.type == "cpu" and len(dtypes) == 1 and step.ok is None:  # adamw counts tensor by tensor
            count_steps(states)
            torch._fused_adamw_(thetas, grads, first, second, [], counters, **options)
        else:
            foreach = None if fused else bool(group["foreach"] or (group["foreach"] is None and device.type != "cpu"))
            bad = None if step.ok is None else 1 - step.ok
            adamw(thetas, grads, first, second, [], counters, foreach, fused=fused, found_inf=bad, **options)
        if thetas is not params:
            torch._foreach_copy_(params, thetas)

    @torch.no_grad()
    def block_statistics(self) -> list[MeanStatistics]:
        """How much of the gradient is means: one entry per matrix with means, in order.

        Costs nothing until it is called, and no communication.

        >>> layer = torch.nn.Linear(8, 4)
        >>> optimizer = Anova(layer.named_parameters(), means=1)
        >>> layer(torch.ones(8)).sum().backward()  # a gradient of ones is its own mean
        >>> optimizer.step()
        >>> [(matrix.parameter, round(matrix.shares.grand, 4)) for matrix in optimizer.block_statistics()]
        [('weight', 1.0)]
        """
        found = []
        for number, group in enumerate(self.param_groups):
            for i, (name, param) in enumerate(zip(given_names(group), distinct(group), strict=True)):
                state = self.state.get(param, {})
                if "unit_means" in state:
                    shape = param.shape[0], param.shape[1:].numel()
                    found.append(mean_statistics(number, name or f"param{i}", shape, means_in(state)))
        return found


def other_means(group: dict[str, Any], i: int, state: State, asked: tuple[int, int], owner: str) -> str:
    """Why a state does not fit."""
    k, q = counts(state)
    return (
        f"{shown_names(group)[i]} has {k} means over units and {q} over inputs, but means={group['means']!r} asks for "
        f"{asked[0]} and {asked[1]}. Construct {owner} anew to change them."
    )
