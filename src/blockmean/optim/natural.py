"""Natural gradient with a block-mean Fisher matrix: θ ← θ − η √τ (F + δτI)⁻¹ g by Theorem 1.

F is the block-mean approximation of the empirical Fisher matrix of batch gradients, the mean of two averages:

    F = ½ E_β[g gᵀ] + ½ E_1[g gᵀ]       E_β: over recent steps, with decay β;   E_1: over all steps equally
    τ = tr F / d                        its mean eigenvalue

A running average alone vanishes with the gradient, so F⁻¹g would grow without bound just when training should settle.
The average over all steps keeps F from vanishing, and the step shrinks with the gradient. The recent average keeps F up
to date and bounds the step, because F ≥ ½ (1 − β) g gᵀ:

    Δθᵀ(F + δτI)Δθ ≤ 2d τ η² / (1 − β)

√τ makes the step independent of the scale of the loss: η is a length per entry, as in Adam. Proposition 1 needs only
block sums and variances within blocks, so the d×d matrix is never formed:

    A_ij = E[u_i u_j] / √(s_i s_j)          λ_i = E[variance of g inside block i]          E = ½ E_β + ½ E_1
    τ = Σ_i ((s_i − 1) λ_i + A_ii) / d
    (F + δτI)⁻¹ g = (g − u_i/s_i) / (λ_i + δτ) + c_i,     c = S^-½ (A + δτI)⁻¹ S^-½ u

The mean of a block goes through A and the rest through λ. This is Theorem 1 without subtracting large numbers. With
momentum μ and weight decay w:

    v ← μ v + √τ (F + δτI)⁻¹ g          θ ← θ − η (v + w θ)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_number
from blockmean._linalg import NEGLIGIBLE, LinAlgError, damped_solve, in_float64
from blockmean.blocks import By
from blockmean.optim.base import NOT_OPTIONS, arithmetic
from blockmean.optim.block_mean import BlockMeanOptimizer, BlockStep, refuse_fused
from blockmean.optim.correction import accumulate_, average_, normalised
from blockmean.optim.layout import Component
from blockmean.optim.passes import move_, signed
from blockmean.optim.sharding import Sum, groups_of, reduce
from blockmean.optim.statistics import diagonal

ADAPT = 1.5
"""The factor by which `adapt_damping` raises or lowers the damping."""

DAMPING_RANGE = (1e-3, 1e6)
"""The range in which `adapt_damping` keeps the damping."""

AVERAGES = (("U", "weight", "variance"), ("total", "count", "total_variance"))
"""Statistics of E_β and of E_1: sums of u uᵀ, of ones, and of the variances inside blocks."""
STATISTICS = [name for names in AVERAGES for name in names]


class NaturalGradientBMA(BlockMeanOptimizer):
    """Natural gradient descent that accounts for the scale of every block and the dependency between blocks.

        v ← μ v + √τ (F + δτI)⁻¹ g,     θ ← θ − η (v + weight_decay · θ)

    F is the block mean of the empirical Fisher matrix of batch gradients, half an average over recent steps and half
    over all, and τ = tr F / d its mean eigenvalue.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element: the length of a step per entry, as in Adam.
        damping: δ, in units of the mean eigenvalue of F. With 0 the direction of the step does not change when blocks
            are rescaled, but a unit whose gradient is near zero takes a very long step: keep it above 0 in training.
            Large values turn the step into that of SGD.
        beta: decay of the average over recent steps.
        momentum: μ, momentum of the steps, as in `torch.optim.SGD`.
        partition: how to cut parameters into blocks, see `Partition.of`.
        coupling: which blocks share one matrix: "all", those of one "module", or "none".
        adapt_damping: raise or lower the damping after each step with a closure (Levenberg-Marquardt). It compares the
            change of the loss with −½ gᵀΔθ, the decrease that a step to the minimum of a quadratic loss would give, and
            calls the closure a second time to do so.
        weight_decay: decoupled, so F remains that of the loss.
        maximize: step uphill.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.

    Cost O(d + L³) per step; state O(L²) numbers, plus d with momentum.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = NaturalGradientBMA(model.parameters(), lr=1e-3)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = optional_state = ("momentum_buffer",)

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        *,
        damping: float = 0.1,
        beta: float = 0.95,
        momentum: float = 0.9,
        partition: By = "unit",
        coupling: str = "none",
        adapt_damping: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
        self._predicted = 0.0
        super().__init__(params, options)

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner = type(self).__name__
        adapts = group["adapt_damping"]
        require(isinstance(adapts, bool), "adapt_damping", owner, "True or False", adapts, TypeError)
        refuse_fused(group, owner)
        if not ranges:
            return
        require_number(group["damping"], "damping", owner)
        for name in ("beta", "momentum"):
            require_number(group[name], name, owner)
            require(group[name] < 1, name, owner, "below 1", group[name])
        if adapts:
            require(group["damping"] > 0, "damping", owner, "> 0 with adapt_damping=True", group["damping"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step. With a closure and `adapt_damping`, adapt the damping to the change of the loss."""
        self._predicted = 0.0
        before = super().step(closure)
        if closure is not None and before is not None and self._predicted > 0:
            with torch.enable_grad():
                after = closure()
            ratio = self._averaged(_number(before) - _number(after)) / self._predicted
            for group in (group for group in self.param_groups if group["adapt_damping"]):
                group["damping"] = adapted(group["damping"], -ratio if group["maximize"] else ratio)
        return before

    def _averaged(self, change: float) -> float:
        """The mean over all processes that have parameters in common, each of which sees the loss of its own samples:
        also over those that replicate them, or else replicas would adapt differently."""
        total = torch.tensor([change, 1.0], dtype=torch.float64, device="cpu")
        params = [param for group in self.param_groups for param in group["params"]]
        reduce([Sum(total, tuple(dict.fromkeys(g for param in params for g in groups_of(param))))])
        return float(total[0] / total[1])

    def block_sums(self, work: BlockStep) -> Tensor:
        """Rows: Σ g; squared deviations from the mean of each shard of a block; (Σ g)²/s of the shard; and, to predict
        the change of the loss, Σ g (μ v + w θ).

        Summed over shards, rows two and three give the sum of squares without losing digits of the variance.
        """
        group, columns = work.group, [torch.zeros(4, 0, dtype=torch.float64, device=work.layout.device)]
        buffers = work.moments("momentum_buffer")
        for param, grad, buffer, member in zip(work.params, work.grads, buffers, work.members, strict=True):
            cut, g = member.cut, signed(param, grad, group)
            u = in_float64(cut.sum(g))
            sizes = cut.sizes.clamp(min=1).to(u, non_blocking=True)
            squares = cut.sum((g - cut.spread((u / sizes).to(g))).square_())
            carried = torch.zeros_like(u)
            if group["adapt_damping"]:
                rest = group["weight_decay"] * param.to(g.dtype)
                carried = cut.sum(g * (rest if buffer is None else rest + group["momentum"] * buffer))
            columns.append(torch.stack([u, in_float64(squares), u.square() / sizes, in_float64(carried)]))
        return torch.cat(columns, 1)

    def update_(self, work: BlockStep) -> None:
        """v ← μ v + (g − mean) inverse + c, θ ← θ − η (v + w θ)."""
        group, lr = work.group, float(work.group["lr"])
        means, inverses, shifts = (work.per_member(x) for x in self._solve(work))
        if group["momentum"]:
            for i, state in work.states.items():
                if "momentum_buffer" not in state:  # a schedule may switch it on later
                    param = work.layout.params[i]
                    state["momentum_buffer"] = torch.zeros_like(param, dtype=arithmetic(param.dtype))
        buffers = work.moments("momentum_buffer")
        for i, (param, grad, member) in enumerate(zip(work.params, work.grads, work.members, strict=True)):
            if grad is None:
                continue
            g = signed(param, grad, group)
            shift, middle, scale = (member.cut.spread(x[i].to(g)) for x in (shifts, means, inverses))
            step = torch.addcmul(shift, g - middle, scale)
            if group["momentum"]:
                step = buffers[i].mul_(group["momentum"]).add_(step)
            if group["weight_decay"]:
                step = step.add(param, alpha=group["weight_decay"])
            move_(param, step, lr)

    def _solve(self, work: BlockStep) -> tuple[Tensor, Tensor, Tensor]:
        """The means of the blocks, and √τ / (λ + δτ) and √τ c, (L,) each."""
        group, sizes = work.group, work.layout.sizes.to(work.sums, non_blocking=True)
        u, squares, between, carried = work.sums
        on = torch.ones_like(u) if work.present is None else work.present.to(u, non_blocking=True)
        within = (squares + between - u.square() / sizes).clamp(min=0)
        variance, lam, trace = within / (sizes - 1).clamp(min=1), torch.zeros_like(u), torch.zeros_like(u[0])
        found: list[tuple[Any, Tensor]] = []
        for component, part in self.statistics(work, STATISTICS):
            blocks, present = component.blocks, work.present_among(component.blocks)
            for (U, weight, spread), beta in zip(AVERAGES, (group["beta"], None), strict=True):
                accumulate_(part[U], u[blocks], beta, present)
                average_(part[weight], on[blocks], beta, present)
                average_(part[spread], variance[blocks], beta, present)
            A = _matrix(sizes[blocks], part, on[blocks])
            inside = sum(part[spread] / part[weight] for _, weight, spread in AVERAGES) / 2
            # A single entry has no variance. Any λ gives the same step, and this one loses no digits.
            lam[blocks] = torch.where(on[blocks] > 0, torch.where(sizes[blocks] == 1, diagonal(A), inside), 0.0)
            trace += (diagonal(A) * on[blocks]).sum()
            found.append((blocks, A))
        trace += (lam * (sizes - 1)).sum()
        tau = trace / (sizes * on).sum()  # Σ ((s_i − 1) λ_i + A_ii) / Σ s_i over the blocks that take part
        unit = torch.where(tau > NEGLIGIBLE, 1 / tau, 0.0)  # no gradients so far: no step
        scale = on * unit.sqrt()
        inverse = damped_solve(lam * unit, group["damping"], scale)
        common = u * sizes.rsqrt()  # the gradient along the direction that a block's entries share
        solved = torch.zeros_like(u)
        for blocks, A in found:
            try:
                own = damped_solve(A * unit, group["damping"], common[blocks])
            except LinAlgError:
                self.count_fallback(len(A))
                own = damped_solve(diagonal(A) * unit, group["damping"], common[blocks])
            solved[blocks] = own * scale[blocks]
        self._last[work.number] = (inverse * common, solved - inverse * common)
        if group["adapt_damping"]:
            slope = float((inverse * within + solved * common + carried).sum())  # −gᵀΔθ/η
            self._predicted += float(group["lr"]) * slope / 2
        return u / sizes, inverse, solved * sizes.rsqrt()

    def matrices(self, work: BlockStep) -> Iterator[tuple[Component, Tensor]]:
        for component, part in self.statistics(work, STATISTICS, keep=False):
            yield component, _matrix(work.layout.sizes[component.blocks].to(part["U"]), part)


def _matrix(sizes: Tensor, part: dict[str, Tensor], on: float | Tensor = 1.0) -> Tensor:
    """A of a component, the mean of both averages, with rows and columns of the identity for blocks that sit out."""
    first, second = (normalised(part[U], on * (sizes * part[weight]).sqrt(), True) for U, weight, _ in AVERAGES)
    return (first + second) / 2


def _number(loss: float | Tensor) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)


def adapted(damping: float, ratio: float) -> float:
    """The damping after a step that lowered the loss by `ratio` times the predicted amount."""
    if not ratio >= 0.25:  # NaN too
        damping *= ADAPT
    elif ratio > 0.75:
        damping /= ADAPT
    return min(max(damping, DAMPING_RANGE[0]), DAMPING_RANGE[1])
