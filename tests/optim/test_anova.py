"""Anova against a dense twin, torch's AdamW and Adam in a rotated basis; its four parts; gradients that say little."""

import numpy as np
import pytest
import torch
from torch import nn

from blockmean import Anova
from blockmean.optim import batches, decomposition, refresh
from support.optimizers import bases
from support.reference import DenseAnova

OPTIONS = {"lr": 0.02, "betas": (0.8, 0.95), "mean_beta": 0.9}


def gradients(shape, steps, seed=0, dtype=torch.float64, rank=3):
    """Gradients with a common low-rank part that turns slowly, and noise."""
    rng = torch.Generator().manual_seed(seed)
    O, I = shape[0], int(np.prod(shape[1:]))
    left, right = (torch.randn(n, rank, generator=rng, dtype=torch.float64) for n in (O, I))
    for _ in range(steps):
        left += 0.1 * torch.randn(O, rank, generator=rng, dtype=torch.float64)
        common = left @ (torch.randn(rank, 1, generator=rng, dtype=torch.float64) * right.T)
        yield (common + torch.randn(O, I, generator=rng, dtype=torch.float64)).view(shape).to(dtype)


def parameter(shape, seed=1, dtype=torch.float64):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype))


def run(param, grads, **options):
    optimizer = Anova([param], **{**OPTIONS, **options})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return optimizer


# ---------------------------------------------------------------- against other implementations


@pytest.mark.parametrize(("every", "lr"), [(1, 5e-4), (3, 5e-4), (3, 2e-2)])
@pytest.mark.parametrize("means", [4, 1, (3, 0), (0, 3), (2, 5), 9, (12, 3), (3, 12), (99, 99)])
@pytest.mark.parametrize("shape", [(9, 12), (12, 9), (6, 3, 2, 2)])
def test_forty_steps_equal_the_dense_reference(shape, means, every, lr):
    param, options = parameter(shape), {**OPTIONS, "lr": lr, "weight_decay": 0.1, "means": means}
    units, inputs = means if isinstance(means, tuple) else (means, means)
    matrix = param.detach().numpy().reshape(shape[0], -1)
    dense = DenseAnova(matrix, units, inputs, every=every, decay=0.1, **{**OPTIONS, "lr": lr})
    optimizer = Anova([param], refresh_every=every, **options)
    factors = set()
    for grad in gradients(shape, 40):
        param.grad = grad.clone()
        optimizer.step()
        dense.step(grad.numpy().reshape(matrix.shape))
        factors.add(round(float(dense.c), 3))
        # More means than the first gradient has directions: their weights are a thousandth of the old ones, twice.
        atol = 1e-6 if max(dense.k, dense.q) > min(matrix.shape) - 1 else 1e-11
        np.testing.assert_allclose(param.detach().numpy().reshape(matrix.shape), dense.theta, rtol=0, atol=atol)
    assert len(factors) > 3  # the factor on the step was at work


