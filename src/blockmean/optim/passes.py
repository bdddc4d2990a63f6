"""The two passes of a step over lists of tensors: block sums, which only read, and the update.

Each pass exists three times: tensor by tensor, with torch's `_foreach_*` operations, and as native kernels (`native`);
`choose` picks one. The first pass hands over one small array, with a row per kind of sum and a column per block:

    rows of "paper"        u = Σ g,  Σ z
    rows of "consistent"   u,  Σ z,  Σ w g
    rows of "weighted"     u,  Σ g²,  Σ ζ²,  Σ w m̂,   and with a cap the squared lengths of the diagonal step and of w
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from blockmean._linalg import in_float64
from blockmean.blocks import TensorBlocks, spread_blocks, sum_blocks
from blockmean.optim import native
from blockmean.optim.forms import Rule

FOREACH_ENTRIES = 2**22
"""Entries that the foreach passes process at a time, which bounds their temporary lists."""

FOREACH_ON_CPU = 2**14
"""Mean entries per tensor up to which foreach is faster on a CPU (measured)."""


class Tensors(NamedTuple):
    """The input of both passes: the tensors that take part in a step, as parallel lists."""

    params: list[Tensor]
    grads: list[Tensor | None]  # None: no gradient; the entries only contribute to the scale of a shared block
    first: list[Tensor]  # first moments; the gradient itself if there are none
    second: list[Tensor]  # second moments: sums or averages of squares
    steps: list[int]  # this step included
    cuts: list[TensorBlocks]

    def parts(self) -> Iterator[tuple[int, Tensors]]:
        """Runs of tensors of one dtype with at most `FOREACH_ENTRIES` entries, each with its start index."""
        start = size = 0
        for i, param in enumerate(self.params):
            if i > start and (size + param.numel() > FOREACH_ENTRIES or param.dtype != self.params[start].dtype):
                yield start, self.part(slice(start, i))
                start, size = i, 0
            size += param.numel()
        if self.params:
            yield start, self.part(slice(start, None))

    def each(self) -> tuple[list[Tensor], list[Tensor | None], list[list[Tensor]], list[TensorBlocks]]:
        """Parameters, gradients, all moments of each, and cuts: parallel lists."""
        moments = [list(own) for own in (zip(self.first, self.second, strict=True) if self.first else zip(self.second))]
        return self.params, self.grads, moments, self.cuts

    def part(self, run: slice) -> Tensors:
        """A slice of all lists."""
        lists: Any = (values[run] for values in self)
        return Tensors(*lists)


def choose(tensors: Tensors, foreach: bool | None, fused: bool | None = False, out: Tensor | None = None) -> Any:
    """The implementation of both passes, with torch's meaning of `foreach` and `fused`.

    If both are None, native kernels take all tensors that they serve; the others go as a list on devices where that is
    faster. Native sums are written to `out`, (rows, L), if given.
    """
    if any(grad is None for grad in tensors.grads):
        return REFERENCE
    if wants_native(foreach, fused):
        refused = [reason for reason in map(native.refusal, *tensors.each()) if reason]
        if not refused:
            return NATIVE(tensors, out)
        if fused:
            raise RuntimeError(f"fused=True cannot be followed: a parameter {refused[0]}. Take fused=None.")
    if foreach is None:
        device = tensors.params[0].device.type
        if device == "cpu":
            foreach = sum(param.numel() for param in tensors.params) <= FOREACH_ON_CPU * len(tensors.params)
        else:
            foreach = device in _get_foreach_kernels_supported_devices()
    return FOREACH if foreach else REFERENCE


def wants_native(foreach: bool | None, fused: bool | None) -> bool:
    """Whether native kernels are wanted and were built. As in torch, `foreach` given by hand comes first."""
    return native.is_available() and (bool(fused) or (fused is None and foreach is None))


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The dtype of state and arithmetic: that of the parameter, but at least float32."""
    return torch.promote_types(dtype, torch.float32)


def effective_grad(param: Tensor, grad: Tensor, rule: Rule) -> Tensor:
    """The gradient after sign and weight decay; never modifies `grad`."""
    g = grad.to(arithmetic(param.dtype))
    if rule.maximize:
        g = -g
    if rule.weight_decay and rule.betas is None:
        g = g.add(param, alpha=rule.weight_decay)
    return g


def debiased(rule: Rule, step: int) -> tuple[float, float]:
    """The factors m̂ / m and r̂ / r."""
    if rule.betas is None or step == 0:
        return 1.0, 1.0
    return 1 / (1 - rule.betas[0] ** step), 1 / (1 - rule.betas[1] ** step)


def rate_of(rule: Rule, step: int) -> float:
    """AdaGrad's learning rate η / (1 + (t − 1) decay), which is η without decay."""
    return rule.lr / (1 + (step - 1) * rule.lr_decay)


def vanishes(rule: Rule, dtype: torch.dtype) -> bool:
    """Whether z can be 0, because ε is 0 or underflows in the dtype. The passes then set z to infinity: no step."""
    return rule.eps < torch.finfo(dtype).tiny


# ---------------------------------------------------------------- tensor by tensor


