"""The contract of torch.optim, for every optimizer: parameters, groups, options, learning rates, directions.

Runs that must agree are compared bit by bit.
"""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims

from support.optimizers import (
    BAD_OPTIONS,
    CLASSES,
    COUPLED_DECAY,
    OTHER_OPTIONS,
    Net,
    assert_same,
    every_block_optimizer,
    every_class,
    every_optimizer,
    loss_of,
    pair,
    params_of,
    snapshot,
    train,
)

# -------------------------------------------------------------------- construction


@every_optimizer
def test_parameters_come_in_every_form_torch_takes(case):
    reference, optimizer = pair(case)
    train(reference, optimizer, 3)
    forms = [
        lambda m: list(m.named_parameters()),
        lambda m: [{"params": m.named_parameters()}],
        lambda m: ({"params": named} for named in [list(m.named_parameters())]),
    ]
    if not case.needs_names:
        forms += [
            lambda m: m.parameters(),
            lambda m: list(m.parameters()),
            lambda m: tuple(m.parameters()),
            lambda m: [{"params": m.parameters()}],
            lambda m: (param for param in m.parameters()),
        ]
    for form in forms:
        model = Net()
        train(model, case(form(model)), 3)
        assert_same(params_of(model), params_of(reference))


@every_class
def test_all_options_have_defaults_and_those_of_torch_go_by_position_as_there(case):
    parameters = list(inspect.signature(case.cls).parameters.values())
    by_position = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    theirs = {"AdamBMA": adam, "Anova": adam, "NaturalGradientBMA": sgd}.get(case.owner, torch.optim.Adagrad)
    assert by_position == list(inspect.signature(theirs).parameters)[: len(by_position)]
    assert by_position[:2] == ["params", "lr"]
    assert all(p.default is not inspect.Parameter.empty for p in parameters[1:])
    assert {"weight_decay", "maximize", "nonfinite"} <= {p.name for p in parameters}
    case.cls(Net().parameters()).step()


@every_class
def test_unknown_arguments_are_errors(case):
    with pytest.raises(TypeError, match="momentumm"):
        case(Net().parameters(), momentumm=0.9)


@pytest.mark.parametrize(
    ("cls", "option", "value", "error", "expected"),
    [(cls, *bad) for cls, table in BAD_OPTIONS.items() for bad in table],
)
def test_bad_options_are_refused_with_one_wording(cls, option, value, error, expected):
    shown = float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    message = f"^The '{option}' parameter of {cls.__name__} must be {re.escape(expected)}.*Got {re.escape(repr(shown))}"
    with pytest.raises(error, match=message):
        cls(Net().parameters(), **{option: value})
    with pytest.raises(error, match=message):
        cls([{"params": Net().parameters(), option: value}])


@every_class
def test_errors_that_torch_expects_of_every_optimizer(case):
    inputs = get_error_inputs_for_all_optims("cpu", torch.float32)
    assert len(inputs) >= 6
    for bad in inputs:
        params = Net().parameters() if bad.optimizer_error_input.params is None else bad.optimizer_error_input.params
        with pytest.raises(bad.error_type, match=bad.error_regex):
            case.cls(params, **bad.optimizer_error_input.kwargs)


@every_class
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_given_twice_counts_once(case):
    once, twice = Net(), Net()
    train(once, case(once.parameters()), 3)
    optimizer = case([*twice.parameters(), *twice.parameters()])
    train(twice, optimizer, 3)
    assert_same(params_of(twice), params_of(once))
    optimizer.load_state_dict(optimizer.state_dict())
    train(twice, optimizer, 1)


@every_class
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
def test_parameters_that_are_not_real_numbers_are_refused(case, dtype):
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=f"^{case.owner} does not support {name} parameters. Parameter 1 is one.$"):
        case([torch.zeros(2), torch.zeros(2, dtype=dtype)])


@every_class
def test_sparse_parameters_are_refused(case):
    with pytest.raises(ValueError, match="does not support sparse parameters"):
        case([torch.eye(2).to_sparse().requires_grad_()])


@every_class
def test_no_parameters_at_all_is_torchs_error_and_an_empty_group_is_fine(case):
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        case([])
    model = Net()
    train(model, case([{"params": []}, {"params": model.parameters()}]), 2)


# -------------------------------------------------------------------- groups


