"""The cost of one optimizer step, and of one iteration, relative to torch's own: ratios within one interleaved run.

    python benchmarks/step_cost.py [--repetitions 30] [--only NAME] [--out benchmarks/results/step_cost.json]

One thread. Steps run on fixed gradients; iterations are forward, backward and step of tasks of the race, on random
inputs. Peak memory is that of a process that builds 12 million parameters and takes three steps.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean import AdaGradBMA, AdamBMA, Anova
from blockmean.lab.arms import ARMS, Unsuitable, make
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.models import MODELS
from blockmean.lab.tasks import DATASETS, LOSSES, TASKS, make_model
from blockmean.lab.text import CONTEXT, vocabulary
from timing import interleaved, peak_bytes, ratios, run_alone, summary

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
        "AdamBMA, fused=False": lambda params: AdamBMA(params, fused=False),
        "AdamBMA, foreach=False": lambda params: AdamBMA(params, foreach=False),
        "AdamBMA, foreach=True": lambda params: AdamBMA(params, foreach=True),
        "AdamBMA, whole tensors": lambda params: whole_tensors(AdamBMA(params, foreach=False)),
        "AdamBMA, module": lambda params: AdamBMA(params, coupling="module"),
        "Anova": Anova,
        "Anova, fused=False": lambda params: Anova(params, fused=False),
        "Anova, means=8": lambda params: Anova(params, means=8),
        "Anova, means=0": lambda params: Anova(params, means=0),
    },
}
PEERS = ("SOAP", "Shampoo", "Muon + AdamW")
"""Arms of the race whose steps are timed beside ours; their cost depends on the step, so many are averaged."""
PEER_STEPS = 25
ITERATIONS = ("mlp-raw", "autoencoder", "cnn", "resnet", "transformer-64", "transformer-192")


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
    named = [(name, nn.Parameter(param.detach().clone())) for name, param in model.named_parameters()]
    set_gradients([param for _, param in named])
    return make(named).step


def set_gradients(params: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3


def peer_steps(model: nn.Module) -> dict[str, Callable[[], object]]:
    """Several steps of every peer, and of AdamW and Anova, on a copy of the model each."""
    steps: dict[str, Callable[[], object]] = {}
    for name in ("AdamW", "Anova", *PEERS):
        own = copy.deepcopy(model)
        set_gradients(list(own.parameters()))
        try:
            optimizer = make(ARMS[name].optimizer, own, 1e-3, ARMS[name].options)
        except Unsuitable:
            continue

        def several(step: Callable[[], object] = optimizer.step) -> None:
            for _ in range(PEER_STEPS):
                step()

        steps[name] = several
    return steps


def iterations(name: str) -> dict[str, Callable[[], object]]:
    """Forward, backward and step of a task with AdamW, with Anova and with SOAP."""
    task, found = TASKS[name], {}
    for arm in ("AdamW", "Anova", "SOAP"):
        torch.manual_seed(0)
        model = make_model(task)
        image = DATASETS[task.dataset].image
        if image:
            x = torch.rand(task.batch, *image)
            y = x.flatten(1) if task.loss == "reconstruction" else torch.randint(10, (task.batch,))
        else:
            x, y = torch.randint(vocabulary(task.dataset), (2, task.batch, CONTEXT))
        optimizer = make(ARMS[arm].optimizer, model, 1e-3, ARMS[arm].options)

        def several(model: nn.Module = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            for _ in range(10 if task.batch > 64 else 3):
                optimizer.zero_grad()
                LOSSES[task.loss].mean(model(x), y).backward()
                optimizer.step()

        found[arm] = several
    return found


def peak(name: str) -> None:
    """Print the peak memory of three steps of an arm on 12 million parameters, beyond the model, in bytes.

    A small model goes first, so that what libraries load once does not count.
    """

    def run(model: nn.Module) -> object:
        optimizer = make(ARMS[name].optimizer, model, 1e-3, ARMS[name].options)
        for _ in range(3):
            optimizer.step()
        return optimizer

    small, model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)), wide()
    for one in (small, model):
        set_gradients(list(one.parameters()))
    run(small)
    print(peak_bytes(lambda: run(model)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--only", help="rows whose model or optimizer has this in its name; writes no record")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_cost.json")
    options = parser.parse_args()
    use_threads(1)
    if options.peak:
        peak(options.peak)
        return
    rows: list[dict[str, Any]] = []

    def measure(what: str, model: str, about: dict[str, Any], operations: dict[str, Any], yardstick: str) -> None:
        only = options.only
        chosen = {k: v for k, v in operations.items() if not only or only in model or only in k or k == yardstick}
        if len(chosen) < 2:
            return
        samples = interleaved(chosen, options.repetitions)
        for name, ratio in ratios(samples, yardstick).items():
            row = {"what": what, "model": model, **about, "optimizer": name, "yardstick": yardstick}
            rows.append({**row, "ratio": ratio, "seconds": summary(samples[name])})
            print(f"{what:9} {model:16} {name:36} {ratio['median']:6.2f} x {yardstick}", flush=True)

    for name in ("small", "mlp", "large", "wide"):
        model = wide() if name == "wide" else MODELS[name]((1, 28, 28))
        about = {"parameters": sum(p.numel() for p in model.parameters()), "tensors": len(list(model.parameters()))}
        for yardstick, makers in FAMILIES.items():
            measure("step", name, about, {k: stepper(one, model) for k, one in makers.items()}, yardstick)
        if name != "wide":
            measure("25 steps", name, about, peer_steps(model), "AdamW")
    for name in ITERATIONS:
        measure("iteration", name, {}, iterations(name), "AdamW")
    if options.only:
        return
    memory = {name: int(run_alone([__file__, "--peak", name])) for name in ("AdamW", "Anova", "SOAP")}
    d = sum(p.numel() for p in wide().parameters())
    beyond = {name: round((value - memory["AdamW"]) / (4 * d), 3) for name, value in memory.items()}
    print(f"peak memory beyond AdamW's, in numbers per parameter: {beyond}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "rows": rows, "peak_bytes": memory, "peak_beyond_adamw": beyond}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
