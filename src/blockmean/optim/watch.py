"""Notice cheaply whether anything that the lists of a step were made from has changed since the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


def _kind(tensor: Tensor) -> tuple[object, ...]:
    if tensor.layout is not torch.strided:  # has no strides
        return (tensor.layout,)
    return type(tensor), tensor.dtype, tensor.is_contiguous() or tensor.stride(), tensor.is_neg()


class Watch:
    """The tensors behind a step: parameters, their states, and the kinds of their gradients.

    Identity alone does not do: `tensor.data = …` gives a tensor other memory, another dtype or other strides.
    """

    def __init__(self, tensors: Sequence[Tensor], states: Mapping[int, dict[str, Any]]) -> None:
        self._states = states
        self._things: list[Tensor] = []
        for i, state in states.items():
            self._things += [tensors[i], *state.values()]
        self._addresses = [thing.data_ptr() for thing in self._things]
        self._kinds = [_kind(tensors[i]) for i in states]
        self._gradients = [_kind(grad) for i in states if (grad := tensors[i].grad) is not None]

    @staticmethod
    def can_see(tensors: Sequence[Tensor], states: Mapping[int, dict[str, Any]]) -> bool:
        """Whether all of these are tensors with memory of their own; somebody may have added others to a state."""
        things = [thing for i, state in states.items() for thing in (tensors[i], tensors[i].grad, *state.values())]
        return all(type(thing) in PLAIN and thing.layout is torch.strided for thing in things)

    def sees_no_change(self, tensors: Sequence[Tensor], states: Mapping[Tensor, dict[str, Any]]) -> bool:
        """Whether these parameters and their states are the ones seen before, with gradients of the same kinds."""
        own, things, kinds, gradients = self._states, [], [], []
        for i, param in enumerate(tensors):
            grad, state = param.grad, own.get(i)
            if grad is None or state is None:
                if grad is not None or state is not None:
                    return False
                continue
            if states.get(param) is not state:
                return False
            things.append(param)
            things += state.values()
            kinds.append(_kind(param))
            gradients.append(_kind(grad))
        return (
            len(things) == len(self._things)
            and all(map(is_, things, self._things))
            and [thing.data_ptr() for thing in things] == self._addresses
            and kinds == self._kinds
            and gradients == self._gradients
        )
