"""The native kernels: equal to the reference on every kind of tensor, whatever the threads; the rest is refused."""

import gc
import math
import multiprocessing
import weakref

import pytest
import torch
from blockmean.optim.native import solver
from torch import nn

from blockmean import AdaGradBMA, AdaGradFull, AdamBMA
from blockmean._linalg import inverse_root_minus_identity, times_inverse_root_minus_identity
from blockmean.blocks import TensorBlocks
from blockmean.optim import correction, native, passes
from blockmean.optim.forms import FORMS, Rule
from support.optimizers import Net, assert_same, params_of, set_gradients, snapshot, stripes, train

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the kernels were not built")

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


def parts_of(optimizer, number=0):
    """The implementations that the last step of a group took."""
    return [part.passes for part in optimizer._works[number].plan.parts]


def is_native(optimizer, number=0):
    return all(isinstance(passes_, native.Table) for passes_ in parts_of(optimizer, number))


# -------------------------------------------------------------------- against the reference


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("form", FORMS_OF)
def test_steps_equal_those_of_the_reference(form, partition):
    shapes = [shape for shape in SHAPES if math.prod(shape) < 10000 or partition in ("tensor", "unit")]
    expected, _ = run(form, foreach=False, partition=partition, shapes=shapes)
    found, optimizer = run(form, fused=True, partition=partition, shapes=shapes)
    assert is_native(optimizer)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS_OF)
def test_they_do_in_every_dtype(form, dtype):
    """Up to rounding of float32 sums, or one unit in the last place of the parameter."""
    expected, slow = run(form, dtype, foreach=False, partition="unit")
    found, optimizer = run(form, dtype, fused=True, partition="unit")
    assert is_native(optimizer)
    for a, b in zip(expected, found, strict=True):
        assert b.dtype == dtype
        torch.testing.assert_close(b, a, rtol=4 * NARROW[dtype], atol=2e-5 if dtype == torch.float32 else 1e-3)
    for a, b in zip(slow.state.values(), optimizer.state.values(), strict=True):
        assert {key: value.dtype for key, value in a.items()} == {key: value.dtype for key, value in b.items()}


@pytest.mark.parametrize("coupling", ["all", "module", "none"])
@pytest.mark.parametrize("form", ["paper", "consistent", "weighted", "adam", "adam-cap"])
def test_every_coupling_has_the_same_statistics_as_the_reference(form, coupling):
    shapes = [(3, 5), (7,), (4, 6, 2, 2), (), (16, 33)]
    options = {"coupling": coupling, "partition": "unit", "shapes": shapes, "steps": 5}
    if not form.startswith("adam"):
        options["initial_accumulator_value"] = 0.1
    expected, slow = run(form, foreach=False, **options)
    found, fast = run(form, fused=True, **options)
    assert fast._works[0].plan.solver is not None and slow._works[0].plan.solver is None
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
def test_tasks_that_take_turns_have_the_sums_of_the_reference(form, dtypes):
    """Blocks of several tasks, of part of one and of no whole vector; four tasks at a time, or not if they differ."""

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
        return native.geometry(tensor.shape, tensor.stride(), TensorBlocks("p", tuple(tensor.shape), "", dims))

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


def test_convolutions_in_channels_last_are_served():
    def steps(**changes):
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
        optimizer = AdamBMA(model.named_parameters(), **changes)
        for t in range(3):
            set_gradients(model.parameters(), t)
            optimizer.step()
        return params_of(model), optimizer

    found, optimizer = steps()
    assert is_native(optimizer) and not found[0].is_contiguous()
    for a, b in zip(steps(foreach=False)[0], found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 34, 90, 400])
