"""NaturalGradientBMA against a dense d×d twin, its invariances compared with Newton's, and whether it trains."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

from blockmean import BlockMean, NaturalGradientBMA, Partition
from blockmean.lab.data import load
from support.problems import blocks_of, data, flat, gradient, small_net
from support.reference import DenseNaturalGradient


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("partition", ["tensor", "unit", "kernel", "module", "all", "element"])
def test_trajectory_equals_the_dense_reference(partition, coupling, momentum):
    torch.manual_seed(0)
    model = small_net()
    options = {"lr": 1e-3, "damping": 0.5, "beta": 0.8, "momentum": momentum}
    decay = 0.1 if momentum else 0.0
    optimizer = NaturalGradientBMA(
        model.named_parameters(), partition=partition, coupling=coupling, weight_decay=decay, **options
    )
    labels, modules = blocks_of(model, partition, coupling, leave_plain=False)
    dense = DenseNaturalGradient(flat(model.parameters()), labels, modules, decay=decay, **options)
    inputs, targets = data(1, 32, 4, 5)
    for i in range(15):
        batch = slice(8 * (i % 4), 8 * (i % 4) + 8)
        dense.step(gradient(model, inputs[batch], targets[batch]))
        optimizer.step()
        np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-12)


def test_first_step_is_the_block_mean_of_the_outer_product():
    model = nn.Linear(4, 3).double()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = NaturalGradientBMA(model.parameters(), lr=0.1, damping=0.2, partition="unit", coupling="all")
    model(torch.arange(4.0, dtype=torch.float64)).square().sum().backward()
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    F = BlockMean.from_rows(g.unsqueeze(0), Partition.of(model, by="unit"))
    tau = F.trace() / len(g)
    expected = before - 0.1 * tau.sqrt() * F.damped(0.2 * tau).solve(g)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), expected)


def random_gradients(count, d, seed):
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def natural_step(gradients, **options):
    """Accumulate statistics from all gradients without moving, then return the step's direction for the last one."""
    param = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = NaturalGradientBMA([param], lr=0.0, damping=0.0, momentum=0.0, **options)
    for g in gradients[:-1]:
        param.grad = g.clone()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    param.grad = gradients[-1].clone()
    optimizer.step()
    return param.detach()


def assert_same_direction(actual, expected):
    torch.testing.assert_close(actual / actual.norm(), expected / expected.norm(), rtol=1e-9, atol=1e-12)


# The learning rate is a length per entry, so a change of units changes the length of a step. Its direction stays.


def test_the_direction_is_invariant_under_any_linear_reparametrisation_with_blocks_of_one_entry():
    """With θ = Kξ gradients become Kᵀg, and a step Δξ must be along K⁻¹Δθ."""
    gradients = random_gradients(40, 5, seed=0)
    K = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = natural_step(gradients, partition="element", coupling="all")
    transformed = natural_step(gradients @ K, partition="element", coupling="all")
    assert_same_direction(K @ transformed, step)


@pytest.mark.parametrize("coupling", ["all", "none"])
def test_the_direction_is_invariant_under_rescaling_of_whole_blocks(coupling):
    gradients = random_gradients(40, 12, seed=2)
    scale = torch.tensor([1e-4, 3.0, 2e5], dtype=torch.float64).repeat_interleave(4)

    def by(name, tensor):
        return torch.arange(3).repeat_interleave(4)

    step = natural_step(gradients, partition=by, coupling=coupling)
    transformed = natural_step(gradients * scale, partition=by, coupling=coupling)
    assert_same_direction(scale * transformed, step)


def test_the_block_mean_form_is_not_invariant_inside_blocks():
    gradients = random_gradients(40, 12, seed=3)
    scale = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
    step = natural_step(gradients, partition="all")
    transformed = natural_step(gradients * scale, partition="all")
    transformed = scale * transformed
    assert (transformed / transformed.norm() - step / step.norm()).norm() > 0.1


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_the_step_does_not_depend_on_the_scale_of_the_loss(scale):
    gradients = random_gradients(40, 12, seed=4)
    torch.testing.assert_close(natural_step(scale * gradients), natural_step(gradients), rtol=1e-9, atol=0)


def test_newtons_method_is_invariant_under_any_linear_reparametrisation():
    """The appendix of the paper, in numbers: Newton's steps on f(Kξ), mapped back, are those on f(θ)."""

    def newton(f, x):
        return x - torch.linalg.solve(hessian(f, x), jacobian(f, x))

    def f(theta):
        return (theta**4).sum() + (theta[0] * theta[1] - theta[2]) ** 2 + theta.square().sum()

    K = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.5, 3.0], [1.0, 0.0, 1.0]], dtype=torch.float64)
    theta = torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)
    xi = torch.linalg.solve(K, theta)
    for _ in range(4):
        theta = newton(f, theta)
        xi = newton(lambda x: f(K @ x), xi)
        torch.testing.assert_close(K @ xi, theta, rtol=1e-10, atol=1e-12)


