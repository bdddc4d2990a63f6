"""The size of an optimizer's state, in numbers and bytes, after two steps on the paper's networks.

python benchmarks/state.py [--out benchmarks/results/state.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from blockmean import AdaGradBMA, AdaGradFull
from blockmean.lab.environment import environment

Make = Callable[[nn.Module], torch.optim.Optimizer]


def network(depth: int, channels: int) -> nn.Sequential:
    """The paper's models on MNIST: four times `depth` convolutions with tanh and one pooling; then a linear layer."""
    layers: list[nn.Module] = []
    before = 1
    for _ in range(4):
        for _ in range(depth):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.Tanh()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, 10))


def bma(partition: str, coupling: str, refresh_every: int = 1) -> Make:
    return lambda model: AdaGradBMA(
        model.named_parameters(),
        variant="weighted",
        partition=partition,
        coupling=coupling,
        refresh_every=refresh_every,
    )


OPTIMIZERS: dict[str, Make] = {
    "torch Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "torch Adam": lambda model: torch.optim.Adam(model.parameters()),
    "AdaGradBMA correction=False": lambda model: AdaGradBMA(model.parameters(), correction=False),
    "AdaGradBMA tensor, all": bma("tensor", "all"),
    "AdaGradBMA tensor, all, refresh_every=10": bma("tensor", "all", 10),
    "AdaGradBMA unit, all": bma("unit", "all"),
    "AdaGradBMA unit, module": bma("unit", "module"),
    "AdaGradBMA unit, none": bma("unit", "none"),
    "AdaGradBMA kernel, none": bma("kernel", "none"),
    "AdaGradFull": lambda model: AdaGradFull(model.parameters()),
}


def measure(make: Make, model: nn.Module) -> dict[str, int]:
    """Numbers and bytes in all state tensors except the step counts; shared memory counts once."""
    optimizer = make(model)
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(4, 1, 28, 28)), torch.arange(4)).backward()
        optimizer.step()
    storages: dict[int, Tensor] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if key != "step":
                storages[value.untyped_storage().data_ptr()] = value
    numbers = sum(value.untyped_storage().nbytes() // value.element_size() for value in storages.values())
    return {"numbers": numbers, "bytes": sum(value.untyped_storage().nbytes() for value in storages.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "state.json")
    out = parser.parse_args().out
    torch.manual_seed(0)
    rows = []
    for size, model in (("small", network(1, 3)), ("large", network(4, 32))):
        d = sum(parameter.numel() for parameter in model.parameters())
        for name, make in OPTIMIZERS.items():
            if name == "AdaGradFull" and size == "large":
                continue  # 155 GB
            rows.append({"model": size, "parameters": d, "optimizer": name, **measure(make, model)})
            print(f"{size:6} {name:42} {rows[-1]['numbers']:>9,} numbers = d + {rows[-1]['numbers'] - d:,}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
