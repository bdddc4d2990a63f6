"""What a step costs: optimizers on the tensors of networks, each beside torch's own in one interleaved run.

Every measurement has a process of its own, so that one optimizer's memory and threads are not another's, and one that
takes too long can be stopped. Gradients are fixed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean import Anova
from blockmean.lab.arms import PEERS, Unsuitable, make, state_bytes
from blockmean.lab.compare import Table
from blockmean.lab.environment import environment, package_version, use_threads
from blockmean.lab.models import MODELS
from blockmean.lab.records import Records, append
from blockmean.lab.timing import interleaved, keep_memory, ratios, summary

# ---------------------------------------------------------------- networks


def resnet_18() -> nn.Module:
    """The layers of a ResNet-18 for ImageNet: 11.7 million parameters in 62 tensors."""
    layers: list[nn.Module] = []

    def add(inputs: int, outputs: int, size: int) -> None:
        layers.extend((nn.Conv2d(inputs, outputs, size, bias=False), nn.BatchNorm2d(outputs)))

    add(3, 64, 7)
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        for width in (inputs, outputs):  # two blocks
            add(width, outputs, 3)
            add(outputs, outputs, 3)
            if width != outputs:
                add(width, outputs, 1)
    return nn.Sequential(*layers, nn.Linear(512, 1000))


def gpt_2() -> nn.Module:
    """The layers of the small GPT-2: 124 million parameters in 148 tensors."""
    layers: list[nn.Module] = [nn.Embedding(50257, 768), nn.Embedding(1024, 768)]
    for _ in range(12):
        layers += [nn.LayerNorm(768), nn.Linear(768, 3 * 768), nn.Linear(768, 768)]
        layers += [nn.LayerNorm(768), nn.Linear(768, 4 * 768), nn.Linear(4 * 768, 768)]
    return nn.Sequential(*layers, nn.LayerNorm(768))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "paper-small": lambda: MODELS["small"]((1, 28, 28)),
    "paper-large": lambda: MODELS["large"]((3, 32, 32)),
    "resnet-18": resnet_18,
    "linear-50M": lambda: nn.Sequential(*(nn.Linear(816, 816) for _ in range(75))),
    "gpt-2": gpt_2,
}
"""The paper's own, whose tensors fit into a cache, and others that do not."""

SWEEPS = {
    "parameters": tuple(f"32x{side}" for side in (16, 32, 64, 128, 256, 512, 1024)),
    "blocks": ("4x512", "16x256", "64x128", "256x64", "1024x32"),
    "means": ("12x577",),
}
"""Networks whose cost shows what it grows with: parameters in 32 tensors, blocks in 2²⁰ parameters, means."""


def network(name: str) -> nn.Module:
    """A network by its name; "12x1000" is 12 square matrices with 1,000 rows."""
    if name in NETWORKS:
        return NETWORKS[name]()
    matrices = re.fullmatch(r"(\d+)x(\d+)", name)
    if matrices is None:
        raise ValueError(f"There is no network {name!r}. There are {', '.join(NETWORKS)}, and COUNTxROWS as 12x1000.")
    count, side = map(int, matrices.groups())
    return nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(count)))


# ---------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class Stepper:
    """An optimizer whose step is timed."""

    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    family: str = "AdamW"
    """The one of torch that it stands beside."""
    cycle: int = 1
    """Steps that a sample averages over: how often it does what it does not do in every step."""
    traffic: int | None = None
    """Bytes per float32 parameter that a step has to move, where that is what it costs."""


