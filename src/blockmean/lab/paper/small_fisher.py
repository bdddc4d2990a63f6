"""The paper's 322-parameter network and its empirical Fisher matrix in full: what Figures 3 and 4 approximate."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from blockmean.lab.data import load
from blockmean.lab.models import small
from blockmean.lab.paper.outcome import Setting

SAMPLES = 4_000
TRAINED = 200
"""Steps of AdaGrad (batch 100, η = 0.1): five epochs of the embedded digits, a third of one of MNIST."""


class SmallFisher(NamedTuple):
    """A network in float64, the images and labels its Fisher is of, and the matrix, (322, 322)."""

    model: nn.Module
    images: Tensor
    labels: Tensor
    matrix: Tensor


def small_fisher(setting: Setting, steps: int = TRAINED) -> SmallFisher:
    """F = 1/N Σ g_n g_nᵀ after so many training steps, on the data of the profile; seed 0 throughout."""
    return _small_fisher("mnist" if setting.profile == "paper" else "digits", setting.data_dir, steps)


@lru_cache(maxsize=4)
def _small_fisher(dataset: str, data_dir: Path | None, steps: int) -> SmallFisher:
    data = load(dataset, "normalised", data_dir)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = small((1, 28, 28))
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        for _ in range(steps):
            batch = torch.randint(len(data.train), (100,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.train[batch]), data.train_labels[batch]).backward()
            optimizer.step()
    model.double().requires_grad_(False)
    images, labels = data.train[:SAMPLES].double(), data.train_labels[:SAMPLES]

    def loss(params: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        output = functional_call(model, params, (image.unsqueeze(0),))
        return nn.functional.cross_entropy(output, label.unsqueeze(0))

    gradients = vmap(grad(loss), (None, 0, 0), chunk_size=500)(dict(model.named_parameters()), images, labels)
    rows = torch.cat([gradient.flatten(1) for gradient in gradients.values()], 1)  # (N, 322)
    return SmallFisher(model.requires_grad_(), images, labels, rows.mT @ rows / len(rows))


def correlations(F: Tensor) -> Tensor:
    """F_ij / √(F_ii F_jj), 0 where a parameter has no gradient."""
    z = F.diagonal().sqrt()
    scale = z.outer(z)
    return F / scale.where(scale > 0, torch.inf)
