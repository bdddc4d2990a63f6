"""Anova's slow twin: equal steps with its switches off, and what each switch changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from blockmean import Anova
from blockmean.lab.ablations import PlainAnova, orthonormal
from blockmean.lab.arms import find, make
from blockmean.lab.study_cells import ABLATIONS

SHAPES = ((40, 24), (12, 100), (16, 8, 3, 3), (200, 10), (30,), (24, 24))
PLAIN = [arm.options for arm in ABLATIONS.values() if arm.optimizer == "PlainAnova"]
SWITCHES = [option for options in PLAIN for option, value in options.items() if value is True]


def gradients(steps, asleep=False, dtype=torch.float64):
    """Noise around a direction that turns; `asleep`: first without most rows, and one matrix without any gradient."""
    generator = torch.Generator().manual_seed(0)
    base = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
    for t in range(steps):
        found = []
        for g in base:
            noise = torch.randn(g.shape, generator=generator, dtype=dtype)
            found.append(0.5 * noise + (1.0 if t < steps // 2 else -0.3) * g)
            if asleep and t < 12 and g.ndim == 2:
                found[-1][:-3] = 0
        if asleep and t < 2:
            found[-1].zero_()
        yield found


def start(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def trained(optimizer_class, steps=20, asleep=False, **options):
    params = start()
    optimizer = optimizer_class(params, **{"lr": 8e-3, "weight_decay": 0.1, **options})
    for found in gradients(steps, asleep):
        for param, gradient in zip(params, found, strict=True):
            param.grad = gradient
        optimizer.step()
    return params


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("options", [{}, {"betas": (0.9, 0.8), "lr": 1e-4}, {"refresh_every": 3, "mean_beta": 0.8}])
def test_the_twin_takes_anovas_steps(options, asleep):
    ours, twins = (trained(cls, 40, asleep, **options) for cls in (Anova, PlainAnova))
    for a, b, at in zip(ours, twins, start(), strict=True):
        moved = (a - at).abs().max()
        # Rounding, 1e-16, times the conditions of what is orthonormalised: to 1e-13 of the way, but to 1e-9 where few
        # rows have a gradient, so that columns are nearly parallel.
        assert (a - b).abs().max() < 1e-9 * moved


@pytest.mark.parametrize("k", [1, 4])
def test_the_twin_takes_as_many_means_as_it_is_asked_for(k):
    """Matrices that have none by default have none here, but for Anova's explicit `means`."""
    ours, twins = trained(Anova, means=k), trained(PlainAnova, means=k)
    plain = trained(PlainAnova)
    for a, b, usual, shape in zip(ours, twins, plain, SHAPES, strict=True):
        alike = usual if shape == (200, 10) else a
        torch.testing.assert_close(b, alike, rtol=0, atol=1e-9)  # rounding, see above


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_what_it_names_and_nothing_else(switch):
    plain, other = trained(PlainAnova), trained(PlainAnova, **{switch: True})
    changed = {tuple(a.shape) for a, b in zip(plain, other, strict=True) if not torch.equal(a, b)}
    matrices = {shape for shape in SHAPES if len(shape) > 1 and shape != (200, 10)}
    expected = {"means_everywhere": {(200, 10)}, "cautious_decay": set(SHAPES)}
    assert changed == expected.get(switch, matrices)
    assert all(torch.isfinite(param).all() for param in other)


def test_cautious_decay_takes_nothing_where_update_and_parameter_disagree():
    param = nn.Parameter(torch.tensor([1.0, -1.0, 1.0, -1.0]))
    optimizer = PlainAnova([param], lr=0.1, weight_decay=1.0, cautious_decay=True, eps=0.0)
    param.grad = torch.tensor([1.0, 1.0, -1.0, -1.0])  # the first update of Adam is the sign
    optimizer.step()
    torch.testing.assert_close(param.data, torch.tensor([0.8, -1.1, 1.1, -0.8]))


def test_second_moments_per_entry_scale_entries_of_the_remainder():
    """Columns of E differ in scale: one moment per row keeps that, one per entry does not."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(100)
    scale[::2] = 0.01
    ratios = []
    for per_entry in (False, True):
        param = nn.Parameter(torch.zeros(100, 100))
        optimizer = PlainAnova([param], lr=1e-3, weight_decay=0.0, remainder_per_entry=per_entry, no_lift=True)
        for _ in range(10):
            param.grad = torch.randn(100, 100, generator=generator) * scale
            optimizer.step()
        sizes = param.detach().square().mean(0).sqrt()
        ratios.append(float(sizes[::2].mean() / sizes[1::2].mean()))
    assert ratios[0] < 0.05 < 0.5 < ratios[1]


def test_columns_that_are_nearly_parallel_stay_as_they_were():
    W = torch.eye(4, 2, dtype=torch.float64)
    same = torch.ones(4, 2, dtype=torch.float64)
    found, fine = orthonormal(same, torch.zeros_like(W))
    assert not fine and not found.any()
    found, fine = orthonormal(same, W)
    assert fine
    torch.testing.assert_close(found.T @ found, torch.eye(2, dtype=torch.float64))


def test_every_ablation_can_be_made_for_a_model():
    model = nn.Sequential(nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10))
    for arm in ABLATIONS.values():
        settings = arm.settings(arm.start)
        optimizer = make(settings["optimizer"], model, 0.01, settings["options"])
        assert isinstance(optimizer, find(arm.optimizer))
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
