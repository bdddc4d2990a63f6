"""Which matrices Anova processes together, their state as batches, and sums over the processes that share them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from blockmean.optim import sharding
from blockmean.optim.base import GroupStep, State, arithmetic, count_steps
from blockmean.optim.decomposition import (
    SIDES,
    Matrices,
    Means,
    Numbers,
    Part,
    Place,
    Products,
    Reduce,
    Sizes,
    Sums,
    project,
    split_state,
    state_widths,
)
from blockmean.optim.sharding import Sides, Sum, local

NARROW, TALL, MOST = 8, 16, 32
"""means="auto": half of the shorter side of a matrix, up to 32.

None for sides of 8 or fewer, and none where one side is more than 16 times the other: vocabularies, adapters of low
rank. There means would cost more than AdamW's second moments do, and rare words share few of them.
"""

BY_SHAPE = ("cpu",)
"""Devices that process matrices of one shape at a time. Elsewhere launches cost more than padding does."""

SMALL = 2**14
"""Entries up to which equal matrices are stacked on a CPU: larger ones do not gain from it."""

MEANS = ("unit_means", "input_means", "grand_means")
"""The state of means, as `split_state` takes it; `input_means` has the dims of its parameter behind the first."""


@functools.cache
def means_of(shape: tuple[int, ...], means: int | tuple[int, int] | str) -> tuple[int, int]:
    """The number of means over the units and over the inputs of a tensor; (0, 0) if it is too narrow for any."""
    if len(shape) < 2:
        return 0, 0
    units, inputs = shape[0], math.prod(shape[1:])
    narrow = min(units, inputs)
    if narrow < 2:
        return 0, 0
    if isinstance(means, str):
        suits = narrow > NARROW and max(units, inputs) <= TALL * narrow
        k = min(narrow // 2, MOST) if suits else 0
        return k, k
    first, second = (means, means) if isinstance(means, int) else means
    return min(first, units), min(second, inputs)


def mean_shapes(shape: Sequence[int], k: int, q: int) -> list[tuple[int, ...]]:
    """The shapes of the state of means, or of what a process has of it."""
    columns, rows, numbers = state_widths(k, q)
    return [(shape[0], columns), (rows, *shape[1:]), (numbers,)]


def mean_state(param: Tensor, k: int, q: int) -> State:
    """The state of k and q means that have not started, all zero."""
    own = local(param)
    zeros = [own.new_zeros(shape, dtype=arithmetic(own.dtype)) for shape in mean_shapes(own.shape, k, q)]
    named = zip(MEANS, zeros, strict=True)
    return {name: sharding.like(param, zero, sharded_dims(name, zero.ndim)) for name, zero in named}


def sharded_dims(name: str, ndim: int) -> list[int]:
    """The dims along which the state of means is sharded if its parameter is."""
    return {"unit_means": [0], "input_means": list(range(1, ndim)), "grand_means": []}[name]


def means_in(state: State) -> Means:
    """The means of one matrix, as this process has them, (1, …) each."""
    units, inputs, grand = (local(state[name])[None] for name in MEANS)
    return split_state(units, inputs.flatten(2), grand, *counts(state))


def counts(state: State) -> tuple[int, int]:
    """How many means a state has, over units and over inputs."""
    columns, rows = state["unit_means"].shape[1] - 1, state["input_means"].shape[0]
    return (2 * columns - rows) // 3, (2 * rows - columns) // 3


@dataclass
class Batch:
    """Matrices that take a step together, as this process has them, those of one shape side by side."""

    indices: list[int]  # in their group
    params: list[Tensor]
    states: list[State]
    padded: dict[str, Tensor]  # the state of means, (n, …) each
    matrices: Matrices
    sides: Sides
    products: Products

    def store(self) -> None:
        """Write state back where it was copied, and count the step."""
        count_steps(self.states)
        if len(self.states) > 1:
            for name, values in self.padded.items():
                own = [_flat(local(state[name])) for state in self.states]
                torch._foreach_copy_(own, _corners(values, own))

    def mask(self, ok: Tensor) -> None:
        """Let nothing change unless `ok` is 1: then gradients, and what was taken from them, count as zero."""
        ok = ok.to(self.products.GV.device, self.products.GV.dtype)
        parts = [part._replace(G=torch.where(ok > 0, part.G, 0.0)) for part in self.matrices.parts]
        self.matrices = self.matrices._replace(parts=parts, numbers=replace(self.matrices.numbers, ok=ok))
        self.products = Products(*(torch.where(ok > 0, x, 0.0) for x in self.products))

    def adamw_squares(self) -> Tensor:
        """Sums over inputs of AdamW's second moments, where it has trained so far; else 0, (n, O)."""
        out = torch.zeros_like(self.matrices.means.v.E)
        for i, state in enumerate(self.states):
            if "exp_avg_sq" in state:
                sums = local(state["exp_avg_sq"]).flatten(1).sum(1)
                out[i, : len(sums)] = sums
        return out


def batches_of(step: GroupStep, matrices: Sequence[int]) -> list[Batch]:
    """Matrices of a group at the same step: on accelerators all that have as many means, else those of one shape."""
    together: dict[Any, list[int]] = {}
    for i in matrices:
        param, state = step.params[i], step.states[i]
        kind: tuple[Any, ...] = param.dtype, int(state["step"]), int(state["means_start_step"])
        if step.is_sharded or param.device.type in BY_SHAPE:
            kind += param.shape, sharding.placement_of(param)
            kind += (i,) if param.device.type == "cpu" and param.numel() > SMALL else ()
        else:
            kind += counts(state)
        together.setdefault(kind, []).append(i)
    return [_batch(step, indices) for indices in together.values()]


