"""Which matrices Anova processes together, their state as batches, and sums over the processes that share them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    Squares,
    Sums,
)
from blockmean.optim.sharding import Sides, Sum, local

NARROW, TALL, MOST = 8, 16, 32
"""means="auto": twice the root of the shorter side of a matrix, up to 32.

None for sides of 8 or fewer, and none where one side is more than 16 times the other: vocabularies, adapters of low
rank. There means would cost more than AdamW's second moments do, and rare words share few of them.
"""

SMALL = 2**14
"""Entries up to which equal matrices are stacked on a CPU: larger ones do not gain from it."""

# The state of means; V, Y and UM have the dims of their parameter behind the first.
UNIT_STATE = ("unit_basis", "unit_sketch", "unit_avg", "rest_sq")  # U, X, MV, v_E: one row per unit
INPUT_STATE = ("input_basis", "input_sketch", "input_avg")  # Vᵀ, Yᵀ, UM: one column per input
SMALL_STATE = ("grand_avg", "grand_sq", "unit_sq", "input_sq", "variance", "rest_variance", "step_factor")
# K, v_K, v_R, v_L, σ², that of E, c
MEANS = (*UNIT_STATE, *INPUT_STATE, *SMALL_STATE)


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
    own = local(param)
    rows, columns = own.shape[:1], own.shape[1:]
    shapes = [(*rows, k), (*rows, k), (*rows, q), rows, (q, *columns), (q, *columns), (k, *columns), (k, q), (k, q)]
    zeros = [own.new_zeros(shape, dtype=arithmetic(own.dtype)) for shape in (*shapes, (q,), (k,), (), (), ())]
    named = zip(MEANS, zeros, strict=True)
    return {name: sharding.like(param, zero, sharded_dims(name, zero.ndim)) for name, zero in named}


def sharded_dims(name: str, ndim: int) -> list[int]:
    """The dims along which the state of means is sharded if its parameter is."""
    return [0] if name in UNIT_STATE else list(range(1, ndim)) if name in INPUT_STATE else []


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
        count = int(state["step"]) + 1
        age = count - int(state["means_start_step"])
        alone = i if param.device.type == "cpu" and param.numel() > SMALL else -1
        placement = sharding.placement_of(param) if step.is_sharded else None
        kind = param.shape, param.dtype, placement, alone, count, age
        together.setdefault(kind, []).append(i)
    return [_batch(step, indices, *kind[-2:]) for kind, indices in together.items()]


def _batch(step: GroupStep, indices: list[int], count: int, age: int) -> Batch:
    group, first = step.group, step.params[indices[0]]
    states = [step.states[i] for i in indices]
    s = {name: _stack([local(state[name]) for state in states]) for name in ("exp_avg", *MEANS)}
    grads = [step.grads[i] for i in indices]
    G = _stack([grad.reshape(len(grad), grad.shape[1:].numel()) for grad in grads]).to(s["exp_avg"].dtype)
    (V, Y, UM), (U, X, MV, v_E) = (s[name].flatten(2) for name in INPUT_STATE), (s[name] for name in UNIT_STATE)
    v = Squares(s["grand_sq"], s["unit_sq"], s["input_sq"], v_E)
    beta1, beta2 = group["betas"]
    mean_beta = group["mean_beta"]
    numbers = Numbers(
        beta1,
        (mean_beta, mean_beta, mean_beta, beta2),
        float(group["lr"]),
        group["weight_decay"],
        group["eps"],
        count,
        age,
        1 - beta1**count,
        (1 - mean_beta**age, 1 - mean_beta**age, 1 - mean_beta**age, 1 - beta2**count),
        refreshes=age % group["refresh_every"] == 0,
    )
    matrices = Matrices(
        -G if group["maximize"] else G,
        s["exp_avg"].view(G.shape),
        Means(U, V.mT, X, Y.mT, s["grand_avg"], MV, UM, v, s["variance"], s["rest_variance"], s["step_factor"]),
        (first.shape[0], first.shape[1:].numel()),
        places_of(first) if step.is_sharded else (Place(), Place()),
        numbers,
    )
    sides = sharding.sides_of(first) if step.is_sharded else sharding.WHOLE
    return Batch(indices, [local(step.params[i]) for i in indices], states, s, matrices, sides)


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
