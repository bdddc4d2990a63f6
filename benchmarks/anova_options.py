"""Anova's defaults against other values of every option: final training loss and time, one change at a time.

    python benchmarks/anova_options.py --data-dir FOLDER [--jobs 2] [--records out/runs]

Every variant runs at the learning rate that was best for the defaults in the race, with three paired seeds. Runs are
kept as records and not repeated; the summary goes to benchmarks/results/anova_options.json.
"""

from __future__ import annotations

import statistics
from typing import Any

from blockmean.lab.compare import (
    NO_RUNS,
    Column,
    Findings,
    Stage,
    Study,
    differences,
    diverged,
    interval,
    mean_columns,
    pairs,
    results_table,
)
from blockmean.lab.race import final_loss
from blockmean.lab.tasks import TASKS
from comparison import arguments, run, save

RATES = {"mlp-raw": 3e-3, "mlp": 3e-3, "autoencoder": 3e-3, "transformer-64": 1e-2}
SEEDS = (200, 201, 202)
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "4 means": {"means": 4},
    "8 means": {"means": 8},
    "16 means": {"means": 16},
    "32 means": {"means": 32},
    "16 means, units only": {"means": (0, 16)},
    "16 means, inputs only": {"means": (16, 0)},
    "mean_beta=0.9": {"mean_beta": 0.9},
    "mean_beta=0.98": {"mean_beta": 0.98},
    "mean_beta=0.999": {"mean_beta": 0.999},
    "betas=(0.9, 0.99)": {"betas": (0.9, 0.99)},
    "betas=(0.9, 0.95)": {"betas": (0.9, 0.95)},
    "betas=(0.95, 0.999)": {"betas": (0.95, 0.999)},
    "refresh_every=1": {"refresh_every": 1},
    "refresh_every=3": {"refresh_every": 3},
    "refresh_every=10": {"refresh_every": 10},
    "refresh_every=30": {"refresh_every": 30},
}


def studies() -> dict[str, Study]:
    """One per task; for one seed all variants run one after another, so that they share the state of the machine."""
    arms = {
        name: {"optimizer": "Anova", "options": {"weight_decay": 0.0, **changed}} for name, changed in VARIANTS.items()
    }
    return {
        name: Study(name, TASKS[name], arms, (rate,), NO_RUNS, Stage(SEEDS, TASKS[name].steps), curve=True)
        for name, rate in RATES.items()
    }


def summary(found: Findings) -> dict[str, dict[str, Any]]:
    """For each variant its final losses, the paired difference from the defaults, and the time of its steps."""
    base, rows = found.results["defaults"], {}
    for variant, records in found.results.items():
        change = interval(differences(records, base, final_loss))
        ratios = [ours / theirs for ours, theirs in pairs(records, base, lambda record: float(record["step_seconds"]))]
        rows[variant] = {
            "final_loss": [None if diverged(record) else final_loss(record) for record in records],
            "difference": change and change._asdict(),
            "step_time_ratio": round(statistics.median(ratios), 3),
        }
    return rows


def main() -> None:
    options = arguments(__doc__, "anova_options").parse_args()
    settings = {"seeds": SEEDS, "rates": RATES, "variants": VARIANTS}
    rows: dict[str, dict[str, Any]] = {}
    for task, study in studies().items():
        found = run(study, options)
        rows[task] = summary(found)
        save(options, settings=settings, rows=rows)
        columns = mean_columns(study, found, "defaults", final_loss, "final loss", ".4g", "− the defaults'")
        columns.append(Column("time of a step", lambda arm, own=rows[task]: f"{own[arm]['step_time_ratio']:.2f}×"))
        print(f"\n{task}\n\n{results_table(study, found, columns, task).markdown()}")


if __name__ == "__main__":
    main()
