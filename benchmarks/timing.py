"""Timing several operations side by side, and the peak memory of one in a process of its own."""

from __future__ import annotations

import ctypes
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

Operation = Callable[[], object]
SHORTEST = 1e-3  # seconds; quicker operations are repeated until a sample takes so long


def interleaved(operations: Mapping[str, Operation], repetitions: int) -> dict[str, list[float]]:
    """Seconds per call of each operation, `repetitions` samples each.

    Every repetition runs all operations, in a random order. So a disturbance of the machine hits all of them alike,
    and the ratio of two samples of one repetition is trustworthy where their times are not.
    """
    calls = {}
    for name, operation in operations.items():
        operation()  # the first call pays for caches and lazy imports
        calls[name] = max(1, round(SHORTEST / _seconds(operation, 1)))
    samples: dict[str, list[float]] = {name: [] for name in operations}
    order = list(operations)
    shuffle = random.Random(0).shuffle
    for _ in range(repetitions):
        shuffle(order)
        for name in order:
            samples[name].append(_seconds(operations[name], calls[name]))
    return samples


def keep_memory() -> bool:
    """Make malloc keep what is freed; False where that cannot be asked for.

    Otherwise a large result costs new page faults or none, as luck will have it: for 40 MB that is 27 ms or 5 ms for
    the same pass, and a yardstick must not depend on it. What is left is the work itself.
    """
    no_mmap, no_trim = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of glibc's <malloc.h>
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(no_mmap, 0) and libc.mallopt(no_trim, 2**31 - 1))
    except (OSError, TypeError, AttributeError):  # not glibc
        return False


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles, to four digits: more would only be noise."""
    lower, median, upper = (float(f"{x:.4g}") for x in statistics.quantiles(samples, n=4, method="inclusive"))
    return {"median": median, "lower": lower, "upper": upper}


def ratios(samples: Mapping[str, list[float]], yardstick: str) -> dict[str, dict[str, float]]:
    """Median and quartiles of the time of each operation over that of the yardstick in the same repetition."""
    base = samples[yardstick]
    return {name: summary([a / b for a, b in zip(own, base, strict=True)]) for name, own in samples.items()}


def peak_bytes(operation: Operation) -> int | None:
    """What the process needs at most during a call, above what it has before. None where /proc does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        before = _status("VmRSS")
        result = operation()
        after = _status("VmHWM")
    except OSError:
        return None
    del result  # it counts, so it must live until here
    return max(0, after - before)


def run_alone(arguments: list[str]) -> str:
    """Run this Python with arguments in a fresh process and give what it prints."""
    # A fixed threshold makes glibc hand freed memory back at once; memory it kept would hide the next allocation.
    fresh = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run([sys.executable, *arguments], env=fresh, capture_output=True, text=True, check=True).stdout


def _seconds(operation: Operation, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - start) / calls


def _status(field: str) -> int:
    """A number of bytes out of /proc/self/status. (ru_maxrss would do, were it not inherited from the parent.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
