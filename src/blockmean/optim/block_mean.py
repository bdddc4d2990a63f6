"""The base of AdaGradBMA, AdamBMA, NaturalGradientBMA and AdaGradFull: block sums, a small solve, the update.

    block_sums   a small array, (rows, L), in float64; row 0 sums the gradient; nothing changes
    (base.py completes the sums of sharded parameters and checks that all are finite)
    update_      statistics between blocks → numbers per block → state and parameters

An optimizer implements `block_sums`, `update_` and `matrices`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from blockmean._checks import require, require_choice
from blockmean._linalg import float64_device
from blockmean.blocks import BY, By, TensorBlocks, cut, outputs_of
from blockmean.optim.base import (
    BaseOptimizer,
    GroupStep,
    State,
    count_steps,
    distinct,
    given_names,
    require_state,
    shown_names,
    state_of,
)
from blockmean.optim.inspection import BlockStatistics
from blockmean.optim.layout import COUPLINGS, Component, Layout, LocalBlocks
from blockmean.optim.sharding import Sum, local, reduce, sides_of
from blockmean.optim.statistics import KINDS, arrange, check_places, statistics

ANEW = "Construct the optimizer anew."

MATRIX_LIMIT = 2**30
"""Largest matrix between blocks that is accepted, in bytes."""

SLOW_MATRIX = 1500
"""Number of blocks at which one eigendecomposition takes about a second (float64, one core)."""


@dataclass
class BlockStep:
    """The blocks of a parameter group during a step: parallel lists over the tensors that take part, as blocks go.

    Pass 1 gives a column per block of every tensor in turn. Tensors that share blocks add up.
    """

    number: int  # of the group
    group: dict[str, Any]
    layout: Layout
    states: dict[int, State]  # of parameters with a gradient, by index
    members: list[LocalBlocks]
    params: list[Tensor]  # what is local of them
    grads: list[Tensor | None]  # None: only counts in a block that it shares with others
    own: list[State]  # the state of each
    steps: list[int]  # this one included
    present: Tensor | None = None  # which blocks take part, (L,) on the CPU; None: all
    index: Tensor | None = None  # the block of every column; None if columns are the blocks of the group
    columns: Tensor = field(init=False)  # of pass 1
    sums: Tensor = field(init=False)  # (rows, L), complete
    is_finite: bool = False  # whether all sums are known to be
    runs: list[Any] = field(default_factory=list)  # what `block_sums` hands on to `update_`

    def moments(self, name: str) -> list[Any]:
        """What is local of a state tensor, for every member; None where there is none."""
        if self.layout.is_sharded:
            return [None if (x := state.get(name)) is None else local(x) for state in self.own]
        return [state.get(name) for state in self.own]

    def present_among(self, blocks: Any) -> Tensor | None:
        """Which of some blocks take part; None: all."""
        return None if self.present is None else self.present.to(self.layout.device, non_blocking=True)[blocks]

    def to_columns(self, values: Tensor) -> Tensor:
        """Numbers per block of the group as numbers per column."""
        return values if self.index is None else values[self.index]

    def to_blocks(self, columns: Tensor) -> Tensor:
        """(rows, L): columns, added up at their blocks."""
        if self.index is None:
            return columns
        return columns.new_zeros(len(columns), self.layout.num_blocks).index_add_(1, self.index, columns)

    def per_member(self, values: Tensor) -> list[Tensor]:
        """Numbers per block of the group, for every member."""
        return list(self.to_columns(values).split([member.cut.count for member in self.members]))


class BlockMeanOptimizer(BaseOptimizer):
    """An optimizer with blocks. Coupling never crosses groups; each behaves like a separate optimizer.

    Attributes:
        skipped_steps: how many steps were skipped because a gradient was not finite (nonfinite="skip").
        diagonal_fallbacks: how many eigendecompositions failed and were replaced by the diagonal step.
    """

    leaves_plain: ClassVar[bool] = False
    """Whether tensors that "unit" and "kernel" cut into single entries are left out of what is coupled."""

    def __init__(self, params: ParamsT | nn.Module, defaults: dict[str, Any]) -> None:
        self.diagonal_fallbacks = 0
        self._layouts: list[Layout] = []  # one per group
        self._last: dict[int, tuple[Tensor, Tensor] | Tensor] = {}  # `common` and `change` of a group's last step
        self._partition: By | None = defaults.get("partition")
        if callable(self._partition):  # groups and defaults must stay picklable
            defaults["partition"] = "custom"
        super().__init__(params, defaults)

    # ---------------------------------------------------------------- what an optimizer implements

    def block_sums(self, work: BlockStep) -> Tensor:
        """Pass 1: (rows, blocks of all members in order); row 0 sums the gradient. Changes nothing."""
        raise NotImplementedError

    def update_(self, work: BlockStep) -> None:
        """Update the statistics between blocks, state and parameters."""
        raise NotImplementedError

    def matrices(self, work: BlockStep) -> Iterator[tuple[Component, Tensor]]:
        """A of every component, outside a step, for `block_statistics`."""
        raise NotImplementedError

    def is_normalised(self, group: dict[str, Any]) -> bool:
        """Whether A_ii is the energy of a block along its mean, in units of the gradient's own size."""
        return False

    def init_state(self, param: Tensor, group: dict[str, Any]) -> State:
        return {"step": torch.tensor(0.0, dtype=torch.float32)}

    def check_options(self, group: dict[str, Any], *, ranges: bool) -> None:
        super().check_options(group, ranges=ranges)
        if "coupling" in group:
            require_choice(group["coupling"], COUPLINGS, "coupling", type(self).__name__)

    # ---------------------------------------------------------------- the step

    def read(self, step: GroupStep) -> None:
        work = step.work = self._begin(step)
        work.columns = self.block_sums(work)
        if not work.layout.is_sharded:
            step.sums = [Sum(work.to_blocks(work.columns), ())]
        else:  # apart for every set of processes, which add theirs
            over = [sides_of(param).both for param in step.params]
            shape = len(work.columns), work.layout.num_blocks
            step.sums = [Sum(work.columns.new_zeros(shape), groups) for groups in dict.fromkeys(over)]
            into = {groups: value for value, groups in step.sums}
            own = work.columns.split([member.cut.count for member in work.members], 1)
            for member, sums in zip(work.members, own, strict=True):
                into[over[member.tensor]][:, member.blocks] += sums
        if work.layout.is_sharded or not work.is_finite:
            values = [one.value for one in step.sums]
            step.evidence = [*values, *(x[0].square() for x in values)]  # U holds squares

    def write(self, steps: list[GroupStep]) -> None:
        for step in steps:
            if not step.states:
                continue
            count_steps(step.states.values())
            if step.work.members or step.work.layout.is_sharded:
                step.work.sums = functools.reduce(torch.add, [one.value for one in step.sums])
                self.update_(step.work)

    def _begin(self, step: GroupStep) -> BlockStep:
        """The lists of a step. Also of parameters without a gradient, in blocks where another one has a gradient."""
        layout, states = self._layout(step), step.states
        if layout.is_shared and len(states) < len(step.params):
            touched = {layout.starts[i] for i in states if layout.counts[i]}
            others = [i for i in layout.component_of if i not in states and layout.starts[i] in touched]
            states = {**states, **{i: state_of(self, step.params[i], step.group) for i in others}}
        is_complete = not set(layout.order).difference(states)
        members = layout.local if is_complete else [member for member in layout.local if member.tensor in states]
        order = [member.tensor for member in members]
        params = [step.params[i] for i in order]
        if layout.is_sharded:
            params = [local(param) for param in params]
        grads, own = list(map(step.grads.get, order)), [states[i] for i in order]
        steps = [int(state["step"].item()) + (grad is not None) for state, grad in zip(own, grads, strict=True)]
        work = BlockStep(step.number, step.group, layout, step.states, members, params, grads, own, steps)
        if not is_complete or layout.is_shared or layout.is_sharded:
            index = [block for member in members for block in range(member.blocks.start, member.blocks.stop)]
            work.index = torch.tensor(index, dtype=torch.int64, device="cpu").to(layout.device, non_blocking=True)
        if not is_complete:
            work.present = torch.zeros(layout.num_blocks, dtype=torch.bool, device="cpu")
            for i in states:
                work.present[layout.starts[i] : layout.starts[i] + layout.counts[i]] = True
        return work

    def statistics(
        self, work: BlockStep, names: Sequence[str], initial: float = 0.0, keep: bool = True
    ) -> Iterator[tuple[Component, dict[str, Tensor]]]:
        """The named statistics of every component that takes part; changes in place are kept, if `keep`."""
        known = {i: self.state[param] for i, param in enumerate(work.layout.params) if param in self.state}
        return statistics(work.layout, known, work.states, names, initial, keep)

    def count_fallback(self, num_blocks: int) -> None:
        """Count a failed eigendecomposition; warn about the first."""
        if not self.diagonal_fallbacks:
            warnings.warn(
                f"{type(self).__name__}: an eigendecomposition of {num_blocks} blocks failed twice; the diagonal step "
                "is taken instead. `diagonal_fallbacks` counts these steps. A smaller lr usually helps.",
                stacklevel=6,
            )
        self.diagonal_fallbacks += 1

    @torch.no_grad()
    def block_statistics(self) -> list[BlockStatistics]:
        """What the optimizer knows about the dependency between blocks: one entry per parameter group and matrix.

        Costs one pass over the state and the eigenvalues of every A, and only when called. If parameters are
        sharded, all processes call it.
        """
        found = []
        for number, group in enumerate(self.param_groups):
            params = distinct(group)
            states = {i: state for i, param in enumerate(params) if "step" in (state := self.state.get(param, {}))}
            if not any("U" in state for state in states.values()):
                continue
            step = GroupStep(number, {**group, "correction": True}, params, {}, states)
            self.read(step)
            reduce(step.sums)
            work: BlockStep = step.work
            work.sums = functools.reduce(torch.add, [one.value for one in step.sums])
            common, change = self._last.get(number, (None, None))
            for component, A in self.matrices(work):
                blocks = torch.arange(work.layout.num_blocks)[component.blocks].tolist()
                found.append(
                    BlockStatistics(
                        group=number,
                        coupling=component.name,
                        names=[work.layout.names[i][0] for i in blocks],
                        parameters=[work.layout.names[i][1] for i in blocks],
                        sizes=work.layout.sizes[blocks],
                        A=A,
                        common=None if common is None else common[component.blocks].clone(),
                        change=None if change is None else change[component.blocks].clone(),
                        is_normalised=self.is_normalised(group),
                    )
                )
        return found

    # ---------------------------------------------------------------- blocks of a group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, or a module, optionally with its own partition, coupling and other options."""
        params = param_group.get("params") if isinstance(param_group, dict) else None
        outputs = outputs_of(params) if isinstance(params, nn.Module) else getattr(params, "outputs", {})
        super().add_param_group(param_group)
        try:
            group, owner = self.param_groups[-1], type(self).__name__
            params, names, by = distinct(group), given_names(group), group.get("partition", "element")
            if by == "custom":
                by = self._partition
                if by is None:
                    raise ValueError(
                        f"{owner} has no callable to cut these parameters with: copies do not keep it. "
                        "Pass 'partition', or construct a new optimizer."
                    )
            known = callable(by) or by in BY
            require(known, "partition", owner, f"a callable or one of {', '.join(map(repr, BY))}", by)
            if "partition" in group:
                group["partition"] = "custom" if callable(by) else by  # groups hold plain values only
            with torch.device("cpu"):  # a layout is looked up, never computed with
                cuts = [cut(names[i], i, param, by, outputs.get(param, 0)) for i, param in enumerate(params)]
            self._layouts.append(self._make_layout(len(self.param_groups) - 1, cuts, group))
        except Exception:
            self.param_groups.pop()
            raise

    def _make_layout(self, number: int, cuts: Sequence[TensorBlocks], group: dict[str, Any]) -> Layout:
        """The blocks of the parameters of a group, for a group with these options."""
        params, names = distinct(self.param_groups[number]), given_names(self.param_groups[number])
        partition, coupling = group.get("partition", "element"), group.get("coupling", "all")
        if coupling == "module" and not all(names):
            raise ValueError(f"{type(self).__name__}(coupling='module') needs names. Pass model.named_parameters().")
        with torch.device("cpu"):
            layout = Layout(number, cuts, params, partition, coupling, self.leaves_plain)
        self.check_size(layout, group)
        return layout

    def check_size(self, layout: Layout, group: dict[str, Any]) -> None:
        """Raise if the largest matrix is too large to be stored; warn if it takes seconds to decompose."""
        if layout.is_diagonal:
            return
        owner, largest = type(self).__name__, layout.largest
        if 8 * largest**2 > MATRIX_LIMIT:
            raise ValueError(
                f"{owner} would need {8 * largest**2:,} bytes for one matrix between {largest:,} blocks, more than the "
                f"limit of {MATRIX_LIMIT:,}. Take a coarser partition, or coupling='module' or 'none'."
            )
        seconds = (largest / SLOW_MATRIX) ** 3 / group.get("refresh_every", 1)
        if seconds >= 1 and group.get("correction", True):
            warnings.warn(
                f"{owner} decomposes a matrix between {largest:,} blocks: about {seconds:.0f} seconds per step. "
                "coupling='none' or 'module' avoids large matrices; refresh_every=k decomposes once in k steps.",
                stacklevel=5,
            )

    def _layout(self, step: GroupStep) -> Layout:
        """The layout of a group; another one after loading, and where wrappers have replaced or moved parameters."""
        group, layout, owner = self.param_groups[step.number], self._layouts[step.number], type(self).__name__
        if layout.params:  # else it has been loaded or copied: a checkpoint may have another coupling
            made = layout.partition, layout.coupling
            if (group.get("partition", made[0]), group.get("coupling", made[1])) != made:
                raise ValueError(f"The partition and coupling of a parameter group of {owner} cannot change. {ANEW}")
            same = len(step.params) == len(layout.params) and all(map(is_, step.params, layout.params))
            if same and step.params[0].device == layout.placed:
                return layout
        shapes, added = [tuple(param.shape) for param in step.params], [tensor.shape for tensor in layout.tensors]
        if shapes != added:
            raise ValueError(
                f"The parameters of a group of {owner} had the shapes {added} when added, and have {shapes} now. Add "
                f"new ones with add_param_group. {ANEW}"
            )
        layout = self._make_layout(step.number, layout.tensors, group)
        states = {i: self.state[param] for i, param in enumerate(step.params) if param in self.state}
        check_places(layout, states, shown_names(group), ANEW)
        arrange(layout, states)
        self._layouts[step.number] = layout
        self._last.pop(step.number, None)
        return layout

    # ---------------------------------------------------------------- saving and loading

    def __getstate__(self) -> dict[str, Any]:
        own = {"diagonal_fallbacks": self.diagonal_fallbacks, "_layouts": self._layouts}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if not any("differentiable" in group for group in self.param_groups):
            self.defaults.pop("differentiable", None)  # torch adds it
        self.__dict__.setdefault("_partition", None)
        self._last = {}
        for layout in self._layouts:
            layout.params = []  # look again at what it is used for

    def adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        if name == "blocks" or KINDS.get(name) == "mask":
            return value.detach().to("cpu", copy=True)
        if name in KINDS:
            return value.detach().to(float64_device(param.device), torch.float64, copy=True)
        return super().adopt(param, name, value)

    def check_state(self, number: int, group: dict[str, Any], states: Mapping[int, State]) -> None:
        owner, current = type(self).__name__, self.param_groups[number]
        for i, state in states.items():
            moments = [name for name in self.entry_state if name in state or name not in self.optional_state]
            require_state(current, i, state, owner, moments)
        remedy = f"Construct {owner} with the model and the partition it was saved with, or delete 'U' from the states."
        layout = self._make_layout(number, self._layouts[number].tensors, group)
        check_places(layout, states, shown_names(current), remedy)


def refuse_fused(group: dict[str, Any], owner: str) -> None:
    """Raise if an optimizer without kernels is asked for them."""
    if group["fused"]:
        raise RuntimeError(f"{owner} has no native kernels, so it does not take fused=True. Take fused=None.")
