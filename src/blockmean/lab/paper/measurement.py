"""Measurements for a part of the paper: taken once, and kept as a record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from blockmean.lab.environment import environment
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.records import UnusableRecord, load, store
from blockmean.lab.train import Record


def load_or_measure(
    config: ReportConfig,
    part: str,
    spec: dict[str, Any],
    measure: Callable[[], Record],
    check: Callable[[Record], None],
) -> Record:
    """The record of a part of the paper. Without a usable one, measure now and keep it.

    FileNotFoundError if there is no usable record and `config.measure` is False.
    """
    path = config.records / f"{part}-{config.profile}.json"
    plain = json.loads(json.dumps(spec))
    problem = f"There is no {path}"
    try:
        record = load(path, lambda stored: stored == plain, {"spec", "environment"}, check)
    except UnusableRecord as error:
        record, problem = None, str(error)
        if config.measure:
            print(f"{error}; it counts as missing.", file=sys.stderr)
    if record is None:
        if not config.measure:
            command = f"blockmean reproduce {part} --profile {config.profile} --records {config.records}"
            raise FileNotFoundError(f"{problem}: `{command}` measures it.")
        record = {"spec": spec, "environment": environment(), **measure()}
        store(path, record)
    return record
