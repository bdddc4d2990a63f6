"""AdaGrad with the full matrix: θ ← θ − η H^-½ g, H = Σ g gᵀ (equation 11 of the paper)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from blockmean.optim._base import BlockMeanOptimizer, Member, Work, decayed_rate, move_
from blockmean.optim._groups import require_number

FULL_LIMIT = 2**30
"""Bytes that H may need before it has to be asked for."""


class AdaGradFull(BlockMeanOptimizer):
    """AdaGrad with the full d×d matrix of each parameter group: what AdaGradBMA approximates.

    The root is computed afresh in every step. With an old one, a gradient outside the range of the old H would be
    multiplied by eigenvalue_floor^-½, and training explodes.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups; H never crosses groups.
        lr: learning rate.  # η
        eigenvalue_floor: smallest eigenvalue of H.
        max_bytes: refuse parameters whose H needs more; None is no limit.
        lr_decay, weight_decay, maximize: as in `torch.optim.Adagrad`.
        nonfinite: "raise" or "skip", as in `AdaGradBMA`.

    Cost O(d³) per step; state d² numbers in float64.
    """

    _is_normalised = False
    _not_negative = ("lr", "weight_decay", "lr_decay")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        eigenvalue_floor: float = 1e-8,
        max_bytes: int | None = FULL_LIMIT,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "eigenvalue_floor": eigenvalue_floor,
            "max_bytes": max_bytes,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        owner = type(self).__name__
        require_number(group["eigenvalue_floor"], "eigenvalue_floor", owner, positive=True)
        require_number(group["max_bytes"], "max_bytes", owner, optional=True)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {"step": torch.tensor(0.0, dtype=torch.float32)}

    def _block_sums(self, group: dict[str, Any], members: list[Member], num_blocks: int) -> Tensor:
        sums = torch.zeros(1, num_blocks, dtype=torch.float64, device=members[0].param.device)
        for member in members:
            sums[0, member.blocks.start : member.blocks.stop] = member.blocks.sum(member.grad)
        return sums

    def _measure(self, work: Work) -> Tensor:
        # In units of the gradient: for one of 1e16, H^-½ g would be the difference of two large numbers, and nothing
        # but their rounding errors would be left.
        length = float(work.sums[0].norm())
        unit: float = max(length, work.group["eigenvalue_floor"] ** 0.5) if length > 0 else 1.0
        return work.present * unit

    def _update(self, work: Work) -> None:
        g, n = work.sums[0], self._measure(work)
        unit = float(n.max())
        # H^-½ g = (g + [A^-½ − I] g) / unit with A = H / unit²; entries without a gradient sit out.
        scale = work.present * unit**-0.5
        step = g / unit + self._correction(work, g, scale, floor=work.group["eigenvalue_floor"] / unit**2)
        for member in work.members:
            delta = member.blocks.spread(step[member.blocks.start : member.blocks.stop])
            move_(member, delta.to(member.grad.dtype), decayed_rate(work.group, member))

    def _fallback_root(self, A: Tensor, floor: float) -> Tensor:
        return torch.diag(A.diagonal().clamp(min=floor).rsqrt() - 1)