def reference_sums(rule: Rule, tensors: Tensors) -> Tensor:
    """Pass 1: the rows listed above, for the blocks of all tensors in order, in float64."""
    columns = []
    for i, (param, grad, r, step, cut) in enumerate(
        zip(tensors.params, tensors.grads, tensors.second, tensors.steps, tensors.cuts, strict=True)
    ):
        g = None if grad is None else effective_grad(param, grad, rule)
        columns.append(_sums(rule, g, tensors.first[i] if rule.betas else g, r, step, cut))
    return in_float64(torch.stack([torch.cat(row) for row in zip(*columns, strict=True)]))


def _sums(rule: Rule, g: Tensor | None, m: Tensor | None, r: Tensor, step: int, cut: TensorBlocks) -> list[Tensor]:
    """The sums over the blocks of one tensor; without a gradient, only those of the accumulated squares."""
    u = nothing = r.new_zeros(cut.count)
    if g is not None:
        u = cut.sum(g)
    if not rule.form.corrects:
        return [u]
    if g is not None and m is not None:
        if rule.betas is None:
            r = torch.addcmul(r, g, g)
        else:
            m = m.lerp(g, 1 - rule.betas[0])
            r = (r * rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1])
    gain, gain_r = debiased(rule, step)
    zeta, z = _scales(rule, r, gain_r, rule.form.is_weighted)
    scale = cut.sum(r).mul_(gain_r) if rule.form.is_weighted else cut.sum(z)
    if vanishes(rule, z.dtype):
        z.masked_fill_(z == 0, torch.inf)
    if rule.form.takes_raw_sums:
        return [u, scale]
    w = z.rsqrt() if zeta is None else zeta.mul_(z.rsqrt())
    b = nothing if g is None or m is None else cut.sum(w * m).mul_(gain)
    if not rule.form.is_weighted:
        return [u, scale, b]
    rows = [u, nothing if g is None else cut.sum(g * g), scale, b]
    if rule.cap is not None:
        length = nothing if g is None or m is None else cut.sum((m / z).square_()).mul_(gain**2)
        rows += [length, cut.sum(w.square_())]
    return rows


def _scales(rule: Rule, r: Tensor, gain_r: float, with_zeta: bool) -> tuple[Tensor | None, Tensor]:
    """ζ, if `with_zeta` or free, and z."""
    if rule.betas is None:
        return (r.sqrt() if with_zeta else None), (r + rule.eps).sqrt_()
    zeta = r.sqrt().mul_(gain_r**0.5)
    return zeta, zeta + rule.eps


def reference_apply_(rule: Rule, tensors: Tensors, c: Any, kappa: Any) -> None:
    """Pass 2: update moments, then θ ← θ − η (κ m̂/z + w c).

    c and κ are one number per block, those of all tensors concatenated; empty ones stand for c = 0 and κ = 1.
    """
    c, kappa = (_split(x, tensors.cuts) for x in (c, kappa))
    for i, (param, grad, r, step, cut) in enumerate(
        zip(tensors.params, tensors.grads, tensors.second, tensors.steps, tensors.cuts, strict=True)
    ):
        if grad is None:
            continue
        g = effective_grad(param, grad, rule)
        if rule.betas is None:
            m = g
            r.addcmul_(g, g)
        else:
            m = tensors.first[i].lerp_(g, 1 - rule.betas[0])
            r.mul_(rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1])
        gain, gain_r = debiased(rule, step)
        zeta, z = _scales(rule, r, gain_r, rule.form.is_weighted)
        if vanishes(rule, z.dtype):
            z.masked_fill_(z == 0, torch.inf)
        delta = m / z
        if gain != 1:
            delta.mul_(gain)
        if kappa:
            delta.mul_(cut.spread(kappa[i].to(g)))
        if c:
            w = z.rsqrt_() if zeta is None else zeta.mul_(z.rsqrt_())
            delta.addcmul_(w, cut.spread(c[i].to(g)))
        if rule.weight_decay and rule.betas is not None:
            delta.add_(param, alpha=rule.weight_decay)
        move_(param, delta, rate_of(rule, step))


def _split(values: Any, cuts: list[TensorBlocks]) -> list[Tensor]:
    """The numbers of every tensor's own blocks; none of none."""
    return list(values.split([cut.count for cut in cuts])) if len(values) else []


def move_(param: Tensor, delta: Tensor, rate: float) -> None:
    """θ ← θ − rate · δ, rounded once to the parameter's own dtype."""
    if param.dtype == delta.dtype:
        param.add_(delta, alpha=-rate)
    else:
        param.copy_(param.to(delta.dtype).add_(delta, alpha=-rate))


# ---------------------------------------------------------------- whole lists at once


def foreach_sums(rule: Rule, tensors: Tensors) -> Tensor:
    """Pass 1 with torch's foreach operations."""
    return torch.cat([_foreach_part_sums(rule, part) for _, part in tensors.parts()], 1)


