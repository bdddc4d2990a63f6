"""Adam with the weighted block mean: AdamW's step, shorter along what the entries of a block share, longer elsewhere.

m ← β₁ m + (1 − β₁) g,   r ← β₂ r + (1 − β₂) g²,   bias-corrected: m̂, r̂
U ← β₂ U + (1 − β₂) u uᵀ,   e ← β₂ e + (1 − β₂) Σ g²  per block,   A_ij = U_ij / √(e_i e_j)
ζ = √r̂,  z = ζ + ε,  n_i = ‖ζ‖ over block i,  λ_i = (s_i − A_ii) / (s_i − 1),  κ = λ^-½
b_i = Σ ζ z^-½ m̂,   c = N⁻¹ [A^-½ − diag κ] N⁻¹ b
δ = κ_i m̂/z + ζ z^-½ c_i,   θ ← θ − η (weight_decay · θ + δ)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_adamw, require_betas, require_number
from blockmean.blocks import By
from blockmean.optim.base import NOT_OPTIONS
from blockmean.optim.correction import CorrectedOptimizer
from blockmean.optim.passes import FORMS, Rule


class AdamBMA(CorrectedOptimizer):
    """AdamW that accounts for what the entries of a block have in common.

    If the inputs of a unit are never negative (pixels, ReLU outputs), the gradients of all its weights have the same
    sign. Adam treats them as independent signals and steps too far along their sum. A_ii measures by how much, and the
    correction shortens the step in that direction only.

        δ = κ_i m̂/z + ζ z^-½ c_i,     θ ← θ − η (weight_decay · θ + δ)

    m̂/z is AdamW's step and ζ the root of its average square. c_i shortens the step along what block i shares, and
    κ_i ≥ 1 lengthens it in the rest; where A = I, c = 0 and κ = 1.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element.
        betas: β₁, β₂, decay of the averages of the gradient and of its square.
        eps: ε, added to the root of the average square.
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        partition: how to cut parameters into blocks, see `Partition.of`.
        coupling: which blocks share one matrix: "none", those of one "module", or "all".
        eigenvalue_floor: smallest eigenvalue of A; with 1 the step along the means of blocks never gets longer.
        correction_cap: longest correction of a block, as a multiple of its diagonal step; with a cap, λ is 1.
        refresh_every: recompute the root of A once in this many steps; all sums are updated in every step.
        maximize: step uphill.
        correction: False gives torch's AdamW.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.
        foreach, fused: how to compute the same step, as in torch; if both are None, native kernels take all tensors on
            the CPU that they serve.

    Cost O(d) per step with coupling "none", which needs no eigendecomposition; state 2d + O(L) numbers.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdamBMA(model.parameters(), lr=1e-3)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        partition: By = "unit",
        coupling: str = "none",
        eigenvalue_floor: float = 1.0,
        correction_cap: float | None = None,
        refresh_every: int = 1,
        maximize: bool = False,
        correction: bool = True,
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
        require_number(group["eigenvalue_floor"], "eigenvalue_floor", owner, positive=True)
        require_adamw(group, owner)
        require(not group["capturable"], "capturable", owner, "False: it has no such form", group["capturable"])
        if ranges:
            require_betas(group["betas"], owner)
            require_number(group["correction_cap"], "correction_cap", owner, optional=True)

    def rule(self, group: dict[str, Any]) -> Rule:
        cap = group["correction_cap"]
        return Rule(
            FORMS["none" if not group["correction"] else "balanced" if cap is None else "capped"],
            group["betas"],
            group["eps"],
            group["weight_decay"],
            group["maximize"],
            float(group["lr"]),
            floor=group["eigenvalue_floor"],
            cap=cap or 0.0,
        )