@pytest.mark.parametrize("kind", ["random", "singular", "identity", "diagonal"])
def test_the_root_without_eigenvectors(n, kind):
    rng = torch.Generator().manual_seed(n)
    G = torch.randn(n, n if kind == "random" else 1, generator=rng, dtype=torch.float64)
    A = G @ G.T / n
    if kind == "identity":
        A = torch.eye(n, dtype=torch.float64)
    elif kind == "diagonal":
        A = torch.diag(torch.logspace(-6, 6, n, dtype=torch.float64))
    b, out = torch.randn(n, generator=rng, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    made = native._kernels.solver(n, [])
    assert solver.times_root(made, A.data_ptr(), n, 0.1, b.data_ptr(), out.data_ptr())
    torch.testing.assert_close(out, inverse_root_minus_identity(A, 0.1) @ b, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(out, times_inverse_root_minus_identity(A, 0.1, b), rtol=1e-9, atol=1e-11)
    A[-1, -1] = torch.nan
    assert not solver.times_root(made, A.data_ptr(), n, 0.1, b.data_ptr(), out.data_ptr())


def times_root(A, floor, b):
    out = torch.full_like(b, torch.nan)
    made = native._kernels.solver(len(A), [])
    assert solver.times_root(made, A.data_ptr(), len(A), floor, b.data_ptr(), out.data_ptr())
    return out


def near_identity(n, norm, seed=0):
    """A symmetric matrix whose rows differ from those of I by `norm` at most, summed over their entries, and b."""
    rng = torch.Generator().manual_seed(seed)
    C = torch.randn(n, n, generator=rng, dtype=torch.float64)
    C = C + C.T
    C *= norm / C.abs().sum(1).max()
    return torch.eye(n, dtype=torch.float64) + C, C, torch.randn(n, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("n", [1, 2, 5, 34, 150])
@pytest.mark.parametrize("norm", [0.0, 1e-12, 1e-3, 0.3, 0.7, 0.899, 0.95, 3.0])
@pytest.mark.parametrize("floor", [1e-10, 0.1, 0.9, 1.0])
def test_roots_near_the_identity_and_far_from_it_are_those_of_torch(n, norm, floor):
    """Near it they are a series, which knows no floor: it must not be taken where the floor matters."""
    A, _, b = near_identity(n, norm)
    found, expected = times_root(A, floor, b), times_inverse_root_minus_identity(A, floor, b)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13 * float(b.abs().max()))


@pytest.mark.parametrize("row", [0, 3, 9])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_matrix_that_is_not_finite_is_no_matrix_near_the_identity(row, bad):
    A, _, b = near_identity(10, 0.1)
    A[row, 4] = A[4, row] = bad
    made, out = native._kernels.solver(10, []), torch.zeros_like(b)
    assert not solver.times_root(made, A.data_ptr(), 10, 0.1, b.data_ptr(), out.data_ptr())


@pytest.mark.parametrize("n", [3, 34, 150])
@pytest.mark.parametrize("norm", [1e-4, 1e-9, 1e-14])
def test_the_root_of_nearly_the_identity_keeps_its_digits(n, norm):
    """Eigenvalues minus one have a rounding error of 1e-16, whatever their size; the series does not subtract."""
    A, _, b = near_identity(n, norm)
    C = A - torch.eye(n, dtype=torch.float64)  # as A has it, exactly
    expected = C @ (C @ (C @ b * (-5 / 16)) + C @ b * (3 / 8)) - C @ b / 2
    torch.testing.assert_close(times_root(A, 0.1, b), expected, rtol=1e-12, atol=0)


# -------------------------------------------------------------------- block by block

LOCAL = [(40, 33), (3, 5), (7, 1), (2, 8192), (2, 8193), (5, 3, 3, 3), (6, 2), (11,)]
TURNS = [(40, 33), (100, 300), (3, 5), (257, 64), (64, 1000), (9, 2), (30, 513), (2, 8192)]  # tasks take turns
LOCAL_FORMS = {
    "weighted": {},
    "decay": {"initial_accumulator_value": 0.1},
    "adam": {"weight_decay": 0.1},
    "adam-eps": {"coupling": "none"},
}


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("form", LOCAL_FORMS)
@pytest.mark.parametrize("shapes", [LOCAL, TURNS], ids=["mixed", "turns"])
def test_a_solve_block_by_block_is_the_one_between_passes_bit_by_bit(shapes, form, dtype, monkeypatch):
    """So it does not matter which of them a step takes: the first one after loading takes the other."""
    options = {"shapes": shapes, "steps": 4, "partition": "unit", **LOCAL_FORMS[form]}
    found, local = run(form, dtype, **options)
    assert local._works[0].plan.parts[0].passes.is_local
    monkeypatch.setattr(correction.Plan, "is_local", lambda plan, layout: False)
    expected, apart = run(form, dtype, **options)
    assert not apart._works[0].plan.parts[0].passes.is_local
    assert_same(found, expected)
    assert_same(snapshot(local), snapshot(apart))
    for a, b in zip(local.block_statistics(), apart.block_statistics(), strict=True):
        assert_same([a.A, a.common, a.change], [b.A, b.common, b.change])


def test_blocks_are_solved_one_by_one_only_where_they_stand_alone():
    def is_local(form="adam", change=None, **options):
        params = new_params(shapes=[(3, 4), (6, 2), (4,)])
        optimizer = make(form, params, **{"partition": "unit", **options})
        for t in range(3):
            set_gradients(params, t)
            if t == 2 and change:
                change(params)
            optimizer.step()
        return any(getattr(own, "is_local", False) for own in parts_of(optimizer)) if optimizer._works else False

    assert is_local() and is_local("weighted") and is_local(refresh_every=3)
    assert not is_local("paper") and not is_local("consistent") and not is_local(correction=False)
    assert not is_local("adam-cap")  # squares of diagonal steps may overflow
    assert not is_local(coupling="all") and not is_local(coupling="module") and not is_local(partition="all")
    assert not is_local(foreach=False) and not is_local(change=lambda params: setattr(params[0], "grad", None))
    assert not is_local(change=lambda params: setattr(params[0], "data", params[0].data.clone()))  # nobody has looked


@pytest.mark.parametrize("form", ["weighted", "adam"])
@pytest.mark.parametrize("size", [1e17, 1e18, 5e18, 1e19])
def test_sums_that_overflow_are_noticed_block_by_block_too(form, size):
    """Squares of float32 near its limit: either nothing changes, or the step is that of the two passes."""
    params = new_params(torch.float32, [(3, 40)])
    optimizer = make(form, params, partition="unit")
    for t in range(12):
        set_gradients(params, t, size)
        before = snapshot(optimizer)
        try:
            optimizer.step()
        except ValueError as error:
            assert "overflow, though every gradient is finite. Nothing was changed" in str(error)
            assert_same(snapshot(optimizer), before)
        assert all(x.isfinite().all() for state in optimizer.state.values() for x in state.values())


def test_moments_that_somebody_has_spoilt_stop_their_own_block():
    params = new_params(shapes=[(3, 4), (6, 2)])
    optimizer = make("adam", params, partition="unit")
    for t in range(2):
        set_gradients(params, t)
        optimizer.step()
    optimizer.state[params[1]]["exp_avg"][4, 1] = torch.nan
    before = [param.detach().clone() for param in params]
    with pytest.raises(ValueError, match=r"^The state of layer0.p1 is not finite, .* layer0.p1\[4\] overflow. The"):
        optimizer.step()
    assert_same(params[1].detach()[4], before[1][4])
    assert (params[1].detach()[:4] != before[1][:4]).all() and params[1].isfinite().all()


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


def test_a_state_that_is_replaced_or_deleted_is_noticed():
    def replace(optimizer, params):
        optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0])
        optimizer.state[params[1]] = dict(optimizer.state[params[1]])
        del optimizer.state[params[1]]["exp_avg_sq"]
        optimizer.state[params[2]]["step"] = torch.tensor(7.0)

    both(replace)
    both(lambda optimizer, params: optimizer.state.clear())

    def drop_statistics(optimizer, params):
        del optimizer.state[params[0]]["U"]

    both(drop_statistics)
    both(drop_statistics, coupling="all")