def test_matrices_of_one_shape_are_a_batch_with_the_same_result_as_alone(monkeypatch):
    batch = [parameter((8, 10), seed) for seed in range(5)]
    alone = [parameter((8, 10), seed) for seed in range(5)]
    together = Anova(batch, means=3, **OPTIONS)
    grads = [list(gradients((8, 10), 9, seed)) for seed in range(5)]
    missing = {(2, 1), (3, 1), (4, 4), (5, 0)}  # step and parameter: neighbours may be at different steps
    sizes = []
    make = batches._batch
    monkeypatch.setattr(
        batches, "_batch", lambda step, indices, *rest: sizes.append(len(indices)) or make(step, indices, *rest)
    )
    for step in range(9):
        for i, param in enumerate(batch):
            param.grad = None if (step, i) in missing else grads[i][step].clone()
        together.step()
    assert sizes[:2] == [5, 5] and max(sizes[4:]) < 5
    for i, param in enumerate(alone):
        run(param, [g for step, g in enumerate(grads[i]) if (step, i) not in missing], means=3)
        torch.testing.assert_close(batch[i], param, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_matrices_of_all_shapes_are_one_batch_with_the_same_result_as_alone(monkeypatch, dtype):
    monkeypatch.setattr(batches, "BY_SHAPE", ())  # as on accelerators
    shapes = [(8, 10), (12, 5, 2), (8, 10), (5, 30), (30, 5)]
    together = [parameter(shape, seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    alone = [parameter(shape, seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    grads = [[g.to(dtype) for g in gradients(shape, 12, seed)] for seed, shape in enumerate(shapes)]
    optimizer = Anova(together, means=(3, 4), **OPTIONS)
    sizes, make = [], batches._batch
    monkeypatch.setattr(batches, "_batch", lambda step, some: sizes.append(len(some)) or make(step, some))
    for step in range(12):
        for i, param in enumerate(together):
            param.grad = grads[i][step].clone()
        optimizer.step()
    assert set(sizes) == {5}
    for i, param in enumerate(alone):
        run(param, grads[i], means=(3, 4))
        # Equal to rounding of float64; of float32 state, and then to bfloat16.
        torch.testing.assert_close(together[i], param, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(9, 12), (7,), (), (3, 1), (1, 5), (2, 2, 2)])
def test_without_means_it_is_torchs_adamw(shape, dtype):
    mine, theirs = parameter(shape, dtype=dtype), parameter(shape, dtype=dtype)
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.1}
    ours, reference = Anova([mine], means=0, **options), torch.optim.AdamW([theirs], **options)
    for grad in gradients(shape or (1,), 30, dtype=dtype, rank=1):
        mine.grad, theirs.grad = grad.view(shape).clone(), grad.view(shape).clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13 if dtype == torch.float64 else 3e-6)


@pytest.mark.parametrize("shape", [(5,), (), (1, 9), (9, 1), (3, 8), (8, 3)])
def test_tensors_too_narrow_for_means_take_adamw(shape):
    mine, theirs = parameter(shape), parameter(shape)
    ours = Anova([mine], lr=0.01)
    reference = torch.optim.AdamW([theirs], lr=0.01)
    for grad in gradients(shape or (1,), 10, rank=1):
        mine.grad, theirs.grad = grad.view(shape).clone(), grad.view(shape).clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13)
    assert "unit_means" not in ours.state[mine]


def test_with_all_means_it_is_adam_in_the_rotated_basis():
    """No refresh: the basis of the first gradient stays, and Adam works in it, entry by entry."""
    param = parameter((6, 6))
    start = param.detach().clone()
    grads = list(gradients((6, 6), 15))
    optimizer = run(param, grads, means=6, refresh_every=100, weight_decay=0.0, mean_beta=0.95)
    U, V = bases(optimizer.state[param])
    theta, m, v, variance, beta2 = U.T @ start @ V, torch.zeros(6, 6), torch.zeros(6, 6), 0.0, OPTIONS["betas"][1]
    for t, grad in enumerate(grads, 1):
        g = U.T @ grad @ V
        energy = (grad.square().sum() + v.sum()).sqrt()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        eps = 1e-8 + 2.0**-19 * energy  # a basis in which the first gradient is diagonal has entries near 0
        root = (v / (1 - 0.95**t)).sqrt() + eps
        ratio = (m / (1 - 0.8**t)) / root
        variance = beta2 * variance + (1 - beta2) * float(grad.square().mean())
        sigma = (variance / (1 - beta2**t)) ** 0.5 + 1e-8
        # The least factor on the step, at such a learning rate, or what agreement allows.
        theta = theta - 0.02 * (ratio**2).clamp(max=1).mul(root / sigma).clamp(min=0.7) * ratio
    torch.testing.assert_close(param.detach(), U @ theta @ V.T, rtol=0, atol=1e-9)


def along(make, sizes=(1.0,) * 30, lr=1e-4):
    """How far a parameter moves along (−1, −1, …) in each step; all entries of a gradient have the given size."""
    param = nn.Parameter(torch.zeros(200, 300, dtype=torch.float64))
    optimizer = make([param], lr=lr, weight_decay=0.0)
    at = []
    for size in sizes:
        param.grad = torch.full((200, 300), size, dtype=torch.float64)
        optimizer.step()
        at.append(-float(param.detach().sum()) / 60_000**0.5)
    return np.diff(at, prepend=0)


def test_gradients_of_rank_one_that_agree_move_as_far_as_with_adamw():
    """One coordinate of ours for 60,000 entries of AdamW."""
    np.testing.assert_allclose(along(Anova), along(torch.optim.AdamW), rtol=1e-3)


def test_noise_of_rank_one_moves_less_than_with_adamw():
    sizes = np.random.default_rng(0).normal(size=200)
    ours, adamw = (np.abs(along(make, sizes))[50:].mean() for make in (Anova, torch.optim.AdamW))
    assert ours < 0.5 * adamw


def test_noise_moves_little_further_than_with_adamw_from_the_first_step_on():
    """In every step, in root mean square: means that are taken to agree share what AdamW's step would be."""
    generator, sizes = torch.Generator().manual_seed(0), {}
    for make in (Anova, torch.optim.AdamW):
        generator.manual_seed(0)
        param = nn.Parameter(torch.zeros(64, 64))
        optimizer = make([param], lr=1e-4, weight_decay=0.0)
        sizes[make] = []
        for _ in range(60):
            before = param.detach().clone()
            param.grad = torch.randn(64, 8, generator=generator) @ torch.randn(8, 64, generator=generator)
            optimizer.step()
            sizes[make].append(float((param.detach() - before).square().mean().sqrt()))
    ours, adamw = (np.array(sizes[make]) for make in (Anova, torch.optim.AdamW))
    assert (ours < 3 * adamw).all() and ours[30:].mean() < 1.5 * adamw[30:].mean()


# ---------------------------------------------------------------- the four parts


@pytest.mark.parametrize("means", [1, 3, (2, 5), (0, 4), (9, 12)])
def test_the_four_parts_are_orthogonal_and_add_up_to_the_gradient(means):
    param = parameter((9, 12))
    grads = list(gradients((9, 12), 20))
    state = run(param, grads, means=means).state[param]
    (U, V), G = bases(state), grads[-1]
    GV, UG, K, rows, total = (x[0] for x in decomposition.project([(slice(1), G[None])], U[None], V[None]))
    R, L = GV - U @ K, UG - K @ V.T
    four = [U @ K @ V.T, R @ V.T, U @ L]
    four.append(G - sum(four))
    torch.testing.assert_close(rows, G.square().sum(1))
    torch.testing.assert_close(total, G.square().sum())
    for i in range(4):
        for j in range(i):
            assert abs(float((four[i] * four[j]).sum())) < 1e-11
    assert torch.allclose(U.T @ four[1], torch.zeros(U.shape[1], 12, dtype=G.dtype), atol=1e-12)
    assert torch.allclose(U.T @ four[3], torch.zeros(U.shape[1], 12, dtype=G.dtype), atol=1e-12)
    assert torch.allclose(four[3] @ V, torch.zeros(9, V.shape[1], dtype=G.dtype), atol=1e-12)


def test_the_start_is_the_textbook_analysis_of_variance():
    waves = refresh.cosines(torch.ones(7, dtype=torch.bool), 4)
    torch.testing.assert_close(waves[:, 0], torch.full((7,), 7**-0.5, dtype=torch.float64))
    torch.testing.assert_close(waves.mT @ waves, torch.eye(4, dtype=torch.float64))
    some = refresh.cosines(torch.tensor([True, False, True, True, False, True]), 3)
    assert not some[[1, 4]].any()
    torch.testing.assert_close(some.mT @ some, torch.eye(3, dtype=torch.float64))
    few = refresh.cosines(torch.tensor([True, False, False, True]), 3)
    torch.testing.assert_close(few.mT @ few, torch.diag(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)))
    assert not refresh.cosines(torch.zeros(5, dtype=torch.bool), 2).any()