@every_optimizer
def test_groups_behave_like_separate_optimizers(case):
    other = OTHER_OPTIONS[case.cls]
    together, apart = Net(), Net()
    halves = [[list(m.named_parameters())[:2], list(m.named_parameters())[2:]] for m in (together, apart)]
    one = case([{"params": halves[0][0]}, {"params": halves[0][1], **other}])
    first, second = case(halves[1][0]), case(halves[1][1], **other)
    for t in range(6):
        train(together, one, range(t, t + 1))
        apart.zero_grad()
        loss_of(apart, t).backward()
        second.step()
        first.step()
    assert_same(params_of(together), params_of(apart))
    states = [*first.state.values(), *second.state.values()]
    for state in (*one.state.values(), *states):
        state.pop("blocks", None)  # it has the number of the group
    assert_same(list(one.state.values()), states)


@every_optimizer
def test_a_group_added_later_equals_one_that_was_there_from_the_start(case):
    other = OTHER_OPTIONS[case.cls]
    early, late = Net(), Net()
    parts = [list(part.named_parameters()) for part in (early.conv, early.head)]
    a = case([{"params": parts[0]}, {"params": parts[1], **other}])
    b = case(late.conv.named_parameters())
    for t in range(6):
        if t == 3:
            b.add_param_group({"params": late.head.named_parameters(), **other})
        early.zero_grad()
        late.zero_grad()
        loss_of(early, t).backward()
        loss_of(late, t).backward()
        if t < 3:
            early.head.zero_grad()
        a.step()
        b.step()
    assert_same(snapshot(a), snapshot(b))


@every_optimizer
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    before = snapshot(optimizer)
    fresh = nn.Parameter(torch.zeros(2))
    named = [("fresh", fresh)]
    bad = [{"params": named, option: value} for option, value, _, _ in BAD_OPTIONS[case.cls]]
    bad += [
        {"params": [fresh]},  # without names
        {"params": [("w", torch.zeros(2, dtype=torch.complex64))]},
        {"params": [("weight", model.head.weight)]},  # in another group
        {"params": [("leaf", fresh * 2)]},
        {"params": {fresh}},
    ]
    for group in bad:
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(group)
        assert_same(snapshot(optimizer), before)
    twin, untouched = pair(case)
    train(twin, untouched, 4)
    train(model, optimizer, range(2, 4))
    assert_same(snapshot(optimizer), snapshot(untouched))


@every_block_optimizer
def test_parameters_appended_to_a_group_by_hand_are_refused(case):
    """Their blocks are numbered when a group is added."""
    if case.needs_names:
        pytest.skip("these parameters have no names")
    model = Net()
    optimizer = case(model.head.parameters())
    train(model, optimizer, 1)
    optimizer.param_groups[0]["params"].append(model.scale)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=rf"a group of {case.owner} had the shapes .* with add_param_group"):
        train(model, optimizer, 1)
    assert_same(snapshot(optimizer), before)


@every_class
def test_tensors_put_in_the_place_of_parameters_are_optimized(case):
    """Wrappers that shard or convert a model replace parameters like this before training."""
    model, reference = Net(), Net()
    optimizer = case(Net(seed=5).parameters())
    optimizer.param_groups[0]["params"] = list(model.parameters())
    train(model, optimizer, 3)
    train(reference, case(reference.parameters()), 3)
    assert_same(params_of(model), params_of(reference))


@every_optimizer
def test_groups_hold_plain_values_only(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    plain = (str, int, float, bool, type(None))
    for group in optimizer.state_dict()["param_groups"]:
        for key, value in group.items():
            if key in ("params", "param_names"):
                assert all(isinstance(entry, int | str) for entry in value)
            else:
                values = value if type(value) is tuple else (value,)  # betas
                assert all(type(entry) in plain for entry in values), key


# -------------------------------------------------------------------- the learning rate


@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_the_learning_rate_may_be_a_tensor(case, shape):
    number, tensor = pair(case, lr=0.05), pair(case, lr=torch.full(shape, 0.05, dtype=torch.float64))
    train(*number, 3)
    train(*tensor, 3)
    assert_same(params_of(tensor[0]), params_of(number[0]))
    tensor[1].param_groups[0]["lr"].fill_(0.0)
    train(*tensor, range(3, 5))
    assert_same(params_of(tensor[0]), params_of(number[0]))


@every_class
@pytest.mark.parametrize("shape", [(2,), (0,), (2, 1)])
def test_a_tensor_learning_rate_has_one_element(case, shape):
    with pytest.raises(ValueError, match=r"^Tensor lr must be 1-element$"):
        case(Net().parameters(), lr=torch.ones(shape))


SCHEDULERS = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "LinearLR": lambda optimizer: LinearLR(optimizer, start_factor=0.25, total_iters=3),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
}


