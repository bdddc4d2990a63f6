"""Time several operations in one interleaved run, and measure the peak memory of one in a separate process."""

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
SHORTEST = 1e-3  # seconds; quicker operations are repeated until a sample takes this long


def interleaved(operations: Mapping[str, Operation], repetitions: int) -> dict[str, list[float]]:
    """Seconds per call of each operation, `repetitions` samples each.

    Every repetition runs all operations in random order. A disturbance of the machine then hits all of them equally,
    and the ratio of two samples of one repetition is reliable even if their times are not.
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
    """Make malloc keep freed memory; return False if that is not possible.

    Otherwise it is random whether a large result causes new page faults: for 40 MB, the same pass takes 27 ms with them
    and 5 ms without. A yardstick must not depend on that.
    """
    no_mmap, no_trim = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of glibc's <malloc.h>
    try:
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(no_mmap, 0) and libc.mallopt(no_trim, 2**31 - 1))
    except (OSError, TypeError, AttributeError):  # not glibc
        return False


def summary(samples: list[float]) -> dict[str, float]:
    """Median and quartiles to four digits; more would be noise."""
    lower, median, upper = (float(f"{x:.4g}") for x in statistics.quantiles(samples, n=4, method="inclusive"))
    return {"median": median, "lower": lower, "upper": upper}


def ratios(samples: Mapping[str, list[float]], yardstick: str) -> dict[str, dict[str, float]]:
    """Median and quartiles of each operation's time relative to the yardstick's in the same repetition."""
    base = samples[yardstick]
    return {name: summary([a / b for a, b in zip(own, base, strict=True)]) for name, own in samples.items()}


def peak_bytes(operation: Operation) -> int | None:
    """The peak memory of the process during a call, above its memory before. None if /proc does not report it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = _status("VmRSS")
        result = operation()
        after = _status("VmHWM")
    except OSError:
        return None
    del result  # the result counts, so it must live until here
    return max(0, after - before)


def run_alone(arguments: list[str]) -> str:
    """Run this Python with arguments in a fresh process and return its output."""
    # A fixed threshold makes glibc return freed memory at once; memory that it kept would hide the next allocation.
    fresh = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run([sys.executable, *arguments], env=fresh, capture_output=True, text=True, check=True).stdout


def _seconds(operation: Operation, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    return (time.perf_counter() - start) / calls


def _status(field: str) -> int:
    """A number of bytes from /proc/self/status. (ru_maxrss would not do: it is inherited from the parent.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
