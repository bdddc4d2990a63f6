"""What a step launches on an accelerator, and how often the host waits for it: counted on tensors without memory."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from blockmean import AdamBMA, Anova
from blockmean.optim import anova
from blockmean.optim.kernels import triton_anova
from support.accelerator import Launches, Recorder, fake_cuda


def gpt(width, layers, vocabulary, context):
    """The shapes of a GPT-2: embeddings, then two norms, attention and an MLP per layer."""
    shapes = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        attention = [(3 * width, width), (3 * width,), (width, width), (width,)]
        mlp = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        shapes += [(width,), (width,), *attention, (width,), (width,), *mlp]
    return shapes


SHAPES = gpt(768, 4, 50_257, 1024)


def count(make, steps=6, dtype=torch.float32, shapes=SHAPES, after=lambda: None):
    """Launches, waits and copies of every step of a GPT-2-sized list: 50 tensors of width 768."""
    fake_cuda()
    found = []
    with FakeTensorMode():
        tensors = [torch.empty(shape, device="cuda:0", dtype=dtype) for shape in shapes]
        params = [torch.nn.Parameter(tensor) for tensor in tensors]
        for param in params:
            param.grad = torch.empty_like(param)
        with Launches():
            optimizer = make(params)
        for t in range(steps):
            with Launches(t) as one:
                optimizer.step()
            after()
            found.append((one.launches.total(), one.waits.total(), one.copies.total()))
    return found


@pytest.fixture
def without_triton(monkeypatch):
    monkeypatch.setattr(triton_anova, "find_spec", lambda name: None)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 250), (torch.bfloat16, 260)])
def test_anova_with_torchs_operations(without_triton, dtype, most):
    first, *others = count(Anova, dtype=dtype)
    assert first[0] <= 1200
    assert all(waits <= 1 and not copies for _, waits, copies in others), others
    # Every second step turns U and V.
    assert max(launches for launches, *_ in others[1::2]) <= most and max(others[::2])[0] <= 800, others


@pytest.mark.parametrize("lr", [1e-3, None], ids=["number", "tensor"])
def test_capturable_steps_never_wait(without_triton, lr):
    def make(params):
        return Anova(params, lr=torch.empty((), device="cuda:0") if lr is None else lr, capturable=True)

    # torch's fused AdamW, which vectors and the vocabulary take, has no fake form with a tensor as its learning rate.
    shapes = SHAPES if lr else [x for x in SHAPES[1:] if len(x) == 2]
    _, *others = count(make, shapes=shapes)
    assert all(waits == 0 and not copies for _, waits, copies in others), others
    assert max(launches for launches, *_ in others[1::2]) <= 320 and max(others[::2])[0] <= 800, others


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("options", "waits"), [({}, 1), ({"capturable": True}, 0)], ids=["eager", "capturable"])
def test_anova_with_triton(monkeypatch, options, waits):
    """Tensors without memory have no addresses, and no kernel can run on them; all else is as on a GPU."""
    from blockmean.optim.kernels import triton_kernels

    recorder = Recorder(triton_kernels)
    monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
    monkeypatch.setattr(anova, "serves", lambda param, grad, state: True)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "device_of", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launched = [0]

    def counted(make, steps):
        for t, found in enumerate(count(make, steps, after=lambda: launched.append(len(recorder.launches)))):
            yield found[0] + launched[t + 1] - launched[t], *found[1:]

    # The second step compiles the kernels; so that it does not turn U and V as well, the fifth does.
    _, compiling, *steady, refresh, after = counted(lambda params: Anova(params, refresh_every=5, **options), 6)
    assert [launched[1], *{b - a for a, b in pairwise(launched[1:])}] == [0, 7]
    assert compiling[2] <= 6  # maps, and the table of addresses
    assert all(n <= 60 and w == waits and not copies for n, w, copies in [*steady, after]), steady
    assert refresh[0] <= 800 and refresh[1] == waits and not refresh[2], refresh
    assert compiling[:2] <= (70, waits)


def test_adam_bma():
    _, *steady = count(AdamBMA)
    assert all(launches <= 120 and waits <= 1 for launches, waits, _ in steady), steady


def test_torchs_own_are_counted_right():
    assert count(lambda params: torch.optim.AdamW(params, foreach=True), 2)[1][0] == 8
    assert count(lambda params: torch.optim.AdamW(params, fused=True), 2)[1][0] == 2
