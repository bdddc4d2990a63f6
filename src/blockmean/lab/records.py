"""Records of runs, one JSON file each: a run that has one is not made again, a corrupt one is named and passed over."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockmean.lab.train import Record, RunSpec, run, steps_per_epoch

REQUIRED = {"spec", "environment", "epochs", "diverged_at", "train_loss", "test_loss", "test_error", "step_seconds"}

_steps_made: Any = None  # in a worker: the counter that it shares with the others and the main process


def read(folder: Path, spec: RunSpec) -> Record | None:
    """The record of a spec, or None where there is none that can be used; one that cannot be used is named."""

    def check(record: Record) -> None:
        if record["diverged_at"] is None:
            if len(record["epochs"]) != spec.steps // steps_per_epoch(spec.dataset, spec.batch):
                raise ValueError("epochs are missing")
            for row in [record, *record["epochs"]]:
                math.fsum((row["train_loss"], row["test_error"]))  # TypeError unless both are numbers

    return load(folder / f"{spec.key}.json", asdict(spec), REQUIRED, check)


def write(folder: Path, spec: RunSpec, record: Record) -> None:
    """Write the record of a spec."""
    store(folder / f"{spec.key}.json", record)


def load(
    path: Path, spec: dict[str, Any], required: set[str], check: Callable[[Record], None] = lambda record: None
) -> Record | None:
    """A record with these keys and this spec, or None where there is none that can be used; `check` may refuse it."""
    if not path.exists():
        return None
    try:
        record: Record = json.loads(path.read_text())
        if not isinstance(record, dict) or not record.keys() >= required:
            raise ValueError("it is no such record")
        if record["spec"] != json.loads(json.dumps(spec)):
            raise ValueError("it belongs to other settings")
        check(record)
    except (ValueError, KeyError, TypeError) as error:  # broken JSON and broken UTF-8 are ValueErrors too
        print(f"{path} cannot be used ({error}); it counts as missing.", file=sys.stderr)
        return None
    return record


def store(path: Path, record: Record) -> None:
    """Write a record in one move, so that an interruption leaves either nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(json.dumps(record, allow_nan=False) + "\n")
    unfinished.replace(path)


def run_all(
    specs: Sequence[RunSpec],
    folder: Path,
    data_dir: Path | None = None,
    jobs: int = 1,
    on_steps: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """The records of all specs, as they become ready: those on disk first, then new ones, `jobs` at a time.

    `on_steps` is told twice a second how many training steps lie behind, those of records on disk included.
    """
    missing: list[RunSpec] = []
    behind = 0
    for spec in dict.fromkeys(specs):
        record = read(folder, spec)
        if record is None:
            missing.append(spec)
        else:
            behind += spec.steps
            yield record
    if on_steps is not None:
        on_steps(behind)
    if not missing:
        return
    # Processes are started anew, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", behind)
    pool = ProcessPoolExecutor(min(jobs, len(missing)), context, initializer=_begin, initargs=(counter,))
    try:
        futures: set[Future[Record]] = {pool.submit(_run, spec, folder, data_dir) for spec in missing}
        while futures:
            ready, futures = wait(futures, timeout=0.5, return_when=FIRST_COMPLETED)
            if on_steps is not None:
                on_steps(counter.value)
            for future in ready:
                yield future.result()
    except BaseException:  # Ctrl-C too: what is finished is on disk, and nobody waits for the runs in progress
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(counter: Any) -> None:
    """Prepare a worker: Ctrl-C reaches it too, but it is the main process that decides; without it, it ends."""
    global _steps_made
    _steps_made = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(spec: RunSpec, folder: Path, data_dir: Path | None) -> Record:
    made = 0

    def count(step: int, loss: float) -> None:
        nonlocal made
        made += 1
        with _steps_made.get_lock():
            _steps_made.value += 1

    record = run(spec, data_dir, count)
    write(folder, spec, record)
    with _steps_made.get_lock():
        _steps_made.value += spec.steps - made  # a run that diverged has made all the steps it ever will
    return record
