"""Anova's arithmetic under torch.compile: pass 1, pass 2 and the refresh are whole graphs with the results of eager."""

import pytest
import torch
from torch import nn

from blockmean import Anova
from blockmean.optim import anova, batches, decomposition, refresh
from support.optimizers import set_gradients

SHAPES = [(12, 10), (5,), (9, 20), (12, 10)]
FUNCTIONS = ("project", "sums_of_squares", "update_moments_", "precondition", "update_", "waking", "refresh_")


def train(steps=11):
    rng = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in SHAPES]
    optimizer = Anova(params, lr=0.01, means=4, refresh_every=3, fused=False)
    for t in range(steps):
        set_gradients(params, t)
        optimizer.step()
    return params


@pytest.fixture
def compiled(monkeypatch):
    """Compiles every function between the checks, with the given backend. A graph break is an error."""
    monkeypatch.setattr(batches, "BY_SHAPE", ())  # all shapes in one batch, as on accelerators
    torch.compiler.reset()

    def with_backend(backend):
        for name in FUNCTIONS:
            function = getattr(decomposition, name, None) or getattr(refresh, name)
            function = torch.compile(function, backend=backend, fullgraph=True)
            monkeypatch.setattr(batches if name == "project" else anova, name, function)

    yield with_backend
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_both_passes_and_the_refresh_are_whole_graphs(compiled):
    expected = train()
    compiled("aot_eager")
    for a, b in zip(train(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.study
@pytest.mark.filterwarnings("ignore")
def test_compiled_by_inductor_they_give_the_same(compiled):
    expected = train(7)
    compiled("inductor")
    for a, b in zip(train(7), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)  # products in another order
