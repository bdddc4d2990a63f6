"""The corrections of AdaGrad-BMA and Adam-BMA as data, and the two passes of a step: block sums, then the update.

Every form multiplies the diagonal step of the entries of block i by κ_i = λ_i^-½ and adds w c_i. c solves one small
problem between blocks:

    A = U / (n nᵀ)  (its diagonal kept, or set to 1)        c = N [A^-½ − diag κ] N b,   N = diag(scale)

    form         n_i              b_i              w           scale_i    diagonal of A   λ_i
    none         –                –                –           –          –               –       the diagonal method
    paper        Σ z              Σ g              z^-½        s_i^-½     1               1       Algorithm 1 as printed
    consistent   Σ z              Σ z^-½ g         z^-½        s_i^-½     1               1       Z^-½ F^-½ Z^-½
    weighted     √(Σ_τ Σ g²)      Σ ζ z^-½ m̂       ζ z^-½      ‖ζ^i‖⁻¹    kept            1       weighted block mean
    balanced     √(Σ_τ Σ g²)      Σ ζ z^-½ m̂       ζ z^-½      ‖ζ^i‖⁻¹    kept            below   the same, trace kept
    capped       √(Σ_τ Σ g²)      Σ ζ z^-½ m̂       ζ z^-½      ‖ζ^i‖⁻¹    kept            1       weighted, c bounded

ζ is the root of the accumulated squares, and z is the same with ε. For weighted forms, U and the squares inside n come
from the same steps, so A is correct even if the accumulator has a longer history than U. "balanced" uses
λ_i = (s_i − A_ii) / (s_i − 1) from Proposition 1 (A_ii at least 1, λ_i at least `SMALLEST_LAMBDA`): the rest of a block
gains what its mean loses. A cap bounds the whole correction, so "capped" has λ = 1.

Both passes are here with torch's `_foreach_*` operations, in `kernels` in C++. The first one only reads, and hands over
one small array, with a row per kind of sum and a column per block:

    rows of "paper"        u = Σ g,  Σ z
    rows of "consistent"   u,  Σ z,  Σ w g
    rows of "weighted"     u,  Σ g²,  Σ ζ²,  Σ w m̂     and of "balanced"
    rows of "capped"       the same, and the squared lengths of the diagonal step and of w
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import in_float64
from blockmean.blocks import TensorBlocks, spread_blocks, sum_blocks
from blockmean.optim.base import arithmetic


class Form(NamedTuple):
    """One correction: a row of the table above."""

    rows: int  # sums that pass 1 computes; 1: none but Σ g, no correction
    is_weighted: bool = False  # weights entries by their own scale ζ, blocks by the squares of their gradients
    projection: int = 0  # the row of b; 0 is Σ g, although the algorithm has already scaled the gradient
    keeps_diagonal: bool = False
    keeps_trace: bool = False  # uses λ of Proposition 1 instead of 1
    floor: float = 1.0  # default for the smallest eigenvalue of A


FORMS = {
    "none": Form(1),
    "paper": Form(2, floor=0.1),
    "consistent": Form(3, projection=2, floor=0.1),
    "weighted": Form(4, is_weighted=True, projection=3, keeps_diagonal=True),
    "balanced": Form(4, is_weighted=True, projection=3, keeps_diagonal=True, keeps_trace=True),
    "capped": Form(6, is_weighted=True, projection=3, keeps_diagonal=True),
}

SMALLEST_LAMBDA = 0.1
"""If a block's gradient is nearly all mean, little is known about the rest: its step grows by 1/√0.1 at most."""