def test_memory_that_is_replaced_is_noticed():
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


def test_options_that_change_take_effect():
    def change(optimizer, params):
        optimizer.param_groups[0].update(lr=torch.tensor(0.01), betas=(0.5, 0.6), correction_cap=0.1, maximize=True)

    both(change)
    both(lambda optimizer, params: optimizer.param_groups[0].update(correction=False))
    both(lambda optimizer, params: optimizer.param_groups[0].update(variant="weighted", lr=0.2), form="paper")
    _, optimizer = both(lambda optimizer, params: optimizer.param_groups[0].update(fused=False))
    assert not is_native(optimizer)


def test_a_model_that_changes_its_dtype_goes_on():
    model = Net()
    optimizer = AdamBMA(model.named_parameters())
    train(model, optimizer, 2)
    model.double()
    train(model, optimizer, range(2, 4))
    assert optimizer.state[model.head.weight]["exp_avg"].dtype == torch.float64 and is_native(optimizer)


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


def test_fused_has_torchs_meaning():
    model = Net()
    for options, expected in [
        ({}, True),
        ({"fused": True}, True),
        ({"fused": False}, False),
        ({"foreach": True}, False),
        ({"foreach": False}, False),
    ]:
        optimizer = AdamBMA(model.named_parameters(), **options)
        train(model, optimizer, 1)
        assert is_native(optimizer) == expected, options


