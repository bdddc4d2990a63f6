"""Where the time of an epoch goes: 600 steps of the paper's small model on MNIST, including reading the data.

    python benchmarks/epoch.py --data-dir FOLDER [--rounds 3]

Every epoch runs in its own process on one thread, one optimizer after the other, in rounds. We measure the wall-clock
seconds of the epoch, from the first byte of data to the end of the last step, and of the evaluation after it (the test
set and 10,000 training images), and the processor seconds of each part of the epoch. Starting Python and importing
torch do not count. The record is benchmarks/results/epoch.json.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from pathlib import Path
from typing import Any

from blockmean.lab.environment import environment, use_threads
from blockmean.lab.paper.protocol import SMALL_ARMS
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import steps_per_epoch
from blockmean.lab.train import run

ARMS: dict[str, dict[str, Any]] = {
    "diag": SMALL_ARMS["diag"],
    "diag, fused": {"optimizer": "Adagrad", "options": {"fused": True}},
    "BMA": SMALL_ARMS["BMA"],
    "full": SMALL_ARMS["full"],
}
COLUMNS = ("epoch", "reading data", "forward and backward", "optimizer", "drawing batches", "evaluation")


def epoch(arm: str, dataset: str, data_dir: Path | None) -> dict[str, float]:
    """Seconds of one epoch and its parts."""
    use_threads(1)
    import torch._dynamo  # noqa: F401  # takes seconds; torch's optimizers import it at their first step

    steps = steps_per_epoch(dataset, 100)
    spec = RunSpec(dataset, "small", **ARMS[arm], lr=0.1, seed=0, steps=steps, batch=100)
    steps_ended: list[tuple[float, float]] = []
    began, cpu_began = _now()
    record = run(spec, data_dir, lambda step, loss: steps_ended.append(_now()))
    ended, cpu_ended = steps_ended[-1]
    data, training, step = (record[key] for key in ("data_seconds", "seconds", "step_seconds"))
    batches = cpu_ended - cpu_began - data - training
    seconds = (ended - began, data, training - step, step, batches, time.perf_counter() - ended)
    return {name: round(value, 3) for name, value in zip(COLUMNS, seconds, strict=True)}


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(dataset: str, data_dir: Path | None, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Rounds of one epoch per optimizer, each in a fresh process."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(rounds):
        for arm in ARMS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[arm].append(pool.apply(epoch, (arm, dataset, data_dir)))
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians over the rounds as a Markdown table, in seconds."""
    lines = [f"| seconds | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    for arm, rows in found.items():
        cells = [f"{statistics.median(row[column] for row in rows):.2f}" for column in COLUMNS]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="mnist", help="digits (4,000 embedded images) is enough for a trial")
    parser.add_argument("--data-dir", type=Path, default=None, help="folder with MNIST")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each optimizer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "epoch.json")
    options = parser.parse_args()
    found = measure(options.dataset, options.data_dir, options.rounds)
    record: dict[str, Any] = {"environment": environment(), "dataset": options.dataset, "epochs": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
