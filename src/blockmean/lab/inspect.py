"""Look into a model: a curvature matrix on data as a table of its blocks, a heat map, and a file of all numbers."""

from __future__ import annotations

import importlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from blockmean import BlockMean, Partition, curvature, plot
from blockmean.lab.data import load
from blockmean.lab.environment import environment
from blockmean.lab.models import MODELS
from blockmean.lab.picture import save

MATRICES: dict[str, Callable[..., curvature.Curvature]] = {
    "empirical_fisher": curvature.empirical_fisher,
    "fisher": curvature.fisher,
    "ggn": curvature.ggn,
    "hessian": curvature.hessian,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
}
LARGEST_BATCH = 128
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Request:
    """What to look at, in the words of the command line."""

    model: str
    """A name in MODELS, or 'module:function' that returns a torch.nn.Module."""
    dataset: str = "digits"
    inputs: str = "normalised"
    data: str | None = None
    """'module:function' that returns (inputs, targets), in the place of a data set."""
    loss: str = "cross_entropy"
    """A name in LOSSES, or 'module:function' that takes (outputs, targets) and returns the mean loss."""
    partition: str = "tensor"
    matrix: str = "empirical_fisher"
    samples: int = 1000
    train_steps: int = 0
    seed: int = 0
    norm_probes: int = 8


class Row(NamedTuple):
    """One block of the matrix; what does not exist is None."""

    block: str
    size: int
    A: float
    lam: float | None  # a single entry has no λ of its own
    share: float | None  # of the trace; None where the trace is not positive
    partner: str | None  # the block of the largest |correlation|
    correlation: float | None


@dataclass(frozen=True)
class Inspection:
    """A request and the matrix that came of it."""

    request: Request
    matrix: BlockMean
    report: curvature.Report
    rows: list[Row]

    def largest(self, count: int) -> list[Row]:
        """The rows with the largest |share of the trace|, in the order of the model."""
        order = sorted(range(len(self.rows)), key=lambda i: -abs(self.rows[i].share or 0.0))[:count]
        return [self.rows[i] for i in sorted(order)]

    def save(self, out: Path) -> list[Path]:
        """Write coupling.png, coupling.svg and coupling.json, and return their paths."""
        figure: Any = plot.coupling(self.matrix, title=self.title).figure
        picture = save(figure, out / "coupling")
        plt.close(figure)
        numbers = out / "coupling.json"
        numbers.write_text(json.dumps(self.record()) + "\n")
        return [picture.png, picture.svg, numbers]

    @property
    def title(self) -> str:
        r = self.request
        trained = f"after {r.train_steps:,} steps" if r.train_steps else "as initialised"
        return f"{self.report.matrix} of {r.model} on {r.data or r.dataset}, {trained}"

    def record(self) -> dict[str, Any]:
        """All numbers in plain values: the request, the report, one entry per block, and A."""
        report = self.report
        return {
            "request": asdict(self.request),
            "environment": environment(),
            "report": {
                "matrix": report.matrix,
                "equation": report.equation,
                "samples": report.samples,
                "probes": report.probes,
                "exact_A": report.exact_A,
                "explained": report.explained,
                "explained_error": report.explained_error,
                "lam_error": [_finite(error) for error in report.lam_error.tolist()],
            },
            "blocks": [row._asdict() for row in self.rows],
            "A": self.matrix.A.tolist(),
        }


def inspect(request: Request, data_dir: Path | None = None, download: bool = False) -> Inspection:
    """Build the model, train it if asked, and compute the matrix. ValueError where the request cannot be met."""
    if request.matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {', '.join(MATRICES)}. Got {request.matrix!r} instead.")
    for name, least in (("samples", 1), ("train_steps", 0), ("norm_probes", 0)):
        if getattr(request, name) < least:
            raise ValueError(f"{name} must be at least {least}. Got {getattr(request, name)} instead.")
    loss_fn = LOSSES.get(request.loss) or find_function(request.loss, "loss", LOSSES)
    inputs, targets = _data(request, data_dir, download)
    model = _model(request, inputs)
    blocks = Partition.of([(n, p) for n, p in model.named_parameters() if p.requires_grad], request.partition)
    if blocks.num_blocks > plot.LARGEST:
        raise ValueError(
            f"partition {request.partition!r} cuts {request.model} into {blocks.num_blocks:,} blocks, more than the "
            f"{plot.LARGEST:,} whose matrix can be drawn. Take a coarser one, such as 'tensor'."
        )
    _try_out(request, model, loss_fn, inputs[:2], targets[:2])
    _train(model, loss_fn, inputs, targets, request)
    chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(request.seed))[: request.samples]
    data = inputs[chosen], targets[chosen]
    found = MATRICES[request.matrix](model.eval(), loss_fn, data, blocks, norm_probes=request.norm_probes)
    return Inspection(request, found.matrix, found.report, _rows(found.matrix))


