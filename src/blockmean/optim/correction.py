"""Between the two passes: turn block sums into one number per block.

    U ← U + u uᵀ  (or its average)      A = U / (n nᵀ)      root = A^-½ − I      c = N [root + I − diag κ] N b

With coupling "none" only diagonals exist: U, A and the root are vectors, and nothing is decomposed. A block with
n_i = 0 (no gradient in this step, or none ever) sits out: its row of A is that of the identity, so the other blocks
take exactly the step of the principal submatrix without it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockmean._linalg import LinAlgError, home_of, inverse_root_minus_identity, times
from blockmean.blocks import By
from blockmean.optim import native
from blockmean.optim.forms import SMALLEST_LAMBDA, Form, Rule
from blockmean.optim.layout import Component, Layout, Pieces
from blockmean.optim.native.solver import Solver, can_solve
from blockmean.optim.optimizer import BlockMeanOptimizer, Work, finite_blocks, shown_names
from blockmean.optim.passes import NATIVE, Tensors, choose, wants_native
from blockmean.optim.sharding import local


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


NOTHING = torch.empty(0)


class Part(NamedTuple):
    """Pieces that share a rule and an implementation of the passes."""

    run: slice  # among the pieces of the group
    columns: slice  # among their blocks, in the order of pieces
    rule: Rule
    tensors: Tensors
    passes: Any


@dataclass
class Plan:
    """How a group takes its steps."""

    options: tuple[Any, ...]  # what the choice of parts depends on
    parts: list[Part]  # those to correct, followed by those that take the plain step
    columns: Tensor  # (rows, blocks of all pieces in order)
    solver: Solver | None = None

    def is_local(self, layout: Layout) -> bool:
        """Whether the kernels may solve block by block, as they update: each block for itself, from its own sums alone.

        Not in the first step of a plan: nobody has looked at the moments yet, and they could be anything. Not with a
        cap: squares of diagonal steps may overflow, which has to be noticed before anything changes.
        """
        rule = self.parts[0].rule
        return self.solver is not None and layout.is_diagonal and rule.form.is_weighted and rule.cap is None


class CorrectedOptimizer(BlockMeanOptimizer):
    """A diagonal method with a correction between blocks, given by a `Rule` and its `Form`."""

    statistics_kept = MappingProxyType({"U": "matrix", "energy": "vector", "root": "matrix", "root_of": "mask"})
    leaves_plain = True
    keeps_lists = True
    has_kernels = True

    def rule(self, group: dict[str, Any]) -> Rule:
        """The method that the options of a group select."""
        raise NotImplementedError

    def measures_diagonal(self, group: dict[str, Any]) -> bool:
        return self.rule({**group, "correction": True}).form.is_weighted

    # ---------------------------------------------------------------- which tensors the native kernels take

    def _make_layout(
        self, group: dict[str, Any], tensors: list[Tensor], by: By, outputs: Sequence[int | Tensor]
    ) -> Layout:
        layout = super()._make_layout(group, tensors, by, outputs)
        if group["fused"]:
            pieces = layout.whole
            self._refuse_fused(group, {i: native.refusal(local(tensors[i]), None, [], cut) for i, _, cut, _ in pieces})
        return layout

    def pieces(self, work: Work, device: torch.device) -> Pieces:
        """Whole tensors for the kernels, and pieces of the others."""
        group = work.group
        if not wants_native(group["foreach"], group["fused"]):
            return super().pieces(work, device)
        reasons: dict[int, str | None] = {}
        cuts = {piece.tensor: piece.cut for piece in work.layout.whole}
        written = []
        for i, state in work.states.items():
            param, moments = local(work.tensors[i]), [local(state[key]) for key in self.entry_state]
            cut = cuts.get(i, work.layout.cuts[i])
            reasons[i] = native.refusal(param, work.gradient(i), moments, cut)
            written += [(i, x) for x in (param, *moments) if not reasons[i]]
        reasons.update(dict.fromkeys(native.overlapping(written), "shares memory with another"))
        if group["fused"]:
            self._refuse_fused(group, reasons)
        work.native = {i for i, reason in reasons.items() if not reason}
        everything = len(work.native) == len(work.tensors)
        return work.layout.whole if everything else work.layout.split_except(work.native)

    def _refuse_fused(self, group: dict[str, Any], reasons: dict[int, str | None]) -> None:
        for i, reason in reasons.items():
            if reason:
                owner, name = type(self).__name__, shown_names(group)[i]
                raise RuntimeError(
                    f"{owner}(fused=True) takes native kernels, which cannot serve {name}: it {reason}. "
                    "Take fused=None."
                )

    # ---------------------------------------------------------------- the hooks

    def _plan(self, work: Work) -> Plan:
        """The parts of a step, or those of the last one with the numbers of this one."""
        rule, group = self.rule(work.group), work.group
        plan: Plan | None = work.plan
        options = (rule.form, rule.cap is None, group["refresh_every"] > 1, group["foreach"], group["fused"])
        if plan is not None and plan.options == options:
            plan.parts = [
                part._replace(
                    rule=rule if part.rule.form.corrects else rule.plain(),
                    tensors=part.tensors._replace(grads=work.grads[part.run], steps=work.steps[part.run]),
                )
                for part in plan.parts
            ]
            return plan
        *first, second = (work.moments[key] for key in self.entry_state)
        lists = Tensors(work.params, work.grads, first[0] if first else [], second, work.steps, work.cuts)
        count = sum(blocks.start < work.layout.num_coupled for blocks in work.blocks) if rule.form.corrects else 0
        shape = native.rows_of(rule if count else rule.plain()), sum(cut.count for cut in work.cuts)
        home = home_of(work.tensors[0].device)
        plan = Plan(options, [], torch.zeros(shape, dtype=torch.float64, device=home))
        start = 0
        for (corrects, is_native), group_of in groupby(
            range(len(work.params)), lambda j: (j < count, work.grads[j] is not None and work.indices[j] in work.native)
        ):
            members = list(group_of)
            run = slice(members[0], members[-1] + 1)
            tensors, own = lists.part(run), rule if corrects else rule.plain()
            columns = slice(start, start := start + sum(cut.count for cut in tensors.cuts))
            fused = group["fused"] if is_native else False
            passes = choose(tensors, group["foreach"], fused, plan.columns[:, columns])
            plan.parts.append(Part(run, columns, own, tensors, passes))
        return plan

    def num_rows(self, group: dict[str, Any]) -> int:
        return native.rows_of(self.rule(group))

    def block_sums(self, work: Work) -> Tensor:
        plan = work.plan = self._plan(work)
        finite = work.in_order
        for part in plan.parts:
            if isinstance(part.passes, NATIVE):
                by_block = part.rule.form.corrects and plan.is_local(work.layout)
                part.passes.block_sums(part.rule, part.tensors, by_block)
                finite = finite and part.passes.is_finite
            else:
                sums = part.passes.block_sums(part.rule, part.tensors)
                plan.columns[: len(sums), part.columns] = sums
                finite = False  # nobody has looked yet
        work.is_finite = finite or None
        return plan.columns

    def apply_(self, work: Work, solution: tuple[Tensor, Tensor | None] | None) -> None:
        c, kappa = (work.in_order_of_pieces(x) if x is not None else x for x in solution or (None, None))
        good = True
        for part in work.plan.parts:
            if isinstance(part.passes, NATIVE) and part.passes.is_local:
                good &= part.passes.solve_and_apply_(part.rule, work.plan.solver, work.sums)
                continue
            own = [x[part.columns] if x is not None and part.rule.form.corrects else NOTHING for x in (c, kappa)]
            part.passes.apply_(part.rule, part.tensors, *own)
        if not good:
            raise ValueError(_describe_state(work))

    def _keep(self, work: Work) -> None:
        super()._keep(work)
        work.plan.parts = [part._replace(tensors=part.tensors._replace(grads=[])) for part in work.plan.parts]

    def _solver(self, work: Work, names: Collection[str], initial: float) -> Solver | None:
        """The native solve, if all tensors take part."""
        plan: Plan | None = work.plan
        if plan is None or not work.in_order:
            return None
        if plan.solver is None:
            corrected = [part.passes for part in plan.parts if part.rule.form.corrects]
            if all(isinstance(passes, NATIVE) for passes in corrected) and can_solve(
                work.layout, work.states, names, self.statistics_kept
            ):
                plan.solver = Solver(work.layout, work.states, list(names), initial)
        return plan.solver

    def solve(self, work: Work) -> tuple[Tensor, Tensor | None] | None:
        """c and κ, one number each per block, (L,). None without a correction; κ is None if it is 1 everywhere.

        None also if all eigendecompositions fail: then the step is that of the diagonal method bit by bit.
        """
        rule, u = self.rule(work.group), work.sums[0]
        form = rule.form
        keeps_trace = form.keeps_trace and rule.cap is None  # a cap bounds the whole correction, and so has λ = 1
        if not form.corrects or work.states.keys().isdisjoint(work.layout.component_of):
            self._last.pop(work.number, None)
            return None
        names = ["U", "energy"] if form.is_weighted else ["U"]
        if work.group["refresh_every"] > 1 and not work.layout.is_diagonal:  # a diagonal has nothing to decompose
            names += ["root", "root_of"]
        solver = self._solver(work, names, rule.initial)
        if solver is not None:
            self._last[work.number] = (solver.common, solver.change)
            if work.plan.parts[0].passes.is_local:  # `apply_` will do it
                return None
            return solver.solve(rule, work.sums, self.count_fallback, partial(_is_due, work))
        n, scale = self._measures(work, form)
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
            return None
        c = scale * (change + (1 - kappa) * common)
        if rule.cap is not None:
            c = capped(c, work.sums[4], work.sums[5], rule.cap)
        return c, kappa if keeps_trace else None

    def _measures(self, work: Work, form: Form) -> tuple[Tensor, Tensor]:
        """The current n of every block (0: the block sits out), and the scale of the form, (L,)."""
        if form.is_weighted:
            n = work.sums[2].sqrt()
            return n, torch.where(n > 0, 1 / n, 0.0)
        n = work.sums[1]
        return n, torch.where(n > 0, work.layout.sizes.to(n, non_blocking=True).rsqrt(), 0.0)

    def _root(self, work: Work, rule: Rule, component: Component, part: dict[str, Tensor], n: Tensor) -> Tensor | None:
        """A^-½ − I, or the stored one if no refresh is due; None if the eigendecomposition fails."""
        layout = work.layout
        if "root" in part:
            present = torch.zeros(len(n), dtype=torch.bool, device="cpu")
            moving = [i for i in component.members if i in work.states]
            for i in moving:
                first = layout.starts[i] - component.blocks.start
                present[first : first + layout.counts[i]] = True
            if not _is_due(work, moving) and torch.equal(part["root_of"], present):
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

    def matrices(self, work: Work) -> Iterator[tuple[Component, Tensor]]:
        asked = replace(work, group={**work.group, "correction": True}, plan=None)
        asked.sums = self.block_sums(asked)
        self._complete([asked])
        work.sums, form = asked.sums, self.rule(asked.group).form
        if not form.corrects or work.states.keys().isdisjoint(work.layout.component_of):
            return
        n, _ = self._measures(work, form)
        for component, part in self.statistics(work, ["U", "energy"] if form.is_weighted else ["U"], keep=False):
            own = n[component.blocks]
            own = part["energy"].sqrt() * (own > 0) if form.is_weighted else own
            yield component, normalised(part["U"], own, form.keeps_diagonal)


def _is_due(work: Work, members: Sequence[int]) -> bool:
    """Whether a new root is due for the matrix of these tensors."""
    return any((int(work.states[i]["step"]) - 1) % work.group["refresh_every"] == 0 for i in members)


def _describe_state(work: Work) -> str:
    i = int((~finite_blocks(work.sums)).nonzero()[0])
    return (
        f"The state of {work.layout.owners[i]} is not finite, or has been changed so that the sums over block "
        f"{work.layout.names[i]} overflow. The parameters in such blocks stay as they are, all others took their step. "
        "Load a checkpoint, or delete the state."
    )
