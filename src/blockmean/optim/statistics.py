"""Statistics between blocks: one matrix per component during a step, stored as rows in the state of each parameter.

A parameter keeps the rows of its own blocks, with the columns in the order of its component. So every way of saving and
loading state works, parameter by parameter, and nothing is lost with a parameter that is frozen or dropped. What tells
another order of columns, and which rows belong together, is `state["blocks"]`: how the tensor is cut (a digest), the
number of its matrix in the optimizer, and its first row there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockmean.optim.layout import Component, Layout

State = dict[str, Any]


def taking_part(layout: Layout, states: Mapping[int, State], device: torch.device) -> Iterator[Component]:
    """Every component with a tensor in `states`; with coupling "none" they are merged into one."""
    active = [component for component in layout.components if any(i in states for i in component.members)]
    if not layout.is_diagonal or len(active) < 2:
        yield from active
        return
    blocks: Any = slice(active[0].blocks.start, active[-1].blocks.stop)
    if len(active) < len(layout.components):
        blocks = torch.cat([torch.arange(c.blocks.start, c.blocks.stop, device=device) for c in active])
    yield Component("none", [i for component in active for i in component.members], blocks)


def gather(
    layout: Layout,
    component: Component,
    kinds: Mapping[str, str],
    held: Mapping[int, State],
    initial: float,
    like: Tensor,
) -> dict[str, Tensor]:
    """The named statistics of a component, assembled from the rows in `held` into new tensors.

    Blocks without stored rows start with the diagonal of U and the energy that H = `initial` I gives, and 0 elsewhere.
    """
    holders = {layout.starts[i]: i for i in component.members}
    holders.update({layout.starts[i]: i for i in reversed(component.members) if i in held})
    count = sum(layout.counts[i] for i in holders.values())
    gathered = {}
    for name, kind in kinds.items():
        wide = (count,) if kind == "matrix" and not layout.is_diagonal else ()
        dtype, device = (torch.bool, "cpu") if kind == "mask" else (like.dtype, like.device)
        gathered[name] = values = torch.cat(
            [
                held[i][name]
                if name in held.get(i, ())
                else torch.zeros(layout.counts[i], *wide, dtype=dtype, device=device)
                for i in holders.values()
            ]
        )
        first = 0
        for start, i in holders.items():
            new = slice(first, first + layout.counts[i])
            first = new.stop
            if i not in held:
                values[..., new] = 0  # if a row is missing, drop its column too
                if initial and name in ("U", "energy"):
                    diagonal = values if values.ndim == 1 else values.diagonal()
                    diagonal[new] = initial * layout.sizes[start : start + layout.counts[i]].to(like)
    return gathered


def scatter(
    layout: Layout,
    component: Component,
    gathered: Mapping[str, Tensor],
    held: Mapping[int, State],
    states: Mapping[int, State],
) -> None:
    """Write the rows back to every parameter: in place if it has them, else as new tensors for those in `states`."""
    counts = {layout.starts[i]: layout.counts[i] for i in component.members}
    taking = {i: held[i] if i in held else states[i] for i in component.members if i in held or i in states}
    for name, values in gathered.items():
        rows = dict(zip(counts, values.split(list(counts.values())), strict=True))
        old = {i: state[name] for i, state in taking.items() if i in held and name in state}
        if old:
            torch._foreach_copy_(list(old.values()), [rows[layout.starts[i]] for i in old])
        for i in taking.keys() - old.keys():
            taking[i][name] = rows[layout.starts[i]].clone()
    for i in taking.keys() - held.keys():
        taking[i]["blocks"] = layout.place(i)


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


def arrange(layout: Layout, states: Mapping[int, State], kinds: Mapping[str, str]) -> None:
    """Reorder the columns of rows that were collected in a different order of blocks."""
    for component in layout.components:
        held = {i: states[i] for i in component.members if {"U", "blocks"} <= states.get(i, {}).keys()}
        where = torch.full((component.blocks.stop - component.blocks.start,), -1, device="cpu")
        for i, state in held.items():
            first, row, count = layout.starts[i] - component.blocks.start, int(state["blocks"][2]), layout.counts[i]
            where[first : first + count] = torch.arange(row, row + count, device="cpu")
            state["blocks"] = layout.place(i)
        for state in held.values():
            for name, kind in kinds.items():
                if kind == "matrix" and not layout.is_diagonal and name in state:
                    state[name] = _with_columns(state[name], where)


def _with_columns(rows: Tensor, where: Tensor) -> Tensor:
    """Rows with their columns taken from the given indices; an index of −1 gives 0."""
    if torch.equal(where, torch.arange(rows.shape[1], device="cpu")):
        return rows
    index, gone = where.clamp(min=0).to(rows.device), (where < 0).to(rows.device)
    return rows.index_select(1, index).masked_fill_(gone, 0)


def without_gaps(state: State) -> State:
    """A state without the empty dicts that torch.distributed.checkpoint inserts for missing values."""
    return {key: value for key, value in state.items() if not (isinstance(value, dict) and not value)}
