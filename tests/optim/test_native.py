"""The native kernels: equal to the reference on every kind of tensor, whatever the threads; the rest is refused."""

import gc
import math
import multiprocessing
import weakref

import pytest
import torch
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA
from blockmean.blocks import TensorBlocks, geometry
from blockmean.optim import correction, kernels, passes
from blockmean.optim.passes import FORMS, Rule
from support.optimizers import Net, assert_same, params_of, set_gradients, snapshot, stripes, train
from support.passes import Reference

pytestmark = pytest.mark.skipif(not kernels.is_available(), reason="the kernels were not built")

SHAPES = [(), (1,), (7,), (3, 5), (16, 33), (5, 1, 3, 3), (4, 6, 2, 2), (1, 40), (40, 1), (2, 20000), (300, 70)]
FORMS_OF = {
    "paper": {},
    "consistent": {"variant": "consistent"},
    "weighted": {"variant": "weighted"},
    "diagonal": {"correction": False},
    "decay": {"variant": "weighted", "weight_decay": 0.1, "lr_decay": 0.1, "maximize": True},
    "eps": {"variant": "consistent", "eps": 0.0},
    "adam": {},
    "adam-cap": {"correction_cap": 0.5, "weight_decay": 0.1, "maximize": True},
    "adam-diagonal": {"correction": False},
    "adam-eps": {"eps": 0.0, "coupling": "module"},
}
PARTITIONS = ["tensor", "unit", "kernel", "module", "all", "element"]
NARROW = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 1e-6, torch.float64: 1e-12}


def make(form, params, **changes):
    cls = AdamBMA if form.startswith("adam") else AdaGradBMA
    named = [(f"layer{i // 2}.p{i}", param) for i, param in enumerate(params)]
    return cls(named, **{"lr": 0.05, "coupling": "none", **FORMS_OF[form], **changes})


def new_params(dtype=torch.float64, shapes=SHAPES):
    rng = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype)) for shape in shapes]


def run(form, dtype=torch.float64, steps=3, shapes=SHAPES, **changes):
    params = new_params(dtype, shapes)
    optimizer = make(form, params, **changes)
    for t in range(steps):
        set_gradients(params, t)
        optimizer.step()
    return [param.detach() for param in params], optimizer


@pytest.fixture
def taken(monkeypatch):
    """The implementations of the passes that steps have taken, in order."""
    found = []

    def recording(cls):
        def init(self, *args, **options):
            cls.__init__(self, *args, **options)
            found.append(self)

        return type(cls.__name__, (cls,), {"__init__": init})

    for cls in (kernels.Native, passes.Foreach):
        monkeypatch.setattr(correction, cls.__name__, recording(cls))
    return found


def is_native(taken):
    return bool(taken) and all(isinstance(one, kernels.Native) for one in taken)


# -------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("form", FORMS_OF)
def test_steps_equal_those_of_the_reference(form, partition, taken):
    shapes = [shape for shape in SHAPES if math.prod(shape) < 10000 or partition in ("tensor", "unit")]
    expected, _ = run(form, foreach=False, partition=partition, shapes=shapes)
    taken.clear()
    found, _ = run(form, fused=True, partition=partition, shapes=shapes)
    assert is_native(taken)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS_OF)
def test_they_do_in_every_dtype(form, dtype, taken):
    """Up to rounding of float32 sums, or one unit in the last place of the parameter."""
    expected, slow = run(form, dtype, foreach=False, partition="unit")
    taken.clear()
    found, optimizer = run(form, dtype, fused=True, partition="unit")
    assert is_native(taken)
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(b, a, rtol=4 * NARROW[dtype], atol=2e-5 if dtype == torch.float32 else 1e-3)
    for a, b in zip(slow.state.values(), optimizer.state.values(), strict=True):
        assert {key: value.dtype for key, value in a.items()} == {key: value.dtype for key, value in b.items()}


