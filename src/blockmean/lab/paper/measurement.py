"""Measurements that a part of the paper needs: taken once, and kept as a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockmean.lab.environment import environment
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.records import load, store
from blockmean.lab.train import Record


def load_or_measure(
    config: ReportConfig,
    part: str,
    spec: dict[str, Any],
    measure: Callable[[], Record],
    check: Callable[[Record], None],
) -> Record:
    """The record of a part of the paper; where there is none that can be used, it is measured now, if it may be."""
    path = config.records / f"{part}-{config.profile}.json"
    record = load(path, spec, {"spec", "environment"}, check)
    if record is None:
        if not config.measure:
            command = f"blockmean reproduce {part} --profile {config.profile}"
            raise FileNotFoundError(f"there is no {path} to be used; `{command}` measures it.")
        found = measure()
        record = {"spec": spec, "environment": environment(), **found}
        store(path, record)
    return record
