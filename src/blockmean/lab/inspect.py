"""Inspect a model: a curvature matrix on data as a table of its blocks, a heat map, and a file of all numbers.

Beside it, how much of each weight's gradient Anova's means hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn

from blockmean import Anova, BlockMean, Partition, curvature, plot
from blockmean.lab.data import load
from blockmean.lab.environment import environment
from blockmean.lab.models import MODELS
from blockmean.lab.own import EXPECTED, check_fit, find_object, own_model, require_function, short
from blockmean.lab.picture import save
from blockmean.lab.records import store
from blockmean.lab.spec import digest, file_name
from blockmean.optim import MeanStatistics

MATRICES: dict[str, Callable[..., curvature.Curvature]] = {
    "empirical_fisher": curvature.empirical_fisher,
    "fisher": curvature.fisher,
    "ggn": curvature.ggn,
    "hessian": curvature.hessian,
}
ANY_OUTPUT = ("empirical_fisher", "hessian")
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": nn.functional.cross_entropy,
    "mse": nn.functional.mse_loss,
}
PARTITIONS = ("tensor", "unit", "kernel", "module", "all", "element")
LARGEST_BATCH = 128
LEARNING_RATE = 1e-3
BATCH = 100  # samples of the matrix between two reports of progress; as quick as all at once
MEAN_STEPS = 20
"""Gradients from which Anova's means learn; second moments then know 64% of what they will."""
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """What to inspect, in the words of the command line."""

    model: str
    """A name in MODELS, or 'module:object': a torch.nn.Module, or a function that returns one."""
    dataset: str = "digits"
    inputs: str = "normalised"
    data: str | None = None
    """'module:object' instead of a data set: (inputs, targets), batches of such pairs, or a function for either."""
    loss: str = "cross_entropy"
    """A name in LOSSES, or 'module:function' that takes (outputs, targets) and returns the mean loss."""
    partition: str = "tensor"
    matrix: str = "empirical_fisher"
    samples: int = 1000
    train_steps: int = 0
    seed: int = 0
    norm_probes: int = 8

    @property
    def key(self) -> str:
        """A file name: different requests have different ones."""
        return f"coupling-{file_name(self.model)}-{self.matrix}-{self.partition}-{digest(asdict(self))}"


class Row(NamedTuple):
    """One block of the matrix; None means that there is no such number."""

    block: str
    size: int
    A: float
    lam: float | None  # a single entry has no λ of its own
    share: float | None  # of the trace; None where the trace is not positive
    partner: str | None  # the block of the largest |correlation|
    correlation: float | None


@dataclass(frozen=True)
class Inspection:
    """A request and its matrix."""

    request: Request
    matrix: BlockMean
    report: curvature.Report
    rows: list[Row]
    means: list[MeanStatistics]
    """Of the weights for which Anova has means."""

    def largest(self, count: int) -> list[Row]:
        """The rows with the largest |share of the trace|, in the order of the model."""
        order = sorted(range(len(self.rows)), key=lambda i: -abs(self.rows[i].share or 0.0))[:count]
        return [self.rows[i] for i in sorted(order)]

    def paths(self, out: Path) -> list[Path]:
        """The PNG, the SVG and the JSON file that `save` writes into a folder."""
        return [out / f"{self.request.key}.{suffix}" for suffix in ("png", "svg", "json")]

    def save(self, out: Path) -> list[Path]:
        """Write the heat map and all numbers, and return the paths."""
        png, svg, numbers = self.paths(out)
        figure: Any = plot.coupling(self.matrix, title=self.title).figure
        save(figure, out / self.request.key)
        plt.close(figure)
        store(numbers, self.record())
        return [png, svg, numbers]

    @property
    def title(self) -> str:
        r = self.request
        trained = f"after {r.train_steps:,} steps" if r.train_steps else "as initialised"
        return f"{self.report.matrix} of {r.model} on {r.data or r.dataset}, {trained}"

    def record(self) -> dict[str, Any]:
        """All numbers in plain values: the request, the report, the blocks and A. A missing number is None."""
        report = self.report
        record = {
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
                "lam_error": report.lam_error.tolist(),
            },
            "blocks": [row._asdict() for row in self.rows],
            "A": self.matrix.A.tolist(),
            "means": [
                {
                    "parameter": one.parameter,
                    "num_means": list(one.num_means),
                    "shares": one.shares._asdict(),
                    "chance": one.chance._asdict(),
                }
                for one in self.means
            ],
        }
        return {name: _without_nan(value) for name, value in record.items()}


