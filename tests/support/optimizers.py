"""Every optimizer of the package, in every relevant form, for the tests of their common contract.

To add an optimizer to all of these tests, add a line to `CASES` and one to each table below it.
"""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, Anova, NaturalGradientBMA
from blockmean.optim.batches import means_in


def stripes(name, tensor):
    """A callable partition with interleaved blocks: every other entry; scalars stay whole."""
    return torch.arange(tensor.numel()).remainder(2).view(tensor.shape) if tensor.numel() > 1 else "tensor"


@dataclass(frozen=True)
class Case:
    """One optimizer class with options that are neither neutral nor unstable on `Net`."""

    id: str
    cls: type[torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def owner(self):
        return self.cls.__name__

    def option(self, name, missing=None):
        """The value of an option, given or default; `missing` if the class has no such option."""
        known = inspect.signature(self.cls).parameters
        return self.options.get(name, known[name].default if name in known else missing)

    @property
    def needs_names(self):
        return "module" in (self.option("partition"), self.option("coupling"))

    @property
    def shares_blocks(self):
        """Whether a block can hold entries of several parameters."""
        return self.option("partition") in ("module", "all")

    @property
    def decomposes(self):
        """Whether a step includes an eigendecomposition."""
        return self.cls is not Anova and self.option("coupling", "all") != "none" and self.option("correction", True)

    @property
    def averages(self):
        """Whether statistics decay, so that even a step with zero gradients changes them."""
        return self.option("betas") is not None or self.option("beta") is not None

    def __call__(self, params, **changes):
        return self.cls(params, **{"lr": 0.05, **self.options, **changes})

    def of(self, model, **changes):
        return self(model.named_parameters(), **changes)


CASES = [
    Case("paper", AdaGradBMA),
    Case("weighted", AdaGradBMA, {"variant": "weighted"}),
    Case("diagonal", AdaGradBMA, {"correction": False}),
    Case("paper-unit-module", AdaGradBMA, {"partition": "unit", "coupling": "module"}),
    Case("paper-kernel-refresh", AdaGradBMA, {"partition": "kernel", "refresh_every": 3}),
    Case("consistent-by_module", AdaGradBMA, {"variant": "consistent", "partition": "module"}),
    Case("weighted-all", AdaGradBMA, {"variant": "weighted", "partition": "all"}),
    Case("weighted-custom", AdaGradBMA, {"variant": "weighted", "partition": stripes}),
    Case(
        "weighted-unit-none-refresh",
        AdaGradBMA,
        {"variant": "weighted", "partition": "unit", "coupling": "none", "refresh_every": 2},
    ),
    Case(
        "consistent-options",
        AdaGradBMA,
        {
            "variant": "consistent",
            "partition": "unit",
            "eps": 1e-6,
            "eigenvalue_floor": 0.5,
            "lr_decay": 0.1,
            "initial_accumulator_value": 0.1,
            "weight_decay": 0.01,
            "nonfinite": "skip",
        },
    ),
    # By default native kernels serve all of these; the same with torch's operations.
    Case("paper-torch", AdaGradBMA, {"fused": False}),
    Case("weighted-unit-torch", AdaGradBMA, {"variant": "weighted", "partition": "unit", "fused": False}),
    Case("adam-torch", AdamBMA, {"fused": False}),
    Case("full", AdaGradFull),
    Case("adam", AdamBMA),
    Case("adam-diagonal", AdamBMA, {"correction": False, "weight_decay": 0.1}),
    Case("adam-by_module-all", AdamBMA, {"partition": "module", "coupling": "all"}),
    Case(
        "adam-module-options",
        AdamBMA,
        {"coupling": "module", "refresh_every": 3, "correction_cap": 0.5, "betas": (0.8, 0.9), "weight_decay": 0.1},
    ),
    Case("anova", Anova, {"means": 2}),
    Case("anova-auto", Anova),
    Case("anova-diagonal", Anova, {"means": 0, "weight_decay": 0.1}),
    Case("anova-one_side", Anova, {"means": (0, 2), "refresh_every": 2, "mean_beta": 0.8}),
    Case("anova-all_units", Anova, {"means": (8, 2), "betas": (0.8, 0.9), "refresh_every": 1, "weight_decay": 0.1}),
    Case("natural", NaturalGradientBMA),
    Case("natural-tensor-all", NaturalGradientBMA, {"partition": "tensor", "coupling": "all", "momentum": 0.0}),
    Case(
        "natural-unit-none",
        NaturalGradientBMA,
        {"partition": "unit", "coupling": "none", "momentum": 0.5, "damping": 1.0, "weight_decay": 0.1},
    ),
    Case("natural-by_module", NaturalGradientBMA, {"partition": "module", "beta": 0.5, "damping": 1.0}),
]

# One case per class, for tests that do not depend on options.
CLASSES = [Case(case.owner, case.cls) for case in {case.cls: case for case in CASES}.values()]

# Options that differ from all cases, for a second parameter group.
OTHER_OPTIONS = {
    AdaGradBMA: {
        "lr": 0.2,
        "variant": "weighted",
        "partition": "unit",
        "coupling": "none",
        "eps": 1e-4,
        "weight_decay": 0.1,
        "maximize": True,
    },
    AdaGradFull: {"lr": 0.2, "lr_decay": 0.5, "eigenvalue_floor": 1e-2, "weight_decay": 0.1, "maximize": True},
    AdamBMA: {
        "lr": 0.02,
        "betas": (0.5, 0.8),
        "eps": 1e-4,
        "partition": "element",
        "coupling": "all",
        "refresh_every": 2,
        "weight_decay": 0.2,
        "maximize": True,
    },
    Anova: {
        "lr": 0.02,
        "betas": (0.5, 0.8),
        "mean_beta": 0.7,
        "means": (1, 2),
        "eps": 1e-4,
        "refresh_every": 2,
        "weight_decay": 0.2,
        "maximize": True,
    },
    NaturalGradientBMA: {
        "lr": 0.02,
        "damping": 2.0,
        "beta": 0.8,
        "momentum": 0.3,
        "partition": "element",
        "coupling": "none",
        "weight_decay": 0.2,
        "maximize": True,
    },
}

# Classes that add weight decay to the gradient before anything else.
COUPLED_DECAY = (AdaGradBMA, AdaGradFull)

_BAD = [
    ("lr", -1.0, ValueError, ">= 0"),
    ("lr", float("nan"), ValueError, ">= 0"),
    ("lr", torch.tensor(-1.0), ValueError, ">= 0"),
    ("lr", "fast", TypeError, "a number >= 0"),
    ("weight_decay", -0.1, ValueError, ">= 0"),
    ("weight_decay", float("nan"), ValueError, ">= 0"),
    ("weight_decay", torch.tensor([0.1, 0.1]), TypeError, "a number >= 0"),
    ("weight_decay", None, TypeError, "a number >= 0"),
    ("maximize", "no", TypeError, "True or False"),
    ("nonfinite", "ignore", ValueError, "one of 'raise', 'skip'"),
]
_BAD_BLOCKS = [
    ("partition", "row", ValueError, "a callable or one of 'tensor', 'unit', 'kernel', 'module', 'all', 'element'"),
    ("partition", 3, ValueError, "a callable or one of 'tensor'"),
    ("coupling", "some", ValueError, "one of 'all', 'module', 'none'"),
    ("coupling", None, ValueError, "one of 'all', 'module', 'none'"),
]
_BAD_ROOT = [
    ("eigenvalue_floor", float("nan"), ValueError, "> 0"),
    ("eigenvalue_floor", 0.0, ValueError, "> 0"),
    ("eigenvalue_floor", "low", TypeError, "a number > 0"),
]
_BAD_CORRECTION = [
    ("refresh_every", 0, ValueError, "a whole number >= 1"),
    ("refresh_every", 1.5, ValueError, "a whole number >= 1"),
    ("correction", 1, TypeError, "True or False"),
    ("eps", -1e-9, ValueError, ">= 0"),
    ("eps", float("nan"), ValueError, ">= 0"),
]
_BAD_BETAS = [
    ("betas", (0.9, 1.0), ValueError, "two numbers in [0, 1)"),
    ("betas", (float("nan"), 0.9), ValueError, "two numbers in [0, 1)"),
    ("betas", (0.9,), ValueError, "two numbers in [0, 1)"),
    ("betas", 0.9, TypeError, "two numbers in [0, 1)"),
    ("betas", ("a", "b"), TypeError, "two numbers in [0, 1)"),
]
_BAD_DECAY = [("lr_decay", -1.0, ValueError, ">= 0"), ("lr_decay", float("nan"), ValueError, ">= 0")]

# Option, bad value, error, and the requirement that the message states.
BAD_OPTIONS = {
    AdaGradBMA: [
        *(_BAD + _BAD_BLOCKS + _BAD_ROOT + _BAD_CORRECTION + _BAD_DECAY),
        ("variant", "best", ValueError, "one of 'paper', 'consistent', 'weighted'"),
        ("initial_accumulator_value", -1.0, ValueError, ">= 0"),
    ],
    AdaGradFull: [*(_BAD + _BAD_ROOT + _BAD_DECAY), ("max_bytes", "1 GB", TypeError, "a number >= 0 or None")],
    AdamBMA: [
        *(_BAD + _BAD_BLOCKS + _BAD_ROOT + _BAD_CORRECTION + _BAD_BETAS),
        ("correction_cap", -1.0, ValueError, ">= 0 or None"),
    ],
    Anova: [
        *(_BAD + _BAD_BETAS),
        ("mean_beta", 1.0, ValueError, "below 1"),
        ("mean_beta", float("nan"), ValueError, ">= 0"),
        ("mean_beta", None, TypeError, "a number >= 0"),
        ("eps", -1e-9, ValueError, ">= 0"),
        ("refresh_every", 0, ValueError, "a whole number >= 1"),
        *(
            ("means", bad, ValueError, "'auto', a whole number >= 0, or two of them (units, inputs)")
            for bad in (-1, 2.5, True, "many", None, (4,), (4, 4, 4), (4, -1), (4, 2.0), "")
        ),
    ],
    NaturalGradientBMA: [
        *(_BAD + _BAD_BLOCKS),
        ("damping", -1.0, ValueError, ">= 0"),
        ("beta", 1.0, ValueError, "below 1"),
        ("beta", float("nan"), ValueError, ">= 0"),
        ("momentum", -0.1, ValueError, ">= 0"),
        ("momentum", "some", TypeError, "a number >= 0"),
        ("adapt_damping", "yes", TypeError, "True or False"),
    ],
}

every_optimizer = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_class = pytest.mark.parametrize("case", CLASSES, ids=lambda case: case.id)
every_block_optimizer = pytest.mark.parametrize(
    "case", [case for case in CASES if case.option("partition") is not None], ids=lambda case: case.id
)


class Net(nn.Module):
    """38 entries in parameters of every kind: a convolution, a linear layer, biases and a scalar."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(1, 2, 2)
            self.head = nn.Linear(8, 3)
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.scale * self.head(self.conv(x).relu().flatten(1))


def loss_of(model, t):
    """The loss of the t-th batch, the same for the same t; like pixels, inputs are not centred."""
    rng = torch.Generator().manual_seed(t)
    dtype = next(model.parameters()).dtype
    inputs = torch.rand(5, 1, 3, 3, generator=rng, dtype=torch.float64).to(dtype)
    return nn.functional.cross_entropy(model(inputs), torch.randint(3, (5,), generator=rng))


def train(model, optimizer, steps):
    """Take the steps of a range, or the given number of steps from the first."""
    for t in range(steps) if isinstance(steps, int) else steps:
        optimizer.zero_grad()
        loss_of(model, t).backward()
        optimizer.step()


def pair(case, **changes):
    """A model and its optimizer, the same at every call."""
    model = Net()
    return model, case.of(model, **changes)


_runs = {}


def uninterrupted(case, steps):
    """A snapshot after the given number of uninterrupted steps."""
    if (case.id, steps) not in _runs:
        model, optimizer = pair(case)
        train(model, optimizer, steps)
        _runs[case.id, steps] = snapshot(optimizer)
    return _runs[case.id, steps]


def model_with(state):
    """A model with the given parameters."""
    model = Net(seed=9)
    model.load_state_dict(state)
    return model


def set_gradients(params, t, scale=1.0):
    """Set random gradients, for parameters that no model could use."""
    rng = torch.Generator().manual_seed(t)
    for param in params:
        noise = scale * torch.randn(param.shape, generator=rng, dtype=torch.float64)
        param.grad = torch.empty_like(param).copy_(noise)


def params_of(model):
    """Copies of the parameters."""
    return [param.detach().clone() for param in model.parameters()]


def snapshot(optimizer):
    """A copy of everything that a step may change: parameters, state, options, counters."""
    params = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    counters = (optimizer.skipped_steps, getattr(optimizer, "diagonal_fallbacks", 0))
    return {"params": params, **copy.deepcopy(optimizer.state_dict()), "counters": counters}


def assert_same(actual, expected, where=""):
    """Assert bitwise equality, with the same types and dtypes; NaN equals NaN."""
    assert type(actual) is type(expected), where
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(
            actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, e, f"{where}[{i}]")
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def bases(state):
    """U and V of a matrix in the state of Anova."""
    means = means_in(state)
    return means.U[0], means.V[0]
