"""What all optimizers of the package share: a step in two passes.

    pass 1, read only   block sums of everything a method needs, for all groups; bad gradients are noticed here
    between             one small vector per block sum: the only thing that would have to be reduced over ranks
    pass 2              L×L statistics, their root, and the update of state and parameters

A method is three functions over lists of tensors (see `adagrad.py`); this file knows no arithmetic but the sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # as torch.optim does: torch.compiler.disable imports all of dynamo

from blockmean.optim._groups import GroupedOptimizer, distinct
from blockmean.optim._inspect import BlockStatistics, eigenvalues_of
from blockmean.optim._layout import Layout, TensorBlocks
from blockmean.statistics import (
    LinAlgError,
    accumulate_,
    average_,
    average_outer_,
    inverse_root_minus_identity,
    normalised,
    times,
)


@dataclass
class Member:
    """One parameter that takes part in a step."""

    param: Tensor
    name: str
    blocks: TensorBlocks
    state: dict[str, Any]
    grad: Tensor  # in the dtype of the arithmetic: float32 at least
    moves: bool  # False: no gradient of its own, it only counts in a block that it shares with others


@dataclass
class Work:
    """What one parameter group does in a step: its members, and after pass 1 their block sums, (rows, L)."""

    group: dict[str, Any]
    layout: Layout
    members: list[Member]
    sums: Tensor

    @cached_property
    def present(self) -> Tensor:
        """Which blocks take part, (L,)."""
        everyone = len(self.members) == len(self.layout.tensors)
        mask = torch.full((self.layout.num_blocks,), everyone, device=self.sums.device)
        for member in self.members if not everyone else ():
            mask[member.blocks.start : member.blocks.stop] = True
        return mask


class BlockMeanOptimizer(GroupedOptimizer):
    """The sequence of a step; subclasses say what is summed and how a parameter moves.

    Coupling never crosses parameter groups: groups behave like separate optimizers, as torch promises.
    """

    # ---------------------------------------------------------------- what a subclass says

    _decays_gradient = True  # weight decay is added to the gradient, and seen by all statistics

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter before its first step, without what lies in L×L buffers."""
        raise NotImplementedError

    def _memory(self, group: dict[str, Any]) -> float | None:
        """The decay of the statistics between blocks where they are averages; None where they are sums."""
        return None

    def _block_sums(self, group: dict[str, Any], members: list[Member], num_blocks: int) -> Tensor:
        """Pass 1: (rows, L) in float64; row 0 holds the block sums of the gradient. Must not change anything."""
        raise NotImplementedError

    def _measure(self, work: Work) -> Tensor:
        """n, what blocks are measured by in A = U/(n nᵀ), from the sums of pass 1, (L,)."""
        raise NotImplementedError

    _weighs_blocks = False  # averages are divided by how much weight each block has gathered
    _is_normalised = True  # A is measured in units of the gradient's own size, entry by entry

    def _keeps_diagonal(self, group: dict[str, Any]) -> bool:
        """Whether A has its own diagonal, or ones."""
        return True

    def _update(self, work: Work) -> None:
        """Pass 2: move state and parameters."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: computes the gradients anew and returns the loss, which is then returned from here.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._advance()
        return loss

    @_disable_dynamo
    def _advance(self) -> None:
        """Both passes over all groups. Never traced: the check for bad gradients branches on values, and eigh breaks
        a graph anyway, so that compiling costs minutes and gains nothing."""
        works = [work for group in self.param_groups if (work := self._collect(group)) is not None]
        bad = [work for work in works if not finite_blocks(work.sums).all()]
        if bad:
            for work in bad:
                if work.group["nonfinite"] == "raise":
                    raise ValueError(_describe_nonfinite(work))
            self.skipped_steps += 1
            return
        for work in works:
            for member in work.members:
                if member.moves:
                    self.state[member.param] = member.state
                    member.state["step"] += 1
            self._update(work)

    def _collect(self, group: dict[str, Any]) -> Work | None:
        """Pass 1 of one group; None where no parameter has a gradient."""
        params = distinct(group)
        if not any(param.numel() for param in params):
            return None
        layout = self._layout_of(group)
        members = []
        for i, (param, blocks) in enumerate(zip(params, layout.tensors, strict=True)):
            if param.grad is not None:
                grad = self._effective_grad(param, layout.parameters[i], group)
                members.append(self._member(layout.parameters[i], param, blocks, group, grad, moves=True))
        if not members:
            return None
        if layout.is_shared:
            touched = {member.blocks.start for member in members}
            for i, (param, blocks) in enumerate(zip(params, layout.tensors, strict=True)):
                if param.grad is None and blocks.start in touched:
                    zero = torch.zeros_like(param, dtype=arithmetic(param))
                    members.append(self._member(layout.parameters[i], param, blocks, group, zero, moves=False))
        devices = sorted({str(member.param.device) for member in members})
        if len(devices) > 1:
            raise RuntimeError(
                f"{type(self).__name__} couples the parameters of a group, which must be on one device. "
                f"Got {' and '.join(devices)}. Put them into separate parameter groups."
            )
        return Work(group, layout, members, self._block_sums(group, members, layout.num_blocks))

    def _member(
        self, name: str, param: Tensor, blocks: TensorBlocks, group: dict[str, Any], grad: Tensor, moves: bool
    ) -> Member:
        state = self.state.get(param, {})
        if "step" not in state:
            # Handed over to self.state only once the gradients of all groups are known to be good.
            state = {**state, **self._new_state(param, group)}
        return Member(param, name, blocks, state, grad, moves)

    def _effective_grad(self, param: Tensor, name: str, group: dict[str, Any]) -> Tensor:
        """The gradient that the method sees; `param.grad` itself is never changed."""
        assert param.grad is not None
        if param.grad.layout != torch.strided:
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients. {name} has one.")
        grad = param.grad.to(arithmetic(param))
        if group["maximize"]:
            grad = -grad
        if group["weight_decay"] and self._decays_gradient:
            grad = grad.add(param, alpha=group["weight_decay"])
        return grad

    # ---------------------------------------------------------------- the correction between blocks

    def _correction(self, work: Work, b: Tensor, scale: Tensor, floor: float) -> Tensor:
        """Update U with the block sums of the gradient and return c, one number per block (see `statistics`)."""
        U, weight = self._gather(work)
        n = self._measure(work)
        amortised = work.group.get("refresh_every", 1) > 1
        roots = self._bind(work, "root", lambda *_: torch.nan) if amortised else [None] * len(U)
        common = scale * b
        change = torch.zeros_like(common)
        for i, (blocks, stored) in enumerate(zip(work.layout.components, roots, strict=True)):
            present = work.present[blocks]
            if not present.any():
                continue
            root = None if stored is None else self._current_root(work, i, stored, present)
            if root is None:
                root = self._fresh_root(self._matrix(work, n, U, weight, i), floor, present, stored)
            change[blocks] = times(root, common[blocks])
        self._remember(work, common, change)
        return scale * change

    def _matrix(self, work: Work, n: Tensor, U: list[Tensor], weight: list[Tensor] | None, i: int) -> Tensor:
        """A of component i."""
        own = n[work.layout.components[i]]
        return normalised(U[i], own if weight is None else own * weight[i].sqrt(), self._keeps_diagonal(work.group))

    def _remember(self, work: Work, common: Tensor, change: Tensor) -> None:
        """Keep what the last step did along the blocks, for `block_statistics`."""
        self._last[work.group["params"][0]] = (common, change)

    def block_statistics(self) -> list[BlockStatistics]:
        """What the optimizer knows of the dependency between blocks: one entry per parameter group and matrix.

        Costs one pass over the state and the eigenvalues of every A; nothing is computed unless it is called.
        """
        found = []
        for number, group in enumerate(self.param_groups):
            params = [param for param in distinct(group) if "U" in self.state.get(param, {})]
            if not params:
                continue
            work = self._work_at_rest(group)
            U = self._bind(work, "U", self._initial_statistics)
            weight = self._bind(work, "weight", lambda *_: 0.0, vector=True) if self._weighs_blocks else None
            n = self._measure(work)
            common, change = self._last.get(group["params"][0], (None, None))
            layout = work.layout
            for i, blocks in enumerate(layout.components):
                matrix = self._matrix(work, n, U, weight, i)
                found.append(
                    BlockStatistics(
                        group=number,
                        coupling=layout.component_name(blocks),
                        names=[layout.names[block] for block in blocks.tolist()],
                        parameters=[layout.owners[block] for block in blocks.tolist()],
                        sizes=layout.sizes[blocks],
                        A=matrix,
                        eigenvalues=eigenvalues_of(matrix),
                        common=None if common is None else common[blocks],
                        change=None if change is None else change[blocks],
                    )
                )
        return found

    @torch.no_grad()
    def _work_at_rest(self, group: dict[str, Any]) -> Work:
        """Pass 1 with zero gradients for every parameter that has state: the sums as they stand."""
        layout = self._layout_of(group)
        members = [
            Member(param, name, blocks, self.state[param], torch.zeros_like(param, dtype=arithmetic(param)), False)
            for param, name, blocks in zip(distinct(group), layout.parameters, layout.tensors, strict=True)
            if "step" in self.state.get(param, {})
        ]
        # Asked for with the correction, so that all sums are there also where it has been switched off since.
        asked = {**group, "correction": True}
        return Work(group, layout, members, self._block_sums(asked, members, layout.num_blocks))

    def _gather(self, work: Work) -> tuple[list[Tensor], list[Tensor] | None]:
        """U with this step in it, and what its averages have to be divided by: None where it is a plain sum."""
        u, present, beta = work.sums[0], work.present, self._memory(work.group)
        U = self._bind(work, "U", self._initial_statistics)
        if beta is None:
            for i, blocks in enumerate(work.layout.components):
                accumulate_(U[i], u[blocks])
            return U, None
        weight = self._bind(work, "weight", lambda *_: 0.0, vector=True) if self._weighs_blocks else None
        for i, blocks in enumerate(work.layout.components):
            average_outer_(U[i], u[blocks], beta, present[blocks])
            if weight is not None:
                average_(weight[i], 1.0, beta, present[blocks])
        return U, weight

    def _current_root(self, work: Work, component: int, stored: Tensor, present: Tensor) -> Tensor | None:
        """The stored A^-½ − I, or None where a parameter's step count comes round or other blocks take part.

        A stored root has NaN on its diagonal where a block sat out.
        """
        every = work.group["refresh_every"]
        members = [m for m in work.members if m.moves and m.blocks.component == component]
        if any((int(member.state["step"]) - 1) % every == 0 for member in members):
            return None
        made_for = ~(stored if stored.ndim == 1 else stored.diagonal()).isnan()
        if not torch.equal(made_for, present):
            return None
        return stored if made_for.all() else stored.nan_to_num(nan=0.0)

    def _fresh_root(self, A: Tensor, floor: float, present: Tensor, stored: Tensor | None) -> Tensor:
        """A^-½ − I, computed now and stored where it is to serve for several steps."""
        try:
            root = inverse_root_minus_identity(A, floor)
        except LinAlgError:
            self._count_fallback(len(A))
            root = self._fallback_root(A, floor)
        if stored is not None:
            stored.copy_(root)
            (stored if stored.ndim == 1 else stored.diagonal()).masked_fill_(~present, torch.nan)
        return root

    def _count_fallback(self, num_blocks: int) -> None:
        if not self.diagonal_fallbacks:
            warnings.warn(
                f"{type(self).__name__}: an eigendecomposition of {num_blocks} blocks failed twice; the diagonal step "
                "is taken instead. `diagonal_fallbacks` counts how often. A smaller lr usually helps.",
                stacklevel=6,
            )
        self.diagonal_fallbacks += 1

    def _fallback_root(self, A: Tensor, floor: float) -> Tensor:
        """What stands in for A^-½ − I where it cannot be had: no correction at all."""
        return torch.zeros_like(A)

    def _initial_statistics(self, group: dict[str, Any], sizes: Tensor) -> float | Tensor:
        """The diagonal of U before the first step."""
        return 0.0

    def _bind(
        self,
        work: Work,
        name: str,
        initial: Callable[[dict[str, Any], Tensor], float | Tensor],
        vector: bool = False,
    ) -> list[Tensor]:
        """The buffers of a statistic, one per component, whose rows are `state[param][name]`; L×L, or L numbers.

        State lives in `state[param]`, so that every way of saving it works; the rows are views of one buffer, so that
        nothing is put together in a step. After loading or copying they are no longer views, and are bound again.
        """
        layout, params = work.layout, distinct(work.group)
        key = (params[0], name)
        held = [self.state.get(param, {}).get(name) for param in params]
        buffers, rows = self._bound.get(key, ([], []))
        if len(rows) != len(held) or any(row is not mine for row, mine in zip(held, rows, strict=True)):
            buffers = self._assemble(work, held, initial, vector or layout.is_diagonal)
            rows = [None] * len(params)
            self._bound[key] = (buffers, rows)
        for i, (param, blocks) in enumerate(zip(params, layout.tensors, strict=True)):
            if rows[i] is None and self.state.get(param):
                rows[i] = self.state[param][name] = blocks.rows(buffers)
        return buffers

    def _assemble(
        self,
        work: Work,
        held: list[Tensor | None],
        initial: Callable[[dict[str, Any], Tensor], float | Tensor],
        vector: bool,
    ) -> list[Tensor]:
        """New buffers with the rows that parameters hold, and the initial diagonal where they hold none."""
        layout = work.layout
        shapes = [len(blocks) if vector else (len(blocks), len(blocks)) for blocks in layout.components]
        buffers = [work.sums.new_zeros(shape) for shape in shapes]
        new = torch.ones(layout.num_blocks, dtype=torch.bool, device="cpu")
        for row, at in zip(held, layout.tensors, strict=True):
            if row is not None and row.shape == at.rows(buffers).shape:
                at.rows(buffers).copy_(row)
                new[at.start : at.stop] = False
        for buffer, blocks in zip(buffers, layout.components, strict=True):
            buffer[..., new[blocks]] = 0.0  # a row that is gone takes its column with it
            diagonal = buffer if vector else buffer.diagonal()
            start = torch.as_tensor(initial(work.group, layout.sizes[blocks])).to(buffer)
            diagonal.copy_(torch.where(new[blocks].to(buffer.device), start, diagonal))
        return buffers


def arithmetic(param: Tensor) -> torch.dtype:
    """The dtype of state and arithmetic: that of the parameter, but float32 at least."""
    return torch.promote_types(param.dtype, torch.float32)


def decayed_rate(group: dict[str, Any], member: Member) -> float:
    """AdaGrad's learning rate η / (1 + (t − 1) decay)."""
    decay = group["lr_decay"]
    return float(group["lr"]) / (1 + (float(member.state["step"]) - 1) * decay if decay else 1)


def move_(member: Member, delta: Tensor, rate: float) -> None:
    """θ ← θ − rate · δ, rounded once to the parameter's own dtype."""
    if member.param.dtype == delta.dtype:
        member.param.add_(delta, alpha=-rate)
    else:
        member.param.copy_(member.param.to(delta.dtype).add_(delta, alpha=-rate))


def finite_blocks(sums: Tensor) -> Tensor:
    """Which blocks have finite sums, and sums of the gradient whose squares U can take, (L,)."""
    return sums.isfinite().all(0) & sums[0].square().isfinite()


def _describe_nonfinite(work: Work) -> str:
    gradients = [(f"gradient of {member.name}", member.param.grad) for member in work.members if member.moves]
    for what, tensor in [*gradients, *((f"parameter {member.name}", member.param) for member in work.members)]:
        if tensor is not None and not tensor.isfinite().all():
            nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            found = f"The {what} has {nan} NaN and {inf} infinite of {tensor.numel()} entries"
            break
    else:
        i = int((~finite_blocks(work.sums)).nonzero()[0])
        found = f"The sums over block {work.layout.names[i]} overflow, though every gradient is finite"
    return f"{found}. Nothing was changed. nonfinite='skip' leaves such steps out and counts them."
