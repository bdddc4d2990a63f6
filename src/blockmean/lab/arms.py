"""Optimizers for experiments: ours, torch's, and those of other packages, which the extra `race` brings."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import blockmean
from blockmean.lab.ablations import PlainAnova

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "NAdam": torch.optim.NAdam,
    "SGD": torch.optim.SGD,
    "AdaGradBMA": blockmean.AdaGradBMA,
    "AdaGradFull": blockmean.AdaGradFull,
    "AdamBMA": blockmean.AdamBMA,
    "Anova": blockmean.Anova,
    "NaturalGradientBMA": blockmean.NaturalGradientBMA,
}
"""Ours and torch's, which take the parameters of any model."""

VARIANTS: dict[str, Make] = {"PlainAnova": PlainAnova}
"""Of ours, for ablations."""

PEERS = {
    "SOAP": "pytorch_optimizer",
    "ScalableShampoo": "pytorch_optimizer",
    "Kron": "pytorch_optimizer",
    "Alice": "pytorch_optimizer",
    "AdamMini": "pytorch_optimizer",
    "AdamWScheduleFree": "schedulefree",
}
"""Optimizers of other packages, and their package."""

LEARNING_RATES = {
    "Adagrad": 0.01,
    "Adam": 0.003,
    "AdamW": 0.003,
    "NAdam": 0.01,
    "SGD": 0.3,
    "AdaGradBMA": 0.01,
    "AdaGradFull": 0.3,
    "AdamBMA": 0.003,
    "Anova": 0.003,
    "NaturalGradientBMA": 0.0003,
}
"""Rates for a first try. An optimizer without an entry keeps the default of its class.

Measured on the embedded digits, batch 100: of rates a factor of about 3 apart, the one with the smallest mean of the
test errors of `mlp` (5 epochs, 2 seeds) and `cnn` (3 epochs, 1 seed); AdaGradFull, which needs a small model, on
`small` (5 epochs, 2 seeds). The paper's tanh networks, `small` and `large`, are slow and want AdaGrad at 0.1.
"""


class Unsuitable(ValueError):
    """An optimizer that has nothing to do in a model."""


class MuonAdamW(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for everything else, at one learning rate.

    Embeddings, the output layer and tensors that are not matrices go to AdamW, as Muon's authors advise; torch's Muon
    takes no convolutions. "match_rms_adamw" gives Muon's updates the size of AdamW's, so that one rate suits both.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        momentum: float = 0.95,
    ) -> None:
        matrices, others = hidden_matrices(model)
        if not matrices:
            raise Unsuitable("Muon takes matrices of hidden layers, and this model has none.")
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"Muon needs torch 2.9 or newer. This is torch {torch.__version__}.")
        self.muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(decay_groups(others, weight_decay), lr=lr, betas=betas)
        # The groups of both, not copies: whoever sets the rate here sets it there.
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the lab uses no closures
        self.muon.step()
        self.adamw.step()
        self.state = {**self.muon.state, **self.adamw.state}  # type: ignore[assignment]  # a dict is enough to read