@every_optimizer
@pytest.mark.parametrize(
    ("name", "as_tensor"), [("StepLR", True), ("LinearLR", True), ("LinearLR", False), ("ReduceLROnPlateau", True)]
)
def test_schedulers_set_the_learning_rate(case, name, as_tensor):
    model, optimizer = pair(case, lr=torch.tensor(0.08, dtype=torch.float64) if as_tensor else 0.08)
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for t in range(6):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        train(model, optimizer, range(t, t + 1))
        scheduler.step(*[1.0] if name == "ReduceLROnPlateau" else [])
    assert len(set(rates)) > 2
    twin, by_hand = pair(case)
    for t, rate in enumerate(rates):
        by_hand.param_groups[0]["lr"] = rate
        train(twin, by_hand, range(t, t + 1))
    assert_same(params_of(model), params_of(twin))


@every_class
def test_one_cycle_also_moves_the_momentum(case):
    if case.option("betas") is None and case.option("momentum") is None:
        pytest.skip("it has no momentum")
    model, optimizer = pair(case)
    cycle = OneCycleLR(optimizer, 0.08, total_steps=7)
    key = "betas" if "betas" in optimizer.defaults else "momentum"
    options = []
    for t in range(6):
        options.append({name: optimizer.param_groups[0][name] for name in ("lr", key)})
        train(model, optimizer, range(t, t + 1))
        cycle.step()
    assert len({option[key] for option in options}) > 2
    twin, by_hand = pair(case)
    for t, option in enumerate(options):
        by_hand.param_groups[0].update(option)
        train(twin, by_hand, range(t, t + 1))
    assert_same(params_of(model), params_of(twin))


# -------------------------------------------------------------------- the direction


@every_optimizer
def test_it_learns(case):
    model, optimizer = pair(case)

    def loss():
        return sum(loss_of(model, t).item() for t in range(3))

    before = loss()
    for _ in range(10):
        train(model, optimizer, 3)
    assert loss() < 0.95 * before


@every_optimizer
def test_maximize_is_minimizing_the_negative_loss(case):
    up, down = pair(case, maximize=True), pair(case)
    train(*up, 5)
    for t in range(5):
        down[1].zero_grad()
        (-loss_of(down[0], t)).backward()
        down[1].step()
    assert_same(params_of(up[0]), params_of(down[0]))
    assert_same(up[1].state_dict()["state"], down[1].state_dict()["state"])


@every_optimizer
@pytest.mark.parametrize("maximize", [False, True])
def test_weight_decay_is_added_to_the_gradient(case, maximize):
    if not issubclass(case.cls, COUPLED_DECAY):
        pytest.skip("decoupled weight decay")
    model, optimizer = pair(case, weight_decay=0.3, maximize=maximize)
    twin, by_hand = pair(case, weight_decay=0.0, maximize=maximize)
    for t in range(5):
        train(model, optimizer, range(t, t + 1))
        by_hand.zero_grad()
        loss_of(twin, t).backward()
        for param in twin.parameters():
            param.grad.add_(param.detach(), alpha=-0.3 if maximize else 0.3)
        by_hand.step()
    assert_same(params_of(model), params_of(twin))


@every_optimizer
def test_looking_at_the_statistics_of_blocks_changes_nothing(case):
    model, optimizer = pair(case)
    assert optimizer.block_statistics() == []
    for t in range(4):
        train(model, optimizer, range(t, t + 1))
        before = snapshot(optimizer)
        optimizer.block_statistics()
        assert_same(snapshot(optimizer), before)
    twin, alone = pair(case)
    train(twin, alone, 4)
    assert_same(snapshot(optimizer), snapshot(alone))


def test_every_class_is_in_the_list():
    import blockmean

    listed = {case.cls for case in CLASSES}
    public = (getattr(blockmean, name) for name in blockmean.__all__)
    assert listed == {thing for thing in public if inspect.isclass(thing) and issubclass(thing, torch.optim.Optimizer)}
    assert listed == set(BAD_OPTIONS) == set(OTHER_OPTIONS)
