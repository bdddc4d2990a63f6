"""Measurements for a part of the paper: taken once, and kept as a record."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from blockmean.lab.environment import environment
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.records import Records, append
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
    path, key = config.records / "measurements.jsonl", f"{part}-{config.profile}"
    plain = json.loads(json.dumps(spec))
    known = Records(path)
    record = known.get(key, lambda stored: stored == plain, check)
    if record is None:
        if not config.measure:
            command = f"blockmean reproduce {part} --profile {config.profile} --records {config.records}"
            problem = "".join(known.unusable) or f"There is no record {key} in {path}"
            raise FileNotFoundError(f"{problem}: `{command}` measures it.")
        for problem in known.unusable:
            print(f"{problem}; it counts as missing.", file=sys.stderr)
        record = {"spec": spec, "environment": environment(), **measure()}
        append(path, key, record)
    return record