@pytest.mark.parametrize("form", ["adam", "adam-cap", "adam-diagonal"])
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.9, 0.0), (0.0, 0.999), (0.2, 0.1), (0.5, 0.5)])
def test_an_average_with_a_short_memory_forgets_a_spike(form, betas):
    def moments(**changes):
        (param,) = params = new_params(torch.float32, [(16, 33)])
        optimizer = make(form, params, betas=betas, **changes)
        for size in (1.0, 1e4, 1.0, 1.0, 1.0):
            set_gradients(params, 0, scale=size)
            optimizer.step()
        return param.detach(), *(optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq"))

    for a, b in zip(moments(foreach=False), moments(fused=True), strict=True):
        # Sums and products in float32; x + (y - x) without care leaves about 1 of a spike of 1e8 in exp_avg_sq.
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("form", ["paper", "consistent", "weighted", "adam", "adam-cap"])
def test_every_coupling_has_the_same_statistics_as_the_reference(form, coupling):
    shapes = [(3, 5), (7,), (4, 6, 2, 2), (), (16, 33)]
    options = {"coupling": coupling, "partition": "unit", "shapes": shapes, "steps": 5}
    if not form.startswith("adam"):
        options["initial_accumulator_value"] = 0.1
    expected, slow = run(form, foreach=False, **options)
    found, fast = run(form, fused=True, **options)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-11, atol=1e-11)
    for a, b in zip(slow.state.values(), fast.state.values(), strict=True):
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=1e-11, atol=1e-12)
    for a, b in zip(slow.block_statistics(), fast.block_statistics(), strict=True):
        torch.testing.assert_close(b.A, a.A, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(b.change, a.change, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtypes", [[torch.float64] * 3, [torch.float64, torch.float32, torch.float64]], ids=str)
@pytest.mark.parametrize("form", ["paper", "consistent"])
def test_large_blocks_have_the_sums_of_the_reference(form, dtypes):
    """Blocks of several tasks, of part of one and of no whole vector."""

    def after_steps(**options):
        sizes = ((300, 301), (70001,), (5, 9))
        params = [new_params(dtype, [size])[0] for size, dtype in zip(sizes, dtypes, strict=True)]
        optimizer = make(form, params, coupling="all", partition="tensor", **options)
        for t in range(3):
            set_gradients(params, t)
            optimizer.step()
        return params

    rounding = max(NARROW[dtype] for dtype in dtypes)  # coupled blocks share that of their sums
    for a, b in zip(after_steps(foreach=False), after_steps(fused=True), strict=True):
        torch.testing.assert_close(b, a, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("seed", range(30))
def test_random_lists_of_tensors(seed):
    """Shapes, memory formats, dtypes, cuts and options drawn at random; odd tensors go to torch, the others do not."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    form, partition, coupling = draw(*FORMS_OF), draw(*PARTITIONS[:5]), draw("all", "module", "none")
    dtype = draw(torch.float64, torch.float64, torch.float32)
    shapes = [[draw(1, 2, 3, 8, 17) for _ in range(draw(0, 1, 2, 3, 4))] for _ in range(draw(1, 3, 6))]
    layouts = [draw("plain", "plain", "last", "gaps", "turned") for _ in shapes]

    def laid_out(x, kind):
        if kind == "last" and x.ndim == 4:
            return x.contiguous(memory_format=torch.channels_last)
        if kind == "gaps" and x.ndim:
            return torch.stack([x, x], -1)[..., 0]
        return x.mT.contiguous().mT if kind == "turned" and x.ndim >= 2 else x

    def steps(**changes):
        values = torch.Generator().manual_seed(seed)
        params = []
        for shape, kind in zip(shapes, layouts, strict=True):
            x = torch.randn(shape, generator=values, dtype=torch.float64).to(dtype)
            params.append(nn.Parameter(laid_out(x, kind)))
        optimizer = make(form, params, partition=partition, coupling=coupling, **changes)
        for t in range(4):
            set_gradients(params, t)
            if t == 1:
                params[0].grad = None
            if t == 2 and params[-1].ndim == 2:
                params[-1].grad = params[-1].grad.mT.contiguous().mT
            optimizer.step()
        return params

    for a, b in zip(steps(foreach=False), steps(), strict=True):
        tolerance = 1e-11 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def test_whole_tensors_go_as_they_lie_in_memory():
    """channels_last, transposed and blocks along a middle dim: (outer, blocks, inner) where that is possible."""

    def found(tensor, *dims):
        return geometry(tensor.shape, tensor.stride(), dims)

    x = torch.zeros(4, 3, 5, 2)
    last = x.contiguous(memory_format=torch.channels_last)
    assert found(x) == found(last) == (1, 1, 120)
    assert found(x, 0) == found(last, 0) == (1, 4, 30)
    assert found(x, 0, 1) == (1, 12, 10) and found(last, 0, 1) is None
    assert found(x, 1) == (4, 3, 10) and found(last, 1) == (40, 3, 1)
    assert found(x, 0, 1, 2, 3) == (1, 120, 1) and found(last, 0, 1, 2, 3) is None
    assert found(x, 0, 2) is None
    assert found(torch.zeros(4, 1, 3), 0, 2) == (1, 12, 1)  # a dim of size 1 is nowhere
    assert found(torch.zeros(6, 4).T, 0) == (6, 4, 1)
    assert found(torch.zeros(6, 4)[:, ::2]) is None and found(torch.zeros(4).expand(3, 4)) is None
    assert found(torch.zeros(())) == (1, 1, 1)


def test_convolutions_in_channels_last_are_served(taken):
    def steps(**changes):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        optimizer = AdamBMA(model.named_parameters(), **changes)
        for t in range(3):
            set_gradients(model.parameters(), t)
            optimizer.step()
        return params_of(model), optimizer

    found, _ = steps()
    assert is_native(taken) and not found[0].is_contiguous()
    for a, b in zip(steps(foreach=False)[0], found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("instructions", ["plain", "avx2", "avx512"])
def test_every_instruction_set_of_this_machine_gives_the_same_steps(instructions):
    """And the same sums bit by bit where they are sums of gradients only: they all add up in double."""
    best = kernels.instructions()
    try:
        kernels.instructions(instructions)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        for form in FORMS_OF:
            for dtype in NARROW:
                found, _ = run(form, dtype, fused=True, partition="unit")
                for a, b in zip(run(form, dtype, foreach=True, partition="unit")[0], found, strict=True):
                    atol = 2e-5 if dtype == torch.float32 else 1e-12 if dtype == torch.float64 else 1e-3
                    torch.testing.assert_close(b, a, rtol=4 * NARROW[dtype], atol=atol)
        assert kernels.instructions() == instructions
    finally:
        kernels.instructions(best)


# -------------------------------------------------------------------- block by block

SHORT = [(40, 33), (3, 5), (2, 8192), (5, 3, 3, 3), (6, 2), (100, 300), (257, 64), (30, 513), (11,)]


def never_by_block(monkeypatch):
    monkeypatch.setattr(correction, "CACHED_BYTES", 0)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", ["adam", "adam-eps", "weighted", "decay"])
def test_a_solve_block_by_block_is_the_one_between_passes(form, dtype, taken, monkeypatch):
    options = {"shapes": SHORT, "steps": 4, "partition": "unit", "coupling": "none"}
    found, one = run(form, dtype, **options)
    assert is_native(taken) and sum(own.by_block for own in taken) == 4
    never_by_block(monkeypatch)
    taken.clear()
    expected, two = run(form, dtype, **options)
    assert is_native(taken) and not any(own.by_block for own in taken)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=NARROW[dtype], atol=NARROW[dtype])
    for a, b in zip(two.state.values(), one.state.values(), strict=True):
        for key in a:
            torch.testing.assert_close(b[key], a[key], rtol=1e-12, atol=1e-14)
    for a, b in zip(two.block_statistics(), one.block_statistics(), strict=True):
        for x, y in zip((a.A, a.common, a.change), (b.A, b.common, b.change), strict=True):
            torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14)


def test_blocks_are_solved_one_by_one_only_where_they_stand_alone(taken):
    def by_block(form="adam", change=None, shapes=((3, 4), (6, 2), (4,)), **options):
        taken.clear()
        params = new_params(shapes=shapes)
        optimizer = make(form, params, **{"partition": "unit", **options})
        for t in range(3):
            set_gradients(params, t)
            if t == 2 and change:
                change(params)
            optimizer.step()
        return any(own.by_block for own in taken[-2:])

    assert by_block() and by_block(refresh_every=3)
    assert by_block(change=lambda params: setattr(params[0], "grad", None))  # the others stand alone as before
    assert by_block("weighted") and by_block(shapes=[(3, 1)]) and by_block(partition="element")
    assert not by_block("consistent") and not by_block("paper") and not by_block(correction=False)
    assert not by_block("adam-cap")  # squares of diagonal steps may overflow
    assert not by_block(coupling="all") and not by_block(coupling="module") and not by_block(partition="all")
    assert not by_block(foreach=False) and not by_block(shapes=[(3, 4), (3, 8193)])
    assert by_block(shapes=[(3, 4), (3, 8192)])


@pytest.mark.parametrize("form", ["weighted", "adam"])
@pytest.mark.parametrize("size", [1e17, 1e18, 5e18, 1e19])
def test_sums_that_overflow_are_noticed_before_anything_changes(form, size):
    """Squares of float32 near its limit: either nothing changes, or all stays finite.

    But for AdaGrad's sums of squares. Where they overflow it takes no step, as torch's does.
    """
    params = new_params(torch.float32, [(3, 40)])
    optimizer = make(form, params, partition="unit")
    for t in range(12):
        set_gradients(params, t, size)
        before = snapshot(optimizer)
        try:
            optimizer.step()
        except ValueError as error:
            assert "sums over them overflow" in str(error) and "Nothing was changed" in str(error)
            assert_same(snapshot(optimizer), before)
        kept = [x for state in optimizer.state.values() for key, x in state.items() if key != "sum"]
        assert all(x.isfinite().all() for x in [*params, *kept])


# -------------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("form", ["paper", "adam", "weighted"])
def test_the_number_of_threads_changes_no_bit(form):
    def bits(threads):
        torch.set_num_threads(threads)
        shapes = [(1000, 300), (500000,), (300, 1000), (10,)]
        return run(form, torch.float32, shapes=shapes, partition=lambda n, t: "unit" if t.ndim > 1 else "tensor")[0]

    one = bits(1)
    for threads in (1, 2, 3):
        assert_same(bits(threads), one)


def _steps_in_a_child(queue):
    queue.put([param.sum().item() for param in run("adam", shapes=[(1000, 300)])[0]])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python 3.12 on: a process with threads forks
def test_steps_work_after_a_fork(monkeypatch):
    torch.set_num_threads(1)  # torch's own threads do not survive a fork: only ours get two
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    here = [param.sum().item() for param in run("adam", shapes=[(1000, 300)])[0]]  # starts the threads
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_steps_in_a_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == here
    child.join(timeout=60)
    assert child.exitcode == 0


# -------------------------------------------------------------------- bad gradients


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("form", ["paper", "adam", "adam-diagonal"])
def test_a_bad_entry_anywhere_is_noticed_before_anything_changes(form, bad):
    params = new_params(torch.float32, [(3, 11), (20000,), (5,)])
    optimizer = make(form, params, fused=True, partition="unit")
    set_gradients(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    for i, place in [(0, 0), (0, 7), (0, 8), (0, 32), (1, 0), (1, 16383), (1, 16384), (1, 19999), (2, 4)]:
        set_gradients(params, 1)
        params[i].grad.view(-1)[place] = bad
        with pytest.raises(ValueError, match=r"^The gradient of .* Nothing was changed"):
            optimizer.step()
        assert_same(snapshot(optimizer), before)


# -------------------------------------------------------------------- changes between steps


def both(change, form="adam", **options):
    """Two runs with the same change in the middle, native and with torch's operations, in float64."""
    results = []
    for own in ({}, {"foreach": False}):
        params = new_params(shapes=[(3, 4), (6, 2), (4,)])
        optimizer = make(form, params, partition="unit", **options, **own)
        for t in range(6):
            set_gradients(params, t)
            if t == 3:
                params = change(optimizer, params) or params
                set_gradients(params, t)
            if t == 4:
                optimizer.zero_grad()
                set_gradients(params, t)
            optimizer.step()
        results.append((params, optimizer))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return results[0]


def test_a_state_that_is_replaced_or_deleted_is_followed():
    def replace(optimizer, params):
        optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0])
        optimizer.state[params[1]] = dict(optimizer.state[params[1]])
        optimizer.state[params[2]]["step"] = torch.tensor(7.0)

    both(replace)
    both(lambda optimizer, params: optimizer.state.clear())

    def drop_statistics(optimizer, params):
        del optimizer.state[params[0]]["U"]

    both(drop_statistics)
    both(drop_statistics, coupling="all")


def test_memory_that_is_replaced_is_followed():
    def replace(optimizer, params):
        params[0].data = params[0].data.clone() + 1
        params[1].data = params[1].data.mT.contiguous().mT
        optimizer.state[params[2]]["exp_avg"].data = torch.ones(4, dtype=torch.float64)
        optimizer.state[params[2]]["step"] += 1

    both(replace)

    def turn(optimizer, params):  # the same address, other strides
        square = nn.Parameter(torch.arange(9.0, dtype=torch.float64).view(3, 3))
        optimizer.add_param_group({"params": [("square", square)]})
        for _ in range(2):
            square.grad = torch.ones_like(square)
            optimizer.step()
        square.data = square.data.mT

    both(turn)


def test_parameters_that_are_swapped_come_and_go():
    def swap(optimizer, params):
        fresh = nn.Parameter(torch.zeros_like(params[0]))
        optimizer.param_groups[0]["params"][0] = fresh
        return [fresh, *params[1:]]

    both(swap)

    def lose(optimizer, params):
        params[1].grad = None
        optimizer.step()

    both(lose)
    both(lose, coupling="all")


def test_options_that_change_take_effect(taken):
    def change(optimizer, params):
        optimizer.param_groups[0].update(lr=torch.tensor(0.01), betas=(0.5, 0.6), correction_cap=0.1, maximize=True)

    both(change)
    both(lambda optimizer, params: optimizer.param_groups[0].update(correction=False))
    both(lambda optimizer, params: optimizer.param_groups[0].update(variant="weighted", lr=0.2), form="paper")
    taken.clear()
    both(lambda optimizer, params: optimizer.param_groups[0].update(fused=False))
    assert is_native(taken[:2]) and isinstance(taken[-1], passes.Foreach)


def test_a_model_that_changes_its_dtype_goes_on(taken):
    model = Net()
    optimizer = AdamBMA(model.named_parameters())
    train(model, optimizer, 2)
    model.double()
    train(model, optimizer, range(2, 4))
    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.float64 and is_native(taken)


def test_gradients_are_freed_and_a_stale_graph_is_noticed():
    model = Net()
    optimizer = AdamBMA(model.parameters())
    train(model, optimizer, 3)
    seen = weakref.ref(model.head.weight.grad)
    optimizer.zero_grad()
    gc.collect()
    assert seen() is None
    loss = (model.head.weight.exp() * model.head.weight).sum()
    set_gradients(model.parameters(), 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# -------------------------------------------------------------------- the choice


def test_fused_has_torchs_meaning(taken):
    model = Net()
    for options, expected in [
        ({}, True),
        ({"fused": True}, True),
        ({"fused": False}, False),
        ({"foreach": True}, False),
        ({"foreach": False}, False),
    ]:
        taken.clear()
        train(model, AdamBMA(model.named_parameters(), **options), 1)
        assert is_native(taken) == expected, options


@pytest.mark.parametrize(
    ("param", "options", "reason"),
    [
        (torch.zeros(2, 2, device="meta"), {}, "is a Parameter on meta"),
        (torch.zeros(2, 2).to(torch.float8_e4m3fn), {}, "is float8_e4m3fn"),
        (torch.zeros(4, 4), {"partition": stripes}, "has blocks that are not regular in memory"),
        (torch.zeros(4, 4)[:, ::2], {}, "has blocks that are not regular in memory"),
        (torch.zeros(2, 3, 4), {"partition": lambda n, t: (0, 2)}, "has blocks that are not regular in memory"),
    ],
)
def test_what_the_kernels_cannot_serve_is_an_error_with_fused_true(param, options, reason):
    message = rf"^AdamBMA\(fused=True\) takes native kernels, which cannot serve 'w': it {reason}. Take fused=None.$"
    with pytest.raises(RuntimeError, match=message):
        AdamBMA([("w", nn.Parameter(param))], fused=True, **options)


def test_what_they_cannot_serve_in_a_step_is_an_error_before_anything_changes(taken):
    params = new_params(shapes=[(3, 4), (4, 4)])
    optimizer = AdamBMA([("a", params[0]), ("b", params[1])], fused=True)
    set_gradients(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    params[1].grad = params[1].grad.mT
    with pytest.raises(RuntimeError, match=r"cannot serve 'b': it has a gradient that has another .* Take fused="):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    optimizer.param_groups[0]["fused"] = None
    taken.clear()
    optimizer.step()
    assert [isinstance(one, kernels.Native) for one in taken] == [True, False]


def test_a_gradient_without_memory_never_reaches_a_kernel(taken):
    param = nn.Parameter(torch.zeros(3, 4))
    optimizer = AdamBMA([param], fused=True)
    param.grad = torch._efficientzerotensor(3, 4)
    with pytest.raises(RuntimeError, match="it has a gradient that has another dtype, shape or layout"):
        optimizer.step()
    assert not optimizer.state
    optimizer.param_groups[0]["fused"] = None
    optimizer.step()
    assert not is_native(taken)


class Odd(torch.Tensor):
    """Whatever a subclass may mean, its memory does not tell."""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: (p, p, [p.double()]), "has state that has another dtype, shape or layout"),
        (lambda p: (p, p[:1], [p]), "has a gradient that has another dtype, shape or layout"),
        (lambda p: (p, torch._neg_view(p), [p]), "has a gradient that has another dtype, shape or layout"),
        (
            lambda p: (p, torch._efficientzerotensor(2, 3), [p]),
            "has a gradient that has another dtype, shape or layout",
        ),
        (lambda p: (p, p.to_sparse(), [p]), "has a gradient that has another dtype, shape or layout"),
        (lambda p: (p, torch.zeros(2, 3, device="meta"), [p]), "has a gradient that is a Tensor on meta"),
        (lambda p: (p.as_subclass(Odd), p, [p]), "is a Odd on cpu"),
    ],
)
def test_every_reason_is_named(spoil, reason):
    cut = TensorBlocks("p", (2, 3), "")
    p = torch.zeros(2, 3)
    assert kernels.why_not_native(p, p, [p], cut) is None
    assert kernels.why_not_native(*spoil(p), cut) == reason


