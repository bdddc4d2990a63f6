"""The environment of a measurement. Every record has it, so that numbers of two machines are never mixed up."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("torch", "numpy", "scipy")


def use_threads(count: int) -> None:
    """Set the threads of torch and SciPy. Call it before importing SciPy: its BLAS reads the variables once."""
    torch.set_num_threads(count)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(count)


def environment() -> dict[str, object]:
    """Python, packages, processor, threads, date and code version; an unknown value is None."""
    return {
        "python": platform.python_version(),
        **{name: package_version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": _load(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "code": _code_version(),
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or None


def _load() -> float | None:
    """Running processes, averaged over the last minute: more than `threads` means that other work ran as well."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


@cache  # the version that was imported, even if the checkout changes during a run
def _code_version() -> str | None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():  # installed, perhaps inside somebody else's repository
        return f"blockmean {package_version('blockmean')}"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
