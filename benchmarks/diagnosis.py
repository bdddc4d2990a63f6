"""Does `diagnose` predict the gain of the correction? Its share after 50 steps, and the gain in first_look.py.

python benchmarks/diagnosis.py --data-dir FOLDER [--out benchmarks/results/diagnosis.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean import AdamBMA, diagnose
from blockmean.lab.data import load
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.models import MODELS

RESULTS = Path(__file__).parent / "results"
STEPS = 50


def share(setting: dict[str, Any], data_dir: Path | None) -> dict[str, float]:
    """The findings of `diagnose` after 50 steps of AdamBMA with its default learning rate."""
    images = load(setting["dataset"], setting["inputs"], data_dir)
    torch.manual_seed(0)
    channels, height, width = images.train.shape[1:]
    model = MODELS[setting["model"]]((channels, height, width))
    optimizer = AdamBMA(model.named_parameters(), weight_decay=0.0)
    for _ in range(STEPS):
        batch = torch.randint(len(images.train), (setting["batch"],))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images.train[batch]), images.train_labels[batch]).backward()
        optimizer.step()
    diagnosis = diagnose(optimizer)
    return {"share": diagnosis.share, "chance": diagnosis.chance, "matters": diagnosis.matters}


def gain(row: dict[str, Any], arm: str, baseline: str) -> float:
    """The relative reduction of an arm's mean loss from that of its baseline."""
    ours, theirs = (statistics.mean(row["arms"][name]["train_loss"]) for name in (arm, baseline))
    return 1 - ours / theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=RESULTS / "diagnosis.json")
    options = parser.parse_args()
    use_threads(1)
    look = json.loads((RESULTS / "first_look.json").read_text())
    rows = []
    print(
        "| task, inputs | common share after 50 steps | loss below Adagrad's | loss below AdamW's |\n|---|---|---|---|"
    )
    for row in look["rows"]:
        found = share(look["tasks"][row["task"]], options.data_dir)
        gains = [gain(row, "AdaGradBMA", "Adagrad"), gain(row, "AdamBMA", "AdamW")]
        rows.append({"task": row["task"], **found, "gain_adagrad": gains[0], "gain_adam": gains[1]})
        print(f"| {row['task']} | {found['share']:.1%} | {gains[0]:.0%} | {gains[1]:.0%} |")
    options.out.write_text(
        json.dumps({"environment": environment(), "steps": STEPS, "rows": rows}, indent=1, allow_nan=False) + "\n"
    )


if __name__ == "__main__":
    main()
