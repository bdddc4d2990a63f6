"""What the block mean gains: training loss after a fixed number of steps, with and without it.

    python benchmarks/first_look.py --data-dir FOLDER [--jobs 2] [--records out/runs]

Every arm is tuned over the same learning rates and seeds; its best rate then runs with five fresh seeds. Seeds fix
initial weights and batches, so arms are compared in pairs. Runs are kept as records and not repeated; the summary goes
to benchmarks/results/first_look.json, the source of the table in docs/optimizers.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from blockmean.lab.environment import environment
from blockmean.lab.records import WorkerKilled, run_all
from blockmean.lab.spec import RunSpec
from blockmean.lab.study import interval

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TUNING_SEEDS = (100,)
FINAL_SEEDS = (0, 1, 2, 3, 4)

TASKS: dict[str, dict[str, Any]] = {
    f"{name}, {inputs}": {**task, "inputs": inputs}
    for name, task in {
        "MNIST MLP": {"dataset": "mnist", "model": "mlp", "steps": 800, "batch": 128},
        "CIFAR-10 CNN": {"dataset": "cifar10", "model": "cnn", "steps": 500, "batch": 64},
    }.items()
    for inputs in ("raw", "centred", "normalised")
}

# The baseline of each corrected method is its diagonal method; none uses weight decay.
ARMS: dict[str, dict[str, Any]] = {
    "Adagrad": {"optimizer": "Adagrad"},
    "AdaGradBMA": {
        "optimizer": "AdaGradBMA",
        "options": {"variant": "weighted", "partition": "unit", "coupling": "none"},
    },
    "AdamW": {"optimizer": "AdamW", "options": {"weight_decay": 0.0}},
    "AdamBMA": {"optimizer": "AdamBMA", "options": {"weight_decay": 0.0}},
}
BASELINE = {"AdaGradBMA": "Adagrad", "AdamBMA": "AdamW"}


Tasks = dict[str, dict[str, Any]]


def compare(
    task: str,
    setting: dict[str, Any],
    arms: Tasks,
    baseline: dict[str, str],
    options: argparse.Namespace,
    results: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """For each arm: its best rate, its results with five seeds, and the paired difference from its baseline.

    `results` holds the arms that are not rerun.
    """
    everything, arms = arms, {arm: arms[arm] for arm in arms if arm not in results}

    def specs(arm: str, rates: Sequence[float], seeds: Sequence[int]) -> list[RunSpec]:
        return [RunSpec(**setting, **arms[arm], lr=rate, seed=seed) for rate in rates for seed in seeds]

    def run(wanted: list[RunSpec], title: str) -> dict[RunSpec, dict[str, Any]]:
        found = {}
        with Progress() as progress:
            bar = progress.add_task(f"{task}: {title}", total=len(wanted))
            for record in run_all(wanted, options.records, options.data_dir, options.jobs):
                found[RunSpec(**record["spec"])] = record
                progress.advance(bar)
        return found

    tuning = run([spec for arm in arms for spec in specs(arm, RATES, TUNING_SEEDS)], "choosing rates")
    tried = {
        arm: {rate: mean_loss([tuning[s] for s in specs(arm, [rate], TUNING_SEEDS)]) for rate in RATES} for arm in arms
    }
    best = {arm: min(losses, key=losses.__getitem__) for arm, losses in tried.items()}
    final = run([spec for arm in arms for spec in specs(arm, [best[arm]], FINAL_SEEDS)], "five fresh seeds")
    for arm in arms:
        runs = [final[spec] for spec in specs(arm, [best[arm]], FINAL_SEEDS)]
        results[arm] = {
            "lr": best[arm],
            "tuning": {f"{rate:g}": loss if loss < float("inf") else None for rate, loss in tried[arm].items()},
            "train_loss": [run["train_loss"] for run in runs],
            "test_error": [run["test_error"] for run in runs],
        }
    for arm, other in baseline.items():
        results[arm]["difference"] = paired(results[arm]["train_loss"], results[other]["train_loss"])
    return {"task": task, "arms": {arm: results[arm] for arm in everything}}


def mean_loss(records: list[dict[str, Any]]) -> float:
    """Mean training loss; infinite if a run diverged."""
    losses = [record["train_loss"] for record in records]
    return float("inf") if None in losses else statistics.mean(losses)


def paired(ours: list[float | None], theirs: list[float | None]) -> dict[str, float] | None:
    """Mean of the differences over seeds, and half the width of its 95% interval; None if a run diverged."""
    if None in ours or None in theirs:
        return None
    found = interval([a - b for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None])
    return found and found._asdict()


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table: mean loss, paired difference and its interval, learning rate."""
    lines = [f"| task, inputs | {' | '.join(rows[0]['arms'])} |", "|---" * (1 + len(rows[0]["arms"])) + "|"]
    for row in rows:
        cells = []
        for arm in row["arms"].values():
            losses = arm["train_loss"]
            cell = "diverged" if None in losses else f"{statistics.mean(losses):.4f}"
            if arm.get("difference"):
                cell += f" ({arm['difference']['mean']:+.4f} ± {arm['difference']['half_width']:.4f})"
            cells.append(f"{cell} at {arm['lr']:g}")
        lines.append(f"| {row['task']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(description: str, tasks: Tasks, arms: Tasks, baseline: dict[str, str], name: str) -> None:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data-dir", type=Path, default=None, help="where MNIST and CIFAR-10 are")
    parser.add_argument("--records", type=Path, default=Path("out/runs"), help="one file per run; none is repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{name}.json")
    parser.add_argument("--arms", nargs="+", choices=arms, help="rerun only these; take the others from the file")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(options.out.read_text())["rows"] if options.arms else []
    kept = {row["task"]: {arm: row["arms"][arm] for arm in arms if arm not in options.arms} for row in before}
    rows = []
    for task, setting in tasks.items():
        if options.arms and task not in kept:
            continue
        try:
            rows.append(compare(task, setting, arms, baseline, options, kept.get(task, {})))
        except WorkerKilled as error:
            raise SystemExit(str(error)) from None
        record = {"environment": environment(), "tasks": tasks, "arms": arms, "rows": rows}
        out = options.out.with_suffix(".new.json") if options.arms else options.out
        out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    if options.arms:
        out.replace(options.out)
    print(table(rows))


if __name__ == "__main__":
    main(__doc__.partition("\n")[0], TASKS, ARMS, BASELINE, "first_look")
