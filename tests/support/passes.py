"""Both passes tensor by tensor, in the plainest operations: what lists and kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from blockmean._linalg import in_float64
from blockmean.blocks import TensorBlocks
from blockmean.optim.base import arithmetic
from blockmean.optim.passes import Rule, Run, move_


class Reference(Run):
    """The interface of `passes.Foreach`."""

    def block_sums(self) -> bool:
        columns = []
        for i, (param, grad, r, cut) in enumerate(self._each()):
            g = None if grad is None else effective_grad(param, grad, self.rule)
            m = self.first[i] if self.rule.betas else g
            columns.append(_sums(self.rule, g, m, r, self.step, cut))
        sums = in_float64(torch.stack([torch.cat(row) for row in zip(*columns, strict=True)]))
        self.sums[: len(sums)] = sums
        return False

    def apply_(self, c: Tensor | None, kappa: Tensor | None) -> None:
        rule, start = self.rule, 0
        for i, (param, grad, r, cut) in enumerate(self._each()):
            blocks = slice(start, start := start + cut.count)
            if grad is None:
                continue
            g = effective_grad(param, grad, rule)
            if rule.betas is None:
                m = g
                r.addcmul_(g, g)
            else:
                m = self.first[i].lerp_(g, 1 - rule.betas[0])
                r.mul_(rule.betas[1]).addcmul_(g, g, value=1 - rule.betas[1])
            gain, gain_r, rate = rule.numbers(self.step)
            zeta, z = _scales(rule, r, gain_r)
            delta = m / z * gain
            if kappa is not None:
                delta *= cut.spread(kappa[blocks].to(g))
            if c is not None:
                w = z.rsqrt() * (zeta if rule.form.is_weighted else 1)
                delta += w * cut.spread(c[blocks].to(g))
            if rule.weight_decay and rule.betas is not None:
                delta += rule.weight_decay * param.to(delta.dtype)
            move_(param, delta, rate)

    def _each(self):
        return zip(self.params, self.grads, self.second, self.cuts, strict=True)


def effective_grad(param: Tensor, grad: Tensor, rule: Rule) -> Tensor:
    """The gradient after sign and weight decay."""
    g = grad.to(arithmetic(param.dtype))
    if rule.maximize:
        g = -g
    if rule.weight_decay and rule.betas is None:
        g = g + rule.weight_decay * param.to(g.dtype)
    return g


def _sums(rule: Rule, g: Tensor | None, m: Tensor | None, r: Tensor, step: int, cut: TensorBlocks) -> list[Tensor]:
    """The sums over the blocks of one tensor; without a gradient, only those of the accumulated squares."""
    u = nothing = r.new_zeros(cut.count)
    if g is not None:
        u = cut.sum(g)
    if rule.form.rows == 1:
        return [u]
    if g is not None and m is not None:
        if rule.betas is None:
            r = r + g * g
        else:
            m = m + (1 - rule.betas[0]) * (g - m)
            r = rule.betas[1] * r + (1 - rule.betas[1]) * g * g
    gain, gain_r, _ = rule.numbers(step)
    zeta, z = _scales(rule, r, gain_r)
    finite = z.masked_fill(z.isinf(), 0)
    if rule.form.rows == 2:
        return [u, cut.sum(finite)]
    w = z.rsqrt() * (zeta if rule.form.is_weighted else 1)
    b = nothing if g is None or m is None else gain * cut.sum(w * m)
    if not rule.form.is_weighted:
        return [u, cut.sum(finite), b]
    rows = [u, nothing if g is None else cut.sum(g * g), gain_r * cut.sum(r), b]
    if rule.form.rows == 6:
        length = nothing if g is None or m is None else gain**2 * cut.sum((m / z).square())
        rows += [length, cut.sum(w * w)]
    return rows


def _scales(rule: Rule, r: Tensor, gain_r: float) -> tuple[Tensor, Tensor]:
    """ζ and z, which is infinite where it would be 0: no step."""
    zeta = (r * gain_r).sqrt()
    z = (r + rule.eps).sqrt() if rule.betas is None else zeta + rule.eps
    vanishes = (z == 0) & (rule.eps < torch.finfo(z.dtype).tiny)
    return zeta, z.masked_fill(vanishes, torch.inf)
