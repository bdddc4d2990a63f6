"""Records of runs, one JSON file each: a run with a record is not made again, an unusable record is named."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import steps_per_epoch
from blockmean.lab.train import Record, run, time_marks

REQUIRED = {"spec", "environment", "epochs", "diverged_at", "train_loss", "test_loss", "test_error", "step_seconds"}
LARGEST_LOSS = 3.5e38
"""Losses are computed in float32: a larger one was never measured."""

_steps_done: Any = None  # in a worker: its counter, which the main process reads


class UnusableRecord(ValueError):
    """A record that is there but cannot be used."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(f"{path} cannot be used ({reason})")


class WorkerKilled(RuntimeError):
    """The process of a run ended before the run did."""


def read(folder: Path, spec: RunSpec) -> Record | None:
    """The record of a spec, or None if there is none; one that cannot be used is named on stderr and counts as none."""
    try:
        return read_strictly(folder, spec)
    except UnusableRecord as error:
        print(f"{error}; it counts as missing.", file=sys.stderr)
        return None


def read_strictly(folder: Path, spec: RunSpec) -> Record | None:
    """The record of a spec, or None if there is none; UnusableRecord if there is one that cannot be used."""

    def check(record: Record) -> None:
        epochs = record["epochs"]
        if record["diverged_at"] is None:
            if len(epochs) != spec.steps // steps_per_epoch(spec.dataset, spec.batch):
                raise ValueError("epochs are missing")
            require_number(record, "train_loss", 0, LARGEST_LOSS)
        else:
            require_number(record, "diverged_at", 0, spec.steps - 1)
        require_number(record, "test_error", 0, 1)
        for epoch in epochs:
            require_number(epoch, "train_loss", 0, LARGEST_LOSS)
            require_number(epoch, "test_error", 0, 1)
        if spec.curve:
            _check_curve(record, spec)

    return load(folder / f"{spec.key}.json", spec.describes, REQUIRED, check)


def _check_curve(record: Record, spec: RunSpec) -> None:
    """Raise unless the record has the loss of every step, and the time at every mark, until the run ended."""
    losses, seconds = record["losses"], record["seconds_at"]
    ended = spec.steps if record["diverged_at"] is None else len(losses)
    if len(losses) != ended or len(seconds) != sum(mark <= ended for mark in time_marks(spec.steps)):
        raise ValueError("steps are missing")
    for loss in losses:
        require_number({"losses": loss}, "losses", -LARGEST_LOSS, LARGEST_LOSS)
    for before, after in pairwise([0, *seconds]):
        require_number({"seconds_at": after}, "seconds_at", before, math.inf)
    require_number(record, "state_bytes", 0, math.inf)
    require_number(record, "parameters", 1, math.inf)


def write(folder: Path, spec: RunSpec, record: Record) -> None:
    """Write the record of a spec."""
    store(folder / f"{spec.key}.json", record)


def load(
    path: Path, describes: Callable[[object], bool], required: set[str], check: Callable[[Record], None]
) -> Record | None:
    """A record from disk, or None if there is no such file.

    Args:
        describes: whether the spec inside the record is the right one.
        required: keys that the record must have.
        check: raises any ordinary error if the record lacks something else.

    Raises UnusableRecord if the file is no such record.
    """
    if not path.exists():
        return None
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        if not isinstance(record, dict) or not record.keys() >= required:
            raise ValueError("it is no such record")
        if not isinstance(record["environment"], dict):
            raise ValueError(f"environment must be an object. Got {record['environment']!r} instead.")
        if not describes(record["spec"]):
            raise ValueError("it belongs to other settings")
        check(record)
    except KeyError as error:
        raise UnusableRecord(path, f"{error} is missing") from error
    # Broken JSON and broken UTF-8 are ValueErrors; the others come from values of an unexpected type or size.
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError, OSError) as error:
        raise UnusableRecord(path, error) from error
    return record


def require_number(values: Mapping[str, Any], name: str, low: float, high: float) -> None:
    """Raise ValueError unless the value of that name is a number from `low` to `high`."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}. Got {value!r} instead.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def store(path: Path, record: Record) -> None:
    """Write a record as strict JSON in one move, so that an interruption leaves either nothing or all of it."""
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

    `on_steps` is called twice a second with the number of training steps done, including those of records on disk.
    Raises WorkerKilled, which names the run, if a process ends before its run does.
    """
    missing: list[RunSpec] = []
    done = 0
    for spec in dict.fromkeys(specs):
        record = read(folder, spec)
        if record is None:
            missing.append(spec)
        else:
            done += spec.steps
            yield record
    if on_steps is not None:
        on_steps(done)
    if not missing:
        return
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    # One counter per worker, without a lock: a killed process would never release it.
    counters = [context.RawValue("q", 0) for _ in range(min(jobs, len(missing)))]
    # One pool per worker, one run at a time: if a process is killed, it is known which run it was making.
    pools = [ProcessPoolExecutor(1, context, initializer=_init_worker, initargs=(counter,)) for counter in counters]
    waiting = iter(missing)
    running: dict[Future[Record], tuple[RunSpec, ProcessPoolExecutor]] = {}

    def start_next(pool: ProcessPoolExecutor) -> None:
        spec = next(waiting, None)
        if spec is not None:
            running[pool.submit(_run, spec, folder, data_dir)] = spec, pool

    try:
        for pool in pools:
            start_next(pool)
        while running:
            ready, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            if on_steps is not None:
                on_steps(done + sum(counter.value for counter in counters))
            for future in ready:
                spec, pool = running.pop(future)
                try:
                    record = future.result()
                except BrokenProcessPool:
                    raise WorkerKilled(
                        f"The process of the run {spec.key} was killed; the machine may be out of memory. Finished "
                        f"runs are in {folder}: run the same command again to resume, with a smaller --jobs to use "
                        "less memory."
                    ) from None
                start_next(pool)
                yield record
    except BaseException:  # Ctrl-C too: finished runs are on disk, and nobody waits for the others
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


def _init_worker(counter: Any) -> None:
    """Leave Ctrl-C to the main process, and end with it."""
    global _steps_done
    _steps_done = counter
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run(spec: RunSpec, folder: Path, data_dir: Path | None) -> Record:
    made = 0

    def count(step: int, loss: float) -> None:
        nonlocal made
        made += 1
        _steps_done.value += 1

    record = run(spec, data_dir, count)
    write(folder, spec, record)
    _steps_done.value += spec.steps - made  # a run that diverged counts as complete
    return record
