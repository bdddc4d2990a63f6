"""What can go wrong in training, for every optimizer: bad gradients, failing eigendecompositions, zeros, extremes."""

import warnings

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA
from blockmean.optim.adagrad import VARIANTS
from blockmean.optim.passes import FORMS
from support.optimizers import (
    Net,
    assert_same,
    every_class,
    every_optimizer,
    loss_of,
    pair,
    set_gradients,
    snapshot,
    train,
)

NAN, INF = torch.nan, torch.inf


def scalar(value, grad, dtype=torch.float32):
    param = nn.Parameter(torch.tensor(value, dtype=dtype))
    param.grad = torch.tensor(grad, dtype=dtype)
    return param


def two_groups(case, model, **changes):
    return case(
        [{"params": list(model.conv.named_parameters())}, {"params": list(model.head.named_parameters())}], **changes
    )


# -------------------------------------------------------------------- gradients that are not finite


@every_optimizer
@pytest.mark.parametrize(("trained", "bad"), [(0, NAN), (3, NAN), (3, -INF)])
def test_bad_gradients_raise_before_anything_has_changed(case, trained, bad):
    model, twin = Net(), Net()
    optimizer, plain = (two_groups(case, m, nonfinite="raise") for m in (model, twin))
    train(model, optimizer, trained)
    before = snapshot(optimizer)
    optimizer.zero_grad()
    loss_of(model, trained).backward()
    model.head.weight.grad[1, 2] = bad
    count = "1 NaN and 0 infinite" if bad != bad else "0 NaN and 1 infinite"
    with pytest.raises(ValueError, match=f"^The gradient of 'weight' has {count} of 24 entries. Nothing was changed"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert bool(optimizer.state) == bool(trained)
    # With good gradients afterwards, it continues as if nothing had happened.
    train(model, optimizer, range(trained, trained + 2))
    train(twin, plain, trained + 2)
    assert_same(snapshot(optimizer), snapshot(plain))


@every_optimizer
def test_infinities_that_cancel_in_a_sum_are_noticed(case):
    model, optimizer = pair(case, nonfinite="raise")
    loss_of(model, 0).backward()
    model.head.weight.grad[0, 0], model.head.weight.grad[0, 1] = INF, -INF
    with pytest.raises(ValueError, match=r"^The gradient of 'head.weight' has 0 NaN and 2 infinite of 24 entries"):
        optimizer.step()


@every_optimizer
def test_bad_gradients_can_be_skipped_and_are_counted(case):
    model, optimizer = pair(case, nonfinite="skip")
    twin, plain = pair(case, nonfinite="skip")
    for t in range(6):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        if t in (0, 3):  # including the very first step
            model.conv.weight.grad[0, 0, 0, 0] = NAN
            before = snapshot(optimizer)
            skipped = optimizer.skipped_steps
            optimizer.step()
            assert optimizer.skipped_steps == skipped + 1
            assert_same(snapshot(optimizer), {**before, "counters": (skipped + 1, 0)})
            assert t or not optimizer.state
        else:
            optimizer.step()
            train(twin, plain, range(t, t + 1))
    after = snapshot(optimizer)
    assert after.pop("counters") == (2, 0)
    expected = snapshot(plain)
    assert expected.pop("counters") == (0, 0)
    assert_same(after, expected)


@every_class
def test_a_group_that_raises_goes_before_one_that_skips(case):
    model = Net()
    optimizer = case(
        [
            {"params": list(model.conv.parameters()), "nonfinite": "skip"},
            {"params": list(model.head.parameters()), "nonfinite": "raise"},
        ]
    )
    loss_of(model, 0).backward()
    model.conv.bias.grad[0] = NAN
    optimizer.step()
    assert optimizer.skipped_steps == 1 and not optimizer.state
    model.head.bias.grad[0] = NAN
    with pytest.raises(ValueError, match=r"The gradient of parameter 1 \[3\] has 1 NaN"):
        optimizer.step()
    assert optimizer.skipped_steps == 1 and not optimizer.state


@every_class
def test_a_parameter_that_spoils_its_gradient_by_weight_decay_is_named(case):
    model, optimizer = pair(case, weight_decay=0.1)
    set_gradients(model.parameters(), 0)
    with torch.no_grad():
        model.head.bias[1] = NAN
    before = snapshot(optimizer)
    try:
        optimizer.step()
    except ValueError as error:
        assert str(error).startswith("The parameter 'head.bias' has 1 NaN and 0 infinite of 3 entries. Nothing was")
        assert_same(snapshot(optimizer), before)
    else:  # decoupled: the others are unaffected
        assert all(param.isfinite().all() for name, param in model.named_parameters() if name != "head.bias")


@every_class
def test_gradients_whose_squares_overflow_are_noticed(case):
    params = [nn.Parameter(torch.zeros(4, dtype=torch.float64)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    optimizer = case(params)
    for param in params:
        param.grad = torch.full_like(param, 1e200)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"^The gradients here are finite, but sums over them overflow"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert not optimizer.state


# -------------------------------------------------------------------- eigendecompositions that fail


def failing_eigh(monkeypatch, failures):
    """Make the next eigendecompositions fail; return how many failures are left and the number of calls."""
    real, count = torch.linalg.eigh, {"left": failures, "calls": 0}

    def eigh(A, *args, **kwargs):
        count["calls"] += 1
        if count["left"]:
            count["left"] -= 1
            raise torch.linalg.LinAlgError("linalg.eigh: the algorithm failed to converge")
        return real(A, *args, **kwargs)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    return count


@every_optimizer
def test_an_eigendecomposition_that_fails_once_is_tried_again_with_jitter(case, monkeypatch):
    reference, plain = pair(case)
    train(reference, plain, 3)
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    count = failing_eigh(monkeypatch, 1)
    train(model, optimizer, range(2, 3))
    if case.decomposes and case.option("refresh_every", 1) == 1:
        assert count["left"] == 0
    assert getattr(optimizer, "diagonal_fallbacks", 0) == 0
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # A jitter of 1e-8 times the mean diagonal, multiplied by at most floor^-½ = 1e4 in the full matrix
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=1e-3)


@every_optimizer
def test_an_eigendecomposition_that_fails_twice_leaves_the_diagonal_step_and_says_so_once(case, monkeypatch):
    model, optimizer = pair(case)
    count = failing_eigh(monkeypatch, 10**6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, 3)
    if not case.decomposes:
        assert count["calls"] == 0 and not caught and not getattr(optimizer, "diagonal_fallbacks", 0)
        return
    assert optimizer.diagonal_fallbacks == count["calls"] // 2 >= 1
    assert len(caught) == 1 and issubclass(caught[0].category, UserWarning)
    assert f"{case.owner}: an eigendecomposition of " in str(caught[0].message)
    assert all(param.isfinite().all() for param in model.parameters())
    if case.option("correction"):
        twin, diagonal = pair(case, correction=False)
        train(twin, diagonal, 3)
        assert_same([p.detach() for p in model.parameters()], [p.detach() for p in twin.parameters()])


def test_an_eigendecomposition_of_statistics_that_overflowed_falls_back_and_recovers():
    """A real failure: an infinite row in U. The step is diagonal, and nothing else is lost."""
    model = Net()
    optimizer = AdaGradBMA(model.parameters(), variant="consistent")
    train(model, optimizer, 1)
    row = optimizer.state[model.head.bias]["U"]
    good = row.clone()
    row.fill_(INF)
    with pytest.warns(UserWarning, match="an eigendecomposition of 5 blocks failed twice; the diagonal step is taken"):
        train(model, optimizer, 1)
    assert optimizer.diagonal_fallbacks == 1
    assert all(param.isfinite().all() for param in model.parameters())
    row.copy_(good)
    train(model, optimizer, 3)
    assert optimizer.diagonal_fallbacks == 1


# -------------------------------------------------------------------- zeros


def zero_gradients(model):
    for param in model.parameters():
        param.grad = torch.zeros_like(param)


@every_optimizer
@pytest.mark.parametrize(("when", "eps"), [(0, None), (2, None), (0, 0.0), (0, 1e-60)])
def test_zero_gradients_change_nothing_and_poison_nothing(case, when, eps):
    if eps is not None and case.option("eps") is None:
        pytest.skip("no ε")
    # Weight decay would act as a gradient; the rate and the age of a root depend on the number of steps.
    neutral = {"weight_decay": 0.0, "lr_decay": 0.0, "refresh_every": 1}
    changes = {key: value for key, value in neutral.items() if case.option(key) is not None}
    changes |= {} if eps is None else {"eps": eps}
    model, optimizer = pair(case, **changes)
    train(model, optimizer, when)
    before = snapshot(optimizer)["params"]
    zero_gradients(model)
    optimizer.step()
    if when == 0 or not case.averages:  # else momentum continues
        assert_same(snapshot(optimizer)["params"], before)
    train(model, optimizer, range(when, 5))
    assert all(param.isfinite().all() for param in model.parameters())
    if not case.averages:
        twin, without = pair(case, **changes)
        train(twin, without, 5)
        for state in optimizer.state.values():
            state["step"] -= 1
        assert_same(snapshot(optimizer), snapshot(without))


@every_optimizer
def test_some_zero_gradients_leave_their_parameters(case):
    model, optimizer = pair(case, weight_decay=0.0)
    for t in range(3):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        model.head.weight.grad.zero_()
        model.head.bias.grad.zero_()
        optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())
    start = Net()
    assert not torch.equal(model.conv.weight, start.conv.weight)
    assert torch.equal(model.head.weight, start.head.weight)
    assert torch.equal(model.head.bias, start.head.bias)


@pytest.mark.parametrize("coupling", ["all", "none"])
@pytest.mark.parametrize("partition", ["tensor", "unit", "all"])
def test_weighted_does_not_move_what_never_had_a_gradient(partition, coupling):
    """Columns of zeros, as for border pixels. There z = √ε, and the unweighted forms would move these entries far."""
    model = nn.Linear(6, 4)
    start = model.weight.detach().clone()
    optimizer = AdaGradBMA(model.parameters(), lr=0.1, variant="weighted", partition=partition, coupling=coupling)
    rng = torch.Generator().manual_seed(0)
    for _ in range(10):
        inputs = torch.rand(8, 6, generator=rng)
        inputs[:, [0, 3]] = 0.0
        optimizer.zero_grad()
        model(inputs).logsumexp(1).mean().backward()
        optimizer.step()
    assert torch.equal(model.weight[:, [0, 3]], start[:, [0, 3]])
    assert (model.weight != start)[:, [1, 2, 4, 5]].all()


@every_optimizer
def test_gradients_that_sum_to_zero_in_every_block(case):
    """A softmax layer: the gradients of the classes cancel, exactly or up to rounding."""
    params = [nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4)), nn.Parameter(torch.zeros(4))]
    optimizer = case([("head.weight", params[0]), ("head.bias", params[1])], weight_decay=0.0)
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        half = torch.randn(3, 2, generator=rng)
        params[0].grad = torch.cat([half, -half], 1)
        params[1].grad = torch.tensor([0.5, -0.5, 0.25, -0.25])
        before = [param.detach().clone() for param in params]
        optimizer.step()
        for param, was in zip(params, before, strict=True):
            assert param.isfinite().all() and not torch.equal(param, was)
            assert (param - was).abs().max() <= 10 * 0.05


