"""AdamBMA against AdamW on a transformer, whose LayerNorm leaves little to correct: it must do no harm.

    python benchmarks/transformer.py --data-dir FOLDER [--steps 400] [--jobs 2] [--records out/runs]

Both run at their defaults and the same learning rates, with five paired seeds: the same initial weights and batches.
The loss is on held-out text, the last tenth. Runs are kept as records and not repeated; the summary goes to
benchmarks/results/transformer.json. (The published one was made by an earlier script, which drew its batches with
replacement.)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from blockmean.lab.compare import NO_RUNS, Stage, Study, differences, interval
from blockmean.lab.race import final_loss, held_out_loss
from blockmean.lab.tasks import PROFILES, Task
from comparison import arguments, run, save

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2, 3, 4)
ARMS: dict[str, dict[str, Any]] = {"AdamW": {"optimizer": "AdamW"}, "AdamBMA": {"optimizer": "AdamBMA"}}
MEASURES = {"held_out": held_out_loss, "train": final_loss}


def studies(task: Task) -> dict[float, Study]:
    """One per rate: nothing is tuned."""
    final = Stage(SEEDS, task.steps)
    return {rate: Study(f"transformer, lr {rate:g}", task, ARMS, (rate,), NO_RUNS, final, curve=True) for rate in RATES}


def main() -> None:
    parser = arguments(__doc__, "transformer")
    parser.add_argument("--profile", choices=PROFILES, default="full", help="quick: the text inside Python itself")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    task = replace(PROFILES[options.profile]["transformer-64"], steps=options.steps)
    runs: dict[str, dict[str, float | None]] = {}
    gains: dict[str, dict[str, float] | None] = {}
    for rate, study in studies(task).items():
        found = run(study, options).results
        for arm, records in found.items():
            for record in records:
                ends = {name: measure(record) for name, measure in MEASURES.items()}
                runs[f"{arm} {rate:g} {record['spec']['seed']}"] = {
                    name: value if math.isfinite(value) else None for name, value in ends.items()
                }
        for name, measure in MEASURES.items():
            gained = interval(differences(found["AdamBMA"], found["AdamW"], measure))
            gains[f"{name} at {rate:g}"] = gained and gained._asdict()
            print(f"AdamBMA - AdamW, {name} at {rate:g}: {gained or 'a run diverged'}")
    setting = {"text": task.dataset, "steps": task.steps, "model": task.model, "batch": task.batch}
    save(options, setting=setting, runs=runs, differences=gains)


if __name__ == "__main__":
    main()
