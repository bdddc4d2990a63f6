"""AdaGrad with the full matrix: θ ← θ − η H^-½ g, H = Σ g gᵀ (equation 11 of the paper)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require_number
from blockmean._linalg import LinAlgError, inverse_roots
from blockmean.optim.base import NOT_OPTIONS, arithmetic
from blockmean.optim.block_mean import BlockMeanOptimizer, BlockStep, refuse_fused
from blockmean.optim.layout import Component, Layout
from blockmean.optim.passes import move_, signed

FULL_LIMIT = 2**30
"""Default limit on the size of H, in bytes; pass `max_bytes` for a larger one."""


class AdaGradFull(BlockMeanOptimizer):
    """AdaGrad with the full d×d matrix of each parameter group, which AdaGradBMA approximates.

        H ← H + g gᵀ,     θ ← θ − η H^-½ g          (equation 11 of the paper)

    Every step recomputes the root. A stale root would multiply a gradient outside the range of the old H by
    eigenvalue_floor^-½, and training would explode.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups; H never crosses groups.
        lr: learning rate η.
        eigenvalue_floor: smallest eigenvalue of H.
        max_bytes: refuse parameters whose H needs more; None means no limit.
        lr_decay, weight_decay, maximize: as in `torch.optim.Adagrad`.
        nonfinite: "raise" or "skip", as in `AdaGradBMA`.

    Cost O(d³) per step; state d² numbers in float64.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdaGradFull(model.parameters(), lr=0.1)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        *,
        eigenvalue_floor: float = 1e-8,
        max_bytes: int | None = FULL_LIMIT,
        maximize: bool = False,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
        super().__init__(params, options)

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner, limit = type(self).__name__, group["max_bytes"]
        refuse_fused(group, owner)
        require_number(group["eigenvalue_floor"], "eigenvalue_floor", owner, positive=True)
        if ranges:
            require_number(group["lr_decay"], "lr_decay", owner)
            require_number(limit, "max_bytes", owner, optional=True)

    def check_size(self, layout: Layout, group: dict[str, Any]) -> None:
        """Raise if H is too large, or sharded. Users who choose the full matrix know its cost: no warning."""
        owner, limit, entries = type(self).__name__, group["max_bytes"], layout.num_blocks
        if limit is not None and 8 * entries**2 > limit:
            raise ValueError(
                f"{owner} would need {8 * entries**2:,} bytes for the matrix of {entries:,} parameters, more than the "
                f"limit of {limit:,}. Raise max_bytes, split the parameters into groups, or take AdaGradBMA."
            )
        if layout.is_sharded:
            raise ValueError(
                f"{owner} needs all entries of all gradients in one place, so it does not take sharded parameters "
                "(DTensor). Use AdaGradBMA, or DistributedDataParallel."
            )

    def block_sums(self, work: BlockStep) -> Tensor:
        """The gradient itself: every entry is a block."""
        grads = [torch.zeros(0, dtype=torch.float64, device=work.layout.device)]
        for param, grad in zip(work.params, work.grads, strict=True):
            g = signed(param, grad, work.group).add(param, alpha=work.group["weight_decay"])
            grads.append(g.flatten().double())
        return torch.cat(grads).unsqueeze(0)

    def update_(self, work: BlockStep) -> None:
        """H ← H + g gᵀ, θ ← θ − η H^-½ g, restricted to the entries that have a gradient."""
        group, g = work.group, work.sums[0]
        step = torch.zeros_like(g)
        on: Any = slice(None) if work.present is None else work.present_among(slice(None))
        for _, part in self.statistics(work, ["U"]):
            H = part["U"].addr_(g, g)[on][:, on]
            try:
                roots, Q = inverse_roots(H, group["eigenvalue_floor"])
                step[on] = Q @ (roots * (Q.mT @ g[on]))
            except LinAlgError:
                self.count_fallback(len(H))
                step[on] = g[on] / H.diagonal().clamp(min=group["eigenvalue_floor"]).sqrt()
        self._last[work.number] = (g, step - g)
        for param, count, delta in zip(work.params, work.steps, work.per_member(step), strict=True):
            rate = float(group["lr"]) / (1 + (count - 1) * group["lr_decay"])
            move_(param, delta.view(param.shape).to(arithmetic(param.dtype)), rate)

    def matrices(self, work: BlockStep) -> Iterator[tuple[Component, Tensor]]:
        for component, part in self.statistics(work, ["U"], keep=False):
            yield component, part["U"]
