"""AdaGradBMA and AdaGradFull against dense d×d twins, and the guarantees of each variant."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull
from support.problems import blocks_of, data, flat, gradient, paper_net, small_net
from support.reference import DenseAdaGradBMA, DenseAdaGradFull

VARIANTS = ("paper", "consistent", "weighted")
FLOORS = {"paper": 0.1, "consistent": 0.1, "weighted": 1.0}
PARTITIONS = ("tensor", "unit", "kernel", "module", "all", "element")
COUPLINGS = ("all", "module", "none")


def dense_twin(model, variant, partition, coupling, **options):
    floor = options.pop("floor", FLOORS[variant])
    labels, modules = blocks_of(model, partition, coupling)
    return DenseAdaGradBMA(flat(model.parameters()), labels, modules, variant=variant, floor=floor, **options)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_trajectory_equals_the_dense_reference(variant, partition, coupling, every):
    torch.manual_seed(0)
    model = small_net()
    optimizer = AdaGradBMA(
        model.named_parameters(),
        lr=0.05,
        variant=variant,
        partition=partition,
        coupling=coupling,
        refresh_every=every,
    )
    # A diagonal has nothing to decompose: its root is always current.
    refresh = 1 if coupling == "none" else every
    dense = dense_twin(model, variant, partition, coupling, lr=0.05, refresh_every=refresh)
    inputs, targets = data(1, 32, 4, 5)
    for i in range(12):
        batch = slice(8 * (i % 4), 8 * (i % 4) + 8)
        dense.step(gradient(model, inputs[batch], targets[batch]))
        optimizer.step()
        # Two eigendecompositions of different size: rounding of about 1e-13 in a root, carried over twelve steps.
        np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("partition", ["tensor", "unit", "module"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_missing_gradients_leave_the_principal_submatrix(variant, partition, coupling):
    torch.manual_seed(0)
    model = small_net()
    params = list(model.parameters())
    optimizer = AdaGradBMA(model.named_parameters(), lr=0.05, variant=variant, partition=partition, coupling=coupling)
    dense = dense_twin(model, variant, partition, coupling, lr=0.05)
    inputs, targets = data(2, 32, 4, 5)
    for i in range(10):
        g = gradient(model, inputs, targets)
        present = np.ones(len(g), bool)
        offset = 0
        for j, param in enumerate(params):
            if (i + j) % 3 == 0:
                param.grad = None
                present[offset : offset + param.numel()] = False
            offset += param.numel()
        dense.step(np.where(present, g, 0.0), present)
        optimizer.step()
        np.testing.assert_allclose(flat(params), dense.theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_accumulator_that_starts_above_zero_stands_for_a_multiple_of_the_identity(variant):
    torch.manual_seed(0)
    model = small_net()
    optimizer = AdaGradBMA(
        model.parameters(), lr=0.05, variant=variant, partition="unit", initial_accumulator_value=0.1
    )
    dense = dense_twin(model, variant, "unit", "all", lr=0.05, initial=0.1)
    inputs, targets = data(3, 16, 4, 5)
    for _ in range(5):
        dense.step(gradient(model, inputs, targets))
        optimizer.step()
    np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("floor", [0.1, 1e-3])
def test_five_hundred_steps_of_the_paper_variant_on_the_paper_net(floor):
    torch.manual_seed(0)
    model = paper_net()
    assert sum(p.numel() for p in model.parameters()) == 322
    optimizer = AdaGradBMA(model.parameters(), lr=0.01, eigenvalue_floor=floor)
    dense = dense_twin(model, "paper", "tensor", "all", lr=0.01, floor=floor)
    inputs, targets = data(4, 100, 28, 10)
    for i in range(500):
        batch = slice(10 * (i % 10), 10 * (i % 10) + 10)
        dense.step(gradient(model, inputs[batch], targets[batch]))
        optimizer.step()
    np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-8)


def test_full_matrix_equals_the_dense_reference():
    torch.manual_seed(0)
    model = small_net()
    optimizer = AdaGradFull(model.parameters(), lr=0.05)
    dense = DenseAdaGradFull(flat(model.parameters()), lr=0.05)
    inputs, targets = data(5, 32, 4, 5)
    for _ in range(12):
        dense.step(gradient(model, inputs, targets))
        optimizer.step()
        # A direction that H barely knows is multiplied by up to floor^-½ = 1e4, and so is its rounding error.
        np.testing.assert_allclose(flat(model.parameters()), dense.theta, rtol=0, atol=1e-6)


def test_element_partition_with_all_coupled_contains_the_full_matrix_up_to_its_diagonal_scale():
    """With single entries as blocks, `consistent` has F = Z⁻¹HZ⁻¹ with unit diagonal: one step from zero agrees."""
    g = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
    param = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    param.grad = g.clone()
    AdaGradBMA([param], lr=1.0, variant="consistent", partition="element", eps=0.0, eigenvalue_floor=1e-12).step()
    z = g.abs()
    C = torch.outer(g, g) / torch.outer(z, z)
    w, Q = torch.linalg.eigh(C)
    expected = -(Q @ ((Q.T @ (g / z.sqrt())) * w.clamp(min=1e-12).rsqrt())) / z.sqrt()
    torch.testing.assert_close(param.detach(), expected, rtol=1e-8, atol=1e-8)


# -------------------------------------------------------------------- reductions


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_correction_it_is_torchs_adagrad(variant):
    """Only at ε = 0: torch has √r + ε, the paper √(r + ε)."""
    torch.manual_seed(0)
    ours, theirs = small_net(), small_net()
    theirs.load_state_dict(ours.state_dict())
    options = {"lr": 0.05, "eps": 0.0, "lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.2}
    mine = AdaGradBMA(ours.parameters(), variant=variant, correction=False, **options)
    reference = torch.optim.Adagrad(theirs.parameters(), **options)
    inputs, targets = data(6, 16, 4, 5)
    for _ in range(20):
        gradient(ours, inputs, targets)
        gradient(theirs, inputs, targets)
        mine.step()
        reference.step()
    np.testing.assert_allclose(flat(ours.parameters()), flat(theirs.parameters()), rtol=0, atol=1e-14)


@pytest.mark.parametrize("variant", ["paper", "consistent"])
def test_blocks_that_are_not_coupled_have_no_correction_in_the_paper_forms(variant):
    torch.manual_seed(0)
    ours, diagonal = small_net(), small_net()
    diagonal.load_state_dict(ours.state_dict())
    mine = AdaGradBMA(ours.parameters(), variant=variant, coupling="none", partition="unit")
    other = AdaGradBMA(diagonal.parameters(), correction=False)
    inputs, targets = data(7, 16, 4, 5)
    for _ in range(5):
        gradient(ours, inputs, targets)
        gradient(diagonal, inputs, targets)
        mine.step()
        other.step()
    assert (flat(ours.parameters()) == flat(diagonal.parameters())).all()


# -------------------------------------------------------------------- guarantees


def scaled_run(variant, scale):
    torch.manual_seed(0)
    model = small_net()
    # ε adds to the scale of z; without it the statement is exact. Every entry here has a gradient.
    optimizer = AdaGradBMA(model.parameters(), lr=0.05, variant=variant, partition="unit", eps=0.0)
    inputs, targets = data(8, 16, 4, 5)
    for _ in range(10):
        model.zero_grad()
        (scale * nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
    return flat(model.parameters())


@pytest.mark.parametrize("variant", ["consistent", "weighted"])
def test_trajectory_does_not_depend_on_the_scale_of_the_loss(variant):
    np.testing.assert_allclose(scaled_run(variant, 1.0), scaled_run(variant, 1000.0), rtol=0, atol=1e-10)


def test_paper_variant_depends_on_the_scale_of_the_loss():
    assert np.abs(scaled_run("paper", 1.0) - scaled_run("paper", 1000.0)).max() > 1e-3


def probed(model, optimizer):
    """The preconditioner, column by column: one step of a copy per unit vector, too small to affect the state."""
    size, columns = 1e-9, []
    for k in range(sum(p.numel() for p in model.parameters())):
        net, copied = copy.deepcopy((model, optimizer))
        before = flat(net.parameters())
        for param in net.parameters():
            param.grad = torch.zeros_like(param)
        place = k
        for param in net.parameters():
            if 0 <= place < param.numel():
                param.grad.view(-1)[place] = size
            place -= param.numel()
        copied.step()
        columns.append((before - flat(net.parameters())) / (size * copied.param_groups[0]["lr"]))
    return np.stack(columns, 1)


@pytest.mark.parametrize("floor", [None, 0.3])
@pytest.mark.parametrize("coupling", COUPLINGS)
@pytest.mark.parametrize("variant", ["consistent", "weighted"])
def test_preconditioner_is_symmetric_positive_definite_and_bounded(variant, coupling, floor):
    torch.manual_seed(0)
    model = small_net()
    optimizer = AdaGradBMA(
        model.named_parameters(),
        lr=1.0,
        lr_decay=1e9,  # only the statistics matter
        eps=1e-4,  # keeps every inverse small enough to probe
        variant=variant,
        partition="unit",
        coupling=coupling,
        eigenvalue_floor=floor,
    )
    inputs, targets = data(9, 16, 4, 5)
    for _ in range(5):
        gradient(model, inputs, targets)
        optimizer.step()
    optimizer.param_groups[0]["lr_decay"] = 0.0
    P = probed(model, optimizer)
    tolerance = 1e-6 * np.abs(P).max()  # 1e-9 times the gradients, and their squares, are lost to rounding
    np.testing.assert_allclose(P, P.T, rtol=0, atol=tolerance)
    z = np.sqrt(flat([optimizer.state[p]["sum"] for p in model.parameters()]) + 1e-4)
    values = np.linalg.eigvalsh(np.sqrt(z)[:, None] * ((P + P.T) / 2) * np.sqrt(z))  # of F^-½
    largest = max(float(statistics.eigenvalues[-1]) for statistics in optimizer.block_statistics())
    assert values.min() > min(1.0, largest**-0.5) - 1e-5 > 0
    assert values.max() < max(1.0, (FLOORS[variant] if floor is None else floor) ** -0.5) + 1e-5


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("variant", ["consistent", "weighted"])
def test_first_step_is_a_descent_direction(variant, seed):
    rng = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=rng).requires_grad_() for shape in [(4, 3), (4,), (2, 4), (2,)]]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.randn(p.shape, generator=rng) + 0.5
    AdaGradBMA(params, lr=1.0, variant=variant, partition="unit").step()
    product = sum(((p.detach() - b) * p.grad).sum() for p, b in zip(params, before, strict=True))
    assert product < 0


def test_paper_variant_can_leave_the_descent_direction():
    """Large gradients of one sign in two blocks: the raw block sums overshoot the scaled gradient."""
    params = [torch.zeros(50, requires_grad=True) for _ in range(2)]
    for p in params:
        p.grad = torch.full((50,), 1e4)
    AdaGradBMA(params, lr=1.0).step()
    assert sum((p.detach() * p.grad).sum() for p in params) > 0


# -------------------------------------------------------------------- convergence


def rosenbrock(variant, coupling, scale, steps=3000, start=-0.5, fused=None):
    x = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0.8], dtype=torch.float64, requires_grad=True)
    optimizer = AdaGradBMA([x, y], lr=0.5, variant=variant, coupling=coupling, fused=fused)
    loss = torch.tensor(0.0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((1 - x) ** 2 + 100 * (y - x**2) ** 2).sum()
        (scale * loss).backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("coupling", ["all", "none"])
@pytest.mark.parametrize("variant", ["consistent", "weighted"])
def test_converges_on_rosenbrock(variant, coupling):
    """The kernels from most of three starts: the path is chaotic, and rounding decides when it stops swinging."""
    assert rosenbrock(variant, coupling, scale=1.0, fused=False) < 1e-3
    losses = [rosenbrock(variant, coupling, scale=1.0, start=-0.5 + k * 1e-13) for k in range(3)]
    assert sorted(losses)[1] < 1e-3


def test_paper_variant_converges_on_rosenbrock_only_where_gradients_are_of_order_one():
    """Raw block sums overshoot once z is large: Algorithm 1 as printed has no guarantee at any scale of the loss."""
    assert rosenbrock("paper", "all", scale=0.01) < 1e-3
    with pytest.raises(ValueError, match="overflow"):
        rosenbrock("paper", "all", scale=1.0)


Q = torch.tensor([[1.0, -0.8], [-0.8, 1.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        *(lambda p, v=v: AdaGradBMA(p, lr=0.5, variant=v, partition="element") for v in VARIANTS),
        lambda p: AdaGradFull(p, lr=0.5),
    ],
)
def test_converges_on_the_quadratic_of_the_paper(make):
    theta = torch.tensor([1.0, 0.3], dtype=torch.float64, requires_grad=True)
    optimizer = make([theta])
    for _ in range(500):
        optimizer.zero_grad()
        (theta @ Q @ theta / 2).backward()
        optimizer.step()
    assert theta.norm() < 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_converges_on_logistic_regression(variant):
    rng = torch.Generator().manual_seed(0)
    X = torch.rand(200, 8, generator=rng, dtype=torch.float64)
    y = (X @ torch.randn(8, generator=rng, dtype=torch.float64) > 0.2).double()
    model = nn.Linear(8, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = AdaGradBMA(model.parameters(), lr=0.5, variant=variant)
    losses = []
    for _ in range(500):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(X).squeeze(-1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.35 * losses[0]
    assert min(losses) == losses[-1]


# -------------------------------------------------------------------- memory and limits


def numbers(optimizer):
    """Numbers in the state, shared buffers counted once."""
    storages = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if key not in ("step", "blocks"):
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes() // value.element_size()
    return sum(storages.values())


@pytest.mark.parametrize("coupling, extra", [("all", lambda L: L * L + L), ("none", lambda L: 2 * L)])
def test_state_is_that_of_adagrad_and_the_small_matrix(coupling, extra):
    model = nn.Linear(30, 20)
    optimizer = AdaGradBMA(model.parameters(), partition="unit", coupling=coupling, variant="weighted")
    model(torch.ones(30)).sum().backward()
    optimizer.step()
    assert numbers(optimizer) == 620 + extra(20)


def test_full_matrix_is_refused_above_a_size_unless_told():
    param = torch.zeros(400, requires_grad=True)
    with pytest.raises(ValueError, match=r"AdaGradFull would need 1,280,000 bytes .* 400 parameters.* Raise max_bytes"):
        AdaGradFull([param], max_bytes=10**6)
    AdaGradFull([param], max_bytes=None)
    with pytest.raises(ValueError, match=r"would need .* bytes"):
        AdaGradFull([torch.zeros(20_000, requires_grad=True)])


def test_coupling_of_too_many_blocks_is_refused():
    with pytest.raises(ValueError, match=r"AdaGradBMA would need 3,200,000,000 bytes .* 20,000 blocks"):
        AdaGradBMA([torch.zeros(20_000, requires_grad=True)], partition="element")
    AdaGradBMA([torch.zeros(20_000, requires_grad=True)], partition="element", coupling="none")
