"""AdamBMA against torch's AdamW and against a dense d×d twin."""

import numpy as np
import pytest
import torch
from torch import nn

from blockmean import AdamBMA
from support.problems import blocks_of, data, flat, gradient, small_net
from support.reference import DenseAdamBMA


@pytest.mark.parametrize("cap", [None, 0.3])
@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("partition", ["tensor", "unit", "kernel", "module", "all", "element"])
def test_forty_steps_equal_the_dense_reference(partition, coupling, cap):
    torch.manual_seed(0)
    model = small_net()
    options = {"lr": 0.02, "betas": (0.8, 0.95)}
    optimizer = AdamBMA(
        model.named_parameters(),
        partition=partition,
        coupling=coupling,
        correction_cap=cap,
        weight_decay=0.1,
        **options,
    )
    dense = DenseAdamBMA(
        flat(model.parameters()), *blocks_of(model, partition, coupling), decay=0.1, cap=cap, **options
    )
    inputs, targets = data(1, 32, 4, 5)
    for i in range(40):
        batch = slice(8 * (i % 4), 8 * (i % 4) + 8)
        dense.step(gradient(model, inputs[batch], targets[batch]))
        optimizer.step()
        np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-11)


def test_floor_below_one_amplifies_as_the_dense_reference_does():
    torch.manual_seed(0)
    model = small_net()
    optimizer = AdamBMA(model.parameters(), lr=0.01, coupling="all", eigenvalue_floor=0.2, weight_decay=0.0)
    dense = DenseAdamBMA(flat(model.parameters()), *blocks_of(model, "unit", "all"), lr=0.01, floor=0.2)
    inputs, targets = data(2, 32, 4, 5)
    for _ in range(20):
        dense.step(gradient(model, inputs, targets))
        optimizer.step()
    np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_correction_it_is_torchs_adamw(dtype):
    torch.manual_seed(0)
    ours, theirs = small_net().to(dtype), small_net().to(dtype)
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    mine = AdamBMA(ours.parameters(), correction=False, **options)
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    inputs, targets = data(3, 32, 4, 5)
    for _ in range(50):
        for model in (ours, theirs):
            gradient(model, inputs.to(dtype), targets)
        mine.step()
        reference.step()
    tolerance = 1e-13 if dtype == torch.float64 else 1e-5  # rounding of fifty steps
    np.testing.assert_allclose(flat(ours.parameters()), flat(theirs.parameters()), rtol=0, atol=tolerance)


def test_refreshing_less_often_keeps_the_root_and_nothing_else():
    """With a constant gradient, A is constant from the first step on, so an old root is just as good."""
    trajectories = []
    for every in (1, 7):
        param = torch.zeros(6, 5, dtype=torch.float64, requires_grad=True)
        optimizer = AdamBMA([param], lr=0.01, coupling="all", refresh_every=every)
        for _ in range(20):
            param.grad = torch.linspace(0.5, 2.0, 30, dtype=torch.float64).view(6, 5)
            optimizer.step()
        trajectories.append(param.detach().clone())
    torch.testing.assert_close(*trajectories, rtol=1e-12, atol=0)


def test_blocks_that_sit_out_are_corrected_for_their_own_steps_and_stay_semidefinite():
    """A parameter that gets a gradient every third step has the same statistics as if it were alone."""
    a, b, alone = (torch.zeros(4, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    optimizer, single = (AdamBMA(p, lr=0.01, betas=(0.9, 0.9), coupling="all") for p in ([a, b], [alone]))
    rng = torch.Generator().manual_seed(1)
    for i in range(30):
        a.grad = torch.randn(4, 5, generator=rng, dtype=torch.float64) + 1
        b.grad = a.grad.clone() if i % 3 == 0 else None
        optimizer.step()
        if b.grad is not None:
            alone.grad = b.grad.clone()
            single.step()
        U = torch.cat([optimizer.state[p]["U"] for p in (a, b) if "U" in optimizer.state[p]])
        assert torch.linalg.eigvalsh(U).min() > -1e-14 * U.abs().max()
    mine, theirs = optimizer.block_statistics()[0].A[4:, 4:], single.block_statistics()[0].A
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


def test_a_parameter_that_joins_a_shared_block_late_does_not_hide_what_it_shares():
    """Both averages of a block come from the same steps, so a young member counts with what it has accumulated."""
    old, young = (torch.zeros(50, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = AdamBMA([old, young], partition="all")
    for i in range(320):
        old.grad = torch.ones_like(old)
        young.grad = torch.ones_like(young) if i >= 300 else None
        optimizer.step()
    late, early = 1 - 0.999**20, (1 - 0.999**300) * 0.999**20  # weights of the last 20 steps and of those before
    expected = (50**2 * early + 100**2 * late) / (50 * (early + late) + 50 * late)
    assert float(optimizer.block_statistics()[0].A) == pytest.approx(expected, rel=1e-9)


def test_one_signed_gradients_are_damped_and_centred_ones_are_not():
    """A_ii is 5 for a row of five equal gradients: the step along it is 1/√5 of Adam's. It is 0 if they cancel."""
    param = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    param.grad = torch.tensor([[1.0] * 5, [1.0, -1.0, 1.0, -1.0, 0.0]], dtype=torch.float64)
    AdamBMA([param], lr=1.0, eps=0.0).step()
    expected = torch.tensor([[-(5**-0.5)] * 5, [-1.0, 1.0, -1.0, 1.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(param.detach(), expected)


def test_state_is_twice_the_parameters_and_two_numbers_per_block():
    model = nn.Linear(30, 20)
    optimizer = AdamBMA(model.parameters())
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    held = {
        key: sum(state[key].numel() for state in optimizer.state.values() if key in state)
        for key in optimizer.state[model.weight]
    }
    assert held == {"step": 2, "exp_avg": 620, "exp_avg_sq": 620, "U": 20, "energy": 20, "blocks": 3}


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9,), (float("nan"), 0.9)])
def test_betas_out_of_range_are_refused(betas):
    with pytest.raises(ValueError, match=r"'betas' parameter of AdamBMA must be two numbers in \[0, 1\)"):
        AdamBMA([torch.zeros(1, requires_grad=True)], betas=betas)
