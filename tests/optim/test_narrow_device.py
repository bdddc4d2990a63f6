"""Devices without float64: small arrays live on the CPU, and nothing on the device is ever float64."""

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdamBMA, Anova, NaturalGradientBMA, _linalg
from support.narrow_device import NarrowDevice, NarrowTensor

CASES = [
    (AdamBMA, {}),
    (AdamBMA, {"coupling": "all", "foreach": True}),
    (AdamBMA, {"coupling": "all", "foreach": False, "correction_cap": 0.5}),
    (AdaGradBMA, {}),
    (AdaGradBMA, {"variant": "weighted", "partition": "unit"}),
    (NaturalGradientBMA, {}),
    (Anova, {"means": 2, "refresh_every": 2}),
    (Anova, {"means": 0}),
]


def train(cls, options, narrow):
    rng = torch.Generator().manual_seed(0)
    shapes = [(6, 5), (6,), (4, 3, 2, 2)]
    values = [torch.randn(shape, generator=rng) for shape in shapes]
    params = [nn.Parameter(NarrowTensor(x) if narrow else x.clone()) for x in values]
    optimizer = cls([(f"layer{i}.weight", p) for i, p in enumerate(params)], lr=0.01, fused=False, **options)
    for _ in range(5):
        for param in params:
            grad = torch.randn(param.shape, generator=rng) + 0.5
            param.grad = NarrowTensor(grad) if narrow else grad
        optimizer.step()
    return [getattr(param, "data_on_cpu", param).detach().clone() for param in params], optimizer


def test_the_device_refuses_float64():
    x = NarrowTensor(torch.ones(3))
    with pytest.raises(TypeError, match="float64"):
        x.double()
    assert x.to("cpu").double().dtype == torch.float64 and (x + 1).device.type == "meta"


@pytest.mark.parametrize(("cls", "options"), CASES, ids=str)
def test_steps_are_those_of_the_cpu(cls, options, monkeypatch):
    monkeypatch.setattr(_linalg, "WITHOUT_FLOAT64", ("meta",))
    expected, _ = train(cls, options, narrow=False)
    with NarrowDevice():
        found, optimizer = train(cls, options, narrow=True)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    for state in optimizer.state.values():
        assert all(x.device.type == "cpu" for x in state.values() if x.dtype == torch.float64)
