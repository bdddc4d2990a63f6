"""What torch.compile makes of the arithmetic of a step on a CPU: seconds per step beside torch's operations.

    python benchmarks/compiled_passes.py [--tensors 20] [--side 256] [--out benchmarks/results/compiled_passes.json]

Both passes in their foreach form, and Anova's step of a batch of matrices, compiled with inductor as whole graphs. One
thread, fixed gradients, one interleaved run per optimizer. A sample is five steps, of which Anova turns U and V in one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from blockmean import AdaGradBMA, AdamBMA, Anova
from blockmean.lab.environment import environment, use_threads
from blockmean.lab.timing import interleaved, ratios, summary
from blockmean.optim import parts, passes

OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "AdaGradBMA": (AdaGradBMA, {"variant": "weighted", "partition": "unit", "coupling": "none"}),
    "AdamBMA": (AdamBMA, {}),
    "Anova": (Anova, {}),
}
TORCH = {"foreach": True, "fused": False}
STEPS = 5
EAGER = passes.FOREACH, parts.apply_


def compiled() -> tuple[Any, Any]:
    """The functions of `EAGER`, compiled on their first call; a graph break is an error."""
    first, second, step = (torch.compile(f, fullgraph=True) for f in (*EAGER[0], EAGER[1]))
    return passes.Passes(first, second), step


def stepper(name: str, options: dict[str, Any], functions: tuple[Any, Any], tensors: int, side: int) -> Any:
    """Steps with these functions; returns the parameters."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(side, side, generator=generator)) for _ in range(tensors)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) * 1e-3
    make, own = OPTIMIZERS[name]
    optimizer = make([(f"layer{i}.weight", param) for i, param in enumerate(params)], **own, **options)

    def several() -> list[nn.Parameter]:
        passes.FOREACH, parts.apply_ = functions
        for _ in range(STEPS):
            optimizer.step()
        passes.FOREACH, parts.apply_ = EAGER
        return params

    return several


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensors", type=int, default=20)
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "compiled_passes.json")
    given = parser.parse_args()
    use_threads(1)
    torch._inductor.config.force_disable_caches = True  # graphs of earlier runs would hide what compiling costs
    rows = []
    for name in OPTIMIZERS:
        torch.compiler.reset()
        counters.clear()
        size = given.tensors, given.side
        steps = {
            "torch's operations": stepper(name, TORCH, EAGER, *size),
            "compiled": stepper(name, TORCH, compiled(), *size),
            "native kernels": stepper(name, {}, EAGER, *size),
        }
        expected = steps["torch's operations"]()
        start = time.perf_counter()
        found = steps["compiled"]()
        seconds = time.perf_counter() - start
        apart = max(float((a - b).detach().abs().max()) for a, b in zip(expected, found, strict=True))
        graphs = counters["stats"]["unique_graphs"]
        samples = interleaved(steps, given.repetitions)
        about = {"optimizer": name, "graphs": graphs, "graphs_at_end": counters["stats"]["unique_graphs"]}
        about |= {"first_steps_seconds": round(seconds, 1), "largest_difference": apart}
        for how, ratio in ratios(samples, "torch's operations").items():
            each = summary([sample / STEPS for sample in samples[how]])
            rows.append({**about, "how": how, "ratio": ratio, "seconds": each})
            print(f"{name:11} {how:19} {each['median'] * 1e3:7.2f} ms  {ratio['median']:5.2f} x", flush=True)
        print(about, flush=True)
    record = {"environment": environment(), "tensors": given.tensors, "side": given.side, "rows": rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
