"""The first epoch of the paper's small model on CIFAR-10 under other protocols, beside the authors' curves.

    python benchmarks/first_epoch.py --data-dir FOLDER [--seeds 0 1 2] [--variations …]

In the authors' curves the training loss of the first epoch is 910 (diag), 857 (BMA) and 840 (full); in our runs the
three are equal within noise. Each variation changes one thing that the paper leaves open, or that a reader of its code
might have done otherwise. Per run we keep the sum of the 500 batch losses, which is what the authors plot, 500 times
the mean loss over the last 50 batches, and 500 times the loss over 10,000 training images after the epoch. The record
is benchmarks/results/first_epoch.json; a run that is in it is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from blockmean.lab import arms
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.paper.protocol import BATCH, DIAGONAL, PAPER, SMALL_ARMS
from blockmean.lab.records import store
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import LOSSES, evaluate, load_data, make_model
from blockmean.lab.train import batches_of

ARMS = {"diag": DIAGONAL, "BMA": PAPER, "full": SMALL_ARMS["full"]}
AUTHORS = {"diag": 910, "BMA": 857, "full": 840}


class Variation(NamedTuple):
    """What differs from the protocol of the study: PyTorch's weights, normalised inputs, mirrored images, rate 0.1."""

    rate: float = 0.1
    inputs: str = "normalised"
    flip: bool = True
    shuffled: bool = True
    weights: str = "default"
    activation: type[nn.Module] = nn.Tanh
    pooling: type[nn.Module] = nn.MaxPool2d
    initial: float = 0.0  # where the sums of squares start; full has no such option
    eps_inside: bool = False  # diag with √(r + ε) as in Algorithm 1, in place of PyTorch's √r + ε


VARIATIONS = {
    "the study's protocol": Variation(),
    "rate 0.3": Variation(rate=0.3),
    "inputs in [0, 1]": Variation(inputs="raw"),
    "Xavier's weights": Variation(weights="xavier"),
    "not mirrored, not shuffled": Variation(flip=False, shuffled=False),
    "mean pooling": Variation(pooling=nn.AvgPool2d),
    "ReLU": Variation(activation=nn.ReLU),
    "rate 0.05": Variation(rate=0.05),
    "rate 0.2": Variation(rate=0.2),
    "sums from 0.1": Variation(initial=0.1),
    "ε inside the root": Variation(eps_inside=True),
}


def first_epoch(variation: Variation, arm: str, seed: int, steps: int, dataset: str, data_dir: Path | None) -> dict:
    """One run of one epoch."""
    options = dict(ARMS[arm]["options"])
    optimizer_name = ARMS[arm]["optimizer"]
    if variation.initial:
        options["initial_accumulator_value"] = variation.initial
    if variation.eps_inside:
        optimizer_name, options = "AdaGradBMA", {"eps": 1e-10, "correction": False}
    spec = RunSpec(
        dataset, "small", optimizer_name, variation.rate, seed, steps, options, variation.inputs, BATCH, variation.flip
    )
    data = load_data(spec, data_dir)
    arms.seed_everything(seed)
    model = _changed(make_model(spec), variation)
    optimizer = arms.make(optimizer_name, model, variation.rate, options)
    if variation.shuffled:
        batches = batches_of(data, spec)
    else:
        batches = zip(data.train.split(BATCH), data.train_targets.split(BATCH), strict=True)
    losses = []
    for (inputs, targets), _ in zip(batches, range(steps), strict=False):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = evaluate(model, LOSSES["cross_entropy"], data.train[:10_000], data.train_targets[:10_000])["test_loss"]
    return {
        "sum": round(500 * statistics.mean(losses), 2),
        "last 50": round(500 * statistics.mean(losses[-50:]), 2),
        "after": round(500 * after, 2),
        "by fifties": [round(500 * statistics.mean(losses[i : i + 50]), 1) for i in range(0, len(losses), 50)],
    }


def _changed(model: nn.Module, variation: Variation) -> nn.Module:
    """The paper's small model with another activation, pooling or weights."""
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Tanh):
            model[i] = variation.activation()
        elif isinstance(layer, nn.MaxPool2d):
            model[i] = variation.pooling(2)
        elif variation.weights == "xavier" and isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight, nn.init.calculate_gain("tanh"))
            nn.init.zeros_(layer.bias)
    return model


def arms_of(variation: Variation) -> list[str]:
    """The arms that the variation concerns."""
    if variation.eps_inside:
        return ["diag"]
    return ["diag", "BMA"] if variation.initial else list(ARMS)


def table(runs: list[dict[str, Any]], measure: str) -> str:
    """One row per variation: mean and range per arm, and the mean differences from diag of the same seeds."""
    header = ["variation", *ARMS, "BMA − diag", "full − diag"]
    lines = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    authors = [str(value) for value in AUTHORS.values()]
    authors += [f"{AUTHORS[arm] - AUTHORS['diag']:+}" for arm in ("BMA", "full")]
    lines.append(f"| the authors' curves | {' | '.join(authors)} |")
    for name in dict.fromkeys(run["variation"] for run in runs):
        own = {(run["arm"], run["seed"]): run[measure] for run in runs if run["variation"] == name}
        cells = []
        for arm in ARMS:
            found = [value for (each, _), value in own.items() if each == arm]
            cells.append(f"{statistics.mean(found):.0f} ({min(found):.0f}–{max(found):.0f})" if found else "–")
        for arm in ("BMA", "full"):
            gaps = [
                own[arm, seed] - value for (each, seed), value in own.items() if each == "diag" and (arm, seed) in own
            ]
            cells.append(f"{statistics.mean(gaps):+.0f} ({min(gaps):+.0f} to {max(gaps):+.0f})" if gaps else "–")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dataset", default="cifar10", help="digits (4,000 embedded images) is enough for a trial")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--variations", nargs="+", default=list(VARIATIONS), choices=list(VARIATIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_epoch.json")
    given = parser.parse_args()
    use_threads(1)
    record = json.loads(given.out.read_text()) if given.out.exists() else {"authors": AUTHORS, "runs": []}
    for seed in given.seeds:
        for name in given.variations:
            for arm in arms_of(VARIATIONS[name]):
                key = {"dataset": given.dataset, "variation": name, "arm": arm, "seed": seed, "steps": given.steps}
                if any(key.items() <= run.items() for run in record["runs"]):
                    continue
                run = first_epoch(VARIATIONS[name], arm, seed, given.steps, given.dataset, given.data_dir)
                record["runs"].append({**key, **run})
                print(name, arm, seed, run["sum"], run["last 50"], run["after"], flush=True)
                store(given.out, {**record, "environment": environment()})
    for measure in ("sum", "last 50", "after"):
        print(f"\n{measure}\n\n{table(record['runs'], measure)}")


if __name__ == "__main__":
    main()
