"""Tensors of every kind in every optimizer: dtypes, strides, devices; mixed precision, clipping, compilation."""

import pytest
import torch
from torch import nn

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

SHAPES = [(3, 2, 2, 2), (4, 3), (5,), (), (1, 1)]


def named(tensors):
    return [(f"layer{i}.weight", tensor) for i, tensor in enumerate(tensors)]


def random_params(dtype=torch.float32, shapes=SHAPES):
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng).to(dtype)) for shape in shapes]


def run(case, params, steps=4, **changes):
    optimizer = case(named(params), **changes)
    for t in range(steps):
        set_gradients(params, t)
        optimizer.step()
    return optimizer


# -------------------------------------------------------------------- dtypes


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_rounded_once_per_step(case, dtype):
    """One step from the same values and gradients is the rounded float32 step; the state is float32."""
    half = random_params(dtype)
    single = [nn.Parameter(param.detach().float()) for param in half]
    optimizers = [case(named(params)) for params in (half, single)]
    for t in range(4):
        with torch.no_grad():
            for h, s in zip(half, single, strict=True):
                s.copy_(h)
        set_gradients(half, t)
        for h, s in zip(half, single, strict=True):
            s.grad = h.grad.float()
        for optimizer in optimizers:
            optimizer.step()
        assert_same([h.detach() for h in half], [s.detach().to(dtype) for s in single])
    assert_same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


@every_optimizer
def test_dtypes_may_be_mixed_in_a_group(case):
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    params = [nn.Parameter(param.detach().to(dtype)) for param, dtype in zip(random_params(), dtypes, strict=True)]
    before = [param.detach().clone() for param in params]
    optimizer = run(case, params)
    for param, was, dtype in zip(params, before, dtypes, strict=True):
        assert param.dtype == dtype and param.isfinite().all() and not torch.equal(param, was)
        numbers = [value for value in optimizer.state[param].values() if value.is_floating_point()]
        assert len(numbers) >= 1 and all(value.dtype in (torch.float32, torch.float64) for value in numbers)


@every_optimizer
def test_a_model_may_change_its_dtype_between_steps(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    model.double()
    train(model, optimizer, range(2, 4))
    reference, plain = pair(case)
    train(reference, plain, 4)
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert param.dtype == torch.float64
        found, expected = param.detach().float(), expected.detach()
        if case.id in ("anova", "anova-all_units") and name == "head.weight":
            # Gradients of a softmax add up to zero over the classes. Two means of three classes hold all that differs
            # between them, so the sum is the whole remainder; a third mean is the sum itself. Either way it has an Adam
            # of its own and is pure rounding error, which ν keeps to a sixteenth of a step; it differs between dtypes.
            torch.testing.assert_close(found.mean(0), expected.mean(0), rtol=0, atol=0.05 / 16)
            found, expected = found - found.mean(0), expected - expected.mean(0)
        # float32 rounding of two steps, multiplied by at most floor^-½ = 100 in the full matrix. A grand mean that is
        # near zero but for rounding takes up to a sixteenth of a step, as the sum over classes does.
        rounding = 0.05 / 16 if case.id in ("anova", "anova-all_units") else 2e-5
        torch.testing.assert_close(found, expected, rtol=0, atol=rounding)


# -------------------------------------------------------------------- strides and shapes


@every_optimizer
def test_strides_play_no_part(case):
    """Transposed, sliced, channels-last parameters and expanded or transposed gradients, against contiguous ones."""
    base = random_params(torch.float64)
    values = [param.detach() for param in base]
    strided = [
        nn.Parameter(values[0].contiguous(memory_format=torch.channels_last)),
        nn.Parameter(values[1].t().contiguous().t()),
        nn.Parameter(torch.stack([values[2], values[2]], 1)[:, 0]),
        nn.Parameter(values[3].clone()),
        nn.Parameter(values[4].clone()),
    ]
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous() and not strided[2].is_contiguous()
    optimizers = [case(named(params)) for params in (base, strided)]
    for t in range(4):
        set_gradients(base, t)
        base[1].grad = base[1].grad[:1].expand(4, 3).clone()
        for a, b in zip(base, strided, strict=True):
            b.grad = a.grad.clone(memory_format=torch.preserve_format)
        strided[1].grad = base[1].grad[:1].clone().expand(4, 3)
        assert strided[1].grad.stride() == (0, 1)
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(base, strided, strict=True):
        # Entries are summed in a different order; floor^-½ = 1e4 for the full matrix.
        torch.testing.assert_close(b.detach(), a.detach(), rtol=0, atol=1e-10)


@every_optimizer
def test_a_single_number_can_be_optimized_in_any_shape(case):
    found = []
    for shape in [(), (1,), (1, 1, 1, 1)]:
        param = nn.Parameter(torch.full(shape, 3.0, dtype=torch.float64))
        optimizer = case([("module.weight", param)])
        for _ in range(5):
            optimizer.zero_grad()
            param.square().sum().backward()
            before = param.item()
            optimizer.step()
            assert 0 < param.item() < before
        found.append(param.item())
    assert found[0] == found[1] == found[2]


@every_optimizer
def test_empty_parameters_are_left_alone(case):
    full, alone = random_params(), random_params()
    empty = [nn.Parameter(torch.zeros(shape)) for shape in [(0,), (3, 0), (0, 2, 2)]]
    a, b, c = [(f"void{i}.weight", param) for i, param in enumerate(empty)]
    optimizer = case([a, *named(full)[:2], b, *named(full)[2:], c])
    twin = case(named(alone))
    for t in range(3):
        set_gradients(full, t)
        set_gradients(alone, t)
        set_gradients(empty, t)
        optimizer.step()
        twin.step()
    assert_same([p.detach() for p in full], [p.detach() for p in alone])
    only = case([("void.weight", nn.Parameter(torch.zeros(0, 2)))])
    set_gradients(only.param_groups[0]["params"], 0)
    only.step()
    only.load_state_dict(only.state_dict())


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_never_changed(case, dtype):
    params = random_params(dtype)
    optimizer = case(named(params), weight_decay=0.1, maximize=True)
    for t in range(3):
        set_gradients(params, t)
        before = [(param.grad, param.grad.clone(), param.grad._version) for param in params]
        optimizer.step()
        for param, (grad, bits, version) in zip(params, before, strict=True):
            assert param.grad is grad and torch.equal(grad, bits) and grad._version == version


@every_optimizer
def test_gradients_may_be_part_of_a_graph(case):
    model, optimizer = pair(case)
    params = list(model.parameters())
    for param, grad in zip(params, torch.autograd.grad(loss_of(model, 0), params, create_graph=True), strict=True):
        param.grad = grad
    assert model.head.weight.grad.requires_grad
    optimizer.step()
    assert not any(value.requires_grad for state in optimizer.state.values() for value in state.values())
    optimizer.zero_grad()  # otherwise the graph keeps itself alive
    twin, plain = pair(case)
    train(twin, plain, 1)
    assert_same(snapshot(optimizer), snapshot(plain))


# -------------------------------------------------------------------- what is refused


@every_class
def test_sparse_gradients_are_refused_before_anything_has_changed(case):
    table = nn.Embedding(4, 2, sparse=True)
    other = nn.Parameter(torch.ones(2))
    optimizer = case([("other", other), ("table", table.weight)])
    before = snapshot(optimizer)
    (table(torch.tensor([1])) * other).sum().backward()
    message = f"^{case.owner} does not support sparse gradients. 'table' has one. Make its layer with sparse=False.$"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert not optimizer.state


@every_class
def test_a_group_on_several_devices_is_refused_before_anything_has_changed(case):
    here, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    first = nn.Parameter(torch.ones(2))
    optimizer = case([{"params": [first]}, {"params": [here, there]}])
    for param in (first, here, there):
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match=f"^{case.owner} processes .* one device. Got cpu and meta. .*separate"):
        optimizer.step()
    assert torch.equal(first, torch.ones(2)) and not optimizer.state
    there.grad = None  # it then takes no part
    optimizer.step()
    assert not torch.equal(first, torch.ones(2)) and not torch.equal(here, torch.ones(2))


