"""Coordinate descent over the settings of an optimizer, one axis after another, with a budget of runs.

Which point comes next follows from the losses so far alone: a search can be stopped, and goes on from its records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Point = tuple[float, ...]
"""A value for each axis."""


class Axis(NamedTuple):
    """A setting, and the values that it may take, in order."""

    name: str
    values: tuple[float, ...]


@dataclass
class Search:
    """How far a search has come."""

    best: Point
    loss: float
    """Of the best point so far; infinite as long as no run has converged."""
    tried: dict[Point, float] = field(default_factory=dict)
    """In the order of the runs."""
    wanted: Point | None = None
    """The next run; None if the search is over."""
    converged: bool = False
    """Whether no neighbour along any axis is better; otherwise the budget ended the search."""


class _Stop(Exception):
    """A run is missing, or the budget is spent."""


def descend(start: Point, axes: Sequence[Axis], budget: int, loss_of: Callable[[Point], float | None]) -> Search:
    """Follow the search through the losses that are known; `loss_of` a point without a run is None.

    Along an axis the best point moves to a better neighbour until it has none: larger values first, then smaller ones.
    After the last axis it is the first one's turn again, until a whole round moves nothing.
    """
    found = Search(start, math.inf)

    def look(point: Point) -> float:
        if point not in found.tried:
            if len(found.tried) == budget:
                raise _Stop
            loss = loss_of(point)
            if loss is None:
                found.wanted = point
                raise _Stop
            found.tried[point] = loss
        return found.tried[point]

    try:
        found.loss = look(start)
        still = 0  # axes in a row that moved nothing
        while still < len(axes):
            for i, axis in enumerate(axes):
                before = found.best
                for direction in (1, -1):
                    _walk(found, i, axis, direction, look)
                    if found.best != before:
                        break  # the other side is where it came from
                still = 0 if found.best != before else still + 1
                if still == len(axes):
                    break
        found.converged = True
    except _Stop:
        pass
    return found


def _walk(found: Search, i: int, axis: Axis, direction: int, look: Callable[[Point], float]) -> None:
    """Go along an axis as long as it helps."""
    while True:
        at = axis.values.index(found.best[i]) + direction
        if not 0 <= at < len(axis.values):
            return
        point = (*found.best[:i], axis.values[at], *found.best[i + 1 :])
        loss = look(point)
        if not loss < found.loss:
            return
        found.best, found.loss = point, loss


def at_edge(point: Point, axes: Sequence[Axis]) -> list[str]:
    """The axes that move and of which a point has the first or last value, so that a better one may lie beyond.

    Beyond a weight decay of zero nothing lies.
    """
    return [
        axis.name
        for value, axis in zip(point, axes, strict=True)
        if len(axis.values) > 1 and value in (axis.values[0], axis.values[-1]) and value != 0
    ]