@pytest.mark.parametrize("spoil", ["dtype", "shape", "strides", "device", "kind", "negative", "labels"])
def test_whole_lists_are_refused_for_a_single_odd_tensor(spoil):
    """`serve_all` says yes only where `why_not_native` has nothing to say."""
    odd = {
        "dtype": torch.zeros(2, 3).double(),
        "shape": torch.zeros(2, 2),
        "strides": torch.zeros(3, 2).T,
        "device": torch.zeros(2, 3, device="meta"),
        "kind": torch.zeros(2, 3).as_subclass(Odd),
        "negative": torch._neg_view(torch.zeros(2, 3)),
        "labels": torch.zeros(2, 3),
    }[spoil]
    cuts = [TensorBlocks("p", (2, 3), "", (0,))] * 3
    lists = [[torch.zeros(2, 3) for _ in range(3)] for _ in range(4)]
    params, grads, *moments = lists
    assert kernels.serve_all(params, grads, [x for xs in moments for x in xs], cuts)
    for place in range(1 if spoil == "negative" else 4):
        if spoil == "labels":
            cuts = [*cuts[:2], TensorBlocks("p", (2, 3), "", labels=torch.zeros(6, dtype=torch.int64))]
        changed = [list(xs) for xs in lists]
        changed[1 if spoil == "negative" else place][2] = odd
        param, grad, first, second = (xs[2] for xs in changed)
        params, grads, *moments = changed
        assert not kernels.serve_all(params, grads, [x for xs in moments for x in xs], cuts)
        assert kernels.why_not_native(param, grad, [first, second], cuts[2]) is not None