@every_optimizer
def test_the_default_device_plays_no_part_in_construction(case):
    model, twin = Net(), Net()
    with torch.device("meta"):
        optimizer = case.of(model)
    plain = case.of(twin)
    train(model, optimizer, 2)
    train(twin, plain, 2)
    assert_same(snapshot(optimizer), snapshot(plain))


# -------------------------------------------------------------------- in training loops


@every_class
def test_a_gradient_scaler_leaves_out_steps_with_infinite_gradients(case):
    model, optimizer = pair(case)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    twin, plain = pair(case)
    for t in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, t)).backward()
        if t == 2:
            model.head.weight.grad[0, 0] = torch.inf
            before = snapshot(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if t == 2:
            assert_same(snapshot(optimizer), before)
        else:
            train(twin, plain, range(t, t + 1))
    # The scale is a power of two: no rounding.
    assert_same(snapshot(optimizer), snapshot(plain))
    assert scaler.get_scale() == 512.0


@every_class
def test_clipped_gradients(case):
    model, optimizer = pair(case)
    twin, by_hand = pair(case)
    for t in range(4):
        for m in (model, twin):
            m.zero_grad()
            loss_of(m, t).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        for param in twin.parameters():
            param.grad = param.grad * (0.01 / (norm + 1e-6))
        optimizer.step()
        by_hand.step()
    assert_same(snapshot(optimizer), snapshot(by_hand))


@every_class
def test_autocast_around_a_step_plays_no_part(case):
    model, optimizer = pair(case)
    twin, plain = pair(case)
    for t in range(3):
        train(twin, plain, range(t, t + 1))
        optimizer.zero_grad()
        loss_of(model, t).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    assert_same(snapshot(optimizer), snapshot(plain))


@every_class
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_function_may_call_step(case):
    model, optimizer = pair(case)
    twin, plain = pair(case)
    torch.compiler.reset()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for t in range(3):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        step()
        train(twin, plain, range(t, t + 1))
    assert_same(snapshot(optimizer), snapshot(plain))
    torch.compiler.reset()


@every_class
def test_steps_can_be_profiled(case):
    model, optimizer = pair(case)
    with torch.autograd.profiler.profile() as profile:
        train(model, optimizer, 1)
    assert f"Optimizer.step#{case.owner}.step" in {event.name for event in profile.function_events}


def test_the_model_of_these_tests_has_parameters_of_every_kind():
    assert sorted(param.ndim for param in Net().parameters()) == [0, 1, 1, 2, 4]
    assert sum(param.numel() for param in Net().parameters()) == 38
