"""What the processes of a `Cluster` do: the same training with whole state, and with ZeroRedundancyOptimizer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import blockmean


def train(cls: str, options: dict[str, Any], divided: bool, steps: int = 12) -> list[torch.Tensor]:
    """The parameters after some steps on averaged gradients, with state on all processes or divided between them."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its module warns of torch.jit

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    made = getattr(blockmean, cls)
    parameters = list(model.parameters())
    optimizer = ZeroRedundancyOptimizer(parameters, made, **options) if divided else made(parameters, **options)
    for step in range(steps):
        rng = torch.Generator().manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(6, 9, generator=rng, dtype=torch.float64)).square().sum().backward()
        for param in parameters:
            dist.all_reduce(param.grad)
        optimizer.step()
    return [param.detach().clone() for param in parameters]


def difference(cls: str, options: dict[str, Any]) -> float:
    """The largest difference between both runs."""
    pairs = zip(train(cls, options, divided=True), train(cls, options, divided=False), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)
