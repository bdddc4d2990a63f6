"""The cost of a native step relative to torch's fused ones, and of its Python part: ratios within one interleaved run.

    python benchmarks/native_cost.py [--repetitions 40] [--threads 1]

The tensors are those of the paper's large network (140,906 parameters in 34 tensors), which fit into a cache, and 75
linear layers (50 million parameters in 150 tensors), which do not. Gradients are fixed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from blockmean import AdaGradBMA, AdamBMA
from blockmean.lab.models import MODELS
from blockmean.optim import native
from timing import interleaved, ratios, summary

PAIRS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "AdaGradBMA / Adagrad": (AdaGradBMA, lambda params: torch.optim.Adagrad(params, fused=True)),
    "AdamBMA / AdamW": (AdamBMA, lambda params: torch.optim.AdamW(params, fused=True)),
}


def shapes_of(size: str) -> list[torch.Size]:
    if size == "large":
        return [param.shape for param in MODELS["large"]((3, 32, 32)).parameters()]
    return [torch.Size(shape) for _ in range(75) for shape in ((816, 816), (816,))]


def stepper(make: Callable[[Any], Any], shapes: list[torch.Size]) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = 1e-3 * torch.randn(param.shape, generator=generator)
    step: Callable[[], object] = make(params).step
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"kernels: {native.instructions()}, threads: {options.threads}")
    for size, repetitions in (("large", options.repetitions), ("50M", max(5, options.repetitions // 4))):
        shapes = shapes_of(size)
        for name, (ours, theirs) in PAIRS.items():
            samples = interleaved({"ours": stepper(ours, shapes), "torch": stepper(theirs, shapes)}, repetitions)
            ratio = ratios(samples, "torch")["ours"]
            times = ", ".join(f"{key} {1e6 * summary(own)['median']:,.0f} µs" for key, own in samples.items())
            print(f"{size:6} {name:22} {ratio['median']:.2f} ({ratio['lower']:.2f} to {ratio['upper']:.2f})   {times}")
    samples = interleaved({"step": stepper(AdamBMA, [torch.Size((1,))] * 200)}, options.repetitions)
    print(f"all but the arithmetic of AdamBMA: {1e6 * summary(samples['step'])['median'] / 200:.2f} µs per tensor")


if __name__ == "__main__":
    main()
