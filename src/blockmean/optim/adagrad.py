"""AdaGrad whose diagonal preconditioner encloses a block mean: G⁻¹ = Z^-½ F^-½ Z^-½, F = I + the block-mean part.

    r ← r + g²,  z = √(r + ε)                                   (Algorithm 1, lines 8-9)
    u_i = Σ g over block i,  U ← U + u uᵀ                       (lines 11, 14)
    δ = g/z + w c_i,   θ ← θ − η δ                              (lines 16-21 in one)

`passes.FORMS` defines c and w for each variant.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require_choice, require_number
from blockmean.blocks import By
from blockmean.optim.base import NOT_OPTIONS
from blockmean.optim.correction import CorrectedOptimizer
from blockmean.optim.passes import FORMS, Rule

VARIANTS = ("paper", "consistent", "weighted")


class AdaGradBMA(CorrectedOptimizer):
    """AdaGrad that accounts for the dependency between blocks of parameters (Algorithm 1 of the paper).

    With r = Σ g² over steps, z = √(r + ε), and one number c_i per block from the block sums of gradients:

        δ = g/z + w c_i,     θ ← θ − η δ

    w is z^-½, or √r z^-½ with variant "weighted". Without the correction c this is diagonal AdaGrad.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for any torch optimizer.
        lr: learning rate η, a number or a tensor with one element.
        variant: "paper" (Algorithm 1 as printed), "consistent" (block sums of the scaled gradient, which makes the
            preconditioner symmetric positive definite and independent of the scale of the loss) or "weighted" (blocks
            weighted by their own scale, diagonal kept).
        partition: how to cut parameters into blocks, see `Partition.of`; the paper uses "tensor".
        coupling: which blocks share one matrix: "all", those of one "module", or "none".
        eps: ε, added to the sum of squares inside the root.
        eigenvalue_floor: smallest eigenvalue of A. None means 0.1, or 1.0 for "weighted"; the authors used 1e-10.
        refresh_every: recompute the root of A once in this many steps; all sums are updated in every step.
        lr_decay, initial_accumulator_value, weight_decay, maximize: as in `torch.optim.Adagrad`.
        correction: False gives the diagonal method.
        nonfinite: what to do about a NaN or infinite gradient: "raise" (before anything changes) or "skip" the step.
        foreach, fused: how to compute the same step, as in torch; if both are None, native kernels take all tensors on
            the CPU that they serve.

    Cost O(d + L³) per step; state d + O(L²) numbers.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdaGradBMA(model.parameters(), lr=0.1)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    entry_state = ("sum",)

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        variant: str = "paper",
        partition: By = "tensor",
        coupling: str = "all",
        eigenvalue_floor: float | None = None,
        refresh_every: int = 1,
        maximize: bool = False,
        correction: bool = True,
        nonfinite: str = "raise",
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in NOT_OPTIONS}
        super().__init__(params, options)

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner = type(self).__name__
        require_choice(group["variant"], VARIANTS, "variant", owner)
        if ranges:
            require_number(group["lr_decay"], "lr_decay", owner)
            require_number(group["initial_accumulator_value"], "initial_accumulator_value", owner)
            require_number(group["eigenvalue_floor"], "eigenvalue_floor", owner, positive=True, optional=True)

    def rule(self, group: dict[str, Any]) -> Rule:
        form, floor = FORMS[group["variant"]], group["eigenvalue_floor"]
        return Rule(
            form if group["correction"] else FORMS["none"],
            None,
            group["eps"],
            group["weight_decay"],
            group["maximize"],
            float(group["lr"]),
            group["lr_decay"],
            group["initial_accumulator_value"],
            form.floor if floor is None else floor,
        )