class Rule(NamedTuple):
    """All that a step needs to know about a method. State accumulates gradients as AdaGrad's sums or Adam's averages:

        AdaGrad   m = g                       r ← r + g²                    ζ = √r    z = √(r + ε)
        Adam      m ← β₁ m + (1 − β₁) g       r ← β₂ r + (1 − β₂) g²        ζ = √r̂    z = ζ + ε       m̂, r̂ unbiased

    AdaGrad adds weight decay to the gradient; Adam subtracts it from the parameters.
    """

    form: Form
    betas: tuple[float, float] | None  # None: AdaGrad
    eps: float
    weight_decay: float
    maximize: bool
    lr: float
    lr_decay: float = 0.0
    initial: float = 0.0  # accumulators start at aI
    floor: float = 1.0  # smallest eigenvalue of A
    cap: float = 0.0  # "capped": longest correction of a block, as a multiple of its diagonal step

    def numbers(self, step: int) -> tuple[float, float, float]:
        """Of a step: m̂ / m, r̂ / r, and the learning rate, which is η / (1 + (t − 1) decay) for AdaGrad."""
        if self.betas is None:
            return 1.0, 1.0, self.lr / (1 + (step - 1) * self.lr_decay)
        if step == 0:  # no gradient yet: m and r are 0
            return 1.0, 1.0, self.lr
        return 1 / (1 - self.betas[0] ** step), 1 / (1 - self.betas[1] ** step), self.lr


MOST_ENTRIES = {"cpu": 2**18}
"""Entries that are processed at a time, which keeps temporary lists in the cache of a processor; elsewhere 2²⁸, which
bounds them: launches cost more than memory does."""


@dataclass
class Run:
    """Tensors of one dtype and one number of steps, all with a gradient or all without, as parallel lists."""

    rule: Rule
    step: int  # this one included
    params: list[Tensor]
    grads: list[Any]  # None: no gradient; the entries only contribute to the scale of a shared block
    first: list[Tensor]  # first moments; empty if there are none: the gradient itself
    second: list[Tensor]  # second moments: sums or averages of squares
    cuts: list[TensorBlocks]
    sums: Tensor  # (rows, blocks of all tensors in order) float64, which pass 1 fills in
    shapes: list[Any]  # (outer, blocks, inner) as tensors lie in memory; None for those that no kernel serves
    by_block: bool = False  # kernels only: pass 2 solves each block for itself, and pass 1 stops at u and Σ g²


