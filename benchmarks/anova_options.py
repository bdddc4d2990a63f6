"""Anova's defaults against other values of every option: final training loss and time, one change at a time.

    python benchmarks/anova_options.py --data-dir FOLDER [--jobs 2] [--records out/runs]

Every variant runs at the learning rate that was best for the defaults in the race, with three paired seeds. Runs are
kept as records and not repeated; the summary goes to benchmarks/results/anova_options.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from rich.progress import track

from blockmean.lab.compare import differences, interval
from blockmean.lab.environment import environment
from blockmean.lab.race import final_loss
from blockmean.lab.records import run_all
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import TASKS

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


def specs(task: str, variant: str) -> list[RunSpec]:
    arm = {"optimizer": "Anova", "options": {"weight_decay": 0.0, **VARIANTS[variant]}}
    return [TASKS[task].spec(arm, RATES[task], seed, curve=True) for seed in SEEDS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None, help="where MNIST and the text are")
    parser.add_argument("--records", type=Path, default=Path("out/runs"), help="one file per run; none is repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "anova_options.json")
    options = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for task in TASKS.keys() & RATES.keys():
        # For one seed all variants run one after another: they share the state of the machine.
        wanted = [spec for by_seed in zip(*(specs(task, one) for one in VARIANTS), strict=True) for spec in by_seed]
        done = run_all(wanted, options.records, options.data_dir, options.jobs)
        found = {RunSpec(**record["spec"]): record for record in track(done, task, total=len(wanted))}
        base = [found[spec] for spec in specs(task, "defaults")]
        rows[task] = {}
        for variant in VARIANTS:
            own = [found[spec] for spec in specs(task, variant)]
            change = interval(differences(own, base, final_loss))
            pairs = [a["step_seconds"] / b["step_seconds"] for a, b in zip(own, base, strict=True)]
            rows[task][variant] = {
                "final_loss": [final_loss(record) if record["diverged_at"] is None else None for record in own],
                "difference": change and change._asdict(),
                "step_time_ratio": round(statistics.median(pairs), 3),
            }
            print(f"{task:16} {variant:24} {rows[task][variant]['final_loss']} {change or '–'}")
    settings = {"seeds": SEEDS, "rates": RATES, "variants": VARIANTS}
    record = {"environment": environment(), "settings": settings, "rows": rows}
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
