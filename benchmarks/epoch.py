"""Where the time of an epoch goes: 600 steps of the paper's small model on MNIST, from reading the data to the test.

    python benchmarks/epoch.py --data-dir FOLDER [--rounds 3]

Every epoch runs in a process of its own on one thread, one optimizer after the other, round after round. Wall-clock
seconds of the whole (reading and checking the data included, starting Python and importing torch not) and processor
seconds of its parts go to benchmarks/results/epoch.json.
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
from blockmean.lab.train import Spec, run, steps_per_epoch

PARTS = ("data", "forward and backward", "optimizer", "the rest")


def epoch(arm: str, data_dir: Path | None) -> dict[str, float]:
    """One epoch: seconds of the whole by the clock on the wall, and of its parts by the processor's."""
    use_threads(1)
    import torch._dynamo  # noqa: F401  # torch's optimizers import it at their first step, in seconds

    spec = Spec("mnist", "small", **SMALL_ARMS[arm], lr=0.1, seed=0, steps=steps_per_epoch("mnist", 100), batch=100)
    wall, processor = time.perf_counter(), time.process_time()
    record = run(spec, data_dir)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    training, step, data = record["seconds"], record["step_seconds"], record["data_seconds"]
    parts = zip(PARTS, (data, training - step, step, processor - training - data), strict=True)
    return {"wall": round(wall, 3), **{name: round(seconds, 3) for name, seconds in parts}}


def measure(data_dir: Path | None, rounds: int, arms: list[str]) -> dict[str, list[dict[str, float]]]:
    """Rounds of one epoch per optimizer, each in a fresh process."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[arm].append(pool.apply(epoch, (arm, data_dir)))
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Medians over the rounds as a Markdown table, in seconds."""
    columns = ("wall", *PARTS)
    lines = [f"| seconds per epoch | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for arm, rows in found.items():
        cells = [f"{statistics.median(row[column] for row in rows):.2f}" for column in columns]
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None, help="where MNIST is")
    parser.add_argument("--rounds", type=int, default=3, help="epochs of each optimizer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "epoch.json")
    options = parser.parse_args()
    found = measure(options.data_dir, options.rounds, list(SMALL_ARMS))
    record: dict[str, Any] = {"environment": environment(), "rounds": options.rounds, "epochs": found}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
