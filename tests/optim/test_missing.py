"""Missing gradients, frozen parameters and deleted state, in every optimizer."""

import pytest
import torch

from support.optimizers import assert_same, every_optimizer, loss_of, pair, params_of, snapshot, train


@every_optimizer
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(case, set_to_none):
    model, optimizer = pair(case)
    loss_of(model, 0).backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for param in model.parameters():
        assert param.grad is None if set_to_none else not param.grad.any()


@every_optimizer
def test_a_step_without_gradients_changes_nothing(case):
    model, optimizer = pair(case)
    before = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert not optimizer.state
    train(model, optimizer, 2)
    optimizer.zero_grad()
    before = snapshot(optimizer)
    optimizer.step()
    assert_same(snapshot(optimizer), before)


@every_optimizer
def test_parameters_without_gradient_stay_and_keep_their_state(case):
    model, optimizer = pair(case)
    params = list(model.parameters())
    # The root caches all blocks together. A block shared by several parameters has statistics of its own, and averages
    # let the entries between absent and present blocks fade.
    common = case.shares_blocks or (case.averages and case.option("coupling") != "none")
    shared = ("U", "energy", "weight", "variance", "total", "total_variance", "count")
    ignored = ("root", "root_of", *shared) if common else ("root", "root_of")

    def frozen(param):
        state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items() if key not in ignored}
        return [param.detach().clone(), state]

    for t in range(8):
        optimizer.zero_grad()
        loss_of(model, t).backward()
        missing = [param for i, param in enumerate(params) if (t + i) % 3 == 0 or (t < 2 and i == 1)]
        for param in missing:
            param.grad = None
        before = [frozen(param) for param in missing]
        others = [param.detach().clone() for param in params]
        optimizer.step()
        assert_same([frozen(param) for param in missing], before)
        for param, was in zip(params, others, strict=True):
            gone = any(param is m for m in missing)
            assert torch.equal(param, was) == gone
    assert [int(optimizer.state[param]["step"]) for param in params] == [5, 4, 5, 5, 6]


@every_optimizer
@pytest.mark.parametrize("first", [True, False])
def test_an_old_root_is_made_anew_when_other_blocks_take_part(case, first):
    """Two steps, only one with all blocks: both compute a fresh root, whatever refresh_every says."""
    if case.option("refresh_every") is None or case.option("coupling") in (None, "module"):
        pytest.skip("roots are always current, or other modules' blocks do not matter")
    runs = []
    for every in (1, 100):
        model, optimizer = pair(case, refresh_every=every)
        for t in range(2):
            optimizer.zero_grad()
            loss_of(model, t).backward()
            if first == (t == 0):
                model.conv.zero_grad()
            optimizer.step()
        runs.append(params_of(model))
    assert_same(runs[0], runs[1])


@every_optimizer
def test_frozen_parameters_join_when_they_are_unfrozen(case):
    model, optimizer = pair(case)
    model.conv.requires_grad_(False)
    before = params_of(model.conv)
    train(model, optimizer, 3)
    assert_same(params_of(model.conv), before)
    assert not any(optimizer.state.get(param) for param in model.conv.parameters())
    model.conv.requires_grad_(True)
    train(model, optimizer, range(3, 5))
    assert all(int(optimizer.state[param]["step"]) == 2 for param in model.conv.parameters())
    assert not any(torch.equal(a, b) for a, b in zip(params_of(model.conv), before, strict=True))


@every_optimizer
def test_state_that_is_deleted_begins_anew(case):
    model, optimizer = pair(case)
    train(model, optimizer, 3)
    optimizer.state.clear()
    twin, fresh = pair(case)
    twin.load_state_dict(model.state_dict())
    train(model, optimizer, range(3, 6))
    train(twin, fresh, range(3, 6))
    assert_same(snapshot(optimizer), snapshot(fresh))
