"""AdamBMA against AdamW on a transformer, whose LayerNorm leaves little to correct: it must do no harm.

    python benchmarks/transformer.py --data-dir FOLDER [--steps 400] [--jobs 2] [--records out/runs]

Both run at their defaults and the same learning rates, with five paired seeds: the same initial weights and batches.
The loss is on held-out text, the last tenth. Runs are kept as records and not repeated; the summary goes to
benchmarks/results/transformer.json. (The published one was made by an earlier script, which drew its batches with
replacement.)
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockmean.lab.compare import Stage, Study, differences, interval
from blockmean.lab.environment import environment
from blockmean.lab.race import final_loss, held_out_loss
from blockmean.lab.records import run_all
from blockmean.lab.tasks import PROFILES

RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEEDS = (0, 1, 2, 3, 4)
ARMS: dict[str, dict[str, Any]] = {"AdamW": {"optimizer": "AdamW"}, "AdamBMA": {"optimizer": "AdamBMA"}}
MEASURES = {"held_out": held_out_loss, "train": final_loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None, help="has text/tinyshakespeare.txt")
    parser.add_argument("--profile", choices=PROFILES, default="full", help="quick: the text inside Python itself")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--records", type=Path, default=Path("out/runs"), help="one file per run; none is repeated")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "transformer.json")
    options = parser.parse_args()
    task = replace(PROFILES[options.profile]["transformer-64"], steps=options.steps)
    stage = Stage(SEEDS, task.steps)
    study = Study("transformer", task, ARMS, RATES, stage, stage, final_loss, curve=True)
    found: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for record in run_all(study.tuning_specs(), options.records, options.data_dir, options.jobs):
        spec = record["spec"]
        found.setdefault((spec["optimizer"], spec["lr"]), []).append(record)
    setting = {"text": task.dataset, "steps": task.steps, "model": task.model, "batch": task.batch}
    summary: dict[str, Any] = {"environment": environment(), "setting": setting, "runs": {}, "differences": {}}
    for (arm, lr), records in sorted(found.items()):
        for record in records:
            ends = {name: measure(record) for name, measure in MEASURES.items()}
            summary["runs"][f"{arm} {lr:g} {record['spec']['seed']}"] = {
                name: value if math.isfinite(value) else None for name, value in ends.items()
            }
    for lr in RATES:
        for name, measure in MEASURES.items():
            gained = interval(differences(found["AdamBMA", lr], found["AdamW", lr], measure))
            summary["differences"][f"{name} at {lr:g}"] = gained and gained._asdict()
            print(f"AdamBMA - AdamW, {name} at {lr:g}: {gained or 'a run diverged'}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(summary, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
