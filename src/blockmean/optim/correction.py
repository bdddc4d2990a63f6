"""A diagonal method with a correction between blocks: both passes, and between them one small problem.

    U ← U + u uᵀ  (or its average)      A = U / (n nᵀ)      root = A^-½ − I      c = N [root + I − diag κ] N b

With coupling "none" only diagonals exist: U, A and the root are vectors, and nothing is decomposed. A block with
n_i = 0 (no gradient in this step, or none ever) sits out: its row of A is that of the identity, so the other blocks
take exactly the step of the principal submatrix without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from blockmean._checks import require, require_number
from blockmean._linalg import LinAlgError, inverse_roots
from blockmean.blocks import TensorBlocks
from blockmean.optim import kernels
from blockmean.optim.base import State, arithmetic, shown_names
from blockmean.optim.block_mean import BlockMeanOptimizer, BlockStep
from blockmean.optim.kernels import CACHED_BYTES, Native, geometry_of, serve_all, why_not_native
from blockmean.optim.layout import Component, Layout
from blockmean.optim.passes import FORMS, MOST_ENTRIES, SMALLEST_LAMBDA, Foreach, Form, Rule, alike
from blockmean.optim.sharding import local
from blockmean.optim.statistics import diagonal

BEGUN = {"U", "energy", "blocks"}
"""State of blocks that are solved one by one."""


def accumulate_(U: Tensor, u: Tensor, beta: float | None, present: Tensor | None) -> None:
    """Without beta a sum, U ← U + u uᵀ, else an average, U ← E U E + (1 − β) u uᵀ; its diagonal if U is a vector.

    E is √β for the blocks that take part and 1 for those that sit out (u_i = 0). This leaves the entries between absent
    blocks unchanged and keeps U positive semi-definite; freezing whole rows would not. `present` is None if all blocks
    take part.
    """
    if U.ndim == 1:
        average_(U, u * u, beta, present)
    elif beta is None:
        U.addr_(u, u)
    elif present is None:
        U.mul_(beta).addr_(u, u, alpha=1 - beta)
    else:
        keep = torch.ones_like(u).masked_fill_(present, beta**0.5)
        U.mul_(keep).mul_(keep.unsqueeze(-1)).addr_(u, u, alpha=1 - beta)


def average_(x: Tensor, value: Tensor, beta: float | None, present: Tensor | None) -> None:
    """x ← x + value, or x ← β x + (1 − β) value, (L,); blocks that sit out keep theirs, and have value 0."""
    if beta is None:
        x.add_(value)
    else:
        keep = beta if present is None else torch.ones_like(x).masked_fill_(present, beta)
        x.mul_(keep).add_(value, alpha=1 - beta)


def normalised(U: Tensor, n: Tensor, keep_diagonal: bool) -> Tensor:
    """A = U / (n nᵀ), with the rows and columns of the identity where n_i = 0; (L, L) or its diagonal (L,)."""
    off = n == 0
    inverse = (1 / n).masked_fill_(off, 0)
    A = U * inverse if U.ndim == 1 else U * inverse[:, None]
    A *= inverse  # two products: n_i n_j alone may underflow
    diagonal(A).masked_fill_(off, 1) if keep_diagonal else diagonal(A).fill_(1)
    return A


def balance(A: Tensor, sizes: Tensor) -> Tensor:
    """κ_i = λ_i^-½ with λ_i = (s_i − A_ii) / (s_i − 1), between 1 and 1 / √SMALLEST_LAMBDA, (L,)."""
    own = diagonal(A).clamp(min=1)
    lam = (sizes - own) / (sizes - 1).clamp_(min=1)
    return lam.clamp_(min=SMALLEST_LAMBDA).rsqrt_().masked_fill_(sizes <= 1, 1)


def capped(c: Tensor, plain: Tensor, weight: Tensor, cap: float) -> Tensor:
    """c, shortened for blocks whose correction is longer than `cap` times their diagonal step."""
    limit = cap * plain.sqrt() / weight.sqrt()
    return torch.where(weight > 0, c.clamp(-limit, limit), 0.0)


def measure(work: BlockStep, form: Form) -> Tensor:
    """The current n of every block, (L,); 0: the block sits out."""
    return work.sums[2].sqrt() if form.is_weighted else work.sums[1]


def matrix(form: Form, part: dict[str, Tensor], n: Tensor) -> Tensor:
    """A of a component, whose n this is. Weighted forms divide by the squares that U has seen."""
    return normalised(part["U"], part["energy"].sqrt() * (n > 0) if form.is_weighted else n, form.keeps_diagonal)


class CorrectedOptimizer(BlockMeanOptimizer):
    """A diagonal method with a correction between blocks, given by a `Rule` and its `Form`.

    The last one of its moments is the second moment.
    """

    leaves_plain = True

    def rule(self, group: dict[str, Any]) -> Rule:
        """The method that the options of a group select."""
        raise NotImplementedError

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        options: Any = {"dtype": arithmetic(param.dtype), "memory_format": torch.preserve_format}
        moments = {name: torch.full_like(param, self.rule(group).initial, **options) for name in self.entry_state}
        return {**super().init_state(param, group), **moments}

    def is_normalised(self, group: dict[str, Any]) -> bool:
        return self.rule({**group, "correction": True}).form.is_weighted

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        owner, k = type(self).__name__, group["refresh_every"]
        require(
            isinstance(group["correction"], bool), "correction", owner, "True or False", group["correction"], TypeError
        )
        whole = isinstance(k, int) and not isinstance(k, bool)
        require(whole and k >= 1, "refresh_every", owner, "a whole number >= 1", k)
        if ranges:
            require_number(group["eps"], "eps", owner)
        if group["fused"] and not kernels.is_available():
            raise RuntimeError(f"{owner}(fused=True) needs native kernels. {kernels.MISSING}, or take fused=None.")

    def _make_layout(self, number: int, cuts: Sequence[TensorBlocks], group: dict[str, Any]) -> Layout:
        layout = super()._make_layout(number, cuts, group)
        for member in layout.local if group["fused"] else ():
            if reason := why_not_native(local(layout.params[member.tensor]), None, (), member.cut):
                raise RuntimeError(self._cannot_serve(self.param_groups[number], member.tensor, reason))
        return layout

    # ---------------------------------------------------------------- pass 1

    def block_sums(self, work: BlockStep) -> Tensor:
        """Who computes what: C++ all tensors that it serves and may have, torch the others."""
        layout, rule = work.layout, self.rule(work.group)
        plain = rule._replace(form=FORMS["none"])
        cuts = [member.cut for member in work.members]
        counts = [cut.count for cut in cuts]
        *first, second = moments = [work.moments(name) for name in self.entry_state]
        shapes = self._shapes(work, moments, cuts)
        corrected = [rule.form.rows > 1 and member.is_corrected for member in work.members]
        dtypes, without = [param.dtype for param in work.params], [grad is None for grad in work.grads]
        longest = CACHED_BYTES // (8 if torch.float64 in dtypes else 4)
        by_block = rule.form.rows == 4 and layout.is_diagonal and not layout.is_shared and not layout.is_sharded
        by_block = by_block and all(
            shape is not None and shape[0] == 1 and shape[2] <= longest for shape in compress(shapes, corrected)
        )
        columns = torch.zeros(rule.form.rows, sum(counts), dtype=torch.float64, device=layout.device)
        by_torch = [shape is None for shape in shapes]
        keys = list(zip(dtypes, work.steps, without, corrected, by_torch, strict=True))
        sizes = [cut.entries if shape is None else 0 for cut, shape in zip(cuts, shapes, strict=True)]
        start, work.is_finite = 0, True
        for own in alike(keys, sizes, MOST_ENTRIES.get(layout.params[0].device.type, 2**28)):
            i, stop = own.start, start + sum(counts[own])
            run = (Foreach if by_torch[i] else Native)(
                rule if corrected[i] else plain,
                work.steps[i],
                work.params[own],
                work.grads[own],
                first[0][own] if first else [],
                second[own],
                cuts[own],
                columns[:, start:stop],
                shapes[own],
                by_block and corrected[i],
            )
            work.is_finite &= run.block_sums()
            work.runs.append(run)
            start = stop
        return columns

    def _shapes(self, work: BlockStep, moments: list[list[Any]], cuts: list[TensorBlocks]) -> list[Any]:
        """Tensors as they lie in memory, where C++ takes them; None for the others."""
        group = work.group
        wanted = group["fused"] or (group["fused"] is None and group["foreach"] is None)
        if not wanted or not cuts:
            return [None] * len(cuts)
        if serve_all(work.params, work.grads, [x for xs in moments for x in xs], cuts):
            return [cut.geometry for cut in cuts]
        found = []
        for member, param, grad, *own in zip(work.members, work.params, work.grads, *moments, strict=True):
            reason = why_not_native(param, grad, own, member.cut)
            if reason and grad is not None and group["fused"]:
                raise RuntimeError(self._cannot_serve(group, member.tensor, reason))
            found.append(None if reason or grad is None else geometry_of(param, member.cut))
        return found

    def _cannot_serve(self, group: dict[str, Any], i: int, reason: str) -> str:
        return (
            f"{type(self).__name__}(fused=True) takes native kernels, which cannot serve {shown_names(group)[i]}: "
            f"it {reason}. Take fused=None."
        )

    # ---------------------------------------------------------------- the solve and pass 2

    def update_(self, work: BlockStep) -> None:
        rule = self.rule(work.group)
        self._last.pop(work.number, None)
        c = kappa = None
        if any(run.by_block for run in work.runs):
            members = zip(work.members, work.own, strict=True)
            if not all(state.keys() >= BEGUN for member, state in members if member.is_corrected):
                list(self.statistics(work, ["U", "energy"], rule.initial))  # starts what is missing
        elif rule.form.rows > 1 and not work.states.keys().isdisjoint(work.layout.component_of):
            c, kappa = (None if x is None else work.to_columns(x) for x in self._solve(work, rule))
        i = j = 0
        for run in work.runs:
            states, columns = work.own[i : (i := i + len(run.params))], slice(j, j := j + run.sums.shape[1])
            if run.by_block:
                run.solve_and_apply_(*([state[name] for state in states] for name in ("U", "energy")))
                self._last[work.number] = work.to_blocks(work.columns)[2:]
            elif run.rule.form.rows > 1:
                run.apply_(*(None if x is None else x[columns] for x in (c, kappa)))
            else:
                run.apply_(None, None)

    def _solve(self, work: BlockStep, rule: Rule) -> tuple[Tensor | None, Tensor | None]:
        """c and κ, one number each per block, (L,); κ is None if it is 1 everywhere.

        Both are None if all eigendecompositions fail: then the step is that of the diagonal method bit by bit.
        """
        form, beta, n = rule.form, None if rule.betas is None else rule.betas[1], measure(work, rule.form)
        names = ["U", "energy"] if form.is_weighted else ["U"]
        if work.group["refresh_every"] > 1 and not work.layout.is_diagonal:  # a diagonal has nothing to decompose
            names += ["root", "root_of"]
        sizes = work.layout.sizes.to(n, non_blocking=True)
        scale = (1 / n if form.is_weighted else sizes.rsqrt()).masked_fill_(n == 0, 0)
        common = scale * work.sums[form.projection]
        change, kappa = torch.zeros_like(common), torch.ones_like(common) if form.keeps_trace else None
        failed = True
        for component, part in self.statistics(work, names, rule.initial):
            blocks, present = component.blocks, work.present_among(component.blocks)
            accumulate_(part["U"], work.sums[0][blocks], beta, present)
            if form.is_weighted:
                average_(part["energy"], work.sums[1][blocks], beta, present)
            A = matrix(form, part, n[blocks])
            try:
                change[blocks] = self._change(work, rule, component, part, A, common[blocks])
            except LinAlgError:
                self.count_fallback(len(A))
                continue
            failed = False
            if kappa is not None:
                kappa[blocks] = balance(A, sizes[blocks])
        self._last[work.number] = (common, change)
        if failed:
            return None, None
        c = scale * (change if kappa is None else torch.addcmul(change, 1 - kappa, common))
        return capped(c, work.sums[4], work.sums[5], rule.cap) if form.rows == 6 else c, kappa

    def _change(
        self, work: BlockStep, rule: Rule, component: Component, part: dict[str, Tensor], A: Tensor, common: Tensor
    ) -> Tensor:
        """(A^-½ − I) common, (L,), with the stored root if no refresh is due."""
        if A.ndim == 1:
            return (A.clamp(min=rule.floor).rsqrt() - 1) * common
        if "root" not in part:
            roots, Q = inverse_roots(A, rule.floor)
            return Q @ ((roots - 1) * (Q.mT @ common))
        present = torch.ones(len(A), dtype=torch.bool, device="cpu")
        if work.present is not None:
            present = work.present[component.blocks]
        steps = [int(work.states[i]["step"]) for i in component.members if i in work.states]
        is_due = any((step - 1) % work.group["refresh_every"] == 0 for step in steps)
        if is_due or not torch.equal(part["root_of"], present):
            part["root_of"].zero_()  # if this fails, the next step tries again
            roots, Q = inverse_roots(A, rule.floor)
            part["root"].copy_((Q * (roots - 1)) @ Q.mT)
            part["root_of"].copy_(present)
        return part["root"] @ common

    def matrices(self, work: BlockStep) -> Iterator[tuple[Component, Tensor]]:
        form = self.rule(work.group).form
        n = measure(work, form)
        for component, part in self.statistics(work, ["U", "energy"] if form.is_weighted else ["U"], keep=False):
            yield component, matrix(form, part, n[component.blocks])