def decay_groups(params: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: tensors of two or more dims, which decay, and biases and gains, which do not."""
    every = list(params)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices that are neither embeddings nor the last linear layer, and all other parameters."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding)] + linear[-1:]
    excluded = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden = [p.ndim == 2 and id(p) not in excluded for p in model.parameters()]
    pairs = list(zip(model.parameters(), hidden, strict=True))
    return [p for p, chosen in pairs if chosen], [p for p, chosen in pairs if not chosen]


MODEL_OPTIMIZERS: dict[str, Make] = {"MuonAdamW": MuonAdamW}
TAKE_THE_MODEL = (*MODEL_OPTIMIZERS, "AdamMini")
"""Optimizers that take the model itself instead of its parameters."""


def known() -> list[str]:
    """The names of all optimizers."""
    return [*OPTIMIZERS, *VARIANTS, *MODEL_OPTIMIZERS, *PEERS]


def find(name: str) -> Make:
    """The class of an optimizer; ModuleNotFoundError names the package that it needs."""
    if name not in known():
        raise ValueError(f"optimizer must be one of {', '.join(known())}. Got {name!r} instead.")
    if name in PEERS:
        found: Make = getattr(importlib.import_module(PEERS[name]), name)
        return found
    return {**OPTIMIZERS, **VARIANTS, **MODEL_OPTIMIZERS}[name]


def make(name: str, model: nn.Module, lr: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    """An optimizer for a model; ValueError if it does not take these options.

    A weight decay among the options is for tensors of two or more dims, whatever the optimizer.
    """
    cls = find(name)
    taken = inspect.signature(cls).parameters
    unknown = [option for option in options if option not in taken]
    if unknown:  # pytorch_optimizer takes any keyword and ignores those it does not know
        others = [option for option in taken if option not in ("params", "model", "lr", "kwargs")]
        raise ValueError(f"{name} has no option {', '.join(unknown)}. It has {', '.join(others)}.")
    decay = options.get("weight_decay", 0.0)
    what: Any = model.parameters() if name in PEERS else model.named_parameters()
    if name in TAKE_THE_MODEL:
        what = model
    elif decay:
        what = (
            decay_groups(model.parameters(), decay)
            if name in PEERS
            else blockmean.param_groups(model, decay, embeddings=True)
        )
    try:
        optimizer = cls(what, lr=lr, **options)
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be made with {options}: {error}") from error
    for group in optimizer.param_groups if decay else ():
        if all(param.ndim < 2 for param in group["params"]):  # Adam-mini makes its groups itself
            group["weight_decay"] = 0.0
    return optimizer


def default_rate(name: str) -> float:
    """The learning rate for an optimizer when none is given."""
    if name in LEARNING_RATES:
        return LEARNING_RATES[name]
    return float(inspect.signature(find(name)).parameters["lr"].default)


def switch(optimizer: torch.optim.Optimizer, mode: str) -> None:
    """Tell optimizers that keep two sets of weights, as schedule-free ones do, which to show: "train" or "eval"."""
    change = getattr(optimizer, mode, None)
    if change is not None:
        change()


def seed_everything(seed: int) -> None:
    """Fix all random numbers of a run; Kron draws from NumPy as well as from torch."""
    import numpy as np

    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # it is the old generator that Kron draws from


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors in the state, however deep they hide; a tensor that appears twice counts once."""
    found = {id(tensor): tensor for state in optimizer.state.values() for tensor in _tensors(state)}
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[object] = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif hasattr(value, "__dict__") and not isinstance(value, type):  # the preconditioner objects of Shampoo
        inner = vars(value).values()
    for one in inner:
        yield from _tensors(one)


@dataclass(frozen=True)
class Arm:
    """One side of the race: an optimizer, its options, and the learning rates that it tries."""

    optimizer: str
    options: dict[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2)
    seed_shift: int = 0
    """Added to every seed: then initial weights and batches are others."""
    colour: str = "0.5"
    control: bool = False
    """Whether it must tie with AdamW."""

    def settings(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "options": self.options}


BASELINE = "AdamW"
NO_DECAY = {"weight_decay": 0.0}
ARMS = {
    BASELINE: Arm("AdamW", NO_DECAY, colour="0.2"),
    "AdamW again": Arm("AdamW", NO_DECAY, seed_shift=1000, colour="0.65", control=True),
    "NAdam": Arm("NAdam", NO_DECAY, colour="tab:brown"),
    "AdamBMA": Arm("AdamBMA", NO_DECAY, colour="tab:blue"),
    "Anova": Arm("Anova", NO_DECAY, colour="tab:red"),
    "Anova means=0": Arm("Anova", {**NO_DECAY, "means": 0}, colour="lightcoral", control=True),
    "Muon + AdamW": Arm("MuonAdamW", NO_DECAY, colour="tab:purple"),
    "SOAP": Arm("SOAP", NO_DECAY, colour="tab:green"),
    "Shampoo": Arm(
        "ScalableShampoo",
        # The default of 1,000 steps between two preconditioners is longer than the runs.
        {**NO_DECAY, "preconditioning_compute_steps": 25},
        rates=(3e-2, 1e-1, 3e-1, 1.0),  # its updates have the size of SGD's
        colour="tab:olive",
    ),
    "Kron": Arm("Kron", NO_DECAY, colour="tab:orange"),
    "Alice": Arm("Alice", NO_DECAY, rates=(2e-3, 6e-3, 2e-2, 6e-2), colour="tab:cyan"),
    "Schedule-Free": Arm("AdamWScheduleFree", NO_DECAY, rates=(3e-3, 1e-2, 3e-2, 1e-1), colour="tab:pink"),
}
"""The arms of the race; adding one is adding a row. All use the defaults of their authors, but for what is given here.

"AdamW again" is AdamW with other seeds, tuned again: what it seems to win or lose is noise. "Anova means=0" is Anova
with its correction switched off, and must tie.
"""