def test_the_means_find_the_directions_that_gradients_share():
    """All gradients are multiples of one matrix of rank one, with a little noise."""
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, generator=rng), torch.randn(30, generator=rng)
    param = parameter((20, 30), dtype=torch.float32)
    grads = [torch.outer(a, b) * torch.randn((), generator=rng) + 0.1 * torch.randn(20, 30, generator=rng)] * 30
    state = run(param, grads, means=4).state[param]
    U, V = bases(state)
    assert abs(float(U[:, 0] @ a) / float(a.norm())) > 0.999
    assert abs(float(V[:, 0] @ b) / float(b.norm())) > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(16, 40), (40, 16)])
def test_weights_stay_orthonormal_over_three_thousand_steps_in_float32(shape):
    param = parameter(shape, dtype=torch.float32)
    optimizer = Anova([param], means=8, lr=1e-3)
    worst = 0.0
    for t, grad in enumerate(gradients(shape, 3_000, dtype=torch.float32)):
        param.grad = grad * (1e-6 if t % 1000 < 300 else 1.0)  # long stretches of small gradients
        optimizer.step()
        if t % 50 == 0:
            for W in bases(optimizer.state[param]):
                worst = max(worst, float((W.mT @ W - torch.eye(8)).abs().max()))
    assert worst < 1e-5


