"""States that come from elsewhere: another order of parameters, another optimizer, another dtype, another time."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, Anova, NaturalGradientBMA, diagnose
from support.optimizers import Net, assert_same, params_of, snapshot, train

# -------------------------------------------------------------------- another order of parameters


class Three(nn.Module):
    """Three layers of the same shape, in the given order of names."""

    def __init__(self, order, width=4):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(width, 4, bias=False).double())


def correlated_gradients(model, t):
    """Gradients that depend only on the name, correlated between layers."""
    common = torch.randn((), generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    for name, param in model.named_parameters():
        rng = torch.Generator().manual_seed(1000 * t + ord(name[0]))
        sign = {"a": 1.0, "b": 0.5, "c": -1.0}[name[0]]
        param.grad = torch.randn(param.shape, generator=rng, dtype=torch.float64) + sign * common


ORDERED = [
    (AdaGradBMA, {"variant": "consistent"}),
    (AdaGradBMA, {"variant": "weighted", "partition": "unit"}),
    (AdaGradBMA, {"partition": "unit", "coupling": "module", "refresh_every": 3}),
    (AdamBMA, {}),
    (AdamBMA, {"coupling": "all", "refresh_every": 4}),
    (NaturalGradientBMA, {"partition": "unit", "coupling": "all"}),
    (AdaGradFull, {}),
]


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("order", ["cab", "bca", "abc"])
@pytest.mark.parametrize(("cls", "options"), ORDERED)
def test_states_loaded_by_name_into_another_order_go_on_alike(cls, options, order, flatten):
    model = Three("abc")
    optimizer = cls(model.named_parameters(), lr=0.05, **options)
    for t in range(5):
        correlated_gradients(model, t)
        optimizer.step()
    how = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=how))
    other = Three(order)
    other.load_state_dict(model.state_dict())
    resumed = cls(other.named_parameters(), lr=0.05, **options)
    set_optimizer_state_dict(other, resumed, saved, options=how)
    for t in range(5, 9):
        for m, o in ((model, optimizer), (other, resumed)):
            correlated_gradients(m, t)
            o.step()
    for name, param in model.named_parameters():
        # An eigendecomposition with rows in a different order rounds differently.
        torch.testing.assert_close(dict(other.named_parameters())[name], param, rtol=0, atol=1e-9)


def test_the_order_plays_no_part_for_layers_of_other_shapes_either():
    """If blocks are not coupled, states of different shapes load by name, as with AdamW."""

    class Mixed(nn.Module):
        def __init__(self, order):
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear({"a": 3, "b": 5, "c": 2}[name], 4, bias=False).double())

    for options in ({}, {"coupling": "all"}):
        model, other = Mixed("abc"), Mixed("cba")
        optimizer = AdamBMA(model.named_parameters(), **options)
        for t in range(3):
            correlated_gradients(model, t)
            optimizer.step()
        other.load_state_dict(model.state_dict())
        resumed = AdamBMA(other.named_parameters(), **options)
        set_optimizer_state_dict(other, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
        for m, o in ((model, optimizer), (other, resumed)):
            correlated_gradients(m, 3)
            o.step()
        for name, param in model.named_parameters():
            torch.testing.assert_close(dict(other.named_parameters())[name], param, rtol=0, atol=1e-12)


def test_states_in_the_order_of_other_parameters_are_refused():
    model, other = Net(), Net()
    optimizer = AdamBMA(model.parameters())
    train(model, optimizer, 2)
    reordered = AdamBMA(list(other.parameters())[::-1])
    before = snapshot(reordered)
    with pytest.raises(ValueError, match=r"exp_avg of shape \(\) for parameter 0 .* Load it with the same model"):
        reordered.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(reordered), before)


def test_equal_shapes_that_are_cut_differently_are_refused():
    def by(name, tensor):
        return 0 if name.startswith("a") else 1

    model, other = Three("ab"), Three("ba")
    optimizer, reordered = (AdamBMA(m.named_parameters(), partition=by) for m in (model, other))
    correlated_gradients(model, 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"'b.weight' was cut into other blocks .* Construct AdamBMA with the model"):
        reordered.load_state_dict(optimizer.state_dict())


def test_blocks_that_were_coupled_with_others_are_refused():
    """Modules with other names: the sizes of the matrices agree, but their blocks do not."""
    first = [(name, nn.Parameter(torch.zeros(3, 2))) for name in ("x.a", "x.b", "y.a", "y.b")]
    second = [(name, nn.Parameter(torch.zeros(3, 2))) for name in ("x.a", "y.a", "x.b", "y.b")]
    optimizer, other = (AdaGradBMA(named, partition="unit", coupling="module") for named in (first, second))
    for _, param in first:
        param.grad = torch.randn(3, 2)
    optimizer.step()
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"'x.a', 'x.b' were coupled with others .* coupling='module' here"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(other), before)


# -------------------------------------------------------------------- statistics that start later than the moments


def test_statistics_that_begin_late_are_measured_by_what_they_have_seen():
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(4, 100, dtype=torch.float64))
    optimizer = AdamBMA([("w", param)], coupling="none", eigenvalue_floor=0.1)

    def step():
        param.grad = torch.rand(4, 100, dtype=torch.float64)
        optimizer.step()
        return optimizer.block_statistics()[0].diagonal

    for _ in range(300):
        long = step()
    assert ((long > 70) & (long < 80)).all()
    del optimizer.state[param]["U"]
    after = step()
    assert ((after > 60) & (after < 90)).all()  # one gradient of uniform numbers: 75 up to noise


@pytest.mark.parametrize("start", ["AdamW", "correction=False"])
def test_a_diagnosis_after_taking_over_is_that_of_a_fresh_optimizer(start):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 20), nn.ReLU(), nn.Linear(20, 1))
    rng = torch.Generator().manual_seed(0)

    def steps(optimizer, count):
        for _ in range(count):
            x = torch.rand(32, 50, generator=rng)
            optimizer.zero_grad()
            (model(x).squeeze(-1) - x[:, 0]).square().mean().backward()
            optimizer.step()

    if start == "AdamW":
        before = torch.optim.AdamW(model.parameters(), lr=1e-4)
        steps(before, 300)
        optimizer = AdamBMA(model.named_parameters())
        optimizer.load_state_dict(before.state_dict())
    else:
        optimizer = AdamBMA(model.named_parameters(), lr=1e-4, correction=False)
        steps(optimizer, 300)
        optimizer.param_groups[0]["correction"] = True
    steps(optimizer, 30)
    fresh = AdamBMA(model.named_parameters(), lr=1e-4)
    steps(fresh, 30)
    assert diagnose(optimizer).share == pytest.approx(diagnose(fresh).share, rel=0.2)


# -------------------------------------------------------------------- what schedules and other dtypes leave


@pytest.mark.parametrize("cls", [AdaGradBMA, AdaGradFull, AdamBMA, NaturalGradientBMA])
def test_a_rate_that_a_schedule_leaves_just_below_zero_can_be_loaded(cls):
    model = Net()
    optimizer = cls(model.parameters(), lr=0.1)
    schedule = LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=9)
    for t in range(9):
        train(model, optimizer, range(t, t + 1))
        schedule.step()
    optimizer.param_groups[0]["lr"] = -5.5e-21  # what LinearLR leaves in many settings
    fresh = Net()
    resumed = cls(fresh.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    train(fresh, resumed, 1)
    assert resumed.param_groups[0]["lr"] == -5.5e-21


def test_a_schedule_of_momentum_can_be_saved_and_loaded_with_an_adapted_damping():
    model = Net()
    optimizer = NaturalGradientBMA(model.parameters(), adapt_damping=True, momentum=0.9)
    schedule = OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    for t in range(4):
        train(model, optimizer, range(t, t + 1))
        schedule.step()
    resumed = NaturalGradientBMA(Net().parameters(), adapt_damping=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["momentum"] == optimizer.param_groups[0]["momentum"]


@pytest.mark.parametrize(("ours", "theirs"), [(AdamBMA, torch.optim.AdamW), (AdaGradBMA, torch.optim.Adagrad)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("to", [torch.float32, torch.float64, torch.bfloat16])
def test_loaded_moments_get_the_dtype_of_the_arithmetic(ours, theirs, dtype, to):
    model = Net().to(dtype)
    before = theirs(model.parameters(), lr=0.01)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    before.step()
    fresh = Net().to(to)
    optimizer = ours(fresh.parameters(), lr=0.01)
    optimizer.load_state_dict(before.state_dict())
    for param in fresh.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    arithmetic = torch.promote_types(to, torch.float32)
    for param in fresh.parameters():
        moments = [optimizer.state[param][key] for key in optimizer.entry_state]
        assert moments and all(value.dtype == arithmetic for value in moments)
        assert param.isfinite().all()


def test_statistics_without_their_place_start_over_and_the_moments_are_kept():
    model = Net()
    optimizer = AdamBMA(model.parameters())
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state.pop("blocks", None)
    fresh = Net()
    resumed = AdamBMA(fresh.parameters())
    resumed.load_state_dict(saved)
    train(fresh, resumed, 1)
    assert all(int(state["step"]) == 4 for state in resumed.state.values())
    # One gradient: U is 1 − β₂ times the square of its sum.
    grad, state = fresh.head.weight.grad.double(), resumed.state[fresh.head.weight]
    torch.testing.assert_close(state["U"], 1e-3 * grad.sum(1).square(), rtol=1e-5, atol=0)


def test_a_checkpoint_of_adamw_that_ran_on_fused_steps_is_taken_over():
    model = Net()
    before = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, before, 2)
    optimizer = AdamBMA(model.parameters())
    optimizer.load_state_dict(before.state_dict())  # its group has fused=True
    start = params_of(model)
    train(model, optimizer, 1)
    assert not any(torch.equal(a, b) for a, b in zip(start, params_of(model), strict=True))


OURS = [AdaGradBMA, AdamBMA, Anova, NaturalGradientBMA, AdaGradFull]
LOADED = {
    (AdaGradBMA, "Adagrad"),
    *((cls, name) for cls in (AdamBMA, Anova) for name in ("Adam", "AdamW", "RAdam")),  # RAdam's state is Adam's
}


def one_step_of(name, **options):
    params = [torch.nn.Parameter(torch.randn(12, 10))]
    theirs = getattr(torch.optim, name)(params, lr=0.1, **options)
    params[0].grad = torch.randn(12, 10)
    theirs.step()
    return params, theirs.state_dict()


@pytest.mark.parametrize("theirs", ["Adagrad", "Adam", "AdamW", "RAdam", "NAdam", "Adamax", "RMSprop", "SGD"])
@pytest.mark.parametrize("cls", OURS)
def test_checkpoints_of_other_optimizers_are_refused_before_anything_changes(cls, theirs):
    params, saved = one_step_of(theirs, **({"momentum": 0.9} if theirs == "SGD" else {}))
    ours = cls(params, lr=1e-3)
    if (cls, theirs) in LOADED:
        ours.load_state_dict(saved)
        assert ours.param_groups[0]["lr"] == 0.1
        return
    with pytest.raises(ValueError, match=f"not one of {cls.__name__}: the state of parameter 0 (lacks|has) "):
        ours.load_state_dict(saved)
    assert ours.param_groups[0]["lr"] == 1e-3 and not ours.state


@pytest.mark.parametrize("cls", [AdamBMA, Anova])
def test_what_nadam_and_amsgrad_keep_besides_is_named(cls):
    params, saved = one_step_of("NAdam")
    with pytest.raises(ValueError, match=f"parameter 0 has mu_product, which {cls.__name__} does not use"):
        cls(params).load_state_dict(saved)
    params, saved = one_step_of("AdamW", amsgrad=True)
    with pytest.raises(ValueError, match=r"'amsgrad' parameter .* must be False"):
        cls(params).load_state_dict(saved)


def test_momentum_of_another_shape_is_refused():
    params, other = (torch.zeros(shape, requires_grad=True) for shape in ((4, 3), (3, 4)))
    params.grad = torch.ones(4, 3)
    optimizer = NaturalGradientBMA([params], partition="tensor")
    optimizer.step()
    with pytest.raises(ValueError, match=r"momentum_buffer of shape \(4, 3\) for parameter 0"):
        NaturalGradientBMA([other], partition="tensor").load_state_dict(optimizer.state_dict())
