"""Cutting parameters into blocks, one tensor at a time; `Partition.of` lays the pieces end to end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from blockmean._checks import as_int, require

Params = nn.Module | Tensor | Mapping[str, Tensor] | Iterable[Tensor] | Iterable[tuple[str, Tensor]]
By = str | Callable[[str, Tensor], "str | Tensor"]
"""How to cut parameters into blocks: a name in `BY`, or a callable (name, tensor) → one of these names or labels."""

BY = ("tensor", "unit", "kernel", "module", "all", "element")


class Origin(NamedTuple):
    """Where a group of consecutive blocks comes from; names are made from it only when somebody asks."""

    name: str
    grid: tuple[int, ...]  # one block per index of the grid; () is a single block
    parameter: str
    module: str = ""  # what coupling="module" groups by

    def block_names(self) -> Iterator[str]:
        for index in itertools.product(*map(range, self.grid)):
            yield self.name + (f"[{','.join(map(str, index))}]" if index else "")


class Cut(NamedTuple):
    """One parameter cut into blocks; blocks with the same key are merged over parameters afterwards."""

    sizes: Tensor
    labels: Tensor | None  # None where the blocks are contiguous
    origin: Origin
    key: str | None
    is_grid: bool  # one block per index of the leading dims, as origin.grid says


def cut_tensor(name: str, position: int, tensor: Tensor, by: By) -> Cut:
    """Cut one parameter into blocks."""
    shape = tuple(tensor.shape)
    shown = name or f"param{position}"
    parameter = f"{shown} {list(shape)}"
    if callable(by):
        answer = by(name, tensor)
        if isinstance(answer, Tensor):
            try:
                answer = answer.broadcast_to(shape)
            except RuntimeError:
                raise ValueError(
                    f"The labels that 'by' returns for {parameter} must broadcast to its shape. "
                    f"Got shape {tuple(answer.shape)} instead."
                ) from None
            sizes, labels = sizes_of_labels(answer.flatten(), f"the partition of {parameter}")
            origin = Origin(shown, (len(sizes),), parameter, module_of(name))
            return Cut(sizes, labels, origin, None, is_grid=False)
        by = answer
    require(by in BY, "by", "Partition.of", f"a callable or one of {', '.join(map(repr, BY))}", by)
    if by == "module" and not name:
        raise ValueError("Cutting parameters by module needs names. Pass model.named_parameters() or the model itself.")
    group = {"module": module_of(name), "all": "all"}.get(str(by))
    if by == "element":
        grid = shape
    elif by == "kernel" and tensor.ndim >= 3:
        grid = shape[:2]
    elif by in ("unit", "kernel") and tensor.ndim >= 2:
        grid = shape[:1]
    else:
        grid = ()
    count = math.prod(grid)
    origin = Origin(group or shown, grid, parameter, group or module_of(name))
    key = group and f"{by} {group}"  # a module may be called "all"
    return Cut(torch.full((count,), tensor.numel() // count), None, origin, key, is_grid=True)


def number_blocks(cuts: Sequence[Cut]) -> tuple[list[int], list[Origin]]:
    """The number of the first block of every cut, and the origins of all blocks in order of first appearance.

    Cuts with a key have one block each and share it with the other cuts of that key.
    """
    starts: list[int] = []
    first: dict[str, tuple[int, int]] = {}  # key → (its block, its place among the origins)
    origins: list[Origin] = []
    count = 0
    for cut in cuts:
        if cut.key in first:
            block, place = first[cut.key]
            origins[place] = origins[place]._replace(parameter=f"{origins[place].parameter}, {cut.origin.parameter}")
            starts.append(block)
            continue
        if cut.key is not None:
            first[cut.key] = (count, len(origins))
        starts.append(count)
        origins.append(cut.origin)
        count += len(cut.sizes)
    return starts, origins


def named_tensors(params: Params) -> list[tuple[str, Tensor]]:
    """Parameters in any accepted form as (name, tensor) pairs; unnamed ones have the name ''."""
    owner = "Partition.of"
    if isinstance(params, Tensor):
        params = [params]
    if isinstance(params, nn.Module):
        params = params.named_parameters()
    if isinstance(params, Mapping):
        params = params.items()
    named: list[tuple[str, Tensor]] = []
    for item in params:
        pair: Any = item if isinstance(item, tuple) and len(item) == 2 else ("", item)
        good = isinstance(pair[0], str) and isinstance(pair[1], Tensor)
        require(good, "params", owner, "tensors or (name, tensor) pairs", item, TypeError)
        named.append(pair)
    seen: dict[int, int] = {}
    for i, (name, tensor) in enumerate(named):
        if (first := seen.setdefault(id(tensor), i)) != i:
            raise ValueError(
                f"The 'params' parameter of {owner} must not hold the same tensor twice: number {i} {name!r} is "
                f"number {first} {named[first][0]!r}. Leave one of them out."
            )
    return named


def module_of(name: str) -> str:
    """The module part of a parameter's name: 'encoder.0.weight' → 'encoder.0', a root parameter → '(root)'."""
    return name.rpartition(".")[0] or "(root)"


def sizes_of_labels(values: Sequence[int] | Tensor, owner: str) -> tuple[Tensor, Tensor | None]:
    """The size of every block, and the labels themselves unless the blocks are contiguous and in order."""
    labels = as_int(values, "labels", owner)
    require(len(labels) > 0, "labels", owner, "a non-empty sequence", [])
    require(int(labels.min()) >= 0, "labels", owner, ">= 0", int(labels.min()))
    # L cannot exceed d without leaving a hole, so a stray huge label must not make a huge count.
    sizes = torch.bincount(labels.clamp(max=len(labels)))
    if (sizes == 0).any():
        raise ValueError(
            f"The 'labels' parameter of {owner} must use every number from 0 to {int(labels.max())}. "
            f"Missing: {int((sizes == 0).nonzero()[0])}."
        )
    return sizes, None if bool((labels.diff() >= 0).all()) else labels