# -------------------------------------------------------------------- extremes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("signs", [(1, 1), (1, -1)])
def test_the_first_step_of_two_numbers_is_within_its_bound(variant, signs):
    """A = [[1, ±1], [±1, 1]] is singular. ‖Z^½ δ‖ ≤ floor^-½ ‖Z^-½ g‖ bounds a symmetric preconditioner, z = |g|."""
    g = torch.tensor([1e-3 * signs[0], 5.0 * signs[1]], dtype=torch.float64)
    params = [scalar(0.0, value.item(), torch.float64) for value in g]
    AdaGradBMA(params, lr=1.0, variant=variant).step()
    delta = torch.stack([param.detach() for param in params])
    bound = (g.abs().sum() / min(FORMS[variant].floor, 1.0)) ** 0.5 / g.abs().sqrt()
    if variant != "paper":
        assert (delta.abs() <= bound).all()
        assert (delta @ g) < 0
    # In units of AdaGrad's first step, lr: the bound for weighted, and those that a floor of 0.1 leaves.
    limit = {"weighted": 10.0, "consistent": 100.0, "paper": 200.0}[variant]
    assert delta.abs().max() <= limit
    assert delta[1].abs() <= 10**0.5


@every_optimizer
@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e-12, 1e12, 1e18])
def test_tiny_and_huge_gradients(case, scale):
    """Steps stay within a bound independent of the scale; Algorithm 1 as printed has none for huge gradients."""
    model, optimizer = pair(case, weight_decay=0.0)
    for t in range(4):
        set_gradients(model.parameters(), t, scale)
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.step()
        for param, was in zip(model.parameters(), before, strict=True):
            assert param.isfinite().all()
            # A natural gradient is a step per unit of information: the less information, the longer the step.
            natural = case.option("damping") is not None and scale < 1
            if not natural and (case.option("variant") != "paper" or scale < 1 or not case.decomposes):
                assert (param - was).abs().max() <= 50 * 0.05
    assert all(value.isfinite().all() for s in optimizer.state.values() for k, value in s.items() if k != "root")
    set_gradients(model.parameters(), 9)
    optimizer.step()
    assert all(param.isfinite().all() for param in model.parameters())


@every_optimizer
@pytest.mark.parametrize("tiny", [1e-158, 1e-162, 1e-320])
def test_gradients_at_the_edge_of_float64_with_sums_of_zero(case, tiny):
    """n_i n_j underflows although n_i does not: 0 · ∞ must not arise."""
    param = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    optimizer = case([("layer.weight", param)], weight_decay=0.0)
    for sign in (1, -1, 1):
        param.grad = sign * tiny * torch.tensor([[1.0, -1.0], [1.0, -1.0]], dtype=torch.float64)
        optimizer.step()
    assert param.isfinite().all()
    torch.testing.assert_close(param.detach(), torch.ones(2, 2, dtype=torch.float64), rtol=0, atol=0.2)
