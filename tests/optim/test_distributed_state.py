"""Checkpoints of every optimizer through torch.distributed.checkpoint, on a single process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from support.optimizers import assert_same, every_optimizer, model_with, pair, snapshot, train, uninterrupted


@every_optimizer
@pytest.mark.parametrize(("flatten", "loaded_before"), [(False, False), (True, False), (True, True)])
def test_distributed_state_dicts_go_on_bit_by_bit(case, flatten, loaded_before):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = pair(case)
    train(model, optimizer, 4)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert_same(snapshot(optimizer), uninterrupted(case, 4))
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh)
    if loaded_before:
        resumed.load_state_dict(resumed.state_dict())
    set_optimizer_state_dict(fresh, resumed, saved, options=options)
    # torch initialises missing state with a step on zero gradients, which must not move anything.
    assert_same(snapshot(resumed), snapshot(optimizer))
    train(fresh, resumed, range(4, 6))
    assert_same(snapshot(resumed), uninterrupted(case, 6))


@every_optimizer
def test_a_distributed_state_dict_of_an_untrained_optimizer_moves_nothing(case):
    model, optimizer = pair(case)
    before = snapshot(optimizer)["params"]
    saved = get_optimizer_state_dict(model, optimizer)
    assert_same(snapshot(optimizer)["params"], before)
    assert saved["state"]
    for state in saved["state"].values():
        assert all(value.isfinite().all() for key, value in state.items() if key != "root")


@every_optimizer
def test_flattened_state_of_parameters_without_gradient_is_no_state(case):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = pair(case)
    model.conv.requires_grad_(False)
    train(model, optimizer, 3)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh)
    set_optimizer_state_dict(fresh, resumed, saved, options=options)
    model.conv.requires_grad_(True)
    train(model, optimizer, range(3, 5))
    train(fresh, resumed, range(3, 5))
    assert_same(snapshot(resumed), snapshot(optimizer))


@every_optimizer
@pytest.mark.filterwarnings("ignore")  # torch warns that there is no process group
def test_a_distributed_checkpoint_on_disk_goes_on_bit_by_bit(case, tmp_path):
    model, optimizer = pair(case)
    train(model, optimizer, 4)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh)
    target = {"optimizer": get_optimizer_state_dict(fresh, resumed)}  # rows of one buffer, filled in place
    dcp.load(target, checkpoint_id=tmp_path)
    set_optimizer_state_dict(fresh, resumed, target["optimizer"])
    assert_same(snapshot(resumed), snapshot(optimizer))
    train(fresh, resumed, range(4, 8))
    assert_same(snapshot(resumed), uninterrupted(case, 8))


class WithEmpty(nn.Module):
    """A layer, and an empty parameter, as in a pruned or not yet grown layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.empty = nn.Parameter(torch.zeros(0, 4))


@every_optimizer
def test_parameters_without_entries_have_state_as_others_have(case):
    """torch.distributed.checkpoint asks for the state of every parameter that requires a gradient."""
    torch.manual_seed(0)
    model, fresh = WithEmpty(), WithEmpty()
    optimizer, resumed = case.of(model), case.of(fresh)
    for _ in range(2):
        optimizer.zero_grad()
        (model.layer(torch.ones(3)).square().sum() + model.empty.sum()).backward()
        optimizer.step()
    set_optimizer_state_dict(fresh, resumed, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    assert float(resumed.state[fresh.empty]["step"]) == 2
    assert torch.equal(resumed.state[fresh.layer.weight]["step"], optimizer.state[model.layer.weight]["step"])
