"""State tensors of equal shape in one buffer, so that one batched operation serves all of them.

The state of a parameter holds views into the buffer, one per parameter, so every way of saving and loading state works
as if each had a tensor of its own; only a state that is saved or copied alone takes the whole buffer along. Whatever
replaces a view (loading, copying, a user) is noticed in the next step, and the buffer is built again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

State = dict[str, Any]


class Run(NamedTuple):
    """Neighbours in a stack that take the same step."""

    members: list[int]  # tensors, by their index in the group
    buffers: dict[str, Tensor]  # (n, …)

    def pieces(self, count: int) -> Iterator[Run]:
        """Runs of at most `count` neighbours."""
        if count >= len(self.members):
            yield self
            return
        for first in range(0, len(self.members), count):
            part = slice(first, first + count)
            yield Run(self.members[part], {name: buffer[part] for name, buffer in self.buffers.items()})


@dataclass
class Stack:
    """One buffer per kind of state, and the views that the states of its members hold."""

    shapes: Mapping[str, tuple[int, ...]]
    members: list[int]
    buffers: dict[str, Tensor]
    views: dict[int, list[tuple[Tensor, int]]]
    """With their addresses: `view.data = …` gives a tensor other memory."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], states: Mapping[int, State], like: Tensor) -> Stack:
        """Move the state of these tensors into new buffers. What a state lacks, or has in another shape, is zero."""
        members = sorted(states)
        stack = cls(shapes, members, {}, {i: [] for i in members})
        for name, shape in shapes.items():  # one kind after another: what was copied can be freed
            buffer = stack.buffers[name] = like.new_zeros(len(members), *shape)
            for i, view in zip(members, buffer.unbind(), strict=True):
                if name in states[i] and states[i][name].shape == view.shape:
                    view.copy_(states[i][name])
                states[i][name] = view
                stack.views[i].append((view, view.data_ptr()))
        return stack

    def holds(self, i: int, state: State) -> bool:
        """Whether the state of a tensor still consists of views into these buffers."""
        views = self.views.get(i)
        return views is not None and all(
            state.get(name) is view and view.data_ptr() == address and view.shape == shape
            for (name, shape), (view, address) in zip(self.shapes.items(), views, strict=True)
        )

    def runs(self, steps: Mapping[int, Hashable]) -> Iterator[Run]:
        """Neighbours with equal values in `steps`; tensors without one sit out."""
        if len(steps) == len(self.members) and len(set(steps.values())) == 1:
            yield Run(self.members, self.buffers)
            return
        first = 0
        while first < len(self.members):
            step, last = steps.get(self.members[first]), first + 1
            while last < len(self.members) and steps.get(self.members[last]) == step:
                last += 1
            if step is not None:
                yield Run(self.members[first:last], {name: b[first:last] for name, b in self.buffers.items()})
            first = last