class Foreach(Run):
    """Both passes over a run with torch's operations."""

    def block_sums(self) -> bool:
        """Pass 1: fill in the sums. Returns whether they are known to be finite: nobody has looked yet.

        Tensors without a gradient add to the sums of scales only, and their moments stay as they are.
        """
        sums = self._block_sums()
        self.sums[: len(sums)] = sums
        return False

    def _block_sums(self) -> Tensor:
        rule, form, g = self.rule, self.rule.form, self._gradients()
        if form.rows == 1:
            return self._summed(g)
        m = g
        if rule.betas is None:
            r: Any = torch._foreach_addcmul(self.second, g, g)
        else:
            gain, gain_r, _ = rule.numbers(self.step)
            r = torch._foreach_mul(self.second, gain_r)
            if self.grads[0] is not None:
                m = torch._foreach_lerp(self.first, g, 1 - rule.betas[0])
                torch._foreach_mul_(m, gain)
                torch._foreach_mul_(r, rule.betas[1])
                torch._foreach_addcmul_(r, g, g, gain_r * (1 - rule.betas[1]))
        zeta, z = _scales(rule, r)
        plain = [] if form.is_weighted else [self._summed(g, z)]  # before z changes
        if form.rows == 2:
            return plain[0]
        _mask_(rule, z)
        steps: Any = torch._foreach_div(m, z) if form.rows == 6 else []
        w: Any = _weights(zeta, z)
        rows = [torch._foreach_mul(w, m)]
        if form.is_weighted:
            rows = [g, torch._foreach_mul(g, g), r, *rows]
        if form.rows == 6:
            rows += [torch._foreach_mul(steps, steps), torch._foreach_mul(w, w)]
        return torch.cat([*plain, self._summed(*rows)])

    def _summed(self, *rows: Any) -> Tensor:
        """Block sums of lists of tensors, all at once, (rows, blocks)."""
        return in_float64(sum_blocks(self.cuts * len(rows), [x for row in rows for x in row])).view(len(rows), -1)

    def _gradients(self) -> Any:
        """After sign and weight decay, in the dtype of the arithmetic, zeros where there are none; never those of the
        parameters themselves where they change."""
        rule, dtype = self.rule, arithmetic(self.params[0].dtype)
        if self.grads[0] is None:
            return [torch.zeros_like(r) for r in self.second]
        g: Any = [grad.to(dtype) for grad in self.grads]
        if rule.maximize:
            g = torch._foreach_neg(g)
        if rule.weight_decay and rule.betas is None:
            g = torch._foreach_add(g, [param.to(dtype) for param in self.params], alpha=rule.weight_decay)
        return g

    def apply_(self, c: Tensor | None, kappa: Tensor | None) -> None:
        """Pass 2: update moments, then θ ← θ − η (κ m̂/z + w c).

        c and κ are one number per block, those of all tensors concatenated; None stands for c = 0 and κ = 1.
        """
        if self.grads[0] is None:
            return
        rule, g, r = self.rule, self._gradients(), self.second
        scaled: Any = r
        gain, gain_r, rate = rule.numbers(self.step)
        if rule.betas is None:
            m = g
            torch._foreach_addcmul_(r, g, g)
        else:
            m = self.first
            torch._foreach_lerp_(m, g, 1 - rule.betas[0])
            torch._foreach_mul_(r, rule.betas[1])
            torch._foreach_addcmul_(r, g, g, 1 - rule.betas[1])
            scaled = torch._foreach_mul(r, gain_r)
        zeta, z = _scales(rule, scaled)
        _mask_(rule, z)
        delta = torch._foreach_div(m, z)
        torch._foreach_mul_(delta, gain)
        given = [x.to(r[0]) for x in (c, kappa) if x is not None]
        spread = spread_blocks(self.cuts, *given) if given else []  # as they broadcast against every tensor
        if kappa is not None:
            torch._foreach_mul_(delta, spread[-1])
        if c is not None:
            torch._foreach_addcmul_(delta, _weights(zeta, z), spread[0])
        if rule.weight_decay and rule.betas is not None:
            torch._foreach_add_(delta, self.params, alpha=rule.weight_decay)
        torch._foreach_mul_(delta, -rate)
        if self.params[0].dtype == delta[0].dtype:
            torch._foreach_add_(self.params, delta)
        else:  # rounded once
            torch._foreach_copy_(self.params, torch._foreach_add([p.to(g[0].dtype) for p in self.params], delta))


def alike(keys: Sequence[Any], sizes: Sequence[float], most: float) -> Iterator[slice]:
    """Cut a list into runs of equal keys. Sizes in a run of several add up to `most` at the most."""
    start, total = 0, 0.0
    for i, size in enumerate(sizes):
        if i > start and (keys[i] != keys[start] or total + size > most):
            yield slice(start, i)
            start, total = i, 0.0
        total += size
    if sizes:
        yield slice(start, len(sizes))


def signed(param: Tensor, grad: Tensor | None, group: dict[str, Any]) -> Tensor:
    """The gradient that a step follows downhill, in the dtype of the arithmetic; zeros if there is none."""
    g = torch.zeros_like(param) if grad is None else grad
    return (-g if group["maximize"] else g).to(arithmetic(param.dtype))


def move_(param: Tensor, delta: Tensor, rate: float) -> None:
    """θ ← θ − rate · δ, rounded once to the parameter's own dtype."""
    if param.dtype == delta.dtype:
        param.add_(delta, alpha=-rate)
    else:
        param.copy_(param.to(delta.dtype).add_(delta, alpha=-rate))


def _scales(rule: Rule, r: Any) -> tuple[Any, Any]:
    """ζ, if the form needs it or it is free, and z, from r or, for Adam, r̂."""
    if rule.betas is None:
        z = torch._foreach_add(r, rule.eps)
        torch._foreach_sqrt_(z)
        return (torch._foreach_sqrt(r) if rule.form.is_weighted else None), z
    zeta = torch._foreach_sqrt(r)
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
