"""A diagonal method with a correction between blocks: both passes, and between them one small problem.

    U ← U + u uᵀ  (or its average)      A = U / (n nᵀ)      root = A^-½ − I      c = N [root + I − diag κ] N b

With coupling "none" only diagonals exist: U, A and the root are vectors, and nothing is decomposed. A block with
n_i = 0 (no gradient in this step, or none ever) sits out: its row of A is that of the identity, so the other blocks
take exactly the step of the principal submatrix without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from blockmean._checks import require, require_number
from blockmean._linalg import LinAlgError, inverse_root_minus_identity, times
from blockmean.blocks import TensorBlocks
from blockmean.optim import kernels
from blockmean.optim.base import GroupStep, State, require_state, shown_names
from blockmean.optim.block_mean import ANEW, BlockMeanOptimizer, BlockStep
from blockmean.optim.forms import SMALLEST_LAMBDA, Form, Rule
from blockmean.optim.kernels import CACHED_ENTRIES, Native, geometry_of, serve_all, why_not_native
from blockmean.optim.layout import Component
from blockmean.optim.passes import Foreach, Tensors, rows_of
from blockmean.optim.sharding import local, reduce
from blockmean.optim.statistics import own_statistics


def accumulate_(U: Tensor, u: Tensor, beta: float | None, present: Tensor | None) -> None:
    """Without beta a sum, U ← U + u uᵀ, else an average, U ← E U E + (1 − β) u uᵀ; its diagonal if U is a vector.

    E is √β for the blocks that take part and 1 for those that sit out (u_i = 0). This leaves the entries between absent
    blocks unchanged and keeps U positive semi-definite; freezing whole rows would not. `present` is None if all blocks
    take part.
    """
    if beta is None:
        U.addcmul_(u, u) if U.ndim == 1 else U.addr_(u, u)
    elif U.ndim == 1:
        average_(U, u * u, beta, present)
    elif present is None:
        U.mul_(beta).addr_(u, u, alpha=1 - beta)
    else:
        keep = torch.ones_like(u).masked_fill_(present, beta**0.5)
        U.mul_(keep).mul_(keep.unsqueeze(-1)).addr_(u, u, alpha=1 - beta)


def average_(x: Tensor, value: Tensor, beta: float | None, present: Tensor | None) -> None:
    """x ← x + value, or x ← β x + (1 − β) value, for the blocks that take part; the rest of x stays, (L,)."""
    if beta is None:
        x.add_(value)
    elif present is None:
        x.mul_(beta).add_(value, alpha=1 - beta)
    else:
        x.copy_(torch.where(present, x * beta + (1 - beta) * value, x))


def normalised(U: Tensor, n: Tensor, keep_diagonal: bool) -> Tensor:
    """A = U / (n nᵀ), with the rows and columns of the identity where n_i = 0; (L, L) or its diagonal (L,)."""
    on = n > 0
    inverse = torch.where(on, 1 / n, 0.0)
    if U.ndim == 1:
        return torch.where(on, U * inverse * inverse, 1.0) if keep_diagonal else torch.ones_like(U)
    A = U * inverse[:, None] * inverse  # two products: n_i n_j alone may underflow
    diagonal = torch.where(on, A.diagonal(), 1.0) if keep_diagonal else torch.ones_like(n)
    A.diagonal().copy_(diagonal)
    return A


def balance(U: Tensor, n: Tensor, sizes: Tensor) -> Tensor:
    """κ_i = λ_i^-½ with λ_i = (s_i − A_ii) / (s_i − 1), between 1 and 1 / √SMALLEST_LAMBDA, (L,)."""
    own = torch.where(n > 0, (U if U.ndim == 1 else U.diagonal()) / n / n, 1.0)
    lam = (sizes - own.clamp(min=1)) / (sizes - 1).clamp(min=1)
    return torch.where(sizes > 1, lam.clamp(min=SMALLEST_LAMBDA).rsqrt(), 1.0)


def capped(c: Tensor, diagonal: Tensor, weight: Tensor, cap: float) -> Tensor:
    """c, shortened for blocks whose correction is longer than `cap` times their diagonal step."""
    limit = cap * diagonal.sqrt() / weight.sqrt()
    return torch.where(weight > 0, c.clamp(-limit, limit), 0.0)


def measures(work: BlockStep, form: Form) -> tuple[Tensor, Tensor]:
    """The current n of every block (0: the block sits out), and the scale of the form, (L,)."""
    if form.is_weighted:
        n = work.sums[2].sqrt()
        return n, torch.where(n > 0, 1 / n, 0.0)
    n = work.sums[1]
    return n, torch.where(n > 0, work.layout.sizes.to(n, non_blocking=True).rsqrt(), 0.0)


class Part(NamedTuple):
    """Neighbours that share a rule and an implementation of the passes."""

    corrects: bool
    columns: slice  # among the blocks of all members, in order
    passes: Foreach | Native


class Plan(NamedTuple):
    """How a group takes a step."""

    rule: Rule
    parts: list[Part]
    by_block: bool  # pass 2 solves, each block for itself
    columns: Tensor  # (rows, blocks of all members)


class CorrectedOptimizer(BlockMeanOptimizer):
    """A diagonal method with a correction between blocks, given by a `Rule` and its `Form`."""

    entry_state: ClassVar[tuple[str, ...]]
    """Moments: state with one number per entry. The last one is the second moment."""

    def rule(self, group: dict[str, Any]) -> Rule:
        """The method that the options of a group select."""
        raise NotImplementedError

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

    def check_state(self, number: int, group: dict[str, Any], states: Mapping[int, State]) -> None:
        require_state(self.param_groups[number], states, dict.fromkeys(states, self.entry_state), type(self).__name__)
        super().check_state(number, group, states)

    def layout_options(self, group: dict[str, Any]) -> dict[str, Any]:
        decompositions = 1 / group["refresh_every"] if group["correction"] else 0.0
        return {"leave_plain": True, "decompositions": decompositions}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, layout = self.param_groups[-1], self._layouts[-1]
        for member in layout.local if group["fused"] else ():
            if reason := why_not_native(local(layout.params[member.tensor]), None, (), member.cut):
                self.param_groups.pop()
                self._layouts.pop()
                raise RuntimeError(self._cannot_serve(group, member.tensor, reason))

    # ---------------------------------------------------------------- pass 1

    def block_sums(self, work: BlockStep) -> Tensor:
        plan = work.plan = self._dispatch(work)
        finite = True
        for part in plan.parts:
            finite &= part.passes.block_sums(plan.columns[:, part.columns])
        work.is_finite = finite
        return plan.columns

    def _dispatch(self, work: BlockStep) -> Plan:
        """Who computes what: C++ all tensors that it serves and may have, torch the others."""
        group, layout, members = work.group, work.layout, work.members
        rule = self.rule(group)
        *first, second = (work.moments(name) for name in self.entry_state)
        cuts = [member.cut for member in members]
        tensors = Tensors(work.params, work.grads, first[0] if first else [], second, work.steps, cuts)
        wanted = group["fused"] or (group["fused"] is None and group["foreach"] is None)
        corrected = layout.num_corrected
        if members is not layout.local:
            corrected = sum(member.tensor in layout.component_of for member in members)
        if not rule.form.corrects:
            corrected = 0
        solves = layout.is_diagonal and not layout.is_shared and not layout.sharded
        solves &= rule.form.keeps_trace and rule.cap is None
        if wanted and kernels.is_available() and serve_all(tensors):
            is_native = [True] * len(members)
            solves &= layout.longest_run <= CACHED_ENTRIES[second[0].dtype]
        else:
            require_moments(work, self.entry_state)
            is_native = [bool(wanted) and self._is_served(work, tensors, j) for j in range(len(members))]
            solves &= all(is_native[j] and _is_short(cuts[j], work.params[j]) for j in range(corrected))
        counts = [cut.count for cut in cuts]
        columns = torch.zeros(rows_of(rule), sum(counts), dtype=torch.float64, device=work.device)
        parts, start, begin = [], 0, 0
        for end in range(1, len(members) + 1):
            if end < len(members) and end != corrected and is_native[end] == is_native[begin]:
                continue
            some, stop, corrects = tensors.part(slice(begin, end)), start + sum(counts[begin:end]), begin < corrected
            used = rule if corrects else rule.plain()
            passes = Native(used, some, by_block=solves and corrects) if is_native[begin] else Foreach(used, some)
            parts.append(Part(corrects, slice(start, stop), passes))
            begin, start = end, stop
        return Plan(rule, parts, solves, columns)

    def _is_served(self, work: BlockStep, tensors: Tensors, j: int) -> bool:
        """Whether C++ takes a tensor; an error if it cannot and has to."""
        grad = work.grads[j]
        if grad is None or not kernels.is_available():
            return False
        moments = [tensors.second[j], *(xs[j] for xs in (tensors.first,) if xs)]
        reason = why_not_native(work.params[j], grad, moments, tensors.cuts[j])
        if reason and work.group["fused"]:
            raise RuntimeError(self._cannot_serve(work.group, work.members[j].tensor, reason))
        return reason is None

    def _cannot_serve(self, group: dict[str, Any], i: int, reason: str) -> str:
        return (
            f"{type(self).__name__}(fused=True) takes native kernels, which cannot serve {shown_names(group)[i]}: "
            f"it {reason}. Take fused=None."
        )

    # ---------------------------------------------------------------- the solve and pass 2

    def update_(self, work: BlockStep) -> None:
        plan: Plan = work.plan
        self._last.pop(work.number, None)
        c = kappa = None
        if (
            not plan.by_block
            and plan.rule.form.corrects
            and not work.states.keys().isdisjoint(work.layout.component_of)
        ):
            c, kappa = (None if x is None else work.in_order_of_members(x) for x in self._solve(work, plan.rule))
        good = True
        for part in plan.parts:
            if isinstance(part.passes, Native) and part.passes.by_block:
                owners = [member.tensor for member in work.members[: len(part.passes)]]
                U, energy = own_statistics(work.layout, owners, work.own)
                good = part.passes.solve_and_apply_(U, energy, plan.columns[:, part.columns])
                lengths = work.assembled(plan.columns)
                self._last[work.number] = lengths[2], lengths[3]
            elif part.corrects:
                part.passes.apply_(*(None if x is None else x[part.columns] for x in (c, kappa)))
            else:
                part.passes.apply_(None, None)
        if not good:
            raise ValueError(_describe_state(work, self._last[work.number][0]))

    def _solve(self, work: BlockStep, rule: Rule) -> tuple[Tensor | None, Tensor | None]:
        """c and κ, one number each per block, (L,); κ is None if it is 1 everywhere.

        Both are None if all eigendecompositions fail: then the step is that of the diagonal method bit by bit.
        """
        form, u = rule.form, work.sums[0]
        keeps_trace = form.keeps_trace and rule.cap is None  # a cap bounds the whole correction, and so has λ = 1
        names = ["U", "energy"] if form.is_weighted else ["U"]
        if work.group["refresh_every"] > 1 and not work.layout.is_diagonal:  # a diagonal has nothing to decompose
            names += ["root", "root_of"]
        n, scale = measures(work, form)
        common = scale * (u if form.takes_raw_sums else work.sums[3 if form.is_weighted else 2])
        change, kappa = torch.zeros_like(common), torch.ones_like(common)
        beta, failed = None if rule.betas is None else rule.betas[1], True
        for component, part in self.statistics(work, names, rule.initial):
            blocks = component.blocks
            present = None if work.present is None else work.present[blocks]
            accumulate_(part["U"], u[blocks], beta, present)
            own = n[blocks]
            if form.is_weighted:
                average_(part["energy"], work.sums[1][blocks], beta, present)
                own = part["energy"].sqrt() * (own > 0)
            root = self._root(work, rule, component, part, own)
            if root is None:
                continue
            failed = False
            change[blocks] = times(root, common[blocks])
            if keeps_trace:
                kappa[blocks] = balance(part["U"], own, work.layout.sizes[blocks].to(own, non_blocking=True))
        self._last[work.number] = (common, change)
        if failed:
            return None, None
        c = scale * (change + (1 - kappa) * common)
        if rule.cap is not None:
            c = capped(c, work.sums[4], work.sums[5], rule.cap)
        return c, kappa if keeps_trace else None

    def _root(
        self, work: BlockStep, rule: Rule, component: Component, part: dict[str, Tensor], n: Tensor
    ) -> Tensor | None:
        """A^-½ − I, or the stored one if no refresh is due; None if the eigendecomposition fails."""
        layout = work.layout
        if "root" in part:
            present = torch.zeros(len(n), dtype=torch.bool, device="cpu")
            moving = [i for i in component.members if i in work.states]
            for i in moving:
                first = layout.starts[i] - component.blocks.start
                present[first : first + layout.counts[i]] = True
            is_due = any((int(work.states[i]["step"]) - 1) % work.group["refresh_every"] == 0 for i in moving)
            if not is_due and torch.equal(part["root_of"], present):
                return part["root"]
            part["root_of"].copy_(present)
        A = normalised(part["U"], n, rule.form.keeps_diagonal)
        try:
            root = inverse_root_minus_identity(A, rule.floor)
        except LinAlgError:
            self.count_fallback(len(A))
            if "root" in part:
                part["root_of"].zero_()  # so that the next step tries again
            return None
        if "root" in part:
            part["root"].copy_(root)
        return root

    def matrices(self, step: GroupStep) -> Iterator[tuple[Component, Tensor]]:
        work: BlockStep = step.work
        work.group = {**work.group, "correction": True}
        form = self.rule(work.group).form
        self._sum(step)
        reduce(step.sums)
        work.add_shares()
        if work.states.keys().isdisjoint(work.layout.component_of):
            return
        n, _ = measures(work, form)
        for component, part in self.statistics(work, ["U", "energy"] if form.is_weighted else ["U"], keep=False):
            own = n[component.blocks]
            own = part["energy"].sqrt() * (own > 0) if form.is_weighted else own
            yield component, normalised(part["U"], own, form.keeps_diagonal)


def require_moments(work: BlockStep, names: Sequence[str]) -> None:
    """Raise unless all moments are there, and as large as their parameters."""
    for name in names:
        for x, param, member in zip(work.moments(name), work.params, work.members, strict=True):
            if x is None or x.shape != param.shape:
                what = f"{name!r} of {shown_names(work.group)[member.tensor]}"
                raise ValueError(f"The state {what} is missing or has another shape than its parameter. {ANEW}")


def _is_short(cut: TensorBlocks, param: Tensor) -> bool:
    """Whether blocks lie in one run each, of two entries or more that stay in the cache."""
    found = geometry_of(param, cut)
    return found is not None and found[0] == 1 and 1 < found[2] <= CACHED_ENTRIES[kernels.ARITHMETIC[param.dtype]]


def _describe_state(work: BlockStep, common: Tensor) -> str:
    i = int((~common.isfinite()).nonzero()[0])
    return (
        f"The state of {work.layout.owners[i]} is not finite, or has been changed so that the sums over block "
        f"{work.layout.names[i]} overflow. The parameters in such blocks stay as they are, all others took their step. "
        "Load a checkpoint, or delete the state."
    )
