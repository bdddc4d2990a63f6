"""Anova's matrices in C++: which ones the kernels serve, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockmean._linalg import NOISE
from blockmean.optim import native
from blockmean.optim.parts import FORGET, STATE, Step


def inner_of(param: Tensor) -> int | None:
    """Kernel positions of a convolution that is stored with its channels last, 1 for rows in order; None if neither."""
    order = native.memory_order(param.shape, param.stride())
    dims = [dim for dim, size in enumerate(param.shape) if size > 1]
    if order == dims:
        return 1
    if order is not None and dims[:2] == [0, 1] and order == [0, *dims[2:], 1]:
        return param.shape[2:].numel()
    return None


class Matrices:
    """Both passes over the matrices of a group, whose addresses are looked up once; only gradients may move."""

    def __init__(self, params: Sequence[Tensor], states: Sequence[Mapping[str, Any]]) -> None:
        numbers: list[int] = []
        for param, state in zip(params, states, strict=True):
            inner = inner_of(param)
            assert inner is not None  # `refusal` has checked
            sides = param.shape[0], param.shape[1:].numel(), state["units"].shape[1], state["inputs"].shape[0]
            numbers += [param.data_ptr(), *sides, inner, native.DTYPES[param.dtype]]
            numbers += [state[name].data_ptr() for name in STATE]
        self._table = native._kernels.matrices(numbers)
        self._params = params
        self._smallest = [torch.finfo(state["units"].dtype).tiny ** 0.5 for state in states]
        self.squares = torch.zeros(len(params), dtype=torch.float64, device="cpu")

    def sums(self, grads: Sequence[Tensor]) -> bool:
        """The squared length of every gradient, in `squares`; whether all are finite."""
        addresses = [grad.data_ptr() for grad in grads]
        native.require_memory(addresses)
        return native._kernels.anova_sums(self._table, addresses, self.squares.data_ptr(), torch.get_num_threads())

    def apply_(self, steps: Sequence[Step], eps: float) -> list[int]:
        """One step of every matrix. Returns those whose U and V have yet to turn."""
        different: dict[tuple[Step, float], int] = {}
        which = [different.setdefault(one, len(different)) for one in zip(steps, self._smallest, strict=True)]
        numbers: list[tuple[float, ...]] = [
            (
                step.maximize,
                step.turns,
                *step.betas,
                step.mean_beta,
                step.rate,
                step.decay,
                step.unbias(is_remainder=False),
                step.unbias(is_remainder=True),
                step.longest(is_remainder=False),
                step.longest(is_remainder=True),
                FORGET,
                eps,
                NOISE,
                smallest if eps <= smallest else 0.0,
            )
            for step, smallest in different
        ]
        left = native._kernels.anova_apply_(
            self._table, self.squares.data_ptr(), numbers, which, torch.get_num_threads()
        )
        torch.autograd.graph.increment_version(self._params)  # so that a stale graph is noticed
        return left
