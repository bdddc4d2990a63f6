"""Anova's compiled kernels: equal to torch's operations for every kind of matrix, whatever the threads."""

import copy

import pytest
import torch
from torch import nn

from blockmean import Anova
from blockmean.optim import native
from blockmean.optim.native.matrices import inner_of

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the kernels were not built")

SHAPES = [(64, 100), (64, 100), (10, 64), (17, 33), (8, 3, 3, 3), (5, 4), (120, 131), (40, 2), (12,), ()]
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}


def set_gradients(params, t):
    rng = torch.Generator().manual_seed(t)
    for param in params:
        noise = torch.randn(param.shape, generator=rng, dtype=torch.float64)
        common = torch.randn(param.shape[:1], generator=rng, dtype=torch.float64)
        grad = noise + 2 * common.view(*param.shape[:1], *[1] * (param.ndim - 1)) if param.ndim > 1 else noise
        like = param.detach()
        param.grad = torch.empty_like(like, memory_format=torch.preserve_format).copy_(grad.to(param.dtype))


def run(dtype=torch.float64, steps=16, shapes=SHAPES, change=None, channels_last=False, **options):
    rng = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)) for shape in shapes]
    if channels_last:
        for param in params:
            if param.ndim == 4:
                param.data = param.data.to(memory_format=torch.channels_last)
    optimizer = Anova(params, lr=0.01, **options)
    for t in range(steps):
        set_gradients(params, t)
        if change is not None:
            change(t, params)
        optimizer.step()
    return [param.detach() for param in params], optimizer


def compiled(optimizer):
    plan = optimizer._works[0].plan
    return len(plan.compiled), len(plan.others)


def sleepers(t, params):
    """Units without a gradient at first, and a matrix that has none in some steps."""
    if t < 3:
        params[3].grad[3:] = 0
    if t % 5 == 3:
        params[2].grad = None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"means": 1},
        {"means": 1000},
        {"means": (0, 5)},
        {"means": (5, 0)},
        {"means": (3, 7), "refresh_every": 1, "mean_beta": 0.8, "betas": (0.95, 0.9)},
        {"maximize": True, "weight_decay": 0.1, "eps": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("change", [None, sleepers])
def test_steps_equal_those_of_torchs_operations(options, change):
    expected, _ = run(fused=False, change=change, **options)
    found, optimizer = run(change=change, **options)
    assert compiled(optimizer)[0] >= 6 and compiled(optimizer)[1] == 0
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=ROUNDING[torch.float64])


@pytest.mark.parametrize("means", [1, 7, 17, 40])
def test_sides_around_the_widths_of_panels_and_blocks(means):
    """Kernels process 48 rows at a time, in panels of 6 to 48 columns, by vectors of 2 to 16 entries."""
    sides = (1, 2, 11, 13, 24, 25, 47, 48, 49, 96, 97)
    shapes = [(O, I) for O in sides for I in sides if (O + I) % 3 == 0] + [(2, 300), (300, 2), (145, 145)]
    expected, _ = run(steps=7, shapes=shapes, means=means, refresh_every=3, fused=False)
    found, optimizer = run(steps=7, shapes=shapes, means=means, refresh_every=3)
    assert compiled(optimizer) == (sum(min(shape) > 1 for shape in shapes), 0)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=ROUNDING[torch.float64], msg=lambda text, a=a: f"{a.shape}{text}")


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_they_do_in_every_dtype_and_memory_format(dtype, channels_last):
    shapes = [(64, 100), (17, 33), (8, 3, 3, 3), (8, 6, 5, 2), (16, 8, 1, 1), (12,)]
    expected, _ = run(dtype, 8, shapes, channels_last=channels_last, fused=False)
    found, optimizer = run(dtype, 8, shapes, channels_last=channels_last)
    assert compiled(optimizer) == (5, 0)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=4 * ROUNDING[dtype])


def test_the_state_is_that_of_torchs_operations():
    _, expected = run(fused=False, shapes=SHAPES[:5])
    _, found = run(shapes=SHAPES[:5])
    for one, other in zip(expected.state.values(), found.state.values(), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-9, atol=1e-11, msg=lambda text, key=key: key + text)


def test_the_number_of_threads_changes_no_bit():
    params, optimizer = run(torch.float32, 2)  # the first step of a matrix takes torch's operations
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            twins = [nn.Parameter(param.clone()) for param in params]
            resumed = Anova(twins, lr=0.01)
            resumed.load_state_dict(optimizer.state_dict())
            for t in range(2, 14):
                set_gradients(twins, t)
                resumed.step()
            results.append(twins)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_a_bad_entry_is_noticed_before_anything_changes(bad, place):
    params, optimizer = run(shapes=SHAPES[:4], steps=7)
    set_gradients(optimizer.param_groups[0]["params"], 7)
    optimizer.param_groups[0]["params"][2].grad.view(-1)[place] = bad
    before = copy.deepcopy([params, optimizer.state_dict()["state"]])
    with pytest.raises(ValueError, match="Nothing was changed"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before[0], strict=True))
    for number, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1][number][key]) for key, value in state.items())


