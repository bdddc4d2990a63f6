"""NaturalGradientBMA: does it converge without noise, stay converged, and train as well as SGD?

    python benchmarks/natural.py [--out FILE]

Three tasks, each with a fixed number of steps, on one thread:

    regression    200×10 Gaussian inputs, exactly linear targets, full batch, default settings
    digits-500    500 MNIST digits, MLP 784-32-10, full batch, default settings
    digits-5000   5,000 MNIST digits, MLP 784-32-10, batches of 128, 500 steps: the best of seven learning rates, a
                  factor of 2 apart, by the mean over three seeds; then five fresh seeds. SGD has momentum 0.9

The summary goes to benchmarks/results/natural.json.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockmean import NaturalGradientBMA
from blockmean.lab.data import load
from blockmean.lab.environment import environment

SCALES = {"equal columns": 0.0, "columns scaled from 0.32 to 3.2": 0.5, "columns scaled from 0.1 to 10": 1.0}
SEEDS = (0, 1, 2)
FRESH_SEEDS = (10, 11, 12, 13, 14)
ARMS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], list[float]]] = {
    "SGD": (torch.optim.SGD, {"momentum": 0.9}, [0.1 * 2.0**k for k in range(-4, 3)]),
    "NaturalGradientBMA": (NaturalGradientBMA, {}, [1e-3 * 2.0**k for k in range(-4, 3)]),
    "NaturalGradientBMA per tensor, coupled": (
        NaturalGradientBMA,
        {"partition": "tensor", "coupling": "all"},
        [1e-3 * 2.0**k for k in range(-4, 3)],
    ),
}


def digits() -> tuple[Tensor, Tensor]:
    """All 5,000 digits, (5000, 784) and (5000,)."""
    images = load("digits")
    inputs = torch.cat([images.train, images.test]).flatten(1)
    return inputs, torch.cat([images.train_labels, images.test_labels])


def mlp(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


def losses(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor], steps: int) -> list[float]:
    """The loss before every step, and after the last."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        found.append(value.item())
        if not math.isfinite(found[-1]):
            return found
        optimizer.step()
    return [*found, loss().item()]


def regression(exponent: float, seed: int, steps: int = 3000) -> list[float]:
    """Noise-free least squares whose columns have scales from 10^-exponent to 10^exponent."""
    torch.manual_seed(seed)
    inputs = torch.randn(200, 10) * torch.logspace(-exponent, exponent, 10)
    targets = inputs @ torch.randn(10, 1) + 0.3
    model = nn.Linear(10, 1)
    return losses(NaturalGradientBMA(model.parameters()), lambda: (model(inputs) - targets).square().mean(), steps)


def full_batch(seed: int, steps: int = 3000) -> list[float]:
    """500 digits in one batch."""
    inputs, labels = (x[:500] for x in digits())
    model = mlp(seed)
    optimizer = NaturalGradientBMA(model.parameters())
    return losses(optimizer, lambda: nn.functional.cross_entropy(model(inputs), labels), steps)


def worst_rise(course: list[float]) -> float:
    """The largest ratio of a loss to the smallest one before it."""
    smallest, worst = course[0], 0.0
    for loss in course[1:]:
        worst = max(worst, loss / smallest) if smallest > 0 else worst
        smallest = min(smallest, loss)
    return worst


def mini_batches(
    data: tuple[Tensor, Tensor], cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any], seed: int
) -> float | None:
    """The loss over all digits after training; None if it diverged."""
    inputs, labels = data
    model = mlp(seed)
    rng = torch.Generator().manual_seed(seed)
    batches: list[Tensor] = []

    def loss() -> Tensor:
        if not batches:
            batches.extend(torch.randperm(len(labels), generator=rng).split(128)[:-1])
        batch = batches.pop()
        return nn.functional.cross_entropy(model(inputs[batch]), labels[batch])

    losses(cls(model.parameters(), **options), loss, steps=500)
    with torch.no_grad():
        final = nn.functional.cross_entropy(model(inputs), labels).item()
    return final if math.isfinite(final) else None


def race() -> dict[str, Any]:
    """For each arm: the loss of every rate and seed, and the best rate."""
    data, rows = digits(), {}
    for name, (cls, options, rates) in ARMS.items():
        tried = {}
        for lr in rates:
            tried[lr] = [mini_batches(data, cls, {**options, "lr": lr}, seed) for seed in SEEDS]
        means = {lr: math.inf if None in found else statistics.mean(found) for lr, found in tried.items()}
        best = min(means, key=means.__getitem__)
        fresh = [mini_batches(data, cls, {**options, "lr": best}, seed) for seed in FRESH_SEEDS]
        rows[name] = {"lr": best, "loss": fresh, "tried": {f"{lr:g}": found for lr, found in tried.items()}}
        print(f"{name}: {fresh} at {best:g}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "natural.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"environment": environment(), "regression": {}, "digits-500": []}
    for name, exponent in SCALES.items():
        record["regression"][name] = [regression(exponent, seed)[-1] for seed in SEEDS]
        print(name, record["regression"][name], flush=True)
    for seed in SEEDS:
        course = full_batch(seed)
        record["digits-500"].append({"losses": course[::500], "worst_rise": worst_rise(course)})
        print("500 digits:", record["digits-500"][-1], flush=True)
    record["digits-5000"] = race()
    options.out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