# ---------------------------------------------------------------- scale, gradients that say little, determinism


@pytest.mark.parametrize("scale", [2.0**-30, 2.0**20])
def test_the_scale_of_the_loss_does_not_matter(scale):
    grads = list(gradients((9, 12), 30))
    one, other = parameter((9, 12)), parameter((9, 12))
    run(one, grads, means=4, eps=0.0)
    run(other, [scale * grad for grad in grads], means=4, eps=0.0)
    torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)


DEGENERATE = {
    "zero": lambda t, shape: torch.zeros(shape),
    "zero at first": lambda t, shape: torch.zeros(shape) if t < 3 else torch.randn(shape),
    "zero later": lambda t, shape: torch.randn(shape) if t < 3 else torch.zeros(shape),
    "constant": lambda t, shape: torch.ones(shape),
    "rank one": lambda t, shape: torch.outer(torch.arange(float(shape[0])), torch.arange(float(shape[1]))),
    "one entry": lambda t, shape: torch.eye(*shape) * (torch.arange(shape[1]) == 2),
    "one row": lambda t, shape: torch.ones(shape) * (torch.arange(shape[0]) == t % 3)[:, None],
    "one column": lambda t, shape: torch.ones(shape) * (torch.arange(shape[1]) == t % 2),
    "tiny": lambda t, shape: torch.randn(shape) * 1e-30,
    "huge": lambda t, shape: torch.randn(shape) * 1e15,
    "rows that sum to zero": lambda t, shape: (g := torch.randn(shape)) - g.mean(0),
}


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("means", [1, 4, (8, 10)])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_gradients_that_say_little_never_give_nan_or_long_steps(kind, means, eps):
    torch.manual_seed(0)
    param = parameter((8, 10), dtype=torch.float32)
    optimizer = Anova([param], means=means, lr=0.01, eps=eps, weight_decay=0.0)
    for t in range(40):
        before = param.detach().clone()
        param.grad = DEGENERATE[kind](t, (8, 10))
        optimizer.step()
        assert param.isfinite().all()
        # A step of Adam has entries up to about √(1/(1−β)) = 4.5 lr here, in each of four parts and any direction.
        assert float((param.detach() - before).norm()) < 0.01 * 80**0.5 * 9
    for value in optimizer.state[param].values():
        assert value.isfinite().all()


def test_zero_gradients_move_nothing():
    param = parameter((8, 10))
    before = param.detach().clone()
    run(param, [torch.zeros(8, 10, dtype=torch.float64)] * 5, means=3, weight_decay=0.0)
    assert torch.equal(param, before)


def test_units_and_inputs_without_any_gradient_do_not_move():
    """Pixels that are always black, words that never occur: as with Adam, their weights stay what they were."""
    param = parameter((12, 14), dtype=torch.float32)
    before = param.detach().clone()
    seen = torch.ones(12, 14)
    seen[[2, 7]] = 0
    seen[:, [0, 5, 13]] = 0
    run(param, [grad * seen for grad in gradients((12, 14), 25, dtype=torch.float32)], means=3, weight_decay=0.0)
    moved = param.detach() != before
    assert not moved[seen == 0].any() and moved[seen == 1].all()


def test_the_same_run_twice_is_bit_identical_and_channels_last_changes_nothing_but_rounding():
    shape = (8, 4, 3, 3)
    grads = list(gradients(shape, 10, dtype=torch.float32))
    one, two, last = (parameter(shape, dtype=torch.float32) for _ in range(3))
    last.data = last.data.to(memory_format=torch.channels_last)
    run(one, grads, means=4)
    run(two, grads, means=4)
    run(last, [grad.to(memory_format=torch.channels_last) for grad in grads], means=4)
    assert torch.equal(one, two)
    torch.testing.assert_close(last, one, rtol=0, atol=2e-6)  # rounding: its step is put together in another order
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_bfloat16_parameters_are_rounded_once():
    exact, rounded = parameter((8, 10), dtype=torch.float32), parameter((8, 10), dtype=torch.float32)
    exact.data = exact.data.bfloat16().float()
    rounded.data = rounded.data.bfloat16()
    grad = next(gradients((8, 10), 1, dtype=torch.float32)).bfloat16()
    run(exact, [grad.float()], means=3)
    run(rounded, [grad], means=3)
    assert torch.equal(rounded, exact.bfloat16())


