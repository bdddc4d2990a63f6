"""Notice cheaply whether anything that the lists of a step were made from has changed since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from blockmean.optim import native

PLAIN = (Tensor, nn.Parameter)


class Watch:
    """The tensors behind a step: parameters, their states, and the kinds of their gradients.

    Identity alone does not do: `tensor.data = …` gives a tensor other memory, another shape or other strides. Of a
    state only its place in memory is compared, and the size of moments: one that is transposed in place goes unnoticed.
    """

    def __init__(self, tensors: list[Tensor], states: Mapping[int, dict[str, Any]]) -> None:
        self._tensors = tensors
        self._own = [states.get(i) for i in range(len(tensors))]
        self._things = [thing for i, state in states.items() for thing in (tensors[i], *state.values())]
        # Not of `blocks`: nobody computes with it.
        self._addresses = [None if thing.dtype == torch.int64 else thing.data_ptr() for thing in self._things]
        self._sizes = [
            thing.nbytes if thing is not tensors[i] and thing.ndim == tensors[i].ndim else None
            for i, state in states.items()
            for thing in (tensors[i], *state.values())
        ]
        self._kinds = [_kind(tensors[i]) for i in states]
        self._gradients = [_gradient_kind(grad) for i in states if (grad := tensors[i].grad) is not None]

    @staticmethod
    def can_see(tensors: Sequence[Tensor], states: Mapping[int, dict[str, Any]]) -> bool:
        """Whether all of these are tensors with memory of their own; somebody may have added others to a state."""
        things = [thing for i, state in states.items() for thing in (tensors[i], tensors[i].grad, *state.values())]
        return all(type(thing) in PLAIN and thing.layout is torch.strided for thing in things)

    def gradients(self, tensors: list[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> list[Tensor] | None:
        """The new gradients, if these parameters and their states are the ones seen before; None if anything differs.

        Those of parameters that take part, in order, and of the same kinds as before.
        """
        about = self._things, self._addresses, self._sizes, self._kinds, self._gradients
        seen = (self._tensors, self._own, *about)
        if native.is_available():
            return native.unchanged(tensors, states, *seen)
        return unchanged(tensors, states, *seen)


def unchanged(
    tensors: list[Tensor],
    states: Mapping[Tensor, dict[str, Any]],
    seen: list[Tensor],
    own: list[dict[str, Any] | None],
    things: list[Tensor],
    addresses: list[int | None],
    sizes: list[int | None],
    kinds: list[tuple[Any, ...]],
    gradients: list[tuple[Any, ...]],
) -> list[Tensor] | None:
    """What `Watch` asks, in Python; native/watch.cpp asks the same."""
    found: list[Tensor] = []
    own_kinds, grads = [], []
    if len(tensors) != len(own) or not all(map(is_, tensors, seen)):
        return None
    for param, state in zip(tensors, own, strict=True):
        grad = param.grad
        if grad is None or state is None:
            if grad is not None or state is not None:
                return None
            continue
        if states.get(param) is not state:
            return None
        found += [param, *state.values()]
        own_kinds.append(_kind(param))
        grads.append(grad)
    same = (
        len(found) == len(things)
        and all(map(is_, found, things))
        and all(at is None or thing.data_ptr() == at for thing, at in zip(found, addresses, strict=True))
        and all(size is None or thing.nbytes == size for thing, size in zip(found, sizes, strict=True))
        and own_kinds == kinds
        and list(map(_gradient_kind, grads)) == gradients
    )
    return grads if same else None


def _kind(param: Tensor) -> tuple[Any, ...]:
    return param.shape, param.is_contiguous() or param.stride()


def _gradient_kind(grad: Tensor) -> tuple[Any, ...]:
    if grad.layout is not torch.strided:  # has no strides
        return type(grad), grad.layout
    return type(grad), grad.dtype, grad.is_neg(), grad.shape, grad.is_contiguous() or grad.stride()
