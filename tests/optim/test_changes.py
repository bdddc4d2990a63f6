"""Options, parameters and states that change in the middle of training: right or refused, never silently wrong."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA, Anova, NaturalGradientBMA
from support.optimizers import Net, assert_same, snapshot, train

F64 = torch.float64


def zeros(*shape, dtype=F64):
    return nn.Parameter(torch.zeros(*shape, dtype=dtype))


def positive_steps(optimizer, params, count, seed=0):
    rng = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for param in params:
            param.grad = torch.rand(param.shape, generator=rng, dtype=F64).to(param.dtype)
        optimizer.step()


LOST = [
    *((AdamBMA, name) for name in ("exp_avg", "exp_avg_sq")),
    (AdaGradBMA, "sum"),
    *((Anova, name) for name in ("exp_avg", "means_start_step", "unit_means", "input_means", "grand_means")),
]


@pytest.mark.parametrize(("cls", "name"), LOST)
def test_state_that_somebody_has_deleted_is_missed_before_anything_changes(cls, name):
    param, options = zeros(12, 20), {"means": 2} if cls is Anova else {}
    optimizer = cls([param], **options)
    positive_steps(optimizer, [param], 2)
    del optimizer.state[param][name]
    kept = param.detach().clone()
    with pytest.raises(ValueError, match=f"has lost {name} of a parameter. Construct the optimizer anew"):
        positive_steps(optimizer, [param], 1)
    assert torch.equal(param, kept)


# -------------------------------------------------------------------- options


@pytest.mark.parametrize("cap", [0.0, 0.1, 1.0])
def test_a_cap_bounds_the_whole_correction(cap):
    param, plain = zeros(4, 25), zeros(4, 25)
    optimizer = AdamBMA([param], lr=1.0, weight_decay=0.0, correction_cap=cap)
    reference = torch.optim.Adam([plain], lr=1.0)
    for _ in range(3):
        before = param.detach().clone(), plain.detach().clone()
        positive_steps(optimizer, [param], 1)
        plain.grad = param.grad.clone()
        reference.step()
        step, diagonal = param.detach() - before[0], plain.detach() - before[1]
        assert ((step - diagonal).norm(dim=1) <= (cap + 1e-6) * diagonal.norm(dim=1)).all()


def test_roots_that_are_to_serve_longer_keep_the_statistics():
    param = zeros(4, 50)
    optimizer = AdamBMA([("w", param)], coupling="all")
    positive_steps(optimizer, [param], 100)
    before = optimizer.block_statistics()[0].eigenvalues[-1]
    optimizer.param_groups[0]["refresh_every"] = 10
    positive_steps(optimizer, [param], 1)
    assert optimizer.block_statistics()[0].eigenvalues[-1] == pytest.approx(float(before), rel=0.05)
    assert "root" in optimizer.state[param]
    optimizer.param_groups[0]["refresh_every"] = 1
    positive_steps(optimizer, [param], 1)
    assert "root" not in optimizer.state[param]  # an old one must not serve later


@pytest.mark.parametrize("option", ["partition", "coupling"])
@pytest.mark.parametrize("steps", [0, 3])
def test_blocks_that_are_cut_or_coupled_otherwise_are_refused(option, steps):
    """Statistics belong to blocks as they were. The optimizer goes on once the option is what it was."""
    params = [zeros(3, 4), zeros(3, 4)]
    optimizer = AdamBMA([("x.a", params[0]), ("x.b", params[1])])
    positive_steps(optimizer, params, steps)
    before = snapshot(optimizer)
    made = optimizer.param_groups[0][option]
    for other in ("all", "module", "tensor" if option == "partition" else "some", lambda name, tensor: 1):
        optimizer.param_groups[0][option] = other
        with pytest.raises(
            ValueError, match=r"The partition and coupling of .* AdamBMA cannot change. Construct .* anew."
        ):
            positive_steps(optimizer, params, 1)
        optimizer.param_groups[0][option] = made
        assert_same(snapshot(optimizer), before)
    positive_steps(optimizer, params, 1)


def test_energy_is_not_kept_by_a_variant_that_does_not_keep_it_up():
    param = zeros(4, 50)
    optimizer = AdaGradBMA([param], partition="unit", variant="weighted", lr=1e-3)
    for variant in ("weighted", "consistent", "weighted"):
        optimizer.param_groups[0]["variant"] = variant
        positive_steps(optimizer, [param], 10)
    diagonal = optimizer.block_statistics()[0].diagonal
    assert ((diagonal > 30) & (diagonal <= 50)).all()  # at most the size of a block; 37.5 for uniform numbers


def test_looking_at_statistics_that_another_variant_would_need_changes_nothing():
    param = zeros(4, 5)
    optimizer = AdaGradBMA([param], partition="unit")
    positive_steps(optimizer, [param], 2)
    optimizer.param_groups[0]["variant"] = "weighted"
    before = snapshot(optimizer)
    optimizer.block_statistics()
    assert_same(snapshot(optimizer), before)


def test_statistics_of_parameters_that_are_no_longer_corrected_are_not_shown():
    param = zeros(6)
    optimizer = AdamBMA([("b", param)], partition="element", coupling="none")
    positive_steps(optimizer, [param], 2)
    optimizer.param_groups[0]["correction"] = False
    positive_steps(optimizer, [param], 1)
    assert optimizer.block_statistics()[0].correction_share is None


# -------------------------------------------------------------------- parameters and states


def test_parameters_in_another_order_keep_their_own_columns():
    def run(reverse):
        params = [zeros(3, 4) for _ in range(3)]
        optimizer = AdaGradBMA([(f"p{i}", param) for i, param in enumerate(params)], variant="consistent", lr=0.1)
        rng = torch.Generator().manual_seed(0)
        for t in range(8):
            if reverse and t == 4:
                optimizer.param_groups[0]["params"].reverse()
                optimizer.param_groups[0]["param_names"].reverse()
            common = torch.randn((), generator=rng, dtype=F64)
            for i, param in enumerate(params):
                param.grad = torch.randn(3, 4, generator=rng, dtype=F64) + (1 - i) * common
            optimizer.step()
        return params

    for a, b in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-12)


class Four(nn.Module):
    def __init__(self):
        super().__init__()
        for name in "abcd":
            setattr(self, name, nn.Linear(4, 4, bias=False).double())

    def groups(self, *parts):
        named = dict(self.named_parameters())
        return [{"params": [(f"{name}.weight", named[f"{name}.weight"]) for name in part]} for part in parts]


def test_states_loaded_by_name_into_other_groups_are_refused():
    model, other = Four(), Four()
    optimizer = AdamBMA(model.groups("ab", "cd"), coupling="all")
    positive_steps(optimizer, list(model.parameters()), 3)
    mixed = AdamBMA(other.groups("ad", "cb"), coupling="all")
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    with pytest.raises(ValueError, match="were coupled with others when their statistics began"):
        set_optimizer_state_dict(other, mixed, saved)


def test_an_equal_partition_under_another_name_is_loaded():
    param, fresh = zeros(4, 5), zeros(4, 5)
    optimizer = AdamBMA([param], partition=lambda name, tensor: 0)
    positive_steps(optimizer, [param], 2)
    resumed = AdamBMA([fresh], partition="unit")
    resumed.load_state_dict(optimizer.state_dict())
    positive_steps(resumed, [fresh], 2)
    assert resumed.param_groups[0]["partition"] == "unit"


def test_checkpoints_of_kin_that_compute_otherwise_are_refused():
    model = Net()
    for make, message in [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "'amsgrad' parameter of AdamBMA must be False"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "Adam with coupled weight decay"),
    ]:
        theirs = make(model.parameters())
        train(model, theirs, 1)
        with pytest.raises(ValueError, match=message):
            AdamBMA(Net().parameters()).load_state_dict(theirs.state_dict())
    theirs = torch.optim.Adam(model.parameters())
    train(model, theirs, 1)
    AdamBMA(Net().parameters()).load_state_dict(theirs.state_dict())
    bma = AdaGradBMA(model.parameters(), partition="element")
    train(model, bma, 1)
    with pytest.raises((TypeError, ValueError), match="'eigenvalue_floor' parameter of AdaGradFull"):
        AdaGradFull(Net().parameters()).load_state_dict(bma.state_dict())


@pytest.mark.parametrize("cls", [AdaGradBMA, AdamBMA])
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("how", ["deleted", "shrunk"])
def test_a_moment_that_does_not_fit_is_an_error_before_anything_changes(cls, fused, how):
    (a, b) = matrices(2)
    optimizer = cls([("a", a), ("b", b)], fused=fused)
    positive_steps(optimizer, [a, b], 2)
    name = optimizer.entry_state[-1]
    if how == "deleted":
        del optimizer.state[a][name]
    else:  # where it is: the same address
        moment = optimizer.state[a][name]
        moment.data = moment.data[:3, :3]
    before = snapshot(optimizer)
    with pytest.raises(ValueError if how == "deleted" else RuntimeError):  # torch's, of other shapes
        positive_steps(optimizer, [a, b], 1)
    assert_same(snapshot(optimizer), before)


# -------------------------------------------------------------------- the natural gradient


def test_natural_gradient_steps_without_a_block_are_those_of_the_principal_submatrix():
    a, b, alone = zeros(2, 3), zeros(2, 3), zeros(2, 3)
    options = {"lr": 0.1, "momentum": 0.0, "partition": "unit", "coupling": "all", "damping": 0.01}
    together, single = NaturalGradientBMA([a, b], **options), NaturalGradientBMA([alone], **options)
    rng = torch.Generator().manual_seed(0)
    for t in range(6):
        a.grad = torch.randn(2, 3, generator=rng, dtype=F64) + 1
        b.grad = None if t == 5 else a.grad + 0.1 * torch.randn(2, 3, generator=rng, dtype=F64)
        alone.grad = a.grad.clone()
        before = a.detach().clone(), alone.detach().clone()
        together.step()
        single.step()
    # What the blocks of `a` know of themselves is what they would know alone.
    np.testing.assert_allclose((a - before[0]).detach(), (alone - before[1]).detach(), rtol=1e-9)


def test_variances_keep_their_digits_in_float32():
    param = zeros(1, 1000, dtype=torch.float32)
    optimizer = NaturalGradientBMA([param], damping=0.1, momentum=0.0)
    param.grad = 1.1 + 1e-4 * torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    state = optimizer.state[param]
    measured = float(state["variance"] / state["weight"])
    # float32 numbers near 1.1 are known to 6e-8, a thousandth of their deviation.
    assert measured == pytest.approx(float(param.grad.double().var()), rel=1e-2)


def test_momentum_that_is_switched_off_while_a_parameter_joins():
    a, b = zeros(3, 4), zeros(2, 2)
    optimizer = NaturalGradientBMA([a, b], adapt_damping=True)
    positive_steps(optimizer, [a], 2)
    optimizer.param_groups[0]["momentum"] = 0.0
    positive_steps(optimizer, [a, b], 2)
    assert a.isfinite().all() and b.isfinite().all()


# -------------------------------------------------------------------- states and gradients that change


def matrices(count, size=4):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, size, dtype=F64)) for _ in range(count)]


@pytest.mark.parametrize("cls", [AdaGradBMA, AdamBMA])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_count_that_is_no_number_is_an_error(cls, bad):
    (param,) = matrices(1)
    optimizer = cls([param])
    positive_steps(optimizer, [param], 50)
    optimizer.state[param]["step"].fill_(bad)
    with pytest.raises((ValueError, OverflowError), match="cannot convert float"):
        positive_steps(optimizer, [param], 1)


@pytest.mark.parametrize("cls", [AdaGradBMA, AdamBMA, Anova])
def test_a_parameter_without_a_gradient_that_is_replaced_is_freed(cls):
    first, second = matrices(2)
    optimizer = cls([first, second])
    positive_steps(optimizer, [first], 3)
    old = weakref.ref(second)
    optimizer.param_groups[0]["params"][1] = second = matrices(1)[0]
    positive_steps(optimizer, [first], 1)
    gc.collect()
    assert old() is None
    positive_steps(optimizer, [first, second], 2)
    assert int(optimizer.state[second]["step"]) == 2


def test_a_matrix_between_blocks_that_is_not_finite_gives_the_diagonal_step():
    params = matrices(12, 20)
    optimizer = AdaGradBMA(params)
    positive_steps(optimizer, params, 2)
    optimizer.state[params[0]]["U"][0, 1] = optimizer.state[params[1]]["U"][0, 0] = torch.nan
    with pytest.warns(UserWarning, match="the diagonal step is taken instead"):
        positive_steps(optimizer, params, 1)
    assert optimizer.diagonal_fallbacks == 1 and all(param.isfinite().all() for param in params)
