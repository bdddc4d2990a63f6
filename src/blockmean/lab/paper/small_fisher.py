"""The paper's 322-parameter network and its empirical Fisher matrix in full: what Figures 3 and 4 approximate."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from blockmean import BlockMean, Partition, curvature
from blockmean.lab.data import load
from blockmean.lab.models import small
from blockmean.lab.paper.measurement import load_or_measure
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.records import require_number
from blockmean.lab.train import Record

d = 322
SAMPLES = 4_000
LARGEST_ENTRY = 1e38  # squares and their sum must stay finite
TRAINED = 200
"""Steps of AdaGrad (batch 100, η = 0.1): five epochs of the embedded digits, a third of an epoch of MNIST."""
CUTS = ("tensor", "unit", "kernel")
"""The partitions of the weights in Figure 4; biases are one block per layer in all three."""


class SmallFisher(NamedTuple):
    """Empirical Fisher matrices of the network, (322, 322), with initial and with trained weights."""

    initial: Tensor
    trained: Tensor
    deviation: float
    """The largest relative distance of a block mean from per-sample block sums to that of the dense matrix."""


def small_fisher(config: ReportConfig) -> SmallFisher:
    """F = 1/N Σ g_n g_nᵀ on the data of the profile; seed 0 throughout."""
    dataset = "mnist" if config.profile == "paper" else "digits"
    spec = {"dataset": dataset, "samples": SAMPLES, "steps": TRAINED, "cuts": CUTS}
    record = load_or_measure(config, "fig4", spec, lambda: _measure(dataset, config), _require_all_entries)
    return SmallFisher(_symmetric(record["initial"]), _symmetric(record["trained"]), record["deviation"])


def correlations(F: Tensor) -> Tensor:
    """F_ij / √(F_ii F_jj), 0 where a parameter has no gradient."""
    z = F.diagonal().sqrt()
    scale = z.outer(z)
    return F / scale.where(scale > 0, torch.inf)


def with_whole_biases(by: str) -> str | Callable[[str, Tensor], str]:
    """How to cut the network by `by` with one block per bias, as Figure 4 does."""
    return by if by in ("module", "all") else lambda name, tensor: by if tensor.ndim > 1 else "tensor"


def untrained() -> nn.Module:
    """The network for MNIST with its initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return small((1, 28, 28))


def _measure(dataset: str, config: ReportConfig) -> Record:
    """Both matrices, as triangles, and how well `curvature.empirical_fisher` agrees with the second."""
    data = load(dataset, "normalised", config.data_dir)
    images, labels = data.train[:SAMPLES].double(), data.train_labels[:SAMPLES]
    stages = 3 + len(CUTS)

    def report(done: int) -> None:
        config.on_progress("Fisher matrices of Figures 3 and 4", done, stages)

    report(0)
    model = untrained()
    initial = fisher(model, images, labels)
    report(1)
    _train(model, data.train, data.train_labels)
    report(2)
    trained = fisher(model, images, labels)
    deviations: list[float] = []
    for by in CUTS:
        report(3 + len(deviations))
        deviations.append(_deviation(model.double(), by, images, labels, trained))
    report(stages)
    return {"initial": _triangle(initial), "trained": _triangle(trained), "deviation": max(deviations)}


def _deviation(model: nn.Module, by: str, images: Tensor, labels: Tensor, F: Tensor) -> float:
    """The relative distance of the block mean from per-sample gradients to that of the dense matrix."""
    partition = Partition.of(model, with_whole_biases(by))
    streamed = curvature.empirical_fisher(model, nn.functional.cross_entropy, (images, labels), partition)
    fitted = BlockMean.fit(F, partition).to_dense()
    return float((streamed.matrix.to_dense() - fitted).norm() / fitted.norm())


def _train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Train for a few steps, the same every time."""
    random = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(TRAINED):
        batch = torch.randint(len(images), (100,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


def fisher(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The empirical Fisher matrix in float64, from all gradients at once."""
    params = {name: param.detach().double() for name, param in model.named_parameters()}

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, params, (image.unsqueeze(0),))
        return nn.functional.cross_entropy(output, label.unsqueeze(0))

    gradients = vmap(grad(loss), (None, 0, 0), chunk_size=500)(params, images, labels)
    rows = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)  # (N, 322)
    return rows.mT @ rows / len(rows)


def _triangle(F: Tensor) -> list[float]:
    """The lower triangle of a symmetric matrix, row by row, to six digits."""
    return [float(f"{x:.6g}") for x in F[*torch.tril_indices(*F.shape)].tolist()]


def _symmetric(triangle: list[float]) -> Tensor:
    F = torch.zeros(d, d, dtype=torch.float64)
    F[*torch.tril_indices(d, d)] = torch.tensor(triangle, dtype=torch.float64)
    return F + F.tril(-1).mT


def _require_all_entries(record: Record) -> None:
    """Both matrices are complete, and could be second moments of gradients."""
    require_number(record, "deviation", 0, 1e300)
    for name in ("initial", "trained"):
        if len(record[name]) != d * (d + 1) // 2:
            raise ValueError("entries are missing")
        for entry in record[name]:
            require_number({name: entry}, name, -LARGEST_ENTRY, LARGEST_ENTRY)
        F = _symmetric(record[name])
        if not F.trace() > 0:
            raise ValueError(f"the trace of {name} must be positive. Got {float(F.trace()):g} instead.")
        variances = F.diagonal().clamp_min(0)
        if not (F.square() <= 1.001 * variances.outer(variances)).all():  # six digits are kept of each entry
            raise ValueError(f"{name} must have F_ij² ≤ F_ii F_jj, as second moments do")