@pytest.mark.parametrize(
    ("param", "options", "reason"),
    [
        (torch.zeros(2, 2, device="meta"), {}, "is on meta"),
        (torch.zeros(2, 2).to(torch.float8_e4m3fn), {}, "is float8_e4m3fn"),
        (torch.zeros(4, 4), {"partition": stripes}, "is cut into blocks by labels"),
        (torch.zeros(4, 4)[:, ::2], {}, "has gaps or overlaps in memory"),
        (torch.zeros(2, 3, 4), {"partition": lambda n, t: (0, 2)}, "has blocks that are not regular in memory"),
    ],
)
def test_what_the_kernels_cannot_serve_is_an_error_with_fused_true(param, options, reason):
    message = rf"^AdamBMA\(fused=True\) takes native kernels, which cannot serve 'w': it {reason}. Take fused=None.$"
    with pytest.raises(RuntimeError, match=message):
        AdamBMA([("w", nn.Parameter(param))], fused=True, **options)


def test_what_they_cannot_serve_in_a_step_is_an_error_before_anything_changes():
    params = new_params(shapes=[(3, 4), (4, 4)])
    optimizer = AdamBMA([("a", params[0]), ("b", params[1])], fused=True)
    set_gradients(params, 0)
    optimizer.step()
    before = snapshot(optimizer)
    params[1].grad = params[1].grad.mT
    with pytest.raises(RuntimeError, match=r"cannot serve 'b': it has a gradient that has other strides. Take fused="):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    optimizer.param_groups[0]["fused"] = None
    optimizer.step()
    assert [isinstance(part, native.Table) for part in parts_of(optimizer)] == [True, False]


def test_parameters_that_share_memory_go_to_torch():
    memory = torch.ones(10, dtype=torch.float64)
    params = [nn.Parameter(memory[:6]), nn.Parameter(memory[4:]), nn.Parameter(torch.ones(3, dtype=torch.float64))]
    optimizer = AdamBMA(params, partition="tensor")
    set_gradients(params, 0)
    optimizer.step()
    assert [isinstance(part, native.Table) for part in parts_of(optimizer)] == [False, True]
    assert native.overlapping([(0, memory), (1, memory[3:4]), (2, torch.ones(3))]) == {0, 1}
    with pytest.raises(RuntimeError, match="it shares memory with another"):
        optimizer.param_groups[0]["fused"] = True
        optimizer._works.clear()
        optimizer.step()


