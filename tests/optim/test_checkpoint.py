"""Copies and checkpoints of every optimizer: however it is saved, training resumes bit by bit."""

import copy
import io
import pickle

import pytest
import torch

from blockmean import AdaGradBMA, AdamBMA, Anova
from blockmean.optim.batches import MEANS
from support.optimizers import (
    CASES,
    Net,
    assert_same,
    every_block_optimizer,
    every_class,
    every_optimizer,
    model_with,
    pair,
    set_gradients,
    snapshot,
    train,
    uninterrupted,
)


def saved_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


# -------------------------------------------------------------------- copies


@every_optimizer
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies_go_on_alike_and_on_their_own(case, way):
    original = pair(case)
    train(*original, 4)
    copied = copy.deepcopy(original) if way == "deepcopy" else pickle.loads(pickle.dumps(original))
    assert_same(snapshot(copied[1]), snapshot(original[1]))
    before = snapshot(original[1])
    train(*copied, range(4, 6))
    assert_same(snapshot(original[1]), before)  # the copy shares nothing with the original
    train(*original, range(4, 6))
    assert_same(snapshot(copied[1]), snapshot(original[1]))
    assert_same(snapshot(copied[1]), uninterrupted(case, 6))


@every_class
def test_copies_keep_public_attributes_and_take_further_groups(case):
    model, optimizer = pair(case)
    train(model, optimizer, 1)
    optimizer.skipped_steps = 3
    if case.cls is not Anova:
        optimizer.diagonal_fallbacks = 2
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), copy.copy(optimizer)):
        public = {key for key in vars(optimizer) if not key.startswith("_")}
        assert public == {key for key in vars(copied) if not key.startswith("_")}
        assert (copied.skipped_steps, getattr(copied, "diagonal_fallbacks", 2)) == (3, 2)
        assert copied.defaults == optimizer.defaults
        copied.add_param_group({"params": [("extra", torch.zeros(2, requires_grad=True))]})
        assert copied.param_groups[0].keys() == copied.param_groups[-1].keys()


# -------------------------------------------------------------------- state_dict


@every_optimizer
@pytest.mark.parametrize(("stop", "through_a_file"), [(1, True), (2, False), (4, True)])
def test_a_fresh_optimizer_goes_on_bit_by_bit(case, stop, through_a_file):
    """Cases with refresh_every > 1 stop with a root that is several steps old: the checkpoint must include it."""
    model, optimizer = pair(case)
    train(model, optimizer, stop)
    saved = copy.deepcopy(optimizer.state_dict())
    if through_a_file:
        loaded = torch.load(saved_bytes(optimizer.state_dict()), weights_only=True)
        assert_same(loaded, saved)
        saved = loaded
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh, lr=0.7)
    resumed.load_state_dict(saved)
    assert_same(snapshot(resumed), snapshot(optimizer))
    train(fresh, resumed, range(stop, 6))
    assert_same(snapshot(resumed), uninterrupted(case, 6))


@every_optimizer
def test_training_on_changes_neither_the_loaded_dict_nor_its_owner(case):
    model, optimizer = pair(case)
    train(model, optimizer, 3)
    saved = optimizer.state_dict()
    before = snapshot(optimizer), copy.deepcopy(saved)
    fresh, resumed = pair(case)
    resumed.load_state_dict(saved)
    train(fresh, resumed, 3)
    assert_same((snapshot(optimizer), saved), before)


@every_optimizer
@pytest.mark.parametrize("loaded", [False, True])
def test_a_state_dict_shows_later_steps_as_torchs_does(case, loaded):
    def shown(model, optimizer):
        train(model, optimizer, 2)
        if loaded:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        saved = optimizer.state_dict()
        train(model, optimizer, range(2, 4))
        optimizer.param_groups[0]["lr"] = 0.7
        now = optimizer.state_dict()["state"]
        same = all(saved["state"][number][key] is value for number in now for key, value in now[number].items())
        return same, saved["param_groups"][0]["lr"] == 0.7

    theirs = Net()
    assert shown(*pair(case)) == shown(theirs, torch.optim.Adagrad(theirs.parameters())) == (True, False)


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_dtype_of_the_state_is_kept(case, dtype):
    def start():
        model = Net().to(dtype)
        return list(model.parameters()), case.of(model)

    def go_on(params, optimizer, steps):
        for t in steps:
            set_gradients(params, t)
            optimizer.step()

    params, optimizer = start()
    go_on(params, optimizer, range(4))
    arithmetic = torch.float32 if dtype.itemsize < 4 else dtype
    for param in params:
        for key, value in optimizer.state[param].items():
            wide = ("sum", "exp_avg", "exp_avg_sq", "momentum_buffer", *(MEANS if case.cls is Anova else ()))
            small = {
                "step": torch.float32,
                "means_start_step": torch.float32,
                "blocks": torch.int64,
                "root_of": torch.bool,
            }
            expected = arithmetic if key in wide else small.get(key, torch.float64)
            assert value.dtype == expected, key
    others, resumed = start()
    with torch.no_grad():
        for param, other in zip(params, others, strict=True):
            other.copy_(param)
    resumed.load_state_dict(torch.load(saved_bytes(optimizer.state_dict()), weights_only=True))
    assert_same(snapshot(resumed), snapshot(optimizer))
    go_on(params, optimizer, range(4, 7))
    go_on(others, resumed, range(4, 7))
    assert_same(snapshot(resumed), snapshot(optimizer))
    assert all(param.isfinite().all() and param.dtype == dtype for param in params)


