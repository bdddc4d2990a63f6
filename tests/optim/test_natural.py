"""NaturalGradientBMA against a dense d×d twin, and what is left of the invariances of Newton and natural gradient."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian, jacobian

from blockmean import BlockMean, NaturalGradientBMA, Partition
from support.problems import blocks_of, data, flat, gradient, small_net
from support.reference import DenseNaturalGradient


@pytest.mark.parametrize("radius", [None, 0.005])
@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("partition", ["tensor", "unit", "kernel", "module", "all", "element"])
def test_trajectory_equals_the_dense_reference(partition, coupling, radius):
    torch.manual_seed(0)
    model = small_net()
    options = {"lr": 1e-3, "damping": 0.5, "beta": 0.8}
    optimizer = NaturalGradientBMA(
        model.named_parameters(), partition=partition, coupling=coupling, trust_radius=radius, **options
    )
    labels, modules = blocks_of(model, partition, coupling, leave_plain=False)
    dense = DenseNaturalGradient(flat(model.parameters()), labels, modules, radius=radius, **options)
    inputs, targets = data(1, 32, 4, 5)
    for i in range(15):
        batch = slice(8 * (i % 4), 8 * (i % 4) + 8)
        dense.step(gradient(model, inputs[batch], targets[batch]))
        optimizer.step()
        np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-12)


def test_first_step_is_the_block_mean_of_the_outer_product():
    model = nn.Linear(4, 3).double()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    optimizer = NaturalGradientBMA(model.parameters(), lr=0.1, damping=0.2, partition="unit", trust_radius=None)
    model(torch.arange(4.0, dtype=torch.float64)).square().sum().backward()
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    F = BlockMean.from_rows(g.unsqueeze(0), Partition.of(model, by="unit"))
    expected = before - 0.1 * F.damped(0.2 * F.trace() / len(g)).solve(g)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), expected)


def random_gradients(count, d, seed):
    return torch.randn(count, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def natural_step(gradients, **options):
    """Gather statistics from all gradients without moving, then return the step for the last one."""
    param = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    optimizer = NaturalGradientBMA([param], lr=0.0, damping=0.0, trust_radius=None, **options)
    for g in gradients[:-1]:
        param.grad = g.clone()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0
    param.grad = gradients[-1].clone()
    optimizer.step()
    return param.detach()


def test_the_full_natural_gradient_is_invariant_under_any_linear_reparametrisation():
    """With θ = Kξ gradients become Kᵀg, and a step Δξ must be K⁻¹Δθ."""
    gradients = random_gradients(40, 5, seed=0)
    K = torch.randn(5, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step = natural_step(gradients, partition="element")
    transformed = natural_step(gradients @ K, partition="element")
    torch.testing.assert_close(K @ transformed, step, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("coupling", ["all", "none"])
def test_the_block_mean_form_is_invariant_under_rescaling_of_whole_blocks(coupling):
    gradients = random_gradients(40, 12, seed=2)
    scale = torch.tensor([1e-4, 3.0, 2e5], dtype=torch.float64).repeat_interleave(4)

    def by(name, tensor):
        return torch.arange(3).repeat_interleave(4)

    step = natural_step(gradients, partition=by, coupling=coupling)
    transformed = natural_step(gradients * scale, partition=by, coupling=coupling)
    torch.testing.assert_close(scale * transformed, step, rtol=1e-9, atol=0)


def test_the_block_mean_form_is_not_invariant_inside_blocks():
    gradients = random_gradients(40, 12, seed=3)
    scale = torch.linspace(0.5, 2.0, 12, dtype=torch.float64)
    step = natural_step(gradients, partition="all")
    transformed = natural_step(gradients * scale, partition="all")
    assert (scale * transformed - step).abs().max() > 0.1 * step.abs().max()


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


def test_the_trust_radius_bounds_the_step_in_the_metric_of_the_model():
    rng = torch.Generator().manual_seed(0)
    param = torch.zeros(20, dtype=torch.float64, requires_grad=True)
    optimizer = NaturalGradientBMA([param], lr=100.0, damping=0.1, trust_radius=0.01)
    dense = DenseNaturalGradient(
        np.zeros(20), np.zeros(20, int), np.zeros(1, int), lr=100.0, damping=0.1, beta=0.95, radius=0.01
    )
    for _ in range(5):
        before = param.detach().clone()
        param.grad = torch.randn(20, generator=rng, dtype=torch.float64)
        dense.step(param.grad.numpy())
        optimizer.step()
        delta = (param.detach() - before).numpy()
        F = dense.fisher()
        F += 0.1 * np.trace(F) / 20 * np.eye(20)
        assert np.sqrt(delta @ F @ delta) == pytest.approx(0.01, rel=1e-9)


def quadratic(param, scale):
    optimizer = NaturalGradientBMA(
        [param], lr=0.5, damping=1.0, adapt_damping=True, trust_radius=None, partition="element"
    )

    def closure():
        optimizer.zero_grad()
        loss = scale * param.square().sum()
        loss.backward()
        return loss

    return optimizer, closure


def test_damping_is_raised_where_the_model_promised_too_much():
    """The loss hardly falls beside what its gradients promise: g is large, the minimum is near."""
    param = torch.full((2,), 1e-3, dtype=torch.float64, requires_grad=True)
    optimizer, closure = quadratic(param, 1.0)
    optimizer.step(closure)
    assert optimizer.param_groups[0]["damping"] == 1.5


def test_damping_is_lowered_where_the_model_can_be_trusted():
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


def test_adapting_needs_a_damping_and_no_momentum():
    param = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match=r"'damping' parameter .* > 0 with adapt_damping=True"):
        NaturalGradientBMA([param], damping=0.0, adapt_damping=True)
    with pytest.raises(ValueError, match=r"'momentum' parameter .* 0 with adapt_damping=True"):
        NaturalGradientBMA([param], momentum=0.9, adapt_damping=True)
    with pytest.raises(ValueError, match=r"'beta' parameter .* below 1"):
        NaturalGradientBMA([param], beta=1.0)