def test_a_gradient_without_memory_never_reaches_a_kernel():
    param = nn.Parameter(torch.zeros(3, 4))
    optimizer = AdamBMA([param])
    param.grad = torch.ones(3, 4)
    optimizer.step()
    before = snapshot(optimizer)
    param.grad = torch._efficientzerotensor(3, 4)
    with pytest.raises(RuntimeError, match="A gradient has no memory of its own"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)


class Odd(torch.Tensor):
    """Whatever a subclass may mean, its memory does not tell."""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda p: (p, p, [p.double()]), "has state that has another dtype, shape or layout"),
        (lambda p: (p, p[:1], [p]), "has a gradient that has another dtype, shape or layout"),
        (lambda p: (p, torch._neg_view(p), [p]), "has a gradient that is not stored as it is"),
        (lambda p: (p, torch._efficientzerotensor(2, 3), [p]), "has a gradient that is not stored as it is"),
        (lambda p: (p, p.to_sparse(), [p]), "has a gradient that has another dtype, shape or layout"),
        (lambda p: (p, torch.zeros(2, 3, device="meta"), [p]), "has a gradient that is on meta"),
        (lambda p: (p.as_subclass(Odd), p, [p]), "is a Odd"),
    ],
)
def test_every_reason_is_named(spoil, reason):
    cut = TensorBlocks("p", (2, 3), "")
    p = torch.zeros(2, 3)
    assert native.refusal(p, p, [p], cut) is None
    assert native.refusal(*spoil(p), cut) == reason


def test_without_kernels_torch_serves_and_only_fused_true_says_so(monkeypatch, recwarn):
    expected, _ = run("adam", foreach=False)
    monkeypatch.setattr(native, "_kernels", None)
    assert not native.is_available() and native.instructions() is None
    found, optimizer = run("adam", foreach=None)
    assert not any(isinstance(part, native.Table) for part in parts_of(optimizer))
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
    assert not recwarn
    with pytest.raises(RuntimeError, match=r"^AdamBMA\(fused=True\) needs native kernels. .* Install a C\+\+ compiler"):
        make("adam", new_params(), fused=True)
    with pytest.raises(RuntimeError, match=r"^AdaGradFull has no native kernels"):
        AdaGradFull(new_params(shapes=[(2,)]), fused=True)


def test_the_functions_themselves_take_lists_as_the_others_do():
    rule = Rule(FORMS["balanced"], (0.9, 0.99), 1e-8, 0.1, False, 0.01)
    lists = [new_params(shapes=[(3, 4), (5, 2)]) for _ in range(8)]
    sums = []
    for (params, grads, first, second), implementation in ((lists[:4], None), (lists[4:], passes.REFERENCE)):
        tensors = passes.Tensors(
            [p.data for p in params],
            [g.data for g in grads],
            [m.data for m in first],
            [r.data.square_() for r in second],
            [3, 3],
            [TensorBlocks("p", tuple(p.shape), "", (0,)) for p in params],
        )
        chosen = implementation or passes.choose(tensors, None, True)
        assert implementation or isinstance(chosen, passes.NATIVE)
        sums.append(chosen.block_sums(rule, tensors).clone())
        chosen.apply_(rule, tensors, sums[-1][0].contiguous(), [])
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)
    for a, b in zip(lists[0] + lists[2] + lists[3], lists[4] + lists[6] + lists[7], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    tensors = passes.Tensors([torch.zeros(2)], [torch.zeros(4)[::2]], [], [torch.zeros(2)], [1], [tensors.cuts[0]])
    with pytest.raises(RuntimeError, match="fused=True cannot be followed: a parameter has a gradient that has other"):
        passes.choose(tensors, None, True)