@every_optimizer
def test_dicts_of_other_ages_are_accepted(case):
    """A step that is a number, and options that did not exist when the dict was saved."""
    model, optimizer = pair(case)
    train(model, optimizer, 4)
    old = copy.deepcopy(optimizer.state_dict())
    for state in old["state"].values():
        state["step"] = int(state["step"])
    for key in ("maximize", "nonfinite", "refresh_every", "blocks", "coupling", "param_names", "max_bytes"):
        old["param_groups"][0].pop(key, None)
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh)
    resumed.load_state_dict(old)
    assert_same(snapshot(resumed), snapshot(optimizer))
    train(fresh, resumed, range(4, 6))
    assert_same(snapshot(resumed), uninterrupted(case, 6))
    resumed.load_state_dict(optimizer.state_dict())  # then a newer dict


@every_class
def test_options_of_a_group_that_a_dict_lacks_stay_the_groups_own(case):
    model = Net()
    optimizer = case([{"params": model.parameters(), "weight_decay": 0.5, "nonfinite": "skip"}])
    saved = optimizer.state_dict()
    del saved["param_groups"][0]["weight_decay"], saved["param_groups"][0]["nonfinite"]
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["weight_decay"], optimizer.param_groups[0]["nonfinite"]) == (0.5, "skip")


@every_optimizer
@pytest.mark.parametrize("named_first", [True, False])
def test_names_play_no_part_in_loading(case, named_first):
    if case.needs_names:
        pytest.skip("blocks are made from names")
    model, fresh = Net(), Net()
    optimizer = case(model.named_parameters() if named_first else model.parameters())
    train(model, optimizer, 3)
    fresh.load_state_dict(model.state_dict())
    other_names = [(f"wrapped.{name}", param) for name, param in fresh.named_parameters()]
    resumed = case(fresh.parameters() if named_first else other_names)
    resumed.load_state_dict(optimizer.state_dict())
    train(fresh, resumed, range(3, 6))
    reference = uninterrupted(case, 6)
    assert_same(snapshot(resumed)["params"], reference["params"])
    assert_same(snapshot(resumed)["state"], reference["state"])


@every_optimizer
def test_parameters_that_never_had_a_gradient_need_no_state(case):
    model, optimizer = pair(case)
    model.conv.requires_grad_(False)
    train(model, optimizer, 3)
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh)
    resumed.load_state_dict(torch.load(saved_bytes(optimizer.state_dict()), weights_only=True))
    model.conv.requires_grad_(True)
    train(model, optimizer, range(3, 7))
    train(fresh, resumed, range(3, 7))
    assert_same(snapshot(resumed), snapshot(optimizer))


@every_block_optimizer
def test_state_that_is_dropped_for_one_parameter_leaves_symmetric_statistics(case):
    model, optimizer = pair(case)
    train(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][2]
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(3, 6))
    assert [int(optimizer.state[param]["step"]) for param in model.parameters()] == [6, 6, 3, 6, 6]
    if case.option("coupling") == "all" and case.decomposes and not case.shares_blocks:
        params = [param for param in model.parameters() if "U" in optimizer.state[param]]  # "unit" leaves biases out
        U = torch.cat([optimizer.state[param]["U"] for param in params])
        torch.testing.assert_close(U, U.T, rtol=1e-14, atol=0)  # averages round in a different order
        assert torch.linalg.eigvalsh(U).min() > -1e-12 * U.diagonal().max()