def test_without_kernels_torch_serves_and_only_fused_true_says_so(monkeypatch, recwarn, taken):
    expected, _ = run("adam", foreach=True)
    monkeypatch.setattr(kernels, "_library", None)
    assert not kernels.is_available() and kernels.instructions() is None
    found, _ = run("adam", foreach=None)
    assert not any(isinstance(one, kernels.Native) for one in taken)
    assert_same(found, expected)
    assert not recwarn
    with pytest.raises(RuntimeError, match=r"^AdamBMA\(fused=True\) needs native kernels. .* Install a C\+\+ compiler"):
        make("adam", new_params(), fused=True)
    with pytest.raises(RuntimeError, match=r"^AdaGradFull has no native kernels"):
        AdaGradFull(new_params(shapes=[(2,)]), fused=True)


def test_the_passes_themselves_take_lists_as_the_others_do():
    rule = Rule(FORMS["balanced"], (0.9, 0.99), 1e-8, 0.1, False, 0.01)
    lists, sums = [new_params(shapes=[(3, 4), (5, 2)]) for _ in range(12)], []
    for k, implementation in enumerate((kernels.Native, passes.Foreach, Reference)):
        params, grads, first, second = ([x.data for x in xs] for xs in lists[4 * k : 4 * k + 4])
        cuts = [TensorBlocks("p", tuple(p.shape), "", (0,)) for p in params]
        sums.append(torch.zeros(4, 8, dtype=torch.float64))
        second, shapes = [r.square_() for r in second], [cut.geometry for cut in cuts]
        one = implementation(rule, 3, params, grads, first, second, cuts, sums[-1], shapes)
        one.block_sums()
        one.apply_(sums[-1][0].contiguous(), None)
    for other in (1, 2):
        torch.testing.assert_close(sums[0], sums[other], rtol=1e-12, atol=1e-12)
        for a, b in zip(lists[:4], lists[4 * other : 4 * other + 4], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
