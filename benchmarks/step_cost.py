"""The cost of one optimizer step relative to torch's own: ratios within one interleaved run, on one thread.

python benchmarks/step_cost.py [--repetitions 30] [--out benchmarks/results/step_cost.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean import AdaGradBMA, AdamBMA
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.models import MODELS
from timing import interleaved, ratios, summary

UNIT = {"variant": "weighted", "partition": "unit", "coupling": "none"}
FAMILIES: dict[str, dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "torch Adagrad": {
        "torch Adagrad": torch.optim.Adagrad,
        "torch Adagrad, fused": lambda params: torch.optim.Adagrad(params, fused=True),
        "AdaGradBMA, correction=False": lambda params: AdaGradBMA(params, correction=False),
        "AdaGradBMA, weighted, unit, none": lambda params: AdaGradBMA(params, **UNIT),
        "AdaGradBMA, paper, tensor, all": AdaGradBMA,
        "AdaGradBMA, paper, refresh_every=10": lambda params: AdaGradBMA(params, refresh_every=10),
    },
    "torch AdamW": {
        "torch AdamW": torch.optim.AdamW,
        "torch AdamW, fused": lambda params: torch.optim.AdamW(params, fused=True),
        "AdamBMA, correction=False": lambda params: AdamBMA(params, correction=False),
        "torch AdamW, foreach": lambda params: torch.optim.AdamW(params, foreach=True),
        "AdamBMA": AdamBMA,
        "AdamBMA, foreach=False": lambda params: AdamBMA(params, foreach=False),
        "AdamBMA, foreach=True": lambda params: AdamBMA(params, foreach=True),
        "AdamBMA, whole tensors": lambda params: whole_tensors(AdamBMA(params, foreach=False)),
        "AdamBMA, module": lambda params: AdamBMA(params, coupling="module"),
    },
}


def whole_tensors(optimizer: AdamBMA) -> AdamBMA:
    """The same step without cutting large tensors into pieces."""
    for layout in optimizer._layouts:
        layout.__dict__["split"] = layout.whole
    return optimizer


def wide() -> nn.Module:
    """Twelve million parameters in 24 tensors: more than a cache holds."""
    return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(12)))


def stepper(make: Callable[[Any], torch.optim.Optimizer], model: nn.Module) -> Callable[[], object]:
    """A step on copies of the model's parameters, with fixed gradients."""
    generator = torch.Generator().manual_seed(0)
    named = [(name, nn.Parameter(param.detach().clone())) for name, param in model.named_parameters()]
    for _, param in named:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3
    return make(named).step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_cost.json")
    options = parser.parse_args()
    use_threads(1)
    rows = []
    for model_name in ("small", "mlp", "large", "wide"):
        model = wide() if model_name == "wide" else MODELS[model_name]((1, 28, 28))
        d, tensors = sum(p.numel() for p in model.parameters()), len(list(model.parameters()))
        for yardstick, makers in FAMILIES.items():
            samples = interleaved({name: stepper(make, model) for name, make in makers.items()}, options.repetitions)
            for name, ratio in ratios(samples, yardstick).items():
                row = {
                    "model": model_name,
                    "parameters": d,
                    "tensors": tensors,
                    "optimizer": name,
                    "yardstick": yardstick,
                }
                rows.append({**row, "ratio": ratio, "seconds": summary(samples[name])})
                print(f"{model_name:6} {name:36} {ratio['median']:6.2f} x {yardstick}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