def _batch(step: GroupStep, indices: list[int]) -> Batch:
    by_shape: dict[torch.Size, list[int]] = {}
    for i in indices:
        by_shape.setdefault(_flat(step.grads[i]).shape, []).append(i)
    group, indices = step.group, [i for same in by_shape.values() for i in same]
    states, params = [step.states[i] for i in indices], [step.params[i] for i in indices]
    padded = {name: _padded([_flat(local(state[name])) for state in states]) for name in MEANS}
    parts, start = [], 0
    for same in by_shape.values():
        averages = [_flat(local(step.states[i]["exp_avg"])) for i in same]
        G = torch.stack([_flat(step.grads[i]) for i in same]) if len(same) > 1 else _flat(step.grads[same[0]])[None]
        G = G.to(averages[0].dtype)
        parts.append(Part(slice(start, start + len(same)), -G if group["maximize"] else G, averages))
        start += len(same)
    units, inputs, grand = padded.values()
    matrices = Matrices(
        parts,
        split_state(units, inputs, grand, *counts(states[0])),
        sizes_of(params),
        places_of(params[0]) if step.is_sharded else (Place(), Place()),
        numbers_of(group, states[0]),
    )
    sides = sharding.sides_of(params[0]) if step.is_sharded else sharding.WHOLE
    products = project(matrices.gradients, matrices.means.U, matrices.means.V)
    return Batch(indices, [local(param) for param in params], states, padded, matrices, sides, products)


def _flat(x: Tensor) -> Tensor:
    """A matrix of what a tensor has, with all dims but the first in one; vectors stay. A view of state."""
    return x.flatten(1) if x.ndim > 2 else x


def _padded(tensors: list[Tensor]) -> Tensor:
    """A view of one tensor, or a copy of several, smaller ones with zeros behind."""
    if len(tensors) == 1:
        return tensors[0][None]
    sizes = [max(sizes) for sizes in zip(*(x.shape for x in tensors), strict=True)]
    out = tensors[0].new_zeros(len(tensors), *sizes)
    torch._foreach_copy_(_corners(out, tensors), tensors)
    return out


def _corners(padded: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What of a padded batch is not padding, as views."""
    return [row[tuple(map(slice, x.shape))] for row, x in zip(padded.unbind(), tensors, strict=True)]


def sizes_of(params: Sequence[Tensor]) -> Sizes:
    """The sizes of whole matrices. Filled in on their device: a copy from the host could not be captured."""
    pairs = [(param.shape[0], param.shape[1:].numel()) for param in params]
    if len(set(pairs)) == 1:
        return Sizes(*pairs[0], math.prod(pairs[0]))
    runs = [(pair, len(list(same))) for pair, same in groupby(pairs)]
    of = params[0].new_empty(0, dtype=arithmetic(params[0].dtype))
    units, inputs = (torch.cat([of.new_full((n, 1), pair[side]) for pair, n in runs]) for side in (0, 1))
    return Sizes(units, inputs, (units * inputs).squeeze(1))


def rate_of(group: dict[str, Any]) -> float | Tensor:
    """The learning rate, a number unless that would make the host wait for it."""
    lr = group["lr"]
    return lr.reshape(()) if group["capturable"] and isinstance(lr, Tensor) else float(lr)


def numbers_of(group: dict[str, Any], state: State) -> Numbers:
    """The numbers of the next step of a matrix."""
    (beta1, beta2), step, start = group["betas"], int(state["step"]) + 1, int(state["means_start_step"])
    return Numbers(
        beta1,
        group["mean_beta"],
        beta2,
        rate_of(group),
        group["weight_decay"],
        group["eps"],
        step,
        is_first=step == start + 1,
        refreshes=(step - start) % group["refresh_every"] == 0,
    )


# -------------------------------------------------------------------- processes that share matrices


def places_of(param: Tensor) -> tuple[Place, Place]:
    """Which units and inputs of a matrix this process has."""
    box = sharding.box_of(param)
    if box is None:
        return Place(), Place()
    device, inputs = param.device, param.shape[1:].numel()
    columns = torch.arange(inputs, device=device).view(param.shape[1:])[tuple(slice(*span) for span in box[1:])]
    return Place(torch.arange(*box[0], device=device), param.shape[0]), Place(columns.flatten(), inputs)


def reducer(batches: Sequence[Batch]) -> Reduce:
    """The callable that completes sums over the processes that share these matrices."""
    return lambda sums: sharding.reduce(over_processes(batches, sums))


def over_processes(batches: Sequence[Batch], sums: Sums) -> list[Sum]:
    """Sums with the process groups that they are taken over."""
    return [
        Sum(value, getattr(batches[i % len(batches)].sides, side))
        for side, values in sums.items()
        for i, value in enumerate(values)
    ]


def sharded_sums(step: GroupStep, batches: Sequence[Batch]) -> list[Sum]:
    """The products of every sharded matrix of a group, in order; zeros for those without a gradient."""
    found = {i: (batch, j) for batch in batches for j, i in enumerate(batch.indices)}
    sums = []
    for i, param in enumerate(step.params):
        k, q = means_of(param.shape, step.group["means"])
        if not sharding.is_distributed(param) or (k, q) == (0, 0):
            continue
        if i in found:
            batch, j = found[i]
            products = Products(*(x[j] for x in batch.products))
        else:
            (rows, *columns), dtype = local(param).shape, arithmetic(param.dtype)
            shapes = (rows, q), (k, math.prod(columns)), (k, q), (rows,), ()
            products = Products(*(torch.zeros(shape, dtype=dtype, device=param.device) for shape in shapes))
        sides = sharding.sides_of(param)
        sums += [Sum(value, getattr(sides, side)) for value, side in zip(products, SIDES[Products], strict=True)]
    return sums
