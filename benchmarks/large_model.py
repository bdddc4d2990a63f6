"""The paper's large model for one epoch: five optimizers, the two rates that train it, three seeds; then fresh seeds.

    python benchmarks/large_model.py --data-dir FOLDER [--datasets mnist cifar10] [--jobs 2] [--show-only]

Of the paper's five learning rates only 0.01 and 0.001 train this network: with the others, diag and Algorithm 1 end
their first epoch at the loss of guessing or above it (docs/results.md has that table). For every optimizer the rate
with the smaller mean loss then runs with five fresh seeds. An epoch takes four to five minutes on one core; finished
runs are kept in results/, where Figure 5 finds those that it needs too, and are not repeated. Equal seeds mean equal
initial weights and batches, so differences are paired.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

from blockmean.lab.compare import Stage, Study, differences, format_difference, last_loss
from blockmean.lab.paper.protocol import BATCH, OWN_ARMS, SMALL_ARMS
from blockmean.lab.records import Records, run_all
from blockmean.lab.tasks import Task, steps_per_epoch
from blockmean.lab.train import Record

RESULTS = Path(__file__).parents[1] / "results"
ARMS = {
    "diag": SMALL_ARMS["diag"],
    "BMA": SMALL_ARMS["BMA"],
    "BMA, our floor": OWN_ARMS["BMA, our floor"],
    "BMA consistent": SMALL_ARMS["BMA consistent"],
    "Anova": {"optimizer": "Anova", "options": {"weight_decay": 0.0}},
}
RATES, SEEDS, FRESH = (1e-2, 1e-3), (100, 101, 102), (110, 111, 112, 113, 114)
GUESSING = 0.99 * math.log(10)


def study(dataset: str, epochs: int = 1) -> Study:
    """One dataset."""
    task = Task(dataset, "large", batch=BATCH, flip=dataset == "cifar10")
    steps = epochs * steps_per_epoch(dataset, BATCH)
    return Study(f"{dataset}-large", task, ARMS, RATES, Stage(SEEDS, steps), Stage(FRESH, steps))


def records(one: Study, folder: Path) -> dict[tuple[str, float], list[Record]]:
    """The finished tuning runs of every optimizer and rate."""
    known = Records(one.file(folder))
    return {(arm, rate): known.of(one.specs(arm, [rate], one.tuning)) for arm in one.arms for rate in RATES}


def fresh_records(one: Study, folder: Path) -> dict[tuple[str, float], list[Record]]:
    """The finished runs of every optimizer with its best rate and fresh seeds."""
    found = one.findings(folder)
    return {(arm, found.best[arm]): records for arm, records in found.results.items()}


def table(one: Study, found: dict[tuple[str, float], list[Record]]) -> str:
    """Mean training loss of the epoch, summed over its batches, and the difference from diag.

    At the same rate, or, where diag has one rate only, at that: its best one.
    """
    batches = steps_per_epoch(one.task.dataset, BATCH)
    diag = {rate: runs for (arm, rate), runs in found.items() if arm == "diag"}
    if len(diag) == 1:
        diag = dict.fromkeys(RATES, *diag.values())

    def loss(record: Record) -> float:
        return last_loss(record) * batches

    lines = ["| optimizer | rate | training loss, each seed | difference from diag | test error | at guessing |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for rate in RATES:
        for arm in one.arms:
            runs = found.get((arm, rate))
            if not runs:
                continue
            cells = [arm, f"{rate:g}", ", ".join(f"{loss(record):.0f}" for record in runs)]
            gained = differences(runs, diag.get(rate, []), loss)
            cells.append("–" if arm == "diag" else format_difference(gained))
            cells.append(f"{statistics.mean(record['test_error'] for record in runs):.3f}")
            cells.append(f"{sum(last_loss(record) > GUESSING for record in runs)} of {len(runs)}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--datasets", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST and CIFAR-10")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one thread")
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--show-only", action="store_true", help="run nothing")
    options = parser.parse_args()
    for one in map(study, options.datasets):
        for specs in () if options.show_only else one.stages(options.records):
            runs = run_all(specs, one.file(options.records), options.data_dir, options.jobs)
            for done, _ in enumerate(runs, 1):
                print(f"{one.name}: {done} of {len(specs)}", flush=True)
        print(f"{one.name}, tuning seeds\n{table(one, records(one, options.records))}")
        print(f"{one.name}, fresh seeds\n{table(one, fresh_records(one, options.records))}")


if __name__ == "__main__":
    main()
