"""What the block mean gains: training loss after a fixed number of steps, with and without it.

    python benchmarks/first_look.py --data-dir FOLDER [--jobs 2] [--records out/runs]

Every arm is tuned over the same learning rates and seeds; its best rate then runs with five fresh seeds. Seeds fix
initial weights and batches, so arms are compared in pairs. Runs are kept as records and not repeated; the summary goes
to benchmarks/results/first_look.json, the source of the table in docs/optimizers/adam-bma.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from blockmean.lab.compare import Findings, Stage, Study, differences, interval, mean_columns, results_table
from blockmean.lab.tasks import Task
from comparison import arguments, run, save

RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
TUNING_SEEDS = (100,)
FINAL_SEEDS = (0, 1, 2, 3, 4)

TASKS = {
    f"{title}, {inputs}": Task(dataset, model, steps, batch, inputs)
    for title, dataset, model, steps, batch in (
        ("MNIST MLP", "mnist", "mlp", 800, 128),
        ("CIFAR-10 CNN", "cifar10", "cnn", 500, 64),
    )
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


def train_loss(record: dict[str, Any]) -> float:
    """Loss on 10,000 training images at the end; infinite for a run that diverged."""
    return math.inf if record["train_loss"] is None else float(record["train_loss"])


def studies(tasks: Mapping[str, Task], arms: Mapping[str, dict[str, Any]]) -> list[Study]:
    return [
        Study(name, task, arms, RATES, Stage(TUNING_SEEDS, task.steps), Stage(FINAL_SEEDS, task.steps), train_loss)
        for name, task in tasks.items()
    ]


def summary(found: Findings, baseline: Mapping[str, str]) -> dict[str, Any]:
    """For each arm: its best rate, its results with five seeds, and the paired difference from its baseline."""
    rows: dict[str, Any] = {}
    for arm, records in found.results.items():
        tuned = {f"{rate:g}": loss if loss < math.inf else None for rate, loss in found.tuned[arm].items()}
        ends = {name: [record[name] for record in records] for name in ("train_loss", "test_error")}
        rows[arm] = {"lr": found.best[arm], "tuning": tuned, **ends}
        if arm in baseline:
            gained = interval(differences(records, found.results.get(baseline[arm], []), train_loss))
            rows[arm]["difference"] = gained and gained._asdict()
    return rows


def main(
    doc: str, tasks: Mapping[str, Task], arms: dict[str, dict[str, Any]], baseline: dict[str, str], name: str
) -> None:
    options = arguments(doc, name).parse_args()
    settings = {task: {k: v for k, v in asdict(setting).items() if k != "title"} for task, setting in tasks.items()}
    rows: list[dict[str, Any]] = []
    for study in studies(tasks, arms):
        found = run(study, options)
        rows.append({"task": study.name, "arms": summary(found, baseline)})
        save(options, tasks=settings, arms=arms, rows=rows)
        columns = mean_columns(
            study, found, baseline, train_loss, "training loss", ".4f", "difference from its baseline"
        )
        print(f"\n{study.name}\n\n{results_table(study, found, columns, study.name).markdown()}")


if __name__ == "__main__":
    main(__doc__, TASKS, ARMS, BASELINE, "first_look")
