"""The arithmetic of a step under torch.compile: whole graphs, the results of torch's operations, few compilations."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from blockmean import AdaGradBMA, AdamBMA
from blockmean.optim import passes
from support.optimizers import set_gradients

STEPS = 6

OPTIONS = {
    "paper": (AdaGradBMA, {"coupling": "none", "lr_decay": 0.1}),
    "weighted": (AdaGradBMA, {"variant": "weighted", "partition": "unit", "coupling": "none", "weight_decay": 0.1}),
    "adam": (AdamBMA, {}),
    "adam-cap": (AdamBMA, {"eps": 0.0, "correction_cap": 0.5, "maximize": True}),
}


@pytest.fixture
def backend():
    """Counts graphs, and runs them with torch's operations."""
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


def compile_passes(monkeypatch, backend):
    """Compile both passes. A graph break is an error (fullgraph=True)."""

    def compiled(function):
        return torch.compile(function, backend=backend, fullgraph=True)

    for name in ("_block_sums", "apply_"):
        monkeypatch.setattr(passes.Foreach, name, compiled(getattr(passes.Foreach, name)))


def train(make, shapes, backend, late=False):
    """Parameters after some steps, and the number of graphs after each of them."""
    rng = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in shapes]
    optimizer = make([(f"layer{i}.weight", param) for i, param in enumerate(params)])
    graphs = []
    for t in range(STEPS):
        set_gradients(params, t)
        if late and t == 0:
            params[0].grad = None
        optimizer.step()
        graphs.append(backend.frame_count)
    return params, graphs


def assert_compiles(make, shapes, backend, monkeypatch, **options):
    """The results of an uncompiled run, and nothing to compile in the last two steps."""
    expected, _ = train(make, shapes, backend, **options)
    assert backend.frame_count == 0
    compile_passes(monkeypatch, backend)
    params, graphs = train(make, shapes, backend, **options)
    for a, b in zip(expected, params, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
    assert graphs[0] > 0
    assert graphs[-1] == graphs[-3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", OPTIONS)
def test_both_passes_are_whole_graphs_that_serve_every_step(form, backend, monkeypatch):
    cls, options = OPTIONS[form]
    assert_compiles(lambda p: cls(p, foreach=True, **options), [(4, 3), (5,)], backend, monkeypatch)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_step_counts_may_differ(backend, monkeypatch):
    assert_compiles(lambda p: AdamBMA(p, foreach=True), [(4, 3), (3, 2)], backend, monkeypatch, late=True)
