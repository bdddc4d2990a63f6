"""The pictures of docs/curvature-examples.md: empirical Fisher matrices of nets before and after a short training run.

`make docs` draws them, in one or two minutes: one thread and fixed seeds, so that the same machine draws the same
pictures. Beside them stands curvature.json, the numbers that the page speaks of. The text comes from
$BLOCKMEAN_DATA/text/tinyshakespeare.txt, or from the manual inside Python itself if that variable is not set.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from blockmean import Partition, curvature, plot
from blockmean.lab import data, models
from blockmean.lab.environment import use_threads
from blockmean.lab.text import CharacterTransformer, read_text

SHAPE = (1, 28, 28)
CONTEXT = 32  # characters
Batch = tuple[Tensor, Tensor]


def train(model: nn.Module, samples: Batch, steps: int, lr: float, batch: int) -> float:
    """Train with Adam; return the mean loss of the last 20 steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for chosen in _batches(len(samples[1]), steps, batch):
        optimizer.zero_grad()
        loss = cross_entropy(model(samples[0][chosen]), samples[1][chosen])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


def _batches(count: int, steps: int, batch: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(count, (batch,), generator=generator) for _ in range(steps))


def look(model: nn.Module, samples: Batch, count: int, by: str = "tensor") -> curvature.Curvature:
    """The empirical Fisher matrix of the first samples, with short block names."""
    given, cut = (samples[0][:count], samples[1][:count]), Partition.of(model, by)
    names = [name.replace("blocks.layers.", "").replace("self_attn.", "") for name in cut.names]
    partition = Partition.from_sizes(cut.sizes, names=names)
    return curvature.empirical_fisher(model, cross_entropy, given, partition, norm_probes=8)


def numbers(F: curvature.Curvature) -> dict[str, Any]:
    """What the page quotes: A, and per block how far its gradients share a direction: A_ii over the mean of the
    diagonal of F in the block. It is 1 if they share none, and s_i if all entries are always equal."""
    diagonal = F.matrix.lam + F.matrix.B.diagonal()
    return {
        "blocks": list(F.names),
        "sizes": F.partition.sizes.tolist(),
        "samples": F.report.samples,
        "explained": F.report.explained,
        "explained_error": F.report.explained_error,
        "common": _rounded(F.matrix.A.diagonal() / diagonal),
        "mean_diagonal": _rounded(diagonal),
        "A": _rounded(F.matrix.A),
        "correlation": _rounded(plot.correlation(F)),
    }


def _rounded(x: Tensor) -> Any:
    """Four digits, because later ones depend on the machine; None if there is no number."""
    if x.ndim > 1:
        return [_rounded(row) for row in x]
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in x.tolist()]


def draw(out: Path) -> list[Path]:
    """All pictures, and the numbers behind them."""
    use_threads(1)
    images = data.load("digits")
    digits = images.train, images.train_labels
    dataset, name = (
        ("shakespeare", "tinyshakespeare") if "BLOCKMEAN_DATA" in os.environ else ("manual", "Python manual")
    )
    text = read_text(dataset, context=CONTEXT)
    windows = text.inputs, text.targets
    tasks: dict[str, tuple[Callable[[], nn.Module], Batch, int, int, float, int]] = {
        # model, samples, how many of them for the matrix, steps, lr, batch
        "small": (lambda: models.small(SHAPE), digits, 1000, 500, 1e-2, 64),
        "large": (lambda: models.large(SHAPE), digits, 200, 300, 1e-3, 32),
        "text": (lambda: CharacterTransformer(text.vocabulary, context=CONTEXT), windows, 500, 400, 3e-3, 32),
    }
    told = {"small": "small net, digits", "large": "large net, digits", "text": f"transformer, {name}"}
    written: list[Path] = []
    record: dict[str, Any] = {}
    for task, (make, samples, count, steps, lr, batch) in tasks.items():
        torch.manual_seed(0)
        model = make()
        for state in ("start", "trained"):
            loss = train(model, samples, steps, lr, batch) if state == "trained" else None
            F = look(model, samples, count)
            when = "at initialisation" if loss is None else f"after {steps} steps, loss {loss:.2f}"
            ax = plot.coupling(F, title=f"{told[task]}\n{when}")
            written.append(out / f"curvature-{task}-{state}.svg")
            # By default matplotlib puts the date and random identifiers into an SVG.
            with matplotlib.rc_context({"svg.hashsalt": written[-1].name}):
                ax.figure.savefig(written[-1], metadata={"Date": None})
            record[f"{task}, {state}"] = {"loss": loss, **numbers(F)}
    record["MLP"] = {how: _inputs(how) for how in ("raw", "normalised", "centred")}
    written.append(out / "curvature.json")
    written[-1].write_text(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    return written


def _inputs(how: str) -> dict[str, Any]:
    """How far the gradients of an MLP's units share a direction, by the preprocessing of its inputs."""
    images = data.load("digits", inputs=how)
    samples = images.train, images.train_labels
    torch.manual_seed(0)
    model = models.mlp(SHAPE)
    loss = train(model, samples, 200, 1e-3, 64)
    found = numbers(look(model, samples, 500, "unit"))
    units: dict[str, list[float | None]] = {}
    for block, common in zip(found["blocks"], found["common"], strict=True):
        if ".weight[" in block:  # biases are single entries
            units.setdefault(block.partition("[")[0], []).append(common)
    return {
        "loss": loss,
        "explained": found["explained"],
        "median_common": {name: _median(values) for name, values in units.items()},
        "units_without_gradient": {name: values.count(None) for name, values in units.items()},
    }


def _median(values: list[float | None]) -> float:
    return statistics.median(value for value in values if value is not None)


if __name__ == "__main__":
    print(*draw(Path(__file__).parent / "img"), sep="\n")
