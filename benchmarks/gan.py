"""Anova beside AdamW in a game: does a generator find all of eight Gaussians on a ring?

    python benchmarks/gan.py [--optimizers AdamW Anova] [--rates 3e-4 1e-3 3e-3] [--seeds 0 1 2 3 4] [--options JSON]
    python benchmarks/gan.py --table

A game has no loss to compare. Of 2,000 samples, midway and at the end: those within three standard deviations of a
mode, and the modes that have at least 1% of them all. Generator and discriminator have steps in turn, each with an
optimizer of its own and the optimizer's defaults but for the rate; many give such games a shorter memory, with
--options '{"betas": [0.5, 0.999]}'. The loss is the logistic one, the generator's not saturating. Equal seeds mean
equal weights and noise. Every run is a line of benchmarks/results/gan.jsonl and is not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from anova_rates import OPTIMIZERS, Make, find, read
from blockmean.lab.arms import seed_everything
from blockmean.lab.environment import environment, use_threads

RATES = (3e-4, 1e-3, 3e-3)
MODES, RADIUS, SPREAD = 8, 2.0, 0.1
NOISE, BATCH, SAMPLES = 16, 256, 2_000
NEAR = 3
"""In standard deviations: a sample that near belongs to a mode."""
LEAST = 0.01
"""The share of the samples that covers a mode."""


def mlp(inputs: int, outputs: int, width: int = 128) -> nn.Sequential:
    hidden = nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def centres() -> Tensor:
    """(modes, 2)"""
    angles = 2 * math.pi / MODES * torch.arange(MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], 1)


def coverage(samples: Tensor) -> dict[str, float]:
    """How many modes have their share of samples, and the share of samples that are near a mode."""
    near = (torch.cdist(samples, centres()) <= NEAR * SPREAD).float().mean(0)
    return {"modes": int((near >= LEAST).sum()), "near": near.sum().item()}


def run(make: Make, rate: float, seed: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train once, on one thread; what a run that diverged has not reached is None."""
    seed_everything(seed)
    generator, discriminator = mlp(NOISE, 2), mlp(2, 1)
    learners = [make(net.parameters(), lr=rate, **options) for net in (generator, discriminator)]
    drawn = torch.Generator().manual_seed(seed + 1_000_003)
    shown = torch.randn(SAMPLES, NOISE, generator=drawn)
    found: dict[str, Any] = {"midway": None, "end": None}
    began = time.process_time()
    for step in range(1, steps + 1):
        modes = centres()[torch.randint(MODES, (BATCH,), generator=drawn)]
        real = modes + SPREAD * torch.randn(BATCH, 2, generator=drawn)
        fake = generator(torch.randn(BATCH, NOISE, generator=drawn))
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(fake.detach())).mean()
        if not loss.isfinite():
            break
        learners[1].zero_grad()
        loss.backward()
        learners[1].step()
        learners[0].zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        learners[0].step()
        if step in (steps // 2, steps):
            with torch.no_grad():
                found["end" if step == steps else "midway"] = coverage(generator(shown))
    return {**found, "seconds": round(time.process_time() - began, 3)}


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells runs apart."""
    return record["arm"], record["rate"], record["seed"], record["steps"]


def table(records: list[dict[str, Any]]) -> str:
    """Medians over seeds, of modes also the least and the most; a run that diverged covers none."""
    header = ["rate, arm", "seeds", "modes, midway", "near, midway", "modes, end", "near, end", "seconds"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for rate, arm in sorted({(record["rate"], record["arm"]) for record in records}):
        own = [record for record in records if (record["rate"], record["arm"]) == (rate, arm)]
        cells = [f"{rate:g}, {arm}", str(len(own))]
        for when in ("midway", "end"):
            seen = [record[when] or {"modes": 0, "near": 0.0} for record in own]
            modes = [one["modes"] for one in seen]
            cells.append(f"{statistics.median(modes):g} ({min(modes)}–{max(modes)})")
            cells.append(f"{statistics.median(one['near'] for one in seen):.0%}")
        cells.append(f"{statistics.median(record['seconds'] for record in own):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), help="AdamW, Anova or 'module:Class'")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of the optimizers, as JSON")
    parser.add_argument("--label", default="", help="name of the arm in the records, instead of optimizer and options")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gan.jsonl")
    parser.add_argument("--table", action="store_true", help="only print what the records say")
    given = parser.parse_args()
    if not given.table:
        use_threads(1)
        finished, where = {key(record) for record in read(given.out)}, environment()
        for seed in given.seeds:
            for rate in given.rates:
                for name in given.optimizers:
                    arm = given.label or ", ".join([name, *(f"{k} {v}" for k, v in given.options.items())])
                    chosen = {"arm": arm, "rate": rate, "seed": seed, "steps": given.steps}
                    if key(chosen) in finished:
                        continue
                    found = run(find(name), rate, seed, given.steps, given.options)
                    record = {**chosen, "options": given.options, **found, "environment": where}
                    with given.out.open("a") as file:
                        file.write(json.dumps(record, allow_nan=False) + "\n")
    print(table(read(given.out)))


if __name__ == "__main__":
    main()
