"""Records of runs, one JSON file each: a run that has one is not made again, a corrupt one is named and made again."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockmean.lab.train import Spec, run

Record = dict[str, Any]


def read(folder: Path, spec: Spec) -> Record | None:
    """The record of a spec, or None where there is none that can be used."""
    path = folder / f"{spec.key}.json"
    if not path.exists():
        return None
    try:
        record: Record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        print(f"{path} is not valid JSON ({error}); the run is made again.", file=sys.stderr)
        return None
    if record.get("spec") != json.loads(json.dumps(asdict(spec))):
        print(f"{path} belongs to another run; the run is made again.", file=sys.stderr)
        return None
    return record


def write(folder: Path, spec: Spec, record: Record) -> None:
    """Write a record in one move, so that an interruption leaves either nothing or all of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{spec.key}.json"
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(json.dumps(record) + "\n")
    unfinished.replace(path)


def run_all(specs: Sequence[Spec], folder: Path, data_dir: Path | None = None, jobs: int = 1) -> Iterator[Record]:
    """The records of all specs, as they become ready: those on disk first, then new ones, `jobs` at a time."""
    missing = []
    for spec in dict.fromkeys(specs):
        record = read(folder, spec)
        if record is None:
            missing.append(spec)
        else:
            yield record
    # Processes are started anew, not forked: torch's threads do not survive a fork.
    pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(run, spec, data_dir): spec for spec in missing}
        for future in as_completed(futures):
            record = future.result()
            write(folder, futures[future], record)
            yield record
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or an interruption only runs in progress are lost