def inspect(
    request: Request,
    data_dir: Path | None = None,
    download: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Inspection:
    """Build the model, train it if asked, and compute the matrix; ValueError if the request cannot be met.

    `on_progress` is called with (what, done, total) as training and the pass over the samples proceed.
    """
    if request.matrix not in MATRICES:
        raise ValueError(f"matrix must be one of {', '.join(MATRICES)}. Got {request.matrix!r} instead.")
    if request.partition not in PARTITIONS:
        raise ValueError(f"partition must be one of {', '.join(PARTITIONS)}. Got {request.partition!r} instead.")
    for name, least in (("samples", 1), ("train_steps", 0), ("norm_probes", 0)):
        if getattr(request, name) < least:
            raise ValueError(f"{name} must be at least {least}. Got {getattr(request, name)} instead.")
    loss_fn = LOSSES.get(request.loss)
    if loss_fn is None:
        loss_fn = require_function(request.loss, "loss", find_object(request.loss, "loss", LOSSES), 2)
    inputs, targets = _data(request, data_dir, download)
    model = _model(request, inputs)
    blocks = Partition.of([(n, p) for n, p in model.named_parameters() if p.requires_grad], request.partition)
    if blocks.num_blocks > plot.LARGEST:
        raise ValueError(
            f"partition {request.partition!r} cuts {request.model} into {blocks.num_blocks:,} blocks, more than the "
            f"{plot.LARGEST:,} whose matrix can be drawn. Take a coarser one, such as 'tensor'."
        )
    # A loss of the user's own may take anything, but fisher and ggn differentiate with respect to the output.
    any_output = request.loss not in LOSSES and request.matrix in ANY_OUTPUT
    check_fit((request.model, model), (request.loss, loss_fn), (inputs[:2], targets[:2]), any_output)
    if request.train_steps:  # what the matrix refuses should not cost the training
        with torch.random.fork_rng(devices=[]):
            MATRICES[request.matrix](model.eval(), loss_fn, (inputs[:2], targets[:2]), "all")
    _train(model, loss_fn, inputs, targets, request, on_progress)
    chosen = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(request.seed))[: request.samples]
    data = _batches(inputs[chosen], targets[chosen], on_progress)
    found = MATRICES[request.matrix](model.eval(), loss_fn, data, blocks, norm_probes=request.norm_probes)
    means = _means(model, loss_fn, inputs[chosen], targets[chosen], request.seed, on_progress)
    return Inspection(request, found.matrix, found.report, _rows(found.matrix), means)


def _data(request: Request, data_dir: Path | None, download: bool) -> tuple[Tensor, Tensor]:
    if request.data is None:
        images = load(request.dataset, request.inputs, data_dir, download)
        return images.train, images.train_labels
    torch.manual_seed(request.seed)  # a DataLoader may shuffle
    found = find_object(request.data, "data")
    if not (_is_pair(found) or isinstance(found, Iterable)):
        found = require_function(request.data, "data", found, 0)()
    if not _is_pair(found):
        found = _join(request, found)
    inputs, targets = found
    if not len(inputs) == len(targets) > 0:
        raise ValueError(
            f"data {request.data!r} must have as many targets as inputs, and at least one of each. "
            f"Got {len(inputs)} inputs and {len(targets)} targets."
        )
    return inputs, targets


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(x, Tensor) for x in data)


def _join(request: Request, batches: Any) -> tuple[Tensor, Tensor]:
    """One pair of tensors from as many batches as the request needs: a loader may be endless."""
    problem = f"data {request.data!r} must be {EXPECTED['data']}"
    if isinstance(batches, Tensor | str) or not isinstance(batches, Iterable):
        raise ValueError(f"{problem}. Got {short(batches)} instead.")
    enough = max(request.samples, request.train_steps * LARGEST_BATCH)
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for batch in batches:
        if not _is_pair(batch):
            raise ValueError(f"{problem}. Got {short(batch)} as a batch.")
        inputs.append(batch[0])
        targets.append(batch[1])
        if sum(map(len, inputs)) >= enough:
            break
    if not inputs:
        raise ValueError(f"{problem}. Got no batch at all.")
    try:
        return torch.cat(inputs), torch.cat(targets)
    except RuntimeError as error:
        raise ValueError(f"The batches of data {request.data!r} cannot be joined: {error}") from error


def _model(request: Request, inputs: Tensor) -> nn.Module:
    torch.manual_seed(request.seed)
    if request.model in MODELS:
        if inputs.ndim != 4:
            raise ValueError(
                f"model {request.model!r} takes images (n, channels, height, width). Got inputs {list(inputs.shape)}."
            )
        channels, height, width = inputs.shape[1:]
        return MODELS[request.model]((channels, height, width))
    return own_model(request.model, MODELS)


def _batches(inputs: Tensor, targets: Tensor, on_progress: OnProgress) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples in batches, between which progress is reported."""
    for number, batch in enumerate(zip(inputs.split(BATCH), targets.split(BATCH), strict=True)):
        on_progress("curvature", number * BATCH, len(inputs))
        yield batch
    on_progress("curvature", len(inputs), len(inputs))


def _train(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Tensor,
    targets: Tensor,
    request: Request,
    on_progress: OnProgress,
) -> None:
    """Take some steps of AdamW: curvature at initialisation says little."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    generator = torch.Generator().manual_seed(request.seed)
    size = min(LARGEST_BATCH, len(inputs))
    model.train()
    for step in range(request.train_steps):
        batch = torch.randint(len(inputs), (size,), generator=generator)
        optimizer.zero_grad()
        loss_fn(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        on_progress("training", step + 1, request.train_steps)


def _means(
    model: nn.Module,
    loss_fn: Callable[..., Tensor],
    inputs: Tensor,
    targets: Tensor,
    seed: int,
    on_progress: OnProgress,
) -> list[MeanStatistics]:
    """How much of the gradients Anova's means hold, on random batches; a rate of 0 leaves the model as it is."""
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    optimizer = Anova(params, lr=0.0, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(MEAN_STEPS):
        batch = torch.randint(len(inputs), (min(BATCH, len(inputs)),), generator=generator)
        optimizer.zero_grad()
        loss_fn(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        on_progress("means", step + 1, MEAN_STEPS)
    optimizer.zero_grad()
    return optimizer.block_statistics()


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


def _without_nan(value: Any) -> Any:
    """Nested lists and dicts with None for every number that is not finite."""
    match value:
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list():
            return [_without_nan(item) for item in value]
        case float():
            return value if math.isfinite(value) else None
    return value