def test_equal_shapes_of_different_dtypes_are_kept_apart():
    half, full = parameter((8, 10), dtype=torch.float32), parameter((8, 10), dtype=torch.float32)
    half.data = half.data.bfloat16()
    alone = parameter((8, 10), dtype=torch.float32)
    grads = list(gradients((8, 10), 6, dtype=torch.float32))
    optimizer = Anova([half, full], means=3, **OPTIONS)
    for grad in grads:
        half.grad, full.grad = grad.bfloat16(), grad.clone()
        optimizer.step()
    run(alone, grads, means=3)
    assert torch.equal(full, alone) and half.dtype == torch.bfloat16


# ---------------------------------------------------------------- state


def test_a_checkpoint_of_adamw_goes_on_with_means():
    param = parameter((9, 12), dtype=torch.float32)
    theirs = torch.optim.AdamW([param], lr=0.01)
    grads = list(gradients((9, 12), 40, dtype=torch.float32))
    for grad in grads[:20]:
        param.grad = grad.clone()
        theirs.step()
    ours = Anova([param], means=3)
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["betas"] == (0.9, 0.999) and ours.param_groups[0]["means"] == 3
    for grad in grads[20:]:
        before = param.detach().clone()
        param.grad = grad.clone()
        ours.step()
        assert float((param.detach() - before).abs().max()) < 0.01 * 9
    state = ours.state[param]
    assert int(state["step"]) == 40 and int(state["means_start_step"]) == 20


@pytest.mark.parametrize("means", [(2, 4), 0, "auto"])
def test_another_number_of_means_needs_a_new_optimizer(means):
    param = parameter((9, 12))
    grads = list(gradients((9, 12), 7))
    optimizer = run(param, grads[:6], means=3)
    optimizer.param_groups[0]["means"] = means
    before = param.detach().clone()
    param.grad = grads[6]
    with pytest.raises(ValueError, match=r"has 3 means over units and 3 over inputs, .* Construct Anova anew"):
        optimizer.step()
    assert torch.equal(param, before)


def test_auto_takes_half_of_the_shorter_side():
    assert batches.means_of((48, 700), "auto") == (24, 24)
    assert batches.means_of((10, 64), "auto") == (5, 5)
    assert batches.means_of((64, 3, 3, 3), "auto") == (13, 13)
    assert batches.means_of((4096, 1024), "auto") == (32, 32)
    assert batches.means_of((8, 100), "auto") == (0, 0)
    assert batches.means_of((50_257, 768), "auto") == (0, 0)  # a vocabulary
    assert batches.means_of((5, 7), (9, 2)) == (5, 2)
    assert batches.means_of((5,), 3) == (0, 0) and batches.means_of((1, 5), 3) == (0, 0)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        ((4096, 4096), 0.56),
        ((1024, 1024), 0.65),
        ((512, 512), 0.75),
        ((192, 192), 1.1),
        ((64, 64), 2.3),  # 32 means on each side: half of the width
        ((8, 4096), 1.5),
    ],
)
def test_state_is_half_of_adamws_in_wide_layers(shape, most):
    param = nn.Parameter(torch.zeros(shape))
    state = Anova([param]).init_state(param, Anova([param]).param_groups[0])
    assert sum(x.nbytes for x in state.values()) <= most * 2 * param.nbytes


def test_state_is_the_average_gradient_and_a_few_columns():
    param = parameter((256, 512), dtype=torch.float32)
    optimizer = run(param, gradients((256, 512), 2, dtype=torch.float32), means=8)
    numbers = sum(x.numel() for x in optimizer.state[param].values())
    assert numbers == 8 + 256 * 512 + 3 * 8 * (256 + 512) + 256 + 2 * 64 + 2 * 8
