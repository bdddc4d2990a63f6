"""Anova with capturable=True: numbers on the device, and a mask in place of a look at the gradients."""

import copy

import pytest
import torch
from torch import nn

from blockmean import AdamBMA, Anova


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.LayerNorm(12)).double()


def set_gradients(model, t):
    rng = torch.Generator().manual_seed(t)
    model.zero_grad()
    model(torch.randn(8, 20, generator=rng, dtype=torch.float64)).pow(3).sum().backward()


@pytest.mark.parametrize(
    "rate", [0.01, torch.tensor(0.01), torch.tensor([0.01])], ids=["number", "tensor", "one-element"]
)
def test_steps_are_those_of_the_usual_form(rate):
    usual, captured = network(), network()
    optimizers = [Anova(usual, lr=0.01, fused=False), Anova(captured, lr=rate, capturable=True)]
    for t in range(12):
        for model, optimizer in zip((usual, captured), optimizers, strict=True):
            set_gradients(model, t)
            optimizer.step()
    for mine, theirs in zip(captured.parameters(), usual.parameters(), strict=True):
        # A learning rate in float32 is off by 2e-8 of itself.
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12 if isinstance(rate, float) else 1e-7)


@pytest.mark.parametrize("at", [0, 3, 4], ids=["first", "steady", "refresh"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", [0, 1], ids=["matrix", "vector"])
def test_a_bad_gradient_leaves_everything_as_it_was_and_is_counted(at, bad, where):
    model = network()
    optimizer = Anova(model, lr=0.01, capturable=True)
    for t in range(9):
        set_gradients(model, t)
        if t == at:
            list(model.parameters())[where].grad.view(-1)[3] = bad
            before, state = copy.deepcopy(list(model.parameters())), copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.step()
        if t == at:
            for param, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(param, old)
            for i, entries in optimizer.state_dict()["state"].items():
                for name, value in entries.items() if i in state else ():
                    counts = name == "step" and "unit_means" in entries  # the host's count says when to refresh
                    assert counts or torch.equal(value, state[i][name]), name
    assert all(param.isfinite().all() for param in model.parameters())
    assert int(optimizer.skipped_steps) == 1


def test_the_rate_is_read_from_the_device_in_every_step():
    model, rate = network(), torch.tensor(0.01)
    optimizer = Anova(model, lr=rate, weight_decay=0.1, capturable=True)
    set_gradients(model, 0)
    optimizer.step()
    rate.zero_()
    before = copy.deepcopy(list(model.parameters()))
    set_gradients(model, 1)
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old)


def test_no_value_is_read_on_the_host(monkeypatch):
    model = network()
    optimizer = Anova(model, capturable=True)
    set_gradients(model, 0)
    optimizer.step()
    counters = {
        id(state[name]) for state in optimizer.state.values() for name in ("step", "means_start_step") if name in state
    }
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda x: pytest.fail("a tensor was read"))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: pytest.fail("a tensor was read"))
    read = torch.Tensor.item
    monkeypatch.setattr(
        torch.Tensor, "item", lambda x: read(x) if id(x) in counters else pytest.fail("a tensor was read")
    )
    for t in range(1, 7):
        set_gradients(model, t)
        optimizer.step()
    assert optimizer.skipped_steps.shape == ()


def test_memory_that_torchs_fused_form_cannot_take_is_refused():
    param = nn.Parameter(torch.ones(3, 4).t()[:1])
    param.grad = torch.ones(1, 3)
    optimizer = Anova([param], capturable=True)
    param.data = torch.ones(3, 2)[:, :1].t()
    with pytest.raises(ValueError, match=r"Anova\(capturable=True\) needs contiguous tensors"):
        optimizer.step()


def test_nothing_has_changed_in_any_group_when_memory_is_refused():
    first, second = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(4, 3).t())
    optimizer = Anova([{"params": [first]}, {"params": [second]}], capturable=True, means=0)
    first.grad, second.grad = torch.ones(5), torch.ones(3, 4)
    with pytest.raises(ValueError, match="needs contiguous tensors"):
        optimizer.step()
    assert torch.equal(first, torch.ones(5)) and not optimizer.state


@pytest.mark.parametrize("every", [1, 5])
def test_bad_gradients_before_the_first_good_one_leave_everything_finite(every):
    param = nn.Parameter(torch.randn(20, 20))
    optimizer = Anova([param], capturable=True, refresh_every=every)
    for t in range(8):
        param.grad = torch.randn(20, 20) if t > 2 else torch.full((20, 20), torch.nan)
        optimizer.step()
    assert param.isfinite().all() and all(value.isfinite().all() for value in optimizer.state[param].values())
    assert int(optimizer.skipped_steps) == 3


def test_only_anova_has_this_form():
    with pytest.raises(ValueError, match="The 'capturable' parameter of AdamBMA must be False"):
        AdamBMA([nn.Parameter(torch.ones(2, 2))], capturable=True)
    with pytest.raises(TypeError, match="The 'capturable' parameter of Anova must be True or False"):
        Anova([nn.Parameter(torch.ones(2, 2))], capturable=1)
