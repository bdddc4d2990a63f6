"""Closures and hooks of every optimizer, and foreign entries in its state."""

import pytest
import torch

from support.optimizers import assert_same, every_class, every_optimizer, loss_of, pair, params_of, snapshot, train


@every_optimizer
def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned(case):
    model, optimizer = pair(case)
    calls = []

    def closure():
        optimizer.zero_grad()
        assert torch.is_grad_enabled()
        loss = loss_of(model, 0)
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1
    twin, plain = pair(case)
    train(twin, plain, 1)
    assert_same(snapshot(optimizer), snapshot(plain))
    assert plain.step() is None


@every_class
def test_a_closure_that_fails_changes_nothing(case):
    _, optimizer = pair(case)
    before = snapshot(optimizer)

    def closure():
        raise ArithmeticError("no loss today")

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert_same(snapshot(optimizer), before)


@every_class
def test_step_hooks_see_every_step(case):
    model, optimizer = pair(case)
    seen = []
    before = optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", params_of(model))))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", params_of(model))))
    start = params_of(model)
    train(model, optimizer, 1)
    before.remove()
    train(model, optimizer, range(1, 2))
    assert [when for when, _ in seen] == ["before", "after", "after"]
    assert_same(seen[0][1], start)
    assert_same(seen[2][1], params_of(model))


@every_class
def test_state_dict_hooks_are_honoured(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    order = []
    optimizer.register_state_dict_pre_hook(lambda o: order.append("before"))
    optimizer.register_state_dict_post_hook(lambda o, saved: order.append("after") or {**saved, "note": "mine"})
    assert optimizer.state_dict()["note"] == "mine"
    assert order == ["before", "after"]


@every_class
def test_load_hooks_of_the_user_come_first_and_last(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    saved = optimizer.state_dict()
    fresh, loaded = pair(case)
    seen = []
    loaded.register_load_state_dict_pre_hook(
        lambda o, incoming: {**incoming, "param_groups": [{**g, "lr": 0.5} for g in incoming["param_groups"]]}
    )
    loaded.register_load_state_dict_post_hook(lambda o: seen.append(snapshot(o)["state"]))
    loaded.register_load_state_dict_post_hook(lambda o: o.state[fresh.scale].update(mine=torch.ones(3)))
    loaded.load_state_dict(saved)
    assert loaded.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert_same(seen[0], saved["state"])  # in the dtypes of training, not cast to the parameter's
    assert torch.equal(loaded.state[fresh.scale]["mine"], torch.ones(3))
    train(fresh, loaded, 1)


@every_optimizer
def test_entries_of_others_in_the_state_survive(case):
    model, optimizer = pair(case)
    optimizer.state["log"]["steps"] = 0

    def count(o, args, kwargs):
        o.state["log"]["steps"] += 1

    optimizer.register_step_post_hook(count)
    optimizer.state[model.scale]["mine"] = torch.arange(3)  # before the first step
    train(model, optimizer, 3)
    twin, plain = pair(case)
    train(twin, plain, 3)
    assert_same(params_of(model), params_of(twin))
    fresh, loaded = pair(case)
    loaded.load_state_dict(optimizer.state_dict())
    for o, m in ((optimizer, model), (loaded, fresh)):
        assert o.state["log"] == {"steps": 3}
        assert torch.equal(o.state[m.scale]["mine"], torch.arange(3))
