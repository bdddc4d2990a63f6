"""The two passes of a step over lists of tensors: block sums, which only read, and the update.

Here with torch's `_foreach_*` operations, in `kernels` in C++. The first pass hands over one small array, with a row
per kind of sum and a column per block:

    rows of "paper"        u = Σ g,  Σ z
    rows of "consistent"   u,  Σ z,  Σ w g
    rows of "weighted"     u,  Σ g²,  Σ ζ²,  Σ w m̂,   and with a cap the squared lengths of the diagonal step and of w
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import in_float64
from blockmean.blocks import TensorBlocks, spread_blocks, sum_blocks
from blockmean.optim.base import arithmetic
from blockmean.optim.forms import Rule

MOST_ENTRIES = {"cpu": 2**18}
"""Entries that are processed at a time, which bounds temporary lists, and keeps them in the cache of a processor."""


class Tensors(NamedTuple):
    """The input of both passes: the tensors that take part in a step, as parallel lists."""

    params: list[Tensor]
    grads: list[Any]  # None: no gradient; the entries only contribute to the scale of a shared block
    first: list[Tensor]  # first moments; empty if there are none: the gradient itself
    second: list[Tensor]  # second moments: sums or averages of squares
    steps: list[int]  # this step included
    cuts: list[TensorBlocks]

    def part(self, run: slice) -> Tensors:
        """A slice of all lists."""
        lists: Any = (values[run] for values in self)
        return Tensors(*lists)

    def parts(self) -> Iterator[Tensors]:
        """Runs of tensors of one dtype, all with a gradient or all without, with at most `MOST_ENTRIES` entries."""
        start = size = 0
        for i, param in enumerate(self.params):
            most = MOST_ENTRIES.get(param.device.type, 2**22)
            same = param.dtype == self.params[start].dtype and (self.grads[i] is None) == (self.grads[start] is None)
            if i > start and (size + param.numel() > most or not same):
                yield self.part(slice(start, i))
                start, size = i, 0
            size += param.numel()
        if self.params:
            yield self.part(slice(start, None))


class Foreach:
    """Both passes over one list of tensors."""

    def __init__(self, rule: Rule, tensors: Tensors) -> None:
        self.rule, self.tensors = rule, tensors

    def block_sums(self, out: Tensor) -> bool:
        """Pass 1: the rows listed above, for the blocks of all tensors in order, in float64.

        Returns whether they are known to be finite: nobody has looked yet.
        """
        sums = torch.cat([_block_sums(self.rule, part) for part in self.tensors.parts()], 1)
        out[: len(sums)] = sums
        return False

    def apply_(self, c: Tensor | None, kappa: Tensor | None) -> None:
        """Pass 2: update moments, then θ ← θ − η (κ m̂/z + w c).

        c and κ are one number per block, those of all tensors concatenated; None stands for c = 0 and κ = 1.
        """
        start = 0
        for part in self.tensors.parts():
            counts = [cut.count for cut in part.cuts]
            own = slice(start, start := start + sum(counts))
            if part.grads[0] is not None:
                _apply_(self.rule, part, *(None if x is None else list(x[own].split(counts)) for x in (c, kappa)))


def rows_of(rule: Rule) -> int:
    """The number of rows of sums that a rule needs."""
    form = rule.form
    if not form.corrects:
        return 1
    if form.is_weighted:
        return 4 if rule.cap is None else 6
    return 2 if form.takes_raw_sums else 3


def debiased(rule: Rule, step: int) -> tuple[float, float]:
    """The factors m̂ / m and r̂ / r."""
    if rule.betas is None or step == 0:
        return 1.0, 1.0
    return 1 / (1 - rule.betas[0] ** step), 1 / (1 - rule.betas[1] ** step)


def rate_of(rule: Rule, step: int) -> float:
    """AdaGrad's learning rate η / (1 + (t − 1) decay), which is η without decay."""
    return rule.lr / (1 + (step - 1) * rule.lr_decay)


def move_(param: Tensor, delta: Tensor, rate: float) -> None:
    """θ ← θ − rate · δ, rounded once to the parameter's own dtype."""
    if param.dtype == delta.dtype:
        param.add_(delta, alpha=-rate)
    else:
        param.copy_(param.to(delta.dtype).add_(delta, alpha=-rate))


def effective_grads(rule: Rule, part: Tensors) -> list[Tensor]:
    """Gradients after sign and weight decay, in the dtype of the arithmetic; never those of the parameters themselves
    where they change."""
    dtype = arithmetic(part.params[0].dtype)
    g = [grad.to(dtype) for grad in part.grads]
    if rule.maximize:
        g = list(torch._foreach_neg(g))
    if rule.weight_decay and rule.betas is None:
        g = list(torch._foreach_add(g, [param.to(dtype) for param in part.params], alpha=rule.weight_decay))
    return g


