"""Records of runs, one line of JSON each and one file per study: a run that has one is not made again."""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import epoch_length
from blockmean.lab.train import Record, run, time_marks

REQUIRED = {"spec", "environment", "epochs", "diverged_at", "train_loss", "test_loss", "test_error", "step_seconds"}
LARGEST_LOSS = 3.5e38
"""Losses are computed in float32: a larger one was never measured."""

KEY = re.compile(r'\{"key": "([^"]+)"')
"""How every line begins: it names the run even where the rest is cut off."""

_steps_done: Any = None  # in a worker: its counter, which the main process reads


class WorkerKilled(RuntimeError):
    """The process of a run ended before the run did."""


class Records:
    """The records in a file, read once. The last line of a key counts.

    A line that was cut off, or is no JSON for another reason, counts only where its key has no other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unusable: list[str] = []
        """One sentence for each record that was asked for and cannot be used; it counts as missing."""
        self._found: dict[str, Record | Exception] = {}
        older = path.with_suffix("")
        if not path.exists() and any(older.glob("*.json")):
            raise FileNotFoundError(
                f"{older} has one file per record, as older versions wrote them. CHANGELOG.md says how to join them "
                f"into {path}; without that folder, everything runs again."
            )
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else ():
            try:
                record = json.loads(line, parse_constant=_refuse_constant)
                self._found[record.pop("key")] = record
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                if key := KEY.match(line):
                    self._found.setdefault(key[1], error)

    def every(self) -> list[Record]:
        """All records that can be read."""
        return [record for record in self._found.values() if not isinstance(record, Exception)]

    def of(self, specs: Iterable[RunSpec]) -> list[Record]:
        """The records of those runs that have a usable one."""
        found = (self.get(spec.key, spec.describes, partial(_check_run, spec)) for spec in specs)
        return [record for record in found if record is not None]

    def get(self, key: str, describes: Callable[[object], bool], check: Callable[[Record], None]) -> Record | None:
        """The record of a key; None if there is none, or none that can be used: `unusable` says why.

        Args:
            describes: whether the spec inside the record is the right one.
            check: raises any ordinary error if the record lacks something else.
        """
        record = self._found.get(key)
        if record is None:
            return None
        try:
            if isinstance(record, Exception):
                raise record
            if not isinstance(record["environment"], dict):
                raise ValueError(f"environment must be an object. Got {record['environment']!r} instead.")
            if not describes(record["spec"]):
                raise ValueError("it belongs to other settings")
            check(record)
            return record
        # Broken JSON is a ValueError; the others come from values of an unexpected type or size.
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            self.unusable.append(f"The record {key} in {self.path} cannot be used ({reason})")
            return None


def _check_run(spec: RunSpec, record: Record) -> None:
    """Raise unless the record has every epoch of the run, with numbers that can have been measured."""
    if not record.keys() >= REQUIRED:
        raise ValueError(f"{', '.join(sorted(REQUIRED - record.keys()))} missing")
    epochs = record["epochs"]
    if record["diverged_at"] is None:
        if len(epochs) != spec.steps // epoch_length(spec):
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


def require_number(values: Mapping[str, Any], name: str, low: float, high: float) -> None:
    """Raise ValueError unless the value of that name is a number from `low` to `high`."""
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}. Got {value!r} instead.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def append(path: Path, key: str, record: Record) -> None:
    """Add a record as one line of strict JSON, in one write: the lines of several processes do not mix."""
    line = json.dumps({"key": key, **record}, allow_nan=False).encode() + b"\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file:  # O_APPEND
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, and if the process is killed
        file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
        if file.read(1) not in (b"", b"\n"):  # the last line was cut off when its process was killed
            line = b"\n" + line
        if file.write(line) != len(line):
            raise OSError(f"{path} cannot take the record {key}: the disk is full.")


def store(path: Path, record: Record) -> None:
    """Write strict JSON in one move, so that an interruption leaves either nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(json.dumps(record, allow_nan=False) + "\n")
    unfinished.replace(path)


def run_all(
    specs: Sequence[RunSpec],
    path: Path,
    data_dir: Path | None = None,
    jobs: int = 1,
    on_steps: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """The records of all specs, as they become ready: those in the file first, then new ones, `jobs` at a time.

    `on_steps` is called twice a second with the number of training steps done, including those of records in the file.
    Raises WorkerKilled, which names the run, if a process ends before its run does.
    """
    known, missing, done = Records(path), [], 0
    for spec in dict.fromkeys(specs):
        if found := known.of([spec]):
            done += spec.steps
            yield from found
        else:
            missing.append(spec)
    for problem in known.unusable:
        print(f"{problem}; it counts as missing.", file=sys.stderr)
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
            running[pool.submit(_run, spec, path, data_dir)] = spec, pool

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
                        f"runs are in {path}: run the same command again to resume, with a smaller --jobs to use "
                        "less memory."
                    ) from None
                start_next(pool)
                yield record
    except BaseException:  # Ctrl-C too: finished runs are in the file, and nobody waits for the others
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


def _run(spec: RunSpec, path: Path, data_dir: Path | None) -> Record:
    made = 0

    def count(step: int, loss: float) -> None:
        nonlocal made
        made += 1
        _steps_done.value += 1

    record = run(spec, data_dir, count)
    append(path, spec.key, record)
    _steps_done.value += spec.steps - made  # a run that diverged counts as complete
    return record