WEIGHTED = {"variant": "weighted", "partition": "unit", "coupling": "none"}
STEPPERS: dict[str, Stepper] = {
    "Adagrad": Stepper("Adagrad", {}, "Adagrad"),
    "Adagrad, foreach": Stepper("Adagrad", {"foreach": True}, "Adagrad"),
    "Adagrad, fused": Stepper("Adagrad", {"fused": True}, "Adagrad", traffic=20),
    "AdaGradBMA": Stepper("AdaGradBMA", {}, "Adagrad", traffic=28),
    "AdaGradBMA, weighted": Stepper("AdaGradBMA", WEIGHTED, "Adagrad", traffic=24),
    "AdaGradBMA, fused=False": Stepper("AdaGradBMA", {"fused": False}, "Adagrad"),
    "AdamW": Stepper("AdamW"),
    "AdamW, foreach": Stepper("AdamW", {"foreach": True}),
    "AdamW, fused": Stepper("AdamW", {"fused": True}, traffic=28),
    "AdamBMA": Stepper("AdamBMA", traffic=32),
    "AdamBMA, fused=False": Stepper("AdamBMA", {"fused": False}),
    "Anova": Stepper("Anova", cycle=2),
    "Anova, fused=False": Stepper("Anova", {"fused": False}, cycle=2),
    **{f"Anova, means={k}": Stepper("Anova", {"means": k}, cycle=2) for k in (0, 1, 2, 4, 8, 16, 32, 64)},
    "SOAP": Stepper("SOAP", cycle=10),
    "Shampoo": Stepper("ScalableShampoo", {"preconditioning_compute_steps": 25}, cycle=25),
    "Muon + AdamW": Stepper("MuonAdamW"),
    "Adam-mini": Stepper("AdamMini"),
}
"""Adding one is adding a row. Peers have the defaults of their authors, except where the race changes them."""
USUAL = tuple(name for name in STEPPERS if "means=" not in name)
OF_A_SWEEP = {
    "parameters": ("AdaGradBMA", "AdamBMA", "Anova"),
    "blocks": ("AdaGradBMA", "AdamBMA"),
    "means": tuple(name for name in STEPPERS if "means=" in name),
}


def yardsticks(name: str) -> tuple[str, str]:
    """Torch's default and its fused form."""
    family = STEPPERS[name].family
    return family, f"{family}, fused"


def operations(optimizer: torch.optim.Optimizer) -> int:
    """Floating-point operations of Anova's products in a step, the turn of U and V not counted; 0 without means."""
    if not isinstance(optimizer, Anova):
        return 0
    matrices = optimizer.block_statistics()
    return sum(4 * sum(matrix.num_means) * matrix.entries for matrix in matrices)


# ---------------------------------------------------------------- measuring


