"""param_groups: what decays and what does not, with every optimizer of ours and with torch's."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from blockmean import AdamBMA, Anova, param_groups
from support.optimizers import Net, assert_same, every_class, every_optimizer, loss_of, params_of, train


def decay_of(groups):
    """The weight decay of every parameter, by name."""
    return {name: group["weight_decay"] for group in groups for name, _ in group["params"]}


class Everything(nn.Module):
    """One module of every kind that has an exception, or seems to need one."""

    def __init__(self):
        super().__init__()
        self.embed, self.bag = nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)
        self.conv, self.wide_norm = nn.Conv2d(3, 4, 3), nn.LayerNorm([4, 2, 2])  # a gain with three dims
        self.batch_norm, self.rms_norm, self.group_norm = nn.BatchNorm2d(4), nn.RMSNorm(4), nn.GroupNorm(2, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)  # biases with three dims
        self.lstm = nn.LSTM(4, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.ones(3, 4))


def test_weights_with_two_or_more_dims_decay_and_nothing_else():
    found = decay_of(param_groups(Everything(), weight_decay=0.1))
    assert set(found) == {name for name, _ in Everything().named_parameters()}
    assert [name for name, decay in found.items() if decay] == [
        "table",
        "conv.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
    ]
    assert set(found.values()) == {0.1, 0.0}


def test_norms_of_other_packages_are_known_by_their_names():
    for name, decays in (("WideRMSNorm", False), ("SyncBatchNorm3d", False), ("NormalizedLinear", True)):
        kind = type(name, (nn.Linear,), {})
        assert bool(decay_of(param_groups(kind(2, 2), 0.1))["weight"]) == decays


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
def test_gains_of_weight_norm_do_not_decay_and_directions_do(norm):
    """A gain is O × 1, as a weight of one input is."""
    model = nn.Sequential(norm(nn.Linear(3, 2)), norm(nn.Conv2d(3, 2, 1)), nn.Linear(1, 4))
    rule, params = decay_of(param_groups(model, 0.1)), dict(model.named_parameters())
    gains = {name for name in rule if name.endswith(("original0", "weight_g"))}
    assert {tuple(params[name].shape) for name in gains} == {(2, 1), (2, 1, 1, 1)}
    biases = {"0.bias", "1.bias", "2.bias"}
    assert {name for name, decay in rule.items() if not decay} == gains | biases


def test_other_parametrizations_decay():
    model = parametrizations.orthogonal(nn.Linear(3, 3))
    assert decay_of(param_groups(model, 0.1))["parametrizations.weight.original"] == 0.1


def test_embeddings_decay_if_asked():
    rule, asked = (decay_of(param_groups(Everything(), 0.1, embeddings=flag)) for flag in (False, True))
    assert {name for name in rule if rule[name] != asked[name]} == {"embed.weight", "bag.weight"}


def test_a_tied_weight_is_there_once_and_counts_as_the_embedding():
    model = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False), "embed": nn.Embedding(9, 4)})
    model["embed"].weight = model["head"].weight
    assert decay_of(param_groups(model, 0.1)) == {"head.weight": 0.0}
    assert decay_of(param_groups(model, 0.1, embeddings=True)) == {"head.weight": 0.1}


def test_frozen_parameters_and_empty_groups_are_left_out():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    assert decay_of(param_groups(model)) == {"1.bias": 0.0}
    assert len(param_groups(model)) == 1


@every_optimizer
def test_every_optimizer_takes_the_groups_with_their_names(case):
    model = Net()
    optimizer = case(param_groups(model, weight_decay=0.1))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["conv.weight", "head.weight"],
        ["scale", "conv.bias", "head.bias"],
    ]
    before = params_of(model)
    train(model, optimizer, 3)
    assert all(not torch.equal(a, b) for a, b in zip(params_of(model), before, strict=True))
    assert all(isinstance(group["params"], list) for group in optimizer.param_groups)
    fresh = case(param_groups(model, weight_decay=0.5))
    fresh.load_state_dict(optimizer.state_dict())
    assert fresh.param_groups[0]["weight_decay"] == 0.1


@every_class
def test_only_the_first_group_decays(case):
    """Without a gradient in the loss, decay is all that is left of a step."""
    model = Net()
    optimizer = case(param_groups(model, weight_decay=0.1))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {"conv.weight", "head.weight"}


def test_torchs_adamw_takes_the_same_groups_and_anova_without_means_agrees():
    ours, theirs = Net().double(), Net().double()
    train(ours, Anova(param_groups(ours, 0.1), lr=0.01, means=0), 20)
    optimizer = torch.optim.AdamW(param_groups(theirs, 0.1), lr=0.01)
    train(theirs, optimizer, 20)
    assert optimizer.param_groups[0]["param_names"] == ["conv.weight", "head.weight"]
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)  # rounding over 20 steps in float64


def test_a_checkpoint_of_adamw_with_the_groups_loads_into_anova():
    model = Net()
    theirs = torch.optim.AdamW(param_groups(model, 0.1), lr=0.01)
    train(model, theirs, 3)
    ours = Anova(param_groups(model, 0.2))
    ours.load_state_dict(theirs.state_dict())
    assert [group["weight_decay"] for group in ours.param_groups] == [0.1, 0.0]
    train(model, ours, range(3, 5))
    assert {float(state["step"]) for state in ours.state.values()} == {5}


class Transposed(nn.Module):
    """A transposed convolution stores (in, out, ...): only the model can say so."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.ConvTranspose2d(3, 2, 2)

    def forward(self, x):
        return self.up(x[:, :, :2, :2].expand(-1, 3, -1, -1)).flatten(1)


def test_blocks_are_cut_along_the_outputs_that_the_model_has():
    def blocks(params):
        model = Transposed()
        optimizer = AdamBMA(params(model))
        loss_of(model, 0).backward()
        optimizer.step()
        return [name for statistics in optimizer.block_statistics() for name in statistics.names]

    assert blocks(param_groups) == blocks(lambda model: model)
    assert len(blocks(param_groups)) == 2
    assert len(blocks(nn.Module.named_parameters)) == 3  # the inputs: nobody knew better


def test_groups_equal_those_written_by_hand():
    by_hand, in_one_call = Net(), Net()
    weights = [(name, param) for name, param in by_hand.named_parameters() if param.ndim > 1]
    others = [(name, param) for name, param in by_hand.named_parameters() if param.ndim < 2]
    train(by_hand, Anova([{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]), 5)
    train(in_one_call, Anova(param_groups(in_one_call, 0.1)), 5)
    assert_same(params_of(in_one_call), params_of(by_hand))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((Net().parameters(),), TypeError, "The 'model' parameter of param_groups must be an nn.Module. Got"),
        ((Net(), -0.1), ValueError, "The 'weight_decay' parameter of param_groups must be >= 0. Got -0.1"),
        ((Net(), "0.1"), TypeError, "The 'weight_decay' parameter of param_groups must be a number >= 0"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        param_groups(*arguments)