def test_momentum_carries_steps_on():
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = NaturalGradientBMA([param], lr=0.1, momentum=0.5, damping=1.0)
    param.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    optimizer.step()
    first = param.detach().clone()
    param.grad = torch.zeros(3, dtype=torch.float64)
    optimizer.step()
    torch.testing.assert_close(param.detach(), 1.5 * first)


@pytest.mark.parametrize("partition", ["all", "element"])
def test_the_step_is_bounded_in_the_metric_of_the_model(partition):
    """Δθᵀ(F + δτI)Δθ ≤ 2d τ η² / (1 − β), even for a gradient unlike all before it."""
    rng = torch.Generator().manual_seed(0)
    d, lr, damping, beta = 20, 0.3, 0.01, 0.9
    labels = np.zeros(d, int) if partition == "all" else np.arange(d)
    param = torch.zeros(d, dtype=torch.float64, requires_grad=True)
    options = {"lr": lr, "damping": damping, "beta": beta, "momentum": 0.0}
    optimizer = NaturalGradientBMA([param], partition=partition, coupling="all", **options)
    dense = DenseNaturalGradient(np.zeros(d), labels, np.zeros(labels.max() + 1, int), **options)
    for t in range(60):
        before = param.detach().clone()
        param.grad = torch.randn(d, generator=rng, dtype=torch.float64) * (1e4 if t == 50 else 1e-4 if t > 55 else 1.0)
        dense.step(param.grad.numpy())
        optimizer.step()
        delta, F = (param.detach() - before).numpy(), dense.fisher()
        tau = np.trace(F) / d
        assert delta @ (F + damping * tau * np.eye(d)) @ delta <= 2 * d * tau * lr**2 / (1 - beta) * (1 + 1e-9)


def quadratic(param, scale, **options):
    optimizer = NaturalGradientBMA(
        [param], lr=0.5, damping=1.0, adapt_damping=True, partition="element", coupling="all", **options
    )

    def closure():
        optimizer.zero_grad()
        loss = scale * param.square().sum()
        loss.backward()
        return loss

    return optimizer, closure


def test_damping_is_raised_where_the_loss_falls_less_than_predicted():
    """The minimum is nearer than the step is long."""
    param = torch.full((2,), 1e-3, dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 1.0)
    optimizer.step(closure)
    assert optimizer.param_groups[0]["damping"] == 1.5


def test_damping_is_lowered_where_the_loss_falls_as_predicted():
    param = torch.full((2,), 1e3, dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 1.0)
    optimizer.step(closure)
    assert optimizer.param_groups[0]["damping"] == pytest.approx(1 / 1.5)


def test_damping_stays_without_a_closure():
    param = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 1.0)
    closure()
    optimizer.step()
    assert optimizer.param_groups[0]["damping"] == 1.0


def test_the_prediction_is_half_the_slope_along_the_step():
    """Momentum and weight decay are part of the step."""
    param = torch.tensor([3.0, -1.0], dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 0.3, momentum=0.6, weight_decay=0.1)
    for _ in range(3):
        before, slope = param.detach().clone(), 0.6 * param.detach()
        optimizer.step(closure)
        assert optimizer._predicted == pytest.approx(float(slope @ (before - param.detach())) / 2, rel=1e-12)


@pytest.mark.parametrize(("power", "bound"), [(1, 1e-3), (0, 1e6)])
def test_adapted_damping_stays_within_bounds(power, bound):
    """A linear loss always falls as predicted; a loss that does not fall despite its gradients never does."""
    param = torch.ones(2, dtype=torch.float64, requires_grad=True)
    optimizer = NaturalGradientBMA([param], lr=1e-3, adapt_damping=True)

    def closure():
        param.grad = torch.ones_like(param)
        return float(power * param.detach().sum())

    for _ in range(100):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["damping"] == bound


def test_adapting_goes_together_with_a_schedule_of_momentum():
    param = torch.tensor([2.0, -3.0], dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=200)
    for _ in range(199):
        optimizer.step(closure)
        schedule.step()
    assert closure().item() < 1e-3
    again, _ = quadratic(torch.zeros(2, dtype=torch.float64, requires_grad=True), 1.0)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"] > 0


