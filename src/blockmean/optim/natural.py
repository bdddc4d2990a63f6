"""Natural gradient with a block-mean Fisher matrix: θ ← θ − η (F + δI)⁻¹ g by Theorem 1.

F is the empirical Fisher matrix E[g gᵀ], averaged over steps, in its block mean approximation. Proposition 1 asks for
nothing but averages of block sums and of variances inside blocks, so the d×d matrix is never there:

    A_ij = E[u_i u_j] / √(s_i s_j)          λ_i = E[variance of g inside block i]
    (F + δI)⁻¹ g = (g − u_i/s_i) / (λ_i + δ) + c_i,     c = S^-½ (A + δI)⁻¹ S^-½ u

The mean of a block goes through A and what is left of it through λ: Theorem 1 without a difference of large numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_number
from blockmean._linalg import NEGLIGIBLE, LinAlgError, damped_solve
from blockmean.blocks import By
from blockmean.optim.correction import accumulate_, average_, normalised
from blockmean.optim.layout import Component
from blockmean.optim.optimizer import BlockMeanOptimizer, Work
from blockmean.optim.passes import arithmetic, move_

ADAPT = 1.5
"""By how much the damping is raised or lowered at a time."""


class NaturalGradientBMA(BlockMeanOptimizer):
    """Natural gradient descent that sees the scale of every block and the dependency between blocks.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for every optimizer of torch.
        lr: learning rate, a number or a tensor with one element.  # η
        damping: δ, in units of the mean eigenvalue of F. With 0 the step does not change when blocks are rescaled.
        beta: decay of the averages that make up F.
        trust_radius: longest step, as √(Δθᵀ(F + δI)Δθ): what the model may change at a time, whatever lr says. None
            is no limit; then lr has to be small, because F is that of a whole batch and its steps are long.
        momentum: of the steps, as in `torch.optim.SGD`.
        partition: how parameters are cut into blocks, see `Partition.of`.
        coupling: which blocks share one matrix: "all", those of one "module", or "none".
        adapt_damping: raise or lower the damping after each step with a closure, by how well the quadratic model
            foretold the change of the loss (Levenberg and Marquardt); the closure is called a second time for that.
        weight_decay: decoupled: F stays that of the loss.
        maximize: step uphill.
        nonfinite: what a NaN or infinite gradient does: "raise" (before anything has changed) or "skip" the step.

    Cost O(d + L³) per step; state O(L²) numbers, and d more with momentum.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = NaturalGradientBMA(model.parameters(), lr=1e-2)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = optional_state = ("momentum_buffer",)
    statistics_kept = MappingProxyType({"U": "matrix", "weight": "vector", "variance": "vector"})
    not_negative = ("lr", "weight_decay", "damping")
    switches = ("maximize", "adapt_damping")

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-2,
        *,
        damping: float = 0.1,
        beta: float = 0.95,
        trust_radius: float | None = 0.01,
        momentum: float = 0.0,
        partition: By = "tensor",
        coupling: str = "all",
        adapt_damping: bool = False,
        weight_decay: float = 0.0,
        maximize: bool = False,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "damping": damping,
            "beta": beta,
            "trust_radius": trust_radius,
            "momentum": momentum,
            "partition": partition,
            "coupling": coupling,
            "adapt_damping": adapt_damping,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "nonfinite": nonfinite,
            "foreach": foreach,
            "fused": fused,
        }
        self._foretold = 0.0
        super().__init__(params, defaults)

    def check_group(self, group: dict[str, Any]) -> None:
        super().check_group(group)
        owner = type(self).__name__
        for name in ("beta", "momentum"):
            require_number(group[name], name, owner)
            require(group[name] < 1, name, owner, "below 1", group[name])
        require_number(group["trust_radius"], "trust_radius", owner, positive=True, optional=True)
        if group["adapt_damping"]:
            require(group["momentum"] == 0, "momentum", owner, "0 with adapt_damping=True", group["momentum"])
            require(group["damping"] > 0, "damping", owner, "> 0 with adapt_damping=True", group["damping"])

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step, and with a closure and `adapt_damping` learn from it how far the model can be trusted."""
        self._foretold = 0.0
        before = super().step(closure)
        if closure is not None and before is not None and self._foretold > 0:
            with torch.enable_grad():
                after = closure()
            ratio = (_number(before) - _number(after)) / self._foretold
            for group in (group for group in self.param_groups if group["adapt_damping"]):
                sign = -1 if group["maximize"] else 1
                if not sign * ratio >= 0.25:  # NaN too
                    group["damping"] *= ADAPT
                elif sign * ratio > 0.75:
                    group["damping"] /= ADAPT
        return before

    def init_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = {"step": torch.tensor(0.0, dtype=torch.float32)}
        if group["momentum"]:
            state["momentum_buffer"] = torch.zeros_like(param, dtype=arithmetic(param.dtype))
        return state

    def block_sums(self, work: Work) -> Tensor:
        """Rows Σ g, squares around the mean of each piece of a block, and Σ (Σ g)²/s, (3, L).

        The last two add up over pieces to the sum of squares, in a form that keeps the digits of a variance.
        """
        columns = []
        for param, grad, cut in zip(work.params, work.grads, work.cuts, strict=True):
            if grad is None:
                columns.append(torch.zeros(3, cut.count, dtype=torch.float64, device=param.device))
                continue
            g = _signed(param, grad, work.group)
            u, sizes = cut.sum(g), cut.sizes.to(g)
            squares = cut.sum((g - cut.spread(u / sizes)).square_())
            columns.append(torch.stack([u, squares, u.square() / sizes]).double())
        return torch.cat(columns, 1)

    def matrices(self, work: Work) -> Iterator[tuple[Component, Any, Tensor]]:
        for component, blocks, part in self.statistics(work, list(self.statistics_kept)):
            yield component, blocks, _matrix(work.layout.sizes[blocks], part)

    def solve(self, work: Work) -> tuple[Tensor, Tensor, Tensor, float]:
        group, layout, sizes = work.group, work.layout, work.layout.sizes.to(work.sums)
        u, squares, between = work.sums
        on = torch.ones_like(u, dtype=torch.bool) if work.present is None else work.present
        within = (squares + between - u.square() / sizes).clamp(min=0)
        variance = within / (sizes - 1).clamp(min=1)
        lam = torch.zeros_like(u)
        A: list[tuple[Any, Tensor]] = []
        for _, blocks, state in self.statistics(work, list(self.statistics_kept)):
            accumulate_(state["U"], u[blocks], group["beta"], on[blocks])
            average_(state["weight"], torch.ones_like(u[blocks]), group["beta"], on[blocks])
            average_(state["variance"], variance[blocks], group["beta"], on[blocks])
            matrix = _matrix(sizes[blocks], state)
            own = matrix if layout.is_diagonal else matrix.diagonal()
            # A single entry has no variance; any λ gives the same step, and this one loses no digits.
            inside = state["variance"] / state["weight"].clamp(min=torch.finfo(u.dtype).tiny)
            lam[blocks] = torch.where(sizes[blocks] == 1, own, inside)
            A.append((blocks, matrix))
        damping = self._damping(work, A, lam, on)
        inverse = torch.where(lam + damping > NEGLIGIBLE, 1 / (lam + damping), 0.0) * on
        common = u * sizes.rsqrt()  # the gradient along the direction that a block's entries share
        solved = torch.zeros_like(u)
        for blocks, matrix in A:
            solved[blocks] = self._solve(matrix, damping, common[blocks])
        self._last[work.number] = (inverse * common, solved - inverse * common)
        c = solved * sizes.rsqrt() * on
        gain = float((inverse * within + c * u).sum())  # gᵀ(F + δI)⁻¹g
        return u / sizes, inverse, c, self._share(group, gain)

    def _share(self, group: dict[str, Any], gain: float) -> float:
        """How much of the step stays within the trust radius."""
        lr, radius = float(group["lr"]), group["trust_radius"]
        if radius is not None:
            radius *= 1 - group["momentum"]  # steps in one direction add up to 1 / (1 − momentum) of the last
        length = lr * max(gain, 0.0) ** 0.5
        share = 1.0 if radius is None or length <= radius else radius / length
        if group["adapt_damping"]:
            # Along its own step the damped quadratic model falls by η (1 − η/2) gᵀ(F + δI)⁻¹g.
            self._foretold += share * lr * (1 - share * lr / 2) * gain
        return share

    def _damping(self, work: Work, A: list[tuple[Any, Tensor]], lam: Tensor, on: Tensor) -> float:
        """δ: the given damping times the mean eigenvalue of F over the blocks that take part."""
        sizes = work.layout.sizes.to(lam) * on
        trace = (lam * (sizes - 1).clamp(min=0)).sum()
        for blocks, matrix in A:
            trace += ((matrix if work.layout.is_diagonal else matrix.diagonal()) * on[blocks]).sum()
        return float(work.group["damping"] * trace / sizes.sum())

    def _solve(self, A: Tensor, damping: float, b: Tensor) -> Tensor:
        try:
            return damped_solve(A, damping, b)
        except LinAlgError:
            self.count_fallback(len(A))
            return damped_solve(A if A.ndim == 1 else A.diagonal(), damping, b)

    def apply_(self, work: Work, solution: tuple[Tensor, Tensor, Tensor, float]) -> None:
        """θ ← θ − η (weight_decay θ + (F + δI)⁻¹ g), through a momentum buffer if there is one."""
        group, lr = work.group, float(work.group["lr"])
        *values, share = solution
        means, inverses, shifts = (work.per_block(x) for x in values)
        for i, (param, grad, cut) in enumerate(zip(work.params, work.grads, work.cuts, strict=True)):
            if grad is None:
                continue
            g = _signed(param, grad, group)
            shift, middle, scale = (
                cut.spread(x.to(g.dtype)) for x in (share * shifts[i], means[i], share * inverses[i])
            )
            step = torch.addcmul(shift, g - middle, scale)
            if group["momentum"]:
                step = work.moments["momentum_buffer"][i].mul_(group["momentum"]).add_(step)
            if group["weight_decay"]:
                step = step.add(param, alpha=group["weight_decay"])
            move_(param, step, lr)


def _matrix(sizes: Tensor, part: dict[str, Tensor]) -> Tensor:
    """A of a component."""
    return normalised(part["U"], (sizes.to(part["U"]) * part["weight"]).sqrt(), keep_diagonal=True)


def _signed(param: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
    g = grad.to(arithmetic(param.dtype))
    return -g if group["maximize"] else g


def _number(loss: float | Tensor) -> float:
    return float(loss.detach() if isinstance(loss, Tensor) else loss)
