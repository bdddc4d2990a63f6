"""Parameter groups with and without weight decay, in one call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.weight_norm import WeightNorm

from blockmean._checks import require, require_number
from blockmean.blocks import NamedParameters, outputs_of

NORM = re.compile(r"Norm(\dd)?$")  # in the names of classes: LayerNorm, BatchNorm2d, and those of other packages


def param_groups(model: nn.Module, weight_decay: float = 0.01, *, embeddings: bool = False) -> list[dict[str, Any]]:
    """Two parameter groups, one with weight decay and one without, for any optimizer of this package or of torch.

    Weights with two or more dims decay. Biases, gains of norms and of weight_norm, and whatever has fewer dims do not,
    nor do embeddings unless asked. A weight that an embedding shares with an output layer is an embedding. Tied weights
    are there once, under their first name; frozen parameters and empty groups are left out.

    Args:
        model: the model. Names of parameters come from it, and which dim of a weight is its output.
        weight_decay: of the group that decays; the other one has 0.
        embeddings: whether embeddings decay too.

    >>> import torch
    >>> from blockmean import Anova
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    >>> optimizer = Anova(param_groups(model, weight_decay=0.1), lr=1e-3)
    >>> [(group["weight_decay"], group["param_names"]) for group in optimizer.param_groups]
    [(0.1, ['1.weight']), (0.0, ['0.weight', '1.bias', '2.weight', '2.bias'])]
    """
    require(isinstance(model, nn.Module), "model", "param_groups", "an nn.Module", type(model).__name__, TypeError)
    require_number(weight_decay, "weight_decay", "param_groups")
    exempt: set[Tensor] = set()
    for module in model.modules():
        is_embedding = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if NORM.search(type(module).__name__) or (is_embedding and not embeddings):
            exempt.update(module.parameters(recurse=False))
        exempt.update(_gains(module))
    outputs = outputs_of(model)
    decayed, plain = NamedParameters(outputs), NamedParameters(outputs)
    for name, param in model.named_parameters():  # each once
        if param.requires_grad:
            decays = param.ndim >= 2 and param not in exempt and "bias" not in name.rpartition(".")[2]
            (decayed if decays else plain).append((name, param))
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _gains(module: nn.Module) -> Iterator[Tensor]:
    """The lengths of units, O × 1, which weight_norm keeps apart from their directions; torch has two forms of it."""
    if isinstance(module, ParametrizationList) and any(type(step).__name__ == "_WeightNorm" for step in module):
        yield module.get_parameter("original0")
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield getattr(module, f"{hook.name}_g")
