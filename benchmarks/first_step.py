"""The length of the first step: why Algorithm 1 with the authors' eigenvalue floor can ruin a network at once.

    python benchmarks/first_step.py --data-dir FOLDER [--seeds 20]

In the first step of AdaGrad every parameter moves by η, whatever its gradient. The block mean corrects that by A^-½
between blocks. A then has rank one, so all its eigenvalues but one are raised to the floor. For each model, floor and
seed we measure the largest move of a parameter in units of η, and how much of the spread of the outputs over 500 test
images is left after a step with η = 0.1. The record is benchmarks/results/first_step.json.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path

import torch
from torch import nn

from blockmean import AdaGradBMA
from blockmean.lab.data import Images, load
from blockmean.lab.environment import environment
from blockmean.lab.records import store
from blockmean.lab.tasks import network

RATE = 0.1
FLOORS = {"the authors' floor, 1e-10": 1e-10, "our floor, 0.1": 0.1}


def first_step(model_name: str, images: Images, seed: int) -> dict[str, dict[str, float]]:
    """The effect of the step with each floor, from the same weights and batch."""
    torch.manual_seed(seed)
    start = network(model_name, images.train)
    batch = torch.randint(len(images.train), (100,))
    nn.functional.cross_entropy(start(images.train[batch]), images.train_labels[batch]).backward()
    found = {}
    for name, floor in FLOORS.items():
        model = copy.deepcopy(start)
        for param, original in zip(model.parameters(), start.parameters(), strict=True):
            param.grad = original.grad
        AdaGradBMA(model.parameters(), RATE, variant="paper", eps=1e-10, eigenvalue_floor=floor).step()
        with torch.no_grad():
            moves = [(a - b).abs().max() / RATE for a, b in zip(model.parameters(), start.parameters(), strict=True)]
            before, after = (net(images.test[:500]).std(0).norm() for net in (start, model))
        found[name] = {"largest move": float(max(moves)), "differences left": float(after / before)}
    return found


def table(found: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    """One row per model and floor. Differences count as lost if less than a thousandth of them is left."""
    header = ["model, floor", "largest move, median seed", "worst seed", "seeds that lose all differences"]
    lines = [f"| {' | '.join(header)} |", "|---|---|---|---|"]
    for model, seeds in found.items():
        for floor in FLOORS:
            moves = [seed[floor]["largest move"] for seed in seeds]
            alike = sum(seed[floor]["differences left"] < 1e-3 for seed in seeds)
            cells = [f"{statistics.median(moves):.2g} η", f"{max(moves):.2g} η", f"{alike} of {len(seeds)}"]
            lines.append(f"| {model}, {floor} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="mnist", help="digits (4,000 embedded images) is enough for a trial")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--models", nargs="+", default=["small", "large"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_step.json")
    given = parser.parse_args()
    images = load(given.dataset, data_dir=given.data_dir)
    found = {model: [first_step(model, images, seed) for seed in range(given.seeds)] for model in given.models}
    store(given.out, {"dataset": given.dataset, "rate": RATE, "models": found, "environment": environment()})
    print(table(found))


if __name__ == "__main__":
    main()
