"""What a step costs apart from its arithmetic: microseconds per tensor for tensors of one entry.

    python benchmarks/overhead.py [--tensors 200] [--out benchmarks/results/overhead.json]

Each optimizer steps in a loop of some 60 ms, in turn with the others; one thread. `blockmean bench step
--networks 200x1` has the other extreme: single steps between those of others, which find nothing in the cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from blockmean import AdaGradBMA, AdamBMA, Anova
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.timing import interleaved, ratios, summary

YARDSTICK = "torch's AdamW, fused"
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    YARDSTICK: lambda params: torch.optim.AdamW(params, fused=True),
    "torch's Adagrad, fused": lambda params: torch.optim.Adagrad(params, fused=True),
    "AdamBMA": AdamBMA,
    "AdaGradBMA, weighted, none": lambda params: AdaGradBMA(params, variant="weighted", coupling="none"),
    "Anova": Anova,
}


def steps(make: Callable[[list[Tensor]], torch.optim.Optimizer], tensors: int, times: int) -> Callable[[], None]:
    """Several steps in a row."""
    params: list[Tensor] = [nn.Parameter(torch.zeros(1, 1)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.ones(1, 1)
    optimizer = make(params)

    def several() -> None:
        for _ in range(times):
            optimizer.step()

    return several


def measure(tensors: int, repetitions: int) -> dict[str, object]:
    use_threads(1)
    times = max(1, 20_000 // tensors)
    samples = interleaved({name: steps(make, tensors, times) for name, make in OPTIMIZERS.items()}, repetitions)
    beside = ratios(samples, YARDSTICK)
    rows = [
        {
            "optimizer": name,
            "microseconds_per_tensor": summary([1e6 * one / times / tensors for one in own]),
            "ratio": beside[name],
        }
        for name, own in samples.items()
    ]
    return {"tensors": tensors, "rows": rows, "environment": environment()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "overhead.json")
    given = parser.parse_args()
    record = measure(given.tensors, given.repetitions)
    for row in record["rows"]:
        print(
            f"{row['optimizer']:28} {row['microseconds_per_tensor']['median']:6.2f} µs {row['ratio']['median']:6.2f} x"
        )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