def test_resuming_is_bit_exact_between_refreshes():
    params, optimizer = run(torch.float32, 8)
    twins = [nn.Parameter(param.clone()) for param in params]
    resumed = Anova(twins, lr=0.01)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    own = optimizer.param_groups[0]["params"]
    for t in range(8, 16):
        for some, one in ((own, optimizer), (twins, resumed)):
            set_gradients(some, t)
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(own, twins, strict=True))


def test_what_the_kernels_cannot_serve_goes_to_torch_or_is_an_error():
    def transposed(t, params):
        params[0].grad = params[0].grad.T.contiguous().T

    found, optimizer = run(shapes=[(30, 20), (17, 33)], change=transposed)
    assert compiled(optimizer)[0] == 1
    expected, _ = run(shapes=[(30, 20), (17, 33)], change=transposed, fused=False)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=1e-12)
    with pytest.raises(RuntimeError, match=r"Anova\(fused=True\) takes native kernels, which cannot serve .* strides"):
        run(shapes=[(30, 20)], change=transposed, fused=True)


def test_a_convolution_with_its_channels_last_takes_adamw_natively_once_its_means_are_off():
    params = [nn.Parameter(torch.randn(7, 5, 3, 3, dtype=torch.float64)) for _ in range(2)]
    params[1].data = params[0].detach().to(memory_format=torch.channels_last, copy=True)
    for param, fused in zip(params, (False, True), strict=True):
        optimizer = Anova([param], lr=0.01, means=4, fused=fused)
        for t in range(6):
            set_gradients([param], t)
            optimizer.param_groups[0]["means"] = 0 if t in (3, 4) else 4
            optimizer.step()
    torch.testing.assert_close(params[1], params[0], rtol=0, atol=1e-12)


def test_rows_in_order_and_channels_last_are_told_apart():
    assert inner_of(torch.empty(4, 5)) == 1 and inner_of(torch.empty(5, 4).T) is None
    conv = torch.empty(4, 5, 3, 2)
    assert inner_of(conv) == 1 and inner_of(conv.to(memory_format=torch.channels_last)) == 6
    assert inner_of(torch.empty(4, 5, 1, 1).to(memory_format=torch.channels_last)) == 1


@pytest.mark.parametrize("event", ["late", "deleted", "replaced"])
def test_state_stays_current_when_a_matrix_that_torch_serves_joins_its_stack(event):
    """The state of both lives in one stack, which is then made anew: kernels must not keep writing to the old one."""
    torch.manual_seed(0)
    a, b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8).T)
    optimizer = Anova([a, b], lr=0.01, means=3)
    for t in range(10):
        set_gradients([a, b], t)
        if event == "late" and t < 3:
            b.grad = None
        if event == "deleted" and t == 3:
            del optimizer.state[b]
        if event == "replaced" and t == 3:
            optimizer.state[b]["exp_avg_sq"] = optimizer.state[b]["exp_avg_sq"].clone()
        before = optimizer.state[a]["exp_avg"].clone() if t else None
        optimizer.step()
        assert before is None or not torch.equal(optimizer.state[a]["exp_avg"], before), t
    twins = [nn.Parameter(p.detach().clone()) for p in (a, b)]
    resumed = Anova(twins, lr=0.01, means=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its in ((optimizer, [a, b]), (resumed, twins)):
        set_gradients(its, 10)
        one.step()
    torch.testing.assert_close(twins[0], a, rtol=0, atol=1e-6)


@pytest.mark.parametrize("option", ["betas", "mean_beta"])
def test_decays_near_one_keep_their_precision_in_float32(option):
    options = {"betas": (0.9, 1 - 1e-7)} if option == "betas" else {"mean_beta": 1 - 1e-7}
    found, _ = run(torch.float32, 12, [(17, 23)], **options)
    expected, _ = run(torch.float64, 12, [(17, 23)], **options)
    torch.testing.assert_close(found[0].double(), expected[0], rtol=0, atol=1e-4)  # it was off by a whole step of 0.01


def test_a_gradient_that_lost_its_memory_or_shape_reaches_no_kernel():
    for damage, message in (
        (lambda grad: grad.untyped_storage().resize_(0), "no memory"),
        (lambda grad: setattr(grad, "data", torch.ones(3)), "shape|size|match"),
    ):
        param = nn.Parameter(torch.randn(40, 30))
        optimizer = Anova([param])
        for t in range(3):
            set_gradients([param], t)
            optimizer.step()
        before = param.detach().clone()
        damage(param.grad)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        assert torch.equal(param, before)


def test_parameters_that_share_memory_take_torchs_operations():
    weight = torch.randn(12, 10)
    both = [nn.Parameter(weight), nn.Parameter(weight)]
    optimizer = Anova(both)
    for t in range(3):
        set_gradients(both, t)
        optimizer.step()
    assert compiled(optimizer)[0] == 0
    with pytest.raises(RuntimeError, match="shares memory with another"):
        again = Anova(both, fused=True)
        set_gradients(both, 0)
        again.step()


def test_a_list_of_means_that_changes_in_place_is_noticed():
    param = nn.Parameter(torch.randn(8, 9))
    optimizer = Anova([param], means=[3, 3])
    for t in range(4):
        set_gradients([param], t)
        optimizer.step()
    optimizer.param_groups[0]["means"][0] = 5
    optimizer.step()
    assert optimizer.state[param]["units"].shape == (8, 5)