def find_function(spec: str, what: str, known: Iterable[str] = ()) -> Callable[..., Any]:
    """The function that 'package.module:function' names; the current folder is looked into as well."""
    module_name, _, name = spec.partition(":")
    if not (module_name and name):
        choice = " or ".join([*known, "'module:function'"])
        raise ValueError(f"{what} must be {choice}. Got {spec!r} instead.")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{what} {spec!r} cannot be imported: {error} (looked into {Path.cwd()}, too).") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{what} {spec!r}: there is no function {name} in {module.__file__ or module_name}.")
    found: Callable[..., Any] = function
    return found


def _data(request: Request, data_dir: Path | None, download: bool) -> tuple[Tensor, Tensor]:
    if request.data is None:
        images = load(request.dataset, request.inputs, data_dir, download)
        return images.train, images.train_labels
    found = find_function(request.data, "data")()
    pair = isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(x, Tensor) for x in found)
    if not pair:
        got = repr(found)[:100]
        raise ValueError(f"data {request.data!r} must return two tensors, (inputs, targets). Got {got} instead.")
    inputs, targets = found
    if not len(inputs) == len(targets) > 0:
        raise ValueError(
            f"data {request.data!r} must return as many targets as inputs, and one at least. "
            f"Got {len(inputs)} inputs and {len(targets)} targets."
        )
    return inputs, targets


def _model(request: Request, inputs: Tensor) -> nn.Module:
    torch.manual_seed(request.seed)
    if request.model in MODELS:
        if inputs.ndim != 4:
            raise ValueError(
                f"model {request.model!r} takes images (n, channels, height, width). Got inputs {list(inputs.shape)}."
            )
        channels, height, width = inputs.shape[1:]
        return MODELS[request.model]((channels, height, width))
    model = find_function(request.model, "model", MODELS)()
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {request.model!r} must return a torch.nn.Module. Got {type(model).__name__} instead.")
    return model


def _try_out(request: Request, model: nn.Module, loss_fn: Callable[..., Tensor], x: Tensor, y: Tensor) -> None:
    """Model, data and loss must fit together, and it is better to say so than to fail somewhere inside."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # mse_loss would broadcast
            loss_fn(model.eval()(x), y)
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        given = f"inputs {list(x.shape[1:])} of {x.dtype}, targets {list(y.shape[1:])} of {y.dtype}"
        told = f"model {request.model!r}, loss {request.loss!r} and the data ({given}) do not fit together"
        raise ValueError(f"{told}: {error}") from error


def _train(model: nn.Module, loss_fn: Callable[..., Tensor], inputs: Tensor, targets: Tensor, request: Request) -> None:
    """Some steps of AdamW, because curvature at initialisation says little."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(request.seed)
    size = min(LARGEST_BATCH, len(inputs))
    model.train()
    for _ in range(request.train_steps):
        batch = torch.randint(len(inputs), (size,), generator=generator)
        optimizer.zero_grad()
        loss_fn(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()


def _rows(matrix: BlockMean) -> list[Row]:
    A, lam = matrix.A.diagonal().tolist(), matrix.lam.tolist()
    total = float(matrix.trace())
    others = plot.correlation(matrix).fill_diagonal_(torch.nan)
    rows = []
    for i, (name, size) in enumerate(zip(matrix.partition.names, matrix.partition.sizes.tolist(), strict=True)):
        strengths = others[i].abs().nan_to_num(-1.0)
        j = int(strengths.argmax())
        known = float(strengths[j]) >= 0
        rows.append(
            Row(
                block=name,
                size=size,
                A=A[i],
                lam=lam[i] if size > 1 else None,
                share=(A[i] + ((size - 1) * lam[i] if size > 1 else 0.0)) / total if total > 0 else None,
                partner=matrix.partition.names[j] if known else None,
                correlation=float(others[i, j]) if known else None,
            )
        )
    return rows


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