def _block_sums(rule: Rule, part: Tensors) -> Tensor:
    """(rows, blocks). Tensors without a gradient add to the sums of scales only, and their moments stay as they are."""

    def summed(values: Any) -> Tensor:
        return in_float64(sum_blocks(part.cuts, values))

    has_gradient = part.grads[0] is not None
    nothing = in_float64(part.second[0].new_zeros(sum(cut.count for cut in part.cuts)))
    r: Any = part.second
    if has_gradient:
        g: Any = effective_grads(rule, part)
        rows = [summed(g)]
    else:
        rows = [nothing]
    if not rule.form.corrects:
        return torch.stack(rows)
    if has_gradient and rule.betas is None:
        m = g
        r = torch._foreach_addcmul(r, g, g)
    elif has_gradient and rule.betas is not None:
        m = torch._foreach_lerp(part.first, g, 1 - rule.betas[0])
        r = torch._foreach_mul(r, rule.betas[1])
        torch._foreach_addcmul_(r, g, g, 1 - rule.betas[1])
    gains = [debiased(rule, step) for step in part.steps]
    zeta, z = _scales(rule, r, [gain_r for _, gain_r in gains])
    scale = summed(r) if rule.form.is_weighted else summed(z)
    _mask_(rule, z)
    if rule.form.takes_raw_sums:
        return torch.stack([*rows, scale])
    if rule.cap is not None and has_gradient:
        length = torch._foreach_div(m, z)
        torch._foreach_mul_(length, length)
    w = _weights(zeta, z)
    b = summed(torch._foreach_mul(w, m)) if has_gradient else nothing
    if not rule.form.is_weighted:
        return torch.stack([*rows, scale, b])
    gain, gain_r = (_per_block(column, part, scale) for column in zip(*gains, strict=True))
    rows += [summed(torch._foreach_mul(g, g)) if has_gradient else nothing, scale * gain_r, b * gain]
    if rule.cap is not None:
        torch._foreach_mul_(w, w)
        rows += [summed(length) * gain * gain if has_gradient else nothing, summed(w)]
    return torch.stack(rows)


def _per_block(values: tuple[float, ...], part: Tensors, like: Tensor) -> float | Tensor:
    """One number per tensor, repeated for each of its blocks; a float in the usual case that all are equal."""
    if all(value == values[0] for value in values):  # a set would make a traced step count a constant
        return values[0]
    counts = torch.tensor([cut.count for cut in part.cuts])
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(counts).to(like.device, non_blocking=True)


def _apply_(rule: Rule, part: Tensors, c: list[Tensor] | None, kappa: list[Tensor] | None) -> None:
    g = effective_grads(rule, part)
    r = part.second
    if rule.betas is None:
        m = g
        torch._foreach_addcmul_(r, g, g)
    else:
        m = part.first
        torch._foreach_lerp_(m, g, 1 - rule.betas[0])
        torch._foreach_mul_(r, rule.betas[1])
        torch._foreach_addcmul_(r, g, g, 1 - rule.betas[1])
    gains = [debiased(rule, step) for step in part.steps]
    zeta, z = _scales(rule, r, [gain_r for _, gain_r in gains])
    _mask_(rule, z)
    delta = torch._foreach_div(m, z)
    if rule.betas is not None:
        torch._foreach_mul_(delta, [gain for gain, _ in gains])
    if kappa is not None:
        torch._foreach_mul_(delta, spread_blocks(part.cuts, kappa, g[0]))
    if c is not None:
        torch._foreach_addcmul_(delta, _weights(zeta, z), spread_blocks(part.cuts, c, g[0]))
    if rule.weight_decay and rule.betas is not None:
        torch._foreach_add_(delta, part.params, alpha=rule.weight_decay)
    torch._foreach_mul_(delta, [-rate_of(rule, step) for step in part.steps])
    if part.params[0].dtype == delta[0].dtype:
        torch._foreach_add_(part.params, delta)
    else:  # rounded once
        torch._foreach_copy_(part.params, torch._foreach_add([p.to(g[0].dtype) for p in part.params], delta))


def _scales(rule: Rule, r: Any, gains_r: list[float]) -> tuple[Any, Any]:
    """ζ, if the form needs it or it is free, and z."""
    if rule.betas is None:
        z = torch._foreach_add(r, rule.eps)
        torch._foreach_sqrt_(z)
        return (torch._foreach_sqrt(r) if rule.form.is_weighted else None), z
    zeta = torch._foreach_sqrt(r)
    torch._foreach_mul_(zeta, [gain**0.5 for gain in gains_r])
    return zeta, torch._foreach_add(zeta, rule.eps)


def _mask_(rule: Rule, z: Any) -> None:
    """No step where z is 0, which it can be if ε is 0 or underflows: z becomes infinite."""
    if rule.eps < torch.finfo(z[0].dtype).tiny:
        for x in z:
            x.masked_fill_(x == 0, torch.inf)


def _weights(zeta: Any, z: Any) -> Any:
    """w = z^-½, or ζ z^-½; z is overwritten."""
    torch._foreach_rsqrt_(z)
    if zeta is None:
        return z
    torch._foreach_mul_(zeta, z)
    return zeta
