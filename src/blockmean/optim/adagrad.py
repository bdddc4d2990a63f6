"""AdaGrad with a block mean between its diagonal: G⁻¹ = Z^-½ F^-½ Z^-½, F = I + the block-mean part.

    r ← r + g²,  z = √(r + ε)                                   (Algorithm 1, lines 8-9)
    u_i = Σ g over block i,  U ← U + u uᵀ                       (lines 11, 14)
    δ = g/z + w c_i,   θ ← θ − η δ                              (lines 16-21 in one)

What the variants differ in, with A = I + offdiag(U)/(n nᵀ) or A = U/(n nᵀ), and c = N [A^-½ − I] N b:

    variant      n_i           b_i                w           N_ii     diagonal of A
    paper        Σ z           Σ g  (as printed)  z^-½        s_i^-½   1
    consistent   Σ z           Σ z^-½ g           z^-½        s_i^-½   1
    weighted     √(Σ r)        Σ √r z^-½ g        √r z^-½     1/n_i    kept
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from blockmean._cut import By
from blockmean.optim._base import BlockMeanOptimizer, Member, Work, arithmetic, decayed_rate, move_
from blockmean.optim._groups import require_number

VARIANTS = ("paper", "consistent", "weighted")
FLOORS = {"paper": 0.1, "consistent": 0.1, "weighted": 1.0}


class AdaGradBMA(BlockMeanOptimizer):
    """AdaGrad that sees the dependency between blocks of parameters (Algorithm 1 of the paper).

    Args:
        params: parameters, (name, parameter) pairs, or dicts of groups, as for every optimizer of torch.
        lr: learning rate, a number or a tensor with one element.  # η
        variant: "paper" (Algorithm 1 as printed), "consistent" (block sums of the scaled gradient, which makes the
            preconditioner symmetric positive definite and free of the scale of the loss) or "weighted" (blocks
            weighted by their own scale, diagonal kept).
        partition: how parameters are cut into blocks, see `Partition.of`; the paper takes "tensor".
        coupling: which blocks share one matrix: "all", those of one "module", or "none".
        eps: added to the sum of squares inside the root.  # ε
        eigenvalue_floor: smallest eigenvalue of A; None is 0.1, and 1.0 for "weighted". The authors took 1e-10.
        refresh_every: compute the root of A every so many steps; all sums stay fresh.
        lr_decay, initial_accumulator_value, weight_decay, maximize: as in `torch.optim.Adagrad`.
        correction: False is the diagonal method.
        nonfinite: what a NaN or infinite gradient does: "raise" (before anything has changed) or "skip" the step.

    Cost O(d + L³) per step; state d + O(L²) numbers.

    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdaGradBMA(model.parameters(), lr=0.1)
    >>> model(torch.ones(3)).square().sum().backward()
    >>> optimizer.step()
    """

    _state_keys = ("step", "sum")
    _not_negative = ("lr", "weight_decay", "eps", "lr_decay", "initial_accumulator_value")
    _switches = ("maximize", "correction")
    _choices: ClassVar = {"variant": VARIANTS}

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        variant: str = "paper",
        partition: By = "tensor",
        coupling: str = "all",
        eps: float = 1e-10,
        eigenvalue_floor: float | None = None,
        refresh_every: int = 1,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
        correction: bool = True,
        nonfinite: str = "raise",
    ) -> None:
        defaults = {
            "lr": lr,
            "variant": variant,
            "partition": partition,
            "coupling": coupling,
            "eps": eps,
            "eigenvalue_floor": eigenvalue_floor,
            "refresh_every": refresh_every,
            "lr_decay": lr_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "correction": correction,
            "nonfinite": nonfinite,
        }
        super().__init__(params, defaults)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        floor = group["eigenvalue_floor"]
        require_number(floor, "eigenvalue_floor", type(self).__name__, positive=True, optional=True)

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        return {
            "step": torch.tensor(0.0, dtype=torch.float32),
            "sum": torch.full_like(
                param, group["initial_accumulator_value"], dtype=arithmetic(param), memory_format=torch.preserve_format
            ),
        }

    def _initial_statistics(self, group: dict[str, Any], sizes: Tensor) -> float | Tensor:
        # An accumulator that starts at a stands for H = aI, whose block sums are a s_i.
        return sizes * float(group["initial_accumulator_value"])

    def _block_sums(self, group: dict[str, Any], members: list[Member], num_blocks: int) -> Tensor:
        return block_sums(members, num_blocks, group["variant"] if group["correction"] else None, group["eps"])

    def _measure(self, work: Work) -> Tensor:
        return work.sums[1].sqrt() if work.group["variant"] == "weighted" else work.sums[1]

    def _keeps_diagonal(self, group: dict[str, Any]) -> bool:
        return bool(group["variant"] == "weighted")

    def _update(self, work: Work) -> None:
        group, variant = work.group, work.group["variant"]
        c = None
        if group["correction"]:
            n = self._measure(work)
            scale = 1 / n if variant == "weighted" else work.layout.sizes.to(n).rsqrt()
            floor = FLOORS[variant] if group["eigenvalue_floor"] is None else group["eigenvalue_floor"]
            c = self._correction(work, work.sums[2], torch.where(n > 0, scale, 0.0), floor)
        rates = [decayed_rate(group, member) for member in work.members]
        update_(work.members, c, rates, group["eps"], variant == "weighted")


def block_sums(members: list[Member], num_blocks: int, variant: str | None, eps: float) -> Tensor:
    """Pass 1, read only: rows u, n (or n²) and b of the table above, (3, L); only u without a variant."""
    device = members[0].param.device
    sums = torch.zeros(1 if variant is None else 3, num_blocks, dtype=torch.float64, device=device)
    for member in members:
        g, blocks = member.grad, member.blocks
        rows = [blocks.sum(g)]
        if variant is not None:
            r = torch.addcmul(member.state["sum"], g, g)
            z = (r + eps).sqrt()
            rows.append(blocks.sum(r if variant == "weighted" else z))
            rows.append(rows[0] if variant == "paper" else blocks.sum(_weight(r, z, eps, variant == "weighted") * g))
        sums[:, blocks.start : blocks.stop].add_(torch.stack(rows))
    return sums


def update_(members: list[Member], c: Tensor | None, rates: list[float], eps: float, weighted: bool) -> None:
    """Pass 2: r ← r + g², θ ← θ − η (g/z + w c); the diagonal step where c is None."""
    for member, rate in zip(members, rates, strict=True):
        if not member.moves:
            continue
        g, r = member.grad, member.state["sum"]
        r.addcmul_(g, g)
        z = (r + eps).sqrt()
        if _may_vanish(z, eps):
            z.masked_fill_(z == 0, torch.inf)  # never a gradient: no step
        delta = g / z
        if c is not None:
            here = c[member.blocks.start : member.blocks.stop].to(g.dtype)
            delta.addcmul_(_weight(r, z, eps, weighted), member.blocks.spread(here))
        move_(member, delta, rate)


def _weight(r: Tensor, z: Tensor, eps: float, weighted: bool) -> Tensor:
    """w: z^-½, times √r where blocks are weighted by scale; 0 where there was never a gradient and ε = 0."""
    w = z.rsqrt()
    if _may_vanish(z, eps):
        w = w.masked_fill(z == 0, 0.0)
    return w.mul_(r.sqrt()) if weighted else w


def _may_vanish(z: Tensor, eps: float) -> bool:
    """Whether z can be 0: ε is, or is too small for the dtype."""
    return eps < torch.finfo(z.dtype).tiny