@every_class
def test_dicts_that_do_not_fit_are_refused_by_torch(case):
    model, optimizer = pair(case)
    train(model, optimizer, 1)
    before, saved = snapshot(optimizer), optimizer.state_dict()
    groups = saved["param_groups"]
    for bad, message in [
        ({**saved, "param_groups": groups * 2}, "different number of parameter groups"),
        ({**saved, "param_groups": [{**groups[0], "params": [0]}]}, "doesn't match the size of optimizer's group"),
        ({**saved, "param_groups": [{**groups[0], "lr": float("nan")}]}, f"'lr' parameter of {case.owner} must be"),
        ({**saved, "param_groups": [{**groups[0], "lr": "fast"}]}, f"'lr' parameter of {case.owner} must be a number"),
        ({**saved, "param_groups": [{**groups[0], "nonfinite": "?"}]}, "'nonfinite' parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(bad)
        assert_same(snapshot(optimizer), before)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (AdaGradBMA, torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-30, "lr_decay": 0.1}),
        (AdamBMA, torch.optim.AdamW, {"lr": 0.05, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
    ],
)
def test_training_can_be_taken_over_from_torch(ours, theirs, options):
    model = Net().double()
    reference = theirs(model.parameters(), **options)
    train(model, reference, 3)
    for correction in (False, True):
        twin = copy.deepcopy(model)
        optimizer = ours(twin.parameters(), correction=correction)
        optimizer.load_state_dict(reference.state_dict())
        train(twin, optimizer, range(3, 6))
        if correction:
            assert all(param.isfinite().all() for param in twin.parameters())
            assert all("U" in optimizer.state[param] for param in twin.parameters() if param.ndim > 1)
        else:
            continued = twin
    train(model, reference, range(3, 6))
    for param, expected in zip(continued.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=0, atol=1e-14)


# -------------------------------------------------------------------- blocks in checkpoints


def interleaved(*ones):
    """Split the 8 weights of the convolution in two: the given entries, and the rest."""
    return lambda name, tensor: (
        torch.tensor([int(k in ones) for k in range(8)]).view(tensor.shape) if name == "conv.weight" else "tensor"
    )


@every_block_optimizer
def test_another_partition_is_refused_before_anything_has_changed(case):
    model, optimizer = pair(case)
    train(model, optimizer, 2)
    before = snapshot(optimizer)
    names = ["tensor", "unit", "kernel", "module", "all", "element", interleaved(1, 5), interleaved(2, 4)]
    for partition in [name for name in names if name != case.option("partition")]:
        other_model, other = pair(case, partition=partition, coupling="none")
        train(other_model, other, 1)
        if not any("U" in state for state in other.state.values()):
            continue  # correction=False: there are no blocks to cut otherwise
        message = rf"was cut into other blocks .* Construct {case.owner} with the model and the partition"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(other.state_dict())
        assert_same(snapshot(optimizer), before)


def test_partitions_of_equal_sizes_and_different_entries_are_told_apart():
    """Every way to put 2 of 8 entries into a separate block gives another number in the state."""
    digests = set()
    for i in range(8):
        for j in range(i):
            model = Net()
            optimizer = AdaGradBMA(model.named_parameters(), partition=interleaved(i, j))
            train(model, optimizer, 1)
            digests.add(int(optimizer.state[model.conv.weight]["blocks"][0]))
    assert len(digests) == 28


@pytest.mark.parametrize("before", ["all", "module", "none"])
@pytest.mark.parametrize("after", ["all", "module", "none"])
def test_the_coupling_is_taken_from_the_checkpoint_as_all_options_are(before, after):
    case = next(case for case in CASES if case.id == "weighted-unit-none-refresh")
    model, optimizer = pair(case, coupling=before)
    train(model, optimizer, 3)
    fresh = model_with(model.state_dict())
    resumed = case.of(fresh, coupling=after)
    train(fresh, resumed, range(1))  # it already has state in another form
    fresh.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    train(model, optimizer, range(3, 6))
    train(fresh, resumed, range(3, 6))
    assert resumed.param_groups[0]["coupling"] == before
    assert_same(snapshot(resumed), snapshot(optimizer))


def test_a_coupling_that_the_optimizer_cannot_have_is_refused_when_loading():
    model = Net()
    optimizer = AdaGradBMA(model.named_parameters(), coupling="module")
    train(model, optimizer, 1)
    other = AdaGradBMA(Net().parameters())
    before = snapshot(other)
    with pytest.raises(ValueError, match=r"AdaGradBMA\(coupling='module'\) needs names"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(other), before)


def test_a_checkpoint_of_another_class_is_refused_before_anything_changes():
    param = torch.zeros(4, 3, requires_grad=True)
    adagrad = AdaGradBMA([param], variant="weighted", partition="unit", coupling="none", eigenvalue_floor=1.0)
    param.grad = torch.ones(4, 3)
    adagrad.step()
    adam = AdamBMA([param])
    with pytest.raises(ValueError, match=r"not one of AdamBMA: the state of parameter 0 lacks exp_avg, exp_avg_sq"):
        adam.load_state_dict(adagrad.state_dict())
    assert not adam.state
    adam.step()
