"""What keeps Anova sane: bounds on its steps, full precision under autocast, weights that revive, checked options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from blockmean import Anova


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
        optimizer = Anova([param], lr=1.0, weight_decay=0)
        for t in range(12):
            gradient = torch.randn(4, 13, generator=generator)
            if t < 2:
                gradient[2:] = 0
            param.grad = gradient
            optimizer.step()
            U = optimizer.state[param]["units"]
            assert float((U.T @ U - torch.diag((U != 0).any(0).float())).abs().max()) < 1e-5, (seed, t)


@pytest.mark.parametrize("shape, before, after", [((4, 64), "auto", 1), ((16, 16), 16, 4), ((16, 16), 16, 0)])
def test_another_number_of_means_does_not_make_steps_jump(shape, before, after):
    generator, param = torch.Generator().manual_seed(0), nn.Parameter(torch.zeros(shape))
    optimizer, sizes = Anova([param], lr=1.0, weight_decay=0, means=before), []
    for t in range(140):
        if t == 120:
            optimizer.param_groups[0]["means"] = after
        old = param.detach().clone()
        param.grad = torch.randn(shape, generator=generator)
        optimizer.step()
        sizes.append(float((param.detach() - old).square().mean().sqrt()))
    assert max(sizes[120:]) < 2.5 * max(sizes[100:120])  # it was 12 times


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


def test_means_begin_again_where_their_beginning_is_unknown_or_lies_ahead():
    for change in (lambda state: state.pop("began"), lambda state: state["step"].zero_()):
        param = nn.Parameter(torch.ones(8, 9))
        optimizer = Anova([param], means=3)
        generator = torch.Generator().manual_seed(0)
        for t in range(8):
            if t == 2:
                optimizer.param_groups[0]["means"] = 2  # they begin at step 2
            if t == 4:
                change(optimizer.state[param])
            param.grad = torch.randn(8, 9, generator=generator)
            optimizer.step()
        state = optimizer.state[param]
        assert float(state["began"]) >= 0 and param.isfinite().all()
        U = state["units"]
        torch.testing.assert_close(U.T @ U, torch.eye(2), rtol=0, atol=1e-5)


def test_means_switched_off_leave_the_moments_of_adamw():
    """After means=0 and a step, `exp_avg` and `exp_avg_sq` are whole: AdamW can load the checkpoint."""
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(20, 30, dtype=torch.float64))
    optimizer = Anova([param], lr=1e-3, weight_decay=0.01)
    common = torch.randn(20, 1, generator=generator, dtype=torch.float64)
    mean = torch.zeros_like(param)
    for t in range(60):
        if t == 50:
            optimizer.param_groups[0]["means"] = 0
        param.grad = torch.randn(20, 30, generator=generator, dtype=torch.float64) + 3 * common
        mean = mean.lerp(param.grad, 0.1)
        optimizer.step()
    adamw = torch.optim.AdamW([param], lr=1e-3)
    adamw.load_state_dict(optimizer.state_dict())
    torch.testing.assert_close(adamw.state[param]["exp_avg"], mean)
    twin = nn.Parameter(param.detach().clone())
    own = Anova([twin], lr=1e-3, means=0)
    own.load_state_dict(optimizer.state_dict())
    param.grad = torch.randn(20, 30, generator=generator, dtype=torch.float64)
    twin.grad = param.grad.clone()
    adamw.step()
    own.step()
    torch.testing.assert_close(param, twin, rtol=0, atol=1e-12)


@pytest.mark.parametrize("betas, mean_beta", [((0.999, 0.9999), 0.5), ((0.99, 0.9999), 0.001)])
def test_decays_for_which_the_bound_overflows_take_steps_all_the_same(betas, mean_beta):
    param = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    optimizer = Anova([param], lr=1e-3, betas=betas, mean_beta=mean_beta, means=2)
    for t in range(1100):
        param.grad = torch.full_like(param, 1.0 + t % 2)
        optimizer.step()
    assert torch.isfinite(param).all()


@pytest.mark.parametrize("fused", [None, False])
def test_a_step_count_set_back_to_zero_keeps_the_momentum(fused):
    torch.manual_seed(0)
    param, gradient = nn.Parameter(torch.zeros(8, 6, dtype=torch.float64)), torch.randn(8, 6, dtype=torch.float64)
    optimizer = Anova([param], means=2, fused=fused)
    for t in range(14):
        if t == 12:
            optimizer.state[param]["step"].zero_()
        param.grad = gradient.clone()
        optimizer.step()
    state = optimizer.state[param]
    U, Vt = state["units"], state["inputs"]
    whole = state["exp_avg"] + U @ state["grand_avg"] @ Vt + state["unit_avg"] @ Vt + U @ state["input_avg"]
    torch.testing.assert_close(whole, (1 - 0.9**14) * gradient)