def test_options_out_of_range_are_refused():
    param = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"'damping' parameter .* > 0 with adapt_damping=True"):
        NaturalGradientBMA([param], damping=0.0, adapt_damping=True)
    with pytest.raises(ValueError, match=r"'momentum' parameter .* below 1"):
        NaturalGradientBMA([param], momentum=1.0)
    with pytest.raises(ValueError, match=r"'beta' parameter .* below 1"):
        NaturalGradientBMA([param], beta=1.0)


# -------------------------------------------------------------------- the learning rate


def trajectory(lr, steps, schedule=None):
    """The steps of a small net, (steps, d)."""
    torch.manual_seed(0)
    model = small_net()
    optimizer = NaturalGradientBMA(model.parameters(), lr=lr)
    scheduler = schedule(optimizer) if schedule else None
    inputs, targets = data(1, 16, 4, 5)
    found = [flat(model.parameters())]
    for _ in range(steps):
        gradient(model, inputs, targets)
        optimizer.step()
        found.append(flat(model.parameters()))
        if scheduler is not None:
            scheduler.step()
    return np.diff(found, axis=0)


@pytest.mark.parametrize("lr", [1e-4, 1e-3, 1e-2])
def test_twice_the_learning_rate_is_twice_the_first_step(lr):
    np.testing.assert_allclose(trajectory(2 * lr, 1), 2 * trajectory(lr, 1), rtol=1e-9)


def test_no_two_learning_rates_have_the_same_trajectory():
    ends = [trajectory(lr, 20).sum(0) for lr in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1)]
    for i, end in enumerate(ends):
        for other in ends[:i]:
            assert np.linalg.norm(end - other) > 0.5 * np.linalg.norm(other)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.0, total_iters=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=20),
    ],
)
def test_a_schedule_to_zero_brings_steps_to_zero(schedule):
    steps = np.linalg.norm(trajectory(1e-3, 21, schedule), axis=1)
    assert steps[20] < 1e-12 * steps[:10].max()


# -------------------------------------------------------------------- the direction


def no_schedule(optimizer):
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def step_schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.9)


def warm_up(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.4, total_iters=4)


@pytest.mark.parametrize("schedule", [no_schedule, step_schedule, warm_up])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("maximize", [False, True])
def test_it_goes_downhill_and_with_maximize_uphill(maximize, weight_decay, schedule):
    """Weight decay is shorter than the step, so it does not reverse it."""
    for seed in range(5):
        rng = torch.Generator().manual_seed(seed)
        weight, bias, x = (torch.randn(shape, generator=rng) for shape in ((10, 5), (10,), (5,)))
        weight.requires_grad_(), bias.requires_grad_()
        optimizer = NaturalGradientBMA([weight, bias], maximize=maximize, weight_decay=weight_decay)
        scheduler = schedule(optimizer)
        losses = []
        for _ in range(21):
            optimizer.zero_grad()
            loss = (weight @ x + bias).square().sum()
            loss.backward()
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        assert losses[-1] > losses[0] if maximize else losses[-1] < losses[0]


# -------------------------------------------------------------------- training at default settings


def train_losses(model, loss, steps):
    optimizer = NaturalGradientBMA(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0.0, 0.5])
def test_it_converges_without_noise(exponent):
    """Columns have scales from 10^-exponent to 10^exponent."""
    torch.manual_seed(0)
    inputs = torch.randn(200, 10) * torch.logspace(-exponent, exponent, 10)
    targets = inputs @ torch.randn(10, 1) + 0.3
    model = nn.Linear(10, 1)
    losses = train_losses(model, lambda: (model(inputs) - targets).square().mean(), 3000)
    assert losses[-1] < 1e-8
    assert max(losses) <= 1.01 * losses[0]


@pytest.fixture(scope="module")
def digits():
    images = load("digits")
    return images.train.flatten(1), images.train_labels


def digits_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 32), nn.ReLU(), nn.Linear(32, 10))


@pytest.mark.slow
def test_it_never_loses_a_loss_it_has_reached(digits):
    inputs, labels = (x[:500] for x in digits)
    model = digits_net()
    losses = train_losses(model, lambda: nn.functional.cross_entropy(model(inputs), labels), 3000)
    lowest = np.minimum.accumulate(losses)
    assert (np.array(losses) <= 1.1 * lowest + 1e-6).all()
    assert losses[-1] < 1e-3


@pytest.mark.slow
def test_it_trains_on_mini_batches(digits):
    inputs, labels = digits
    model, rng = digits_net(), torch.Generator().manual_seed(0)

    def loss():
        batch = torch.randint(len(labels), (128,), generator=rng)
        return nn.functional.cross_entropy(model(inputs[batch]), labels[batch])

    assert np.mean(train_losses(model, loss, 500)[-20:]) < 0.05
