"""What the step costs a training iteration, and the peak memory of steps, beside torch's fused AdamW.

    python benchmarks/step_cost.py [--repetitions 30] [--out benchmarks/results/step_cost.json]

One thread. Iterations are forward, backward and step of tasks of the race, of two layers of the small GPT-2 on 2,048
tokens, and of the paper's two networks, on random inputs, interleaved; those of the paper stand beside torch's fused
Adagrad. Peak memory is that of a process that takes three steps of 12 million parameters. `blockmean bench step` times
steps alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean.lab.arms import ARMS, make
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.models import MODELS
from blockmean.lab.tasks import DATASETS, LOSSES, TASKS, make_model
from blockmean.lab.text import CONTEXT, vocabulary
from blockmean.lab.timing import interleaved, peak_bytes, ratios, run_alone, summary

ITERATIONS = ("mlp-raw", "autoencoder", "cnn", "resnet", "transformer-64", "transformer-192")
GPT_2 = "gpt-2-layers"
PAPER = {"paper-small": ("small", (1, 28, 28)), "paper-large": ("large", (3, 32, 32))}
"""The paper's networks, and the images that they take, 100 at a time."""


FUSED = "AdamW, fused"


def optimizer_for(arm: str, model: nn.Module) -> torch.optim.Optimizer:
    if arm == FUSED:
        return make("AdamW", model, 1e-3, {**ARMS["AdamW"].options, "fused": True})
    return make(ARMS[arm].optimizer, model, 1e-3, ARMS[arm].options)


def wide() -> nn.Module:
    """Twelve million parameters in 24 tensors: more than a cache holds."""
    return nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(12)))


def set_gradients(params: list[nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(0)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3


def iterations(name: str) -> dict[str, Callable[[], object]]:
    """Forward, backward and step of a task with both forms of AdamW, our own and SOAP."""
    task, found = TASKS[name], {}
    for arm in (FUSED, "AdamW", "AdamBMA", "Anova", "SOAP"):
        torch.manual_seed(0)
        model = make_model(task)
        image = DATASETS[task.dataset].image
        if image:
            x = torch.rand(task.batch, *image)
            y = x.flatten(1) if task.loss == "reconstruction" else torch.randint(10, (task.batch,))
        else:
            x, y = torch.randint(vocabulary(task.dataset), (2, task.batch, CONTEXT))
        optimizer = optimizer_for(arm, model)
        times = 10 if task.batch > 64 else 3
        found[arm] = partial(iterate, model, optimizer, LOSSES[task.loss].mean, x, y, times)
    return found


def gpt_2_iterations() -> dict[str, Callable[[], object]]:
    """The same for two layers of the small GPT-2 on 2,048 tokens, a refresh of Anova included; SOAP takes minutes."""
    found = {}
    for arm in (FUSED, "AdamW", "AdamBMA", "Anova"):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0, batch_first=True, norm_first=True)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        x, y = torch.randn(2, 8, 256, 768)
        optimizer = optimizer_for(arm, model)
        found[arm] = partial(iterate, model, optimizer, nn.functional.mse_loss, x, y, 5)
    return found


def paper_iterations(name: str) -> dict[str, Callable[[], object]]:
    """Forward, backward and step of a network of the paper with torch's fused Adagrad and with AdaGradBMA."""
    (network, image), found = PAPER[name], {}
    for arm, (optimizer, options) in {
        "Adagrad, fused": ("Adagrad", {"fused": True}),
        "AdaGradBMA": ("AdaGradBMA", {}),
    }.items():
        torch.manual_seed(0)
        model = MODELS[network](image).to(memory_format=torch.channels_last)  # as they are trained
        x, y = torch.rand(100, *image), torch.randint(10, (100,))
        stepper = make(optimizer, model, 1e-3, options)
        found[arm] = partial(iterate, model, stepper, nn.functional.cross_entropy, x, y, 5)
    return found


def iterate(model: nn.Module, optimizer: Any, loss: Callable[..., Any], x: Any, y: Any, times: int) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()


def peak(name: str) -> None:
    """Print the peak memory of three steps of an arm on 12 million parameters, beyond the model, in bytes.

    A small model goes first, so that what libraries load once does not count.
    """

    def run(model: nn.Module) -> object:
        optimizer = optimizer_for(name, model)
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
    parser.add_argument("--tasks", default=",".join([*ITERATIONS, GPT_2, *PAPER]))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "step_cost.json")
    options = parser.parse_args()
    use_threads(1)
    if options.peak:
        peak(options.peak)
        return
    rows: list[dict[str, Any]] = []
    for task in options.tasks.split(","):
        runs = gpt_2_iterations() if task == GPT_2 else paper_iterations(task) if task in PAPER else iterations(task)
        samples = interleaved(runs, options.repetitions)
        for arm, ratio in ratios(samples, next(iter(runs))).items():
            rows.append({"task": task, "optimizer": arm, "ratio": ratio, "seconds": summary(samples[arm])})
            print(
                f"{task:16} {arm:10} {ratio['median']:.3f} ({ratio['lower']:.3f} to {ratio['upper']:.3f})", flush=True
            )
    memory = {name: int(run_alone([__file__, "--peak", name])) for name in ("AdamW", "Anova", "SOAP")}
    d = sum(p.numel() for p in wide().parameters())
    beyond = {name: round((value - memory["AdamW"]) / (4 * d), 3) for name, value in memory.items()}
    print(f"peak memory beyond AdamW's, in numbers per parameter: {beyond}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    record = {"environment": environment(), "rows": rows, "peak_bytes": memory, "peak_beyond_adamw": beyond}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
