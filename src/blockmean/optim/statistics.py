"""Statistics between blocks: one matrix per component during a step, stored as rows in the state of each parameter.

A parameter keeps the rows of its own blocks, with the columns in the order of its component. So every way of saving and
loading state works, parameter by parameter, and nothing is lost with a parameter that is frozen or dropped. What tells
another order of columns, and which rows belong together, is `state["blocks"]`: how the tensor is cut (a digest), the
number of its matrix in the optimizer, and its first row there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockmean.optim.base import State
from blockmean.optim.layout import Component, Layout

KINDS = {
    "U": "matrix",
    "energy": "vector",
    "root": "matrix",
    "root_of": "mask",
    "weight": "vector",
    "variance": "vector",
    "total": "matrix",
    "total_variance": "vector",
    "count": "vector",
}
"""All statistics that an optimizer of ours keeps. With coupling "none" a matrix is its diagonal."""

OPTIONAL = ("root", "root_of")
"""Those that may be missing: without a root, one is due."""


def statistics(
    layout: Layout,
    known: Mapping[int, State],
    states: Mapping[int, State],
    names: Sequence[str],
    initial: float = 0.0,
    keep: bool = True,
) -> Iterator[tuple[Component, dict[str, Tensor]]]:
    """Yield the named statistics of every component that takes part; changes in place are stored afterwards.

    Args:
        known: the states of all parameters that have one.
        states: of those that take part.
        initial: blocks that are new start with the diagonal of U and the energy of H = `initial` I, and 0 in all else.
        keep: whether anything is to be stored. What is not named is not kept up, and is dropped.
    """
    needed, stale = {"blocks", *names}.difference(OPTIONAL), KINDS.keys() - names
    for component in taking_part(layout, states):
        held = {i: known[i] for i in component.members if needed <= known.get(i, {}).keys()}
        holders = {layout.starts[i]: i for i in component.members}  # of the rows from a block on
        holders.update({layout.starts[i]: i for i in reversed(component.members) if i in held})
        gathered = {name: _gather(layout, name, holders, held, initial) for name in names}
        yield component, gathered
        if not keep:
            continue
        taking_rows = {i: held[i] if i in held else states[i] for i in component.members if i in held or i in states}
        for name, values in gathered.items():
            rows = dict(zip(holders, values.split([layout.counts[i] for i in holders.values()]), strict=True))
            old = {i: state[name] for i, state in taking_rows.items() if i in held and name in state}
            if old:
                torch._foreach_copy_(list(old.values()), [rows[layout.starts[i]] for i in old])
            for i in taking_rows.keys() - old.keys():
                taking_rows[i][name] = rows[layout.starts[i]].clone()
        for i in taking_rows.keys() - held.keys():
            states[i]["blocks"] = layout.place(i)
        for i in component.members:
            for name in stale.intersection(known.get(i, ())):
                del known[i][name]


def taking_part(layout: Layout, states: Collection[int]) -> Iterator[Component]:
    """Every component with a tensor in `states`; with coupling "none" they are merged into one."""
    active = [component for component in layout.components if any(i in states for i in component.members)]
    if not layout.is_diagonal or len(active) < 2:
        yield from active
        return
    blocks: Any = slice(active[0].blocks.start, active[-1].blocks.stop)
    if len(active) < len(layout.components):
        blocks = torch.cat([torch.arange(c.blocks.start, c.blocks.stop, device=layout.device) for c in active])
    yield Component("none", [i for component in active for i in component.members], blocks)


def _gather(layout: Layout, name: str, holders: Mapping[int, int], held: Mapping[int, State], initial: float) -> Tensor:
    """A statistic of a component: a new tensor, from the rows in `held`; the others start."""
    kind, counts = KINDS[name], [layout.counts[i] for i in holders.values()]
    wide = [sum(counts)] if kind == "matrix" and not layout.is_diagonal else []
    dtype, device = (torch.bool, "cpu") if kind == "mask" else (torch.float64, layout.device)
    rows = [
        held[i][name] if name in held.get(i, ()) else torch.zeros(count, *wide, dtype=dtype, device=device)
        for i, count in zip(holders.values(), counts, strict=True)
    ]
    values, stop = torch.cat(rows), 0
    for (start, i), count in zip(holders.items(), counts, strict=True):
        stop += count
        if i not in held:
            values[..., stop - count : stop] = 0  # if a row is missing, drop its column too
            if initial and name in ("U", "energy"):
                diagonal(values)[stop - count : stop] = initial * layout.sizes[start : start + count].to(values)
    return values


def diagonal(A: Tensor) -> Tensor:
    """The diagonal of a matrix, or of the diagonal matrix that a vector represents, (L,)."""
    return A if A.ndim == 1 else A.diagonal()


def check_places(layout: Layout, states: Mapping[int, State], names: Sequence[str], remedy: str) -> None:
    """Raise unless the blocks of every component are cut and coupled as when their statistics were gathered."""
    places = {i: state["blocks"].tolist() for i, state in states.items() if "blocks" in state and "U" in state}
    for i, (digest, *_) in places.items():
        if digest != layout.tensors[i].digest or i not in layout.component_of:
            raise ValueError(f"{names[i]} was cut into other blocks when its statistics began. {remedy}")
    for component in layout.components:
        members = [i for i in component.members if i in places]
        matrices = {places[i][1] for i in members}
        strangers = [i for i in places if places[i][1] in matrices and i not in component.members]
        rows = {(layout.starts[i], places[i][2]) for i in members}  # one row for each block, and no row for two
        unclear = len({start for start, _ in rows}) < len(rows) or len({row for _, row in rows}) < len(rows)
        kind = any((states[i]["U"].ndim == 1) != layout.is_diagonal for i in members)
        if len(matrices) > 1 or strangers or unclear or kind:
            raise ValueError(
                f"The blocks of {', '.join(names[i] for i in members)} were coupled with others when their statistics "
                f"began; coupling={layout.coupling!r} here couples them differently. {remedy}"
            )


def arrange(layout: Layout, states: Mapping[int, State]) -> None:
    """Reorder the columns of rows that were collected in a different order of blocks."""
    for component in layout.components:
        held = {i: states[i] for i in component.members if {"U", "blocks"} <= states.get(i, {}).keys()}
        where = torch.full((component.blocks.stop - component.blocks.start,), -1, device="cpu")
        for i, state in held.items():
            first, row, count = layout.starts[i] - component.blocks.start, int(state["blocks"][2]), layout.counts[i]
            where[first : first + count] = torch.arange(row, row + count, device="cpu")
            state["blocks"] = layout.place(i)
        index, gone = where.clamp(min=0).to(layout.device), (where < 0).to(layout.device)
        for state in held.values() if not layout.is_diagonal else ():
            for name in ("U", "root", "total"):
                if name in state:
                    state[name] = state[name][:, index].masked_fill_(gone, 0)
