"""What keeps Anova sane: bounds on its steps, full precision under autocast, weights that revive, checked options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockmean import Anova
from support.optimizers import bases


def sparse_rows(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """The gradient of an embedding: five rows."""
    rows = torch.randint(shape[0], (5,), generator=generator)
    return torch.zeros(shape).index_add_(0, rows, torch.randn(5, shape[1], generator=generator))


def longest_step(steps: int = 200, **options: object) -> float:
    """The largest root mean square of a step, in units of the learning rate."""
    generator, param = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(200, 32))
    optimizer = Anova([param], lr=1.0, weight_decay=0, **options)
    longest = 0.0
    for _ in range(steps):
        param.grad, before = sparse_rows((200, 32), generator), param.detach().clone()
        optimizer.step()
        longest = max(longest, float((param.detach() - before).square().mean().sqrt()))
    return longest


@pytest.mark.parametrize("beta1, mean_beta", [(0.9, 0.95), (0.95, 0.9), (0.975, 0.95), (0.98, 0.95), (0.99, 0.95)])
def test_steps_stay_bounded_whatever_the_decays(beta1, mean_beta):
    assert longest_step(betas=(beta1, 0.999), mean_beta=mean_beta) < 3  # β₁ = .98 had 4,500


def test_steps_stay_bounded_when_a_schedule_cycles_the_momentum():
    param = nn.Parameter(torch.zeros(200, 32))
    optimizer = Anova([param], lr=1.0, weight_decay=0, mean_beta=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=200)  # β₁ between .85 and .95
    generator, lr = torch.Generator().manual_seed(0), []
    for _ in range(199):
        param.grad, before = sparse_rows((200, 32), generator), param.detach().clone()
        optimizer.step()
        lr.append(float((param.detach() - before).square().mean().sqrt()) / optimizer.param_groups[0]["lr"])
        schedule.step()
    assert max(lr) < 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("means", ["auto", (0, 3)])
def test_a_step_inside_autocast_is_the_same_step(dtype, means):
    torch.manual_seed(0)
    model = nn.Linear(32, 8)
    model(torch.randn(4, 32)).square().mean().backward()
    other = copy.deepcopy(model)
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        its.grad = own.grad.clone()
    outside, inside = Anova(model.parameters(), means=means), Anova(other.parameters(), means=means)
    for _ in range(6):
        outside.step()
        with torch.autocast("cpu", dtype):
            inside.step()
    for own, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(own, its)


def test_weights_stay_orthonormal_when_units_wake_up_late():
    for seed in range(40, 60):  # 46 had .7
        generator, param = torch.Generator().manual_seed(seed), nn.Parameter(torch.zeros(4, 13))
        optimizer = Anova([param], lr=1.0, weight_decay=0, means=4)
        for t in range(12):
            gradient = torch.randn(4, 13, generator=generator)
            if t < 2:
                gradient[2:] = 0
            param.grad = gradient
            optimizer.step()
            U, _ = bases(optimizer.state[param])
            assert float((U.T @ U - torch.diag((U != 0).any(0).float())).abs().max()) < 1e-5, (seed, t)


@pytest.mark.parametrize(
    "name, value, error",
    [
        ("refresh_every", 0, ValueError),
        ("refresh_every", 2.5, ValueError),
        ("refresh_every", None, ValueError),
        ("mean_beta", 1.0, ValueError),
        ("mean_beta", 1.5, ValueError),
        ("betas", (1.0, 0.9), ValueError),
        ("betas", 0.9, TypeError),
        ("means", -1, ValueError),
        ("means", (1, 2, 3), ValueError),
    ],
)
def test_an_option_set_by_hand_is_checked_before_anything_changes(name, value, error):
    param = nn.Parameter(torch.ones(8, 9))
    optimizer = Anova([param])
    param.grad = torch.randn(8, 9, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before, state = param.detach().clone(), copy.deepcopy(optimizer.state_dict()["state"][0])
    optimizer.param_groups[0][name] = value
    with pytest.raises(error, match=f"'{name}' parameter of Anova"):
        optimizer.step()
    assert torch.equal(param, before)
    for key, own in optimizer.state_dict()["state"][0].items():
        assert torch.equal(own, state[key]), key


@pytest.mark.parametrize("betas, mean_beta", [((0.999, 0.9999), 0.5), ((0.99, 0.9999), 0.001)])
def test_decays_for_which_the_bound_overflows_take_steps_all_the_same(betas, mean_beta):
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = Anova([param], lr=1e-3, betas=betas, mean_beta=mean_beta, means=2)
    for t in range(1100):
        param.grad = torch.full_like(param, 1.0 + t % 2)
        optimizer.step()
    assert torch.isfinite(param).all()