def _foreach_part_sums(rule: Rule, part: Tensors) -> Tensor:
    def summed(values: Any) -> Tensor:
        return in_float64(sum_blocks(part.cuts, values))

    g = _foreach_grads(rule, part)
    rows = [summed(g)]
    if not rule.form.corrects:
        return torch.stack(rows)
    m: Any = g
    if rule.betas is None:
        r = torch._foreach_addcmul(part.second, g, g)
    else:
        m = torch._foreach_lerp(part.first, g, 1 - rule.betas[0])
        r = torch._foreach_mul(part.second, rule.betas[1])
        torch._foreach_addcmul_(r, g, g, 1 - rule.betas[1])
    gains = [debiased(rule, step) for step in part.steps]
    zeta, z = _foreach_scales(rule, r, [gain_r for _, gain_r in gains], rule.form.is_weighted)
    scale = summed(r) if rule.form.is_weighted else summed(z)
    _foreach_mask_(rule, z)
    if rule.form.takes_raw_sums:
        return torch.stack([*rows, scale])
    if rule.cap is not None:
        length = torch._foreach_div(m, z)
        torch._foreach_mul_(length, length)
    w = _foreach_weights(zeta, z)
    b = summed(torch._foreach_mul(w, m))
    if not rule.form.is_weighted:
        return torch.stack([*rows, scale, b])
    gain, gain_r = (_per_block(column, part, scale) for column in zip(*gains, strict=True))
    rows += [summed(torch._foreach_mul(g, g)), scale * gain_r, b * gain]
    if rule.cap is not None:
        torch._foreach_mul_(w, w)
        rows += [summed(length) * gain * gain, summed(w)]
    return torch.stack(rows)


def _per_block(values: tuple[float, ...], part: Tensors, like: Tensor) -> float | Tensor:
    """One number per tensor, repeated for each of its blocks; a float in the usual case that all are equal."""
    if all(value == values[0] for value in values):  # a set would make a traced step count a constant
        return values[0]
    counts = torch.tensor([cut.count for cut in part.cuts])
    return torch.tensor(values, dtype=like.dtype).repeat_interleave(counts).to(like.device, non_blocking=True)


def foreach_apply_(rule: Rule, tensors: Tensors, c: Any, kappa: Any) -> None:
    """Pass 2 with torch's foreach operations."""
    c, kappa = (_split(x, tensors.cuts) for x in (c, kappa))
    for start, part in tensors.parts():
        g = _foreach_grads(rule, part)
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
        zeta, z = _foreach_scales(rule, r, [gain[1] for gain in gains], rule.form.is_weighted)
        _foreach_mask_(rule, z)
        delta = torch._foreach_div(m, z)
        if rule.betas is not None:
            torch._foreach_mul_(delta, [gain[0] for gain in gains])
        own = slice(start, start + len(delta))
        if kappa:
            torch._foreach_mul_(delta, spread_blocks(part.cuts, kappa[own], g[0]))
        if c:
            spread = spread_blocks(part.cuts, c[own], g[0])
            torch._foreach_addcmul_(delta, _foreach_weights(zeta, z), spread)
        if rule.weight_decay and rule.betas is not None:
            torch._foreach_add_(delta, part.params, alpha=rule.weight_decay)
        torch._foreach_mul_(delta, [-rate_of(rule, step) for step in part.steps])
        if part.params[0].dtype == delta[0].dtype:
            torch._foreach_add_(part.params, delta)
        else:
            torch._foreach_copy_(part.params, torch._foreach_add([p.to(g[0].dtype) for p in part.params], delta))


def _foreach_grads(rule: Rule, part: Tensors) -> list[Tensor]:
    dtype = arithmetic(part.params[0].dtype)
    g = [grad.to(dtype) for grad in part.grads if grad is not None]
    if rule.maximize:
        g = list(torch._foreach_neg(g))
    if rule.weight_decay and rule.betas is None:
        params = [param.to(dtype) for param in part.params]
        g = list(torch._foreach_add(g, params, alpha=rule.weight_decay))
    return g


def _foreach_scales(rule: Rule, r: Any, gains_r: list[float], with_zeta: bool) -> tuple[Any, Any]:
    if rule.betas is None:
        z = torch._foreach_add(r, rule.eps)
        torch._foreach_sqrt_(z)
        return (torch._foreach_sqrt(r) if with_zeta else None), z
    zeta = torch._foreach_sqrt(r)
    torch._foreach_mul_(zeta, [gain**0.5 for gain in gains_r])
    return zeta, torch._foreach_add(zeta, rule.eps)


def _foreach_mask_(rule: Rule, z: Any) -> None:
    if vanishes(rule, z[0].dtype):
        for x in z:
            x.masked_fill_(x == 0, torch.inf)


def _foreach_weights(zeta: Any, z: Any) -> Any:
    """w = z^-½, or ζ z^-½; z is overwritten."""
    torch._foreach_rsqrt_(z)
    if zeta is None:
        return z
    torch._foreach_mul_(zeta, z)
    return zeta


class Passes(NamedTuple):
    """One implementation of both passes."""

    block_sums: Any
    apply_: Any


REFERENCE = Passes(reference_sums, reference_apply_)
FOREACH = Passes(foreach_sums, foreach_apply_)
NATIVE = native.Table
