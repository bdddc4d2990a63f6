"""Which matrices Anova processes together, their state as batches, and sums over the processes that share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from blockmean.optim import sharding
from blockmean.optim.base import GroupStep, State, arithmetic
from blockmean.optim.decomposition import (
    SIDES,
    Matrices,
    Means,
    Numbers,
    Place,
    Products,
    Reduce,
    Sums,
    split_state,
    state_widths,
)
from blockmean.optim.sharding import Sides, Sum, local

NARROW, TALL, MOST = 8, 16, 32
"""means="auto": twice the root of the shorter side of a matrix, up to 32.

None for sides of 8 or fewer, and none where one side is more than 16 times the other: vocabularies, adapters of low
rank. There means would cost more than AdamW's second moments do, and rare words share few of them.
"""

SMALL = 2**14
"""Entries up to which equal matrices are stacked on a CPU: larger ones do not gain from it."""

MEANS = ("unit_means", "input_means", "grand_means")
"""The state of means, as `split_state` takes it; `input_means` has the dims of its parameter behind the first."""


def means_of(shape: Sequence[int], means: int | Sequence[int] | str) -> tuple[int, int]:
    """The number of means over the units and over the inputs of a tensor; (0, 0) if it is too narrow for any."""
    if len(shape) < 2:
        return 0, 0
    units, inputs = shape[0], math.prod(shape[1:])
    narrow = min(units, inputs)
    if narrow < 2:
        return 0, 0
    if isinstance(means, str):
        suits = narrow > NARROW and max(units, inputs) <= TALL * narrow
        k = min(round(2 * narrow**0.5), MOST) if suits else 0
        return k, k
    first, second = (means, means) if isinstance(means, int) else means
    return min(first, units), min(second, inputs)


def mean_state(param: Tensor, k: int, q: int) -> State:
    """The state of k and q means that have not started, all zero."""
    own, (columns, rows, numbers) = local(param), state_widths(k, q)
    shapes = (own.shape[0], columns), (rows, *own.shape[1:]), (numbers,)
    zeros = [own.new_zeros(shape, dtype=arithmetic(own.dtype)) for shape in shapes]
    named = zip(MEANS, zeros, strict=True)
    return {name: sharding.like(param, zero, sharded_dims(name, zero.ndim)) for name, zero in named}


def sharded_dims(name: str, ndim: int) -> list[int]:
    """The dims along which the state of means is sharded if its parameter is."""
    return {"unit_means": [0], "input_means": list(range(1, ndim)), "grand_means": []}[name]


def fits(state: State, k: int, q: int) -> bool:
    """Whether a state has this many means."""
    widths = state["unit_means"].shape[1], state["input_means"].shape[0], state["grand_means"].shape[0]
    return widths == state_widths(k, q)


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
    """Equal matrices that take a step together, as this process has them."""

    indices: list[int]  # in their group
    params: list[Tensor]
    states: list[State]
    stacked: dict[str, Tensor]  # their state, (n, …) each
    matrices: Matrices
    sides: Sides
    products: Products = field(init=False)

    def store(self) -> None:
        """Write state back where it was stacked, and count the step."""
        torch._foreach_add_([state["step"] for state in self.states], 1)
        if len(self.states) > 1:
            for name, values in self.stacked.items():
                torch._foreach_copy_([local(state[name]) for state in self.states], list(values.unbind()))

    def mask(self, ok: Tensor) -> None:
        """Let nothing change unless `ok` is 1: then gradients, and what was taken from them, count as zero."""
        ok = ok.to(self.matrices.G.device, self.matrices.G.dtype)
        numbers = replace(self.matrices.numbers, ok=ok)
        self.matrices = self.matrices._replace(G=torch.where(ok > 0, self.matrices.G, 0.0), numbers=numbers)
        self.products = Products(*(torch.where(ok > 0, x, 0.0) for x in self.products))

    def adamw_squares(self) -> Tensor:
        """Sums over inputs of AdamW's second moments, where it has trained so far; else 0, (n, O)."""
        kept = [state.get("exp_avg_sq") for state in self.states]
        nothing = self.matrices.G.new_zeros(self.matrices.G.shape[1])
        return torch.stack([nothing if x is None else local(x).flatten(1).sum(1) for x in kept])


def batches_of(step: GroupStep, matrices: Sequence[int]) -> list[Batch]:
    """Equal matrices of a group, at the same step, together."""
    together: dict[Any, list[int]] = {}
    for i in matrices:
        param, state = step.params[i], step.states[i]
        alone = i if param.device.type == "cpu" and param.numel() > SMALL else -1
        placement = sharding.placement_of(param) if step.is_sharded else None
        kind = param.shape, param.dtype, placement, alone, int(state["step"]), int(state["means_start_step"])
        together.setdefault(kind, []).append(i)
    return [_batch(step, indices) for indices in together.values()]


def _batch(step: GroupStep, indices: list[int]) -> Batch:
    group, first = step.group, step.params[indices[0]]
    states = [step.states[i] for i in indices]
    stacked = {name: _stack([local(state[name]) for state in states]) for name in ("exp_avg", *MEANS)}
    M, units, inputs, grand = stacked.values()
    G = _stack([step.grads[i].flatten(1) for i in indices]).to(M.dtype)
    matrices = Matrices(
        -G if group["maximize"] else G,
        M.view(G.shape),
        split_state(units, inputs.view(*inputs.shape[:2], G.shape[2]), grand, *means_of(first.shape, group["means"])),
        (first.shape[0], first.shape[1:].numel()),
        places_of(first) if step.is_sharded else (Place(), Place()),
        numbers_of(group, states[0]),
    )
    sides = sharding.sides_of(first) if step.is_sharded else sharding.WHOLE
    return Batch(indices, [local(step.params[i]) for i in indices], states, stacked, matrices, sides)


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


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """A view of one tensor, or a copy of several."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


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