def measure(name: str, on: str, threads: int, repetitions: int) -> dict[str, Any]:
    """Time an optimizer beside both yardsticks, in this process. Unsuitable if it has nothing to do there."""
    use_threads(threads)
    kept = keep_memory()  # torch's default AdamW takes twice as long where every temporary causes page faults
    steps: dict[str, Callable[[], object]] = {}
    found: dict[str, Any] = {}
    for each in dict.fromkeys((*yardsticks(name), name)):
        stepper = STEPPERS[each]
        torch.manual_seed(0)
        model = network(on)
        for parameter in model.parameters():
            parameter.grad = 1e-3 * torch.randn_like(parameter)
        optimizer = make(stepper.optimizer, model, 1e-4, stepper.options)

        def several(step: Callable[[], object] = optimizer.step, times: int = stepper.cycle) -> None:
            for _ in range(times):
                step()

        several()
        steps[each] = several
        found |= {"bytes_per_parameter": round(state_bytes(optimizer) / parameters(model), 3)}
        found |= {"operations": operations(optimizer)}
    samples = interleaved(steps, repetitions)
    samples = {each: [one / STEPPERS[each].cycle for one in own] for each, own in samples.items()}
    default, fused = yardsticks(name)
    return {
        "seconds": summary(samples[name]),
        "beside_default": ratios(samples, default)[name],
        "beside_fused": ratios(samples, fused)[name],
        **found,
        "memory_kept": kept,
        "environment": environment(),
        "version": package_version(PEERS[STEPPERS[name].optimizer]) if STEPPERS[name].optimizer in PEERS else None,
    }


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def measure_alone(name: str, on: str, threads: int, repetitions: int, longest: float) -> dict[str, Any]:
    """The same in a process of its own; {"missing": why} if it cannot be had within so many seconds."""
    command = [sys.executable, "-m", __name__, name, on, str(threads), str(repetitions)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=longest, check=False)
    except subprocess.TimeoutExpired:
        return {"missing": f"did not finish within {longest:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"]
        return {"missing": lines[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def machine(threads: int, seconds: float = 1.0) -> dict[str, float]:
    """Bytes per second of a sum in place that no cache holds, and operations per second of a product of matrices."""
    use_threads(threads)
    a, b = torch.zeros(2**25), torch.ones(2**25)
    m = torch.ones(1024, 1024)

    def best(operation: Callable[[], object]) -> float:
        times, began = [], time.perf_counter()
        while time.perf_counter() - began < seconds:
            start = time.perf_counter()
            operation()
            times.append(time.perf_counter() - start)
        return min(times)

    return {
        "stream_bytes_per_second": round(3 * 4 * a.numel() / best(lambda: a.add_(b))),
        "product_operations_per_second": round(2 * 1024**3 / best(lambda: m @ m)),
    }


@dataclass(frozen=True)
class Costs:
    """What was measured on one network with one number of threads."""

    network: str
    threads: int
    rows: dict[str, dict[str, Any]]
    machine: dict[str, float]
    parameters: int
    tensors: int

    @property
    def measured(self) -> dict[str, dict[str, Any]]:
        """Rows with numbers, in the order of STEPPERS."""
        return {name: self.rows[name] for name in STEPPERS if "seconds" in self.rows.get(name, {})}

    def seconds(self, name: str) -> float:
        """Of a step: those of torch's fused one, times what it takes beside that.

        Each optimizer is measured in minutes of its own, in which the machine may have been slower or faster, but
        beside torch's. Its own seconds where the fused one has no row.
        """
        row, fused = self.rows[name], self.measured.get(yardsticks(name)[1])
        return float(fused["seconds"]["median"] * row["beside_fused"]["median"] if fused else row["seconds"]["median"])

    def share_of_stream(self, name: str) -> float | None:
        """Bytes per second beside those of a stream; None for an optimizer whose cost is not memory."""
        traffic = STEPPERS[name].traffic
        if traffic is None:
            return None
        moved = traffic * self.parameters / self.seconds(name)
        return float(moved / self.machine["stream_bytes_per_second"])

    def share_of_product(self) -> float | None:
        """Operations per second of Anova's products beside those of a product of square matrices."""
        if not self.measured.get("Anova", {}).get("operations"):
            return None
        speed = self.rows["Anova"]["operations"] / self.seconds("Anova")
        return float(speed / self.machine["product_operations_per_second"])


def unmeasured(path: Path, names: Sequence[str], on: str, threads: int) -> list[str]:
    """The optimizers that have no record on a network."""
    known = {name for costs in read(path, [on], threads) for name in costs.rows}
    return [name for name in names if name not in known]


def run(
    path: Path, names: Sequence[str], on: str, threads: int, repetitions: int, longest: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure what has no record yet, and add each record to the file; yields each row that is new."""
    missing = unmeasured(path, names, on, threads)
    if not missing:
        return
    model = network(on)
    about: dict[str, Any] = {"network": on, "threads": threads, "parameters": parameters(model)}
    about |= {"tensors": len(list(model.parameters())), "machine": machine(threads)}
    del model
    for name in missing:
        row = measure_alone(name, on, threads, repetitions, longest)
        append(path, f"{on}-{threads}-{name}", {**about, "optimizer": name, "row": row})
        yield name, row


def read(path: Path, names: Sequence[str], threads: int) -> list[Costs]:
    """What the records of networks say, as far as there are any."""
    found: dict[str, Costs] = {}
    for record in Records(path).every():
        name, machine = record["network"], record["machine"]
        if name not in names or record["threads"] != threads:
            continue
        new = Costs(name, threads, {}, {}, record["parameters"], record["tensors"])
        costs = found.setdefault(name, new)
        costs.rows[record["optimizer"]] = record["row"]
        # Other work on the machine can only make it look slower.
        costs.machine.update({rate: max(value, costs.machine.get(rate, 0.0)) for rate, value in machine.items()})
    return [found[name] for name in names if name in found]


def table(costs: Costs) -> Table:
    """The optimizers of one network; ratios with quartiles."""
    rows = []
    for name, row in costs.measured.items():
        share, fused = costs.share_of_stream(name), row["beside_fused"]
        milliseconds = 1e3 * costs.seconds(name)
        cells = [f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:,.0f}"]
        cells += [f"{row['beside_default']['median']:.2f}"]
        cells += [f"{fused['median']:.2f} ({fused['lower']:.2f}–{fused['upper']:.2f})"]
        rows.append([name, *cells, f"{row['bytes_per_parameter']:.1f}", "–" if share is None else f"{share:.0%}"])
    header = ["optimizer", "ms", "× default", "× fused", "state, bytes/param", "of a stream's bytes/s"]
    threads = "1 thread" if costs.threads == 1 else f"{costs.threads} threads"
    title = f"{costs.network}: {costs.parameters:,} parameters in {costs.tensors} tensors, {threads}"
    return Table(title, header, rows)


def notes(costs: Costs) -> list[str]:
    """What is missing, and why."""
    missing = {name: row["missing"] for name, row in costs.rows.items() if "missing" in row}
    return [f"{costs.network}: no {name}. {why[:1].upper()}{why[1:]}" for name, why in missing.items()]


def main(arguments: Sequence[str]) -> None:
    name, on, threads, repetitions = arguments
    try:
        print(json.dumps(measure(name, on, int(threads), int(repetitions))))
    except (Unsuitable, ModuleNotFoundError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main(sys.argv[1:])
