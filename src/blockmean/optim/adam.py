"""Adam with the weighted block mean: AdamW's step, and per block one number that damps what its entries share.

m ← β₁ m + (1 − β₁) g,   r ← β₂ r + (1 − β₂) g²,   U ← β₂ U + (1 − β₂) u uᵀ      all with bias correction: m̂, r̂, Û
ζ = √r̂,  z = ζ + ε,  n_i = ‖ζ‖ over block i,  A = Û / (n nᵀ)
b_i = Σ ζ z^-½ m̂,   c = N⁻¹ [A^-½ − I] N⁻¹ b
δ = m̂/z + ζ z^-½ c_i,   θ ← θ − η (weight_decay · θ + δ)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from blockmean._checks import require
from blockmean._cut import By
from blockmean.optim._base import BlockMeanOptimizer, Member, Work, arithmetic, move_
from blockmean.optim._groups import require_number


class AdamBMA(BlockMeanOptimizer):
    """AdamW that sees what the entries of a block have in common.

    A unit fed by non-negative inputs (pixels, ReLU) gets gradients of one sign over its whole row of weights. Adam
    takes them for so many independent hints and steps too far along their sum; A_ii measures by how much, and the step
    is shortened in just that direction.

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for every optimizer of torch.
        lr: learning rate, a number or a tensor with one element.  # η
        betas: decay of the averages of the gradient and of its square.  # β₁, β₂
        eps: added to the root of the average square.  # ε
        weight_decay: decoupled, as in `torch.optim.AdamW`.
        partition: how parameters are cut into blocks, see `Partition.of`.
        coupling: which blocks share one matrix: "none", those of one "module", or "all".
        eigenvalue_floor: smallest eigenvalue of A; at 1 the correction only damps.
        correction_cap: largest length of the correction of a block, in lengths of its diagonal step; None is no cap.
        refresh_every: compute the root of A every so many steps; all sums stay fresh.
        maximize: step uphill.
        correction: False is torch's AdamW.
        nonfinite: what a NaN or infinite gradient does: "raise" (before anything has changed) or "skip" the step.

    Cost O(d) per step with coupling "none", which decomposes nothing; state 2d + O(L) numbers.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdamBMA(model.parameters(), lr=1e-3)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    _switches = ("maximize", "correction")
    _not_negative = ("lr", "weight_decay", "eps")
    _decays_gradient = False
    _state_keys = ("step", "exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        partition: By = "unit",
        coupling: str = "none",
        eigenvalue_floor: float = 1.0,
        correction_cap: float | None = None,
        refresh_every: int = 1,
        maximize: bool = False,
        correction: bool = True,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "partition": partition,
            "coupling": coupling,
            "eigenvalue_floor": eigenvalue_floor,
            "correction_cap": correction_cap,
            "refresh_every": refresh_every,
            "maximize": maximize,
            "correction": correction,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        owner, betas = type(self).__name__, group["betas"]
        pair = isinstance(betas, tuple | list) and all(isinstance(beta, int | float) for beta in betas)
        require(pair, "betas", owner, "two numbers in [0, 1)", betas, TypeError)
        require(len(betas) == 2 and all(0 <= b < 1 for b in betas), "betas", owner, "two numbers in [0, 1)", betas)
        require_number(group["eigenvalue_floor"], "eigenvalue_floor", owner, positive=True)
        require_number(group["correction_cap"], "correction_cap", owner, optional=True)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        def zeros() -> Tensor:
            return torch.zeros_like(param, dtype=arithmetic(param), memory_format=torch.preserve_format)

        return {"step": torch.tensor(0.0, dtype=torch.float32), "exp_avg": zeros(), "exp_avg_sq": zeros()}

    def _memory(self, group: dict[str, Any]) -> float | None:
        return float(group["betas"][1])

    def _block_sums(self, group: dict[str, Any], members: list[Member], num_blocks: int) -> Tensor:
        rows = 1 if not group["correction"] else 4 if group["correction_cap"] is None else 6
        return block_sums(members, num_blocks, rows, group["betas"], group["eps"])

    def _measure(self, work: Work) -> Tensor:
        # U and r are averages of the same steps, so that A needs no bias correction: it would cancel.
        return work.sums[1].sqrt()

    def _update(self, work: Work) -> None:
        group, c = work.group, None
        if group["correction"]:
            n = work.sums[2].sqrt()
            c = self._correction(work, work.sums[3], torch.where(n > 0, 1 / n, 0.0), group["eigenvalue_floor"])
            if group["correction_cap"] is not None:
                c = capped(c, work.sums[4], work.sums[5], group["correction_cap"])
        update_(work.members, c, group["betas"], group["eps"], float(group["lr"]), group["weight_decay"])


def block_sums(members: list[Member], num_blocks: int, num_rows: int, betas: tuple[float, float], eps: float) -> Tensor:
    """Pass 1, read only: rows u, Σ r, n² = Σ r̂, b, and for a cap the squared lengths of δ and ζ z^-½, (num_rows, L)."""
    sums = torch.zeros(num_rows, num_blocks, dtype=torch.float64, device=members[0].param.device)
    for member in members:
        g, blocks = member.grad, member.blocks
        rows = [blocks.sum(g)]
        if num_rows > 1:
            m, r = member.state["exp_avg"], member.state["exp_avg_sq"]
            step = float(member.state["step"])
            if member.moves:
                step += 1
                m, r = m.lerp(g, 1 - betas[0]), (r * betas[1]).addcmul_(g, g, value=1 - betas[1])
            squares = blocks.sum(r)
            zeta, z = _scales(r, step, betas[1], eps)
            w = zeta * z.rsqrt()
            # Without a gradient of its own a parameter does not move; it only counts for the scale of its block.
            gain = 1 / (1 - betas[0] ** step) if member.moves else 0.0
            rows += [squares, squares / (1 - betas[1] ** step) if step else squares, blocks.sum(w * m) * gain]
            if num_rows > 4:
                rows += [blocks.sum((m / z).square_()) * gain**2, blocks.sum(w.square_())]
        sums[:, blocks.start : blocks.stop].add_(torch.stack(rows))
    return sums


def capped(c: Tensor, diagonal: Tensor, weight: Tensor, cap: float) -> Tensor:
    """c, shortened where the correction of a block is longer than `cap` times its diagonal step."""
    limit = cap * diagonal.sqrt() / weight.sqrt()
    return torch.where(weight > 0, c.clamp(-limit, limit), 0.0)


def update_(
    members: list[Member], c: Tensor | None, betas: tuple[float, float], eps: float, lr: float, weight_decay: float
) -> None:
    """Pass 2: averages, then θ ← θ − η (weight_decay θ + m̂/z + w c); AdamW's step where c is None."""
    for member in members:
        if not member.moves:
            continue
        g, m, r = member.grad, member.state["exp_avg"], member.state["exp_avg_sq"]
        step = float(member.state["step"])
        m.lerp_(g, 1 - betas[0])
        r.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        zeta, z = _scales(r, step, betas[1], eps)
        delta = (m / z).div_(1 - betas[0] ** step)
        if c is not None:
            here = c[member.blocks.start : member.blocks.stop].to(g.dtype)
            delta.addcmul_(zeta.mul_(z.rsqrt_()), member.blocks.spread(here))
        if weight_decay:
            delta.add_(member.param, alpha=weight_decay)
        move_(member, delta, lr)


def _scales(r: Tensor, step: float, beta: float, eps: float) -> tuple[Tensor, Tensor]:
    """ζ = √r̂ and z = ζ + ε; z is infinite, so that nothing moves, where ε is 0 and there was never a gradient."""
    zeta = r.sqrt().div_((1 - beta**step) ** 0.5) if step else torch.zeros_like(r)
    z = zeta + eps
    return zeta, z.masked_fill_(z == 0, torch.inf) if eps < torch.finfo(z.dtype).tiny else z
