"""The lab: one run of training, and what it says of itself."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockmean
from blockmean.lab import arms, environment, tasks, train
from blockmean.lab.data import load
from blockmean.lab.models import MODELS
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import Data, steps_per_epoch
from blockmean.lab.train import batches_of, run

REAL_DATA = Path(__file__).parents[3] / "shared" / "data"
SPEC = RunSpec(dataset="digits", model="small", optimizer="AdaGradBMA", lr=0.1, seed=0, steps=5, batch=50)


@pytest.mark.parametrize(
    ("model", "shape", "count"),
    [
        ("small", (1, 28, 28), 322),
        ("small", (3, 32, 32), 466),
        ("large", (1, 28, 28), 139_370),
        ("large", (3, 32, 32), 140_906),
        ("mlp", (1, 28, 28), 55_050),
        ("cnn", (3, 32, 32), 33_834),
    ],
)
def test_models_have_the_parameters_they_are_said_to_have(model, shape, count):
    network = MODELS[model](shape)
    assert sum(p.numel() for p in network.parameters()) == count
    assert network(torch.zeros(2, *shape)).shape == (2, 10)


def without_times(record):
    return {key: value for key, value in record.items() if "seconds" not in key and key != "environment"}


def losses_of(spec):
    seen = []
    run(spec, on_step=lambda step, loss: seen.append(loss))
    return seen


def test_equal_specs_give_equal_runs_and_other_optimizers_start_alike():
    first, again = run(SPEC), run(SPEC)
    assert without_times(first) == without_times(again)
    assert 0 < first["test_error"] < 1
    ours, theirs = losses_of(SPEC), losses_of(replace(SPEC, optimizer="Adagrad", lr=0.03))
    assert len(ours) == len(theirs) == 5
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]


def test_an_epoch_is_recorded_when_it_is_over():
    spec = replace(SPEC, steps=9, batch=1000)  # four batches an epoch
    losses, record = losses_of(spec), run(spec)
    assert [epoch["train_loss"] for epoch in record["epochs"]] == [sum(losses[:4]) / 4, sum(losses[4:8]) / 4]
    after_eight = run(replace(spec, steps=8))
    assert record["epochs"] == after_eight["epochs"]
    assert after_eight["epochs"][-1]["test_error"] == after_eight["test_error"]
    assert after_eight["epochs"][-1]["test_loss"] == after_eight["test_loss"]


@pytest.mark.parametrize("dataset", ["digits", "mnist", "cifar10"])
def test_steps_per_epoch_are_those_of_the_data(dataset):
    try:
        images = load(dataset, "raw", REAL_DATA)
    except FileNotFoundError:
        pytest.skip(f"{dataset} is not on this machine")
    assert steps_per_epoch(dataset, 128) == len(images.train) // 128


def test_batches_go_through_every_image_once_an_epoch_and_mirror_half_of_them():
    count, width = 12, 4
    pictures = torch.arange(count * width).view(count, 1, 1, width).float()
    images = Data(pictures, torch.arange(count), pictures, torch.arange(count))
    spec = replace(SPEC, batch=5, steps=40, flip=True)
    batches = list(batches_of(images, spec))
    assert len(batches) == 40
    mirrored = []
    for epoch in range(20):  # two batches of five; two images are left out
        labels = torch.cat([batches[2 * epoch][1], batches[2 * epoch + 1][1]]).tolist()
        assert len(set(labels)) == 10
    for inputs, labels in batches:
        for picture, label in zip(inputs, labels, strict=True):
            assert torch.equal(picture.sort(dim=-1).values, pictures[label])
            mirrored.append(not torch.equal(picture, pictures[label]))
    assert 0.35 < sum(mirrored) / len(mirrored) < 0.65  # 200 tosses: 4 standard deviations
    straight = list(batches_of(images, replace(spec, flip=False)))
    assert all(torch.equal(x, pictures[y]) for x, y in straight)


def test_a_run_that_diverges_ends_there_and_says_when():
    seen = []
    record = run(
        replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=20), on_step=lambda *step: seen.append(step)
    )
    assert 0 < record["diverged_at"] == len(seen) < 20
    assert record["train_loss"] is None
    json.dumps(record, allow_nan=False)


def test_specs_that_cannot_run_say_why():
    with pytest.raises(ValueError, match=r"A batch of 5000 cannot be drawn from 4000 images"):
        run(replace(SPEC, batch=5000))
    with pytest.raises(ValueError, match=r"model must be one of small, .* Got 'huge'"):
        run(replace(SPEC, model="huge"))
    with pytest.raises(ValueError, match=r"optimizer must be one of Adagrad, .* Got 'Lion'"):
        run(replace(SPEC, optimizer="Lion"))
    with pytest.raises(ValueError, match=r"inputs must be one of raw, .* Got 'grey'"):
        run(replace(SPEC, inputs="grey"))
    with pytest.raises(ValueError, match=r"steps must be at least 1. Got 0 instead."):
        run(replace(SPEC, steps=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": math.inf}, "lr must be a finite number. Got inf instead."),
        ({"lr": math.nan}, "lr must be a finite number. Got nan instead."),
        ({"options": {"eps": math.inf}}, "The option 'eps' must be made of finite numbers, .* Got inf instead."),
        ({"options": {"betas": {1, 2}}}, r"The option 'betas' must .* Got \{1, 2\} instead."),
        ({"options": {"variant": b"x"}}, "The option 'variant' must .* Got b'x' instead."),
        ({"options": {"speed": 3}}, "AdaGradBMA has no option speed. It has lr_decay, "),
        ({"optimizer": "Adam", "options": {"foreach": True, "fused": True}}, "Adam cannot be made with .*fused"),
        ({"seed": 2**32}, "seed must be between 0 and 4294967295. Got 4294967296 instead."),
        ({"batch": 0}, "A batch of 0 cannot be drawn from 4000 images."),
    ],
)
def test_a_check_finds_what_would_fail_later_without_any_data(changes, message, monkeypatch):
    monkeypatch.setattr(tasks, "load", lambda *_: pytest.fail("data was read"))
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=message):
        train.check(replace(SPEC, **changes))
    train.check(SPEC)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("optimizer", arms.OPTIMIZERS)
def test_every_optimizer_learns_with_its_own_learning_rate(optimizer):
    spec = replace(SPEC, optimizer=optimizer, lr=arms.default_rate(optimizer), model="small", batch=100, steps=80)
    losses = losses_of(spec)
    assert sum(losses[-10:]) < 0.95 * sum(losses[:10]) or optimizer == "SGD"  # which is slow on this model
    train.check(spec)


def test_a_learning_rate_of_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"optimizer must be one of .* Got 'Lion'"):
        arms.default_rate("Lion")


def test_a_run_that_breaks_at_its_last_step_has_diverged():
    record = run(replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=1))
    assert record["diverged_at"] == 0
    assert record["train_loss"] is None


def test_records_say_where_and_with_which_code_they_were_made():
    where = run(SPEC)["environment"]
    assert where["threads"] == 1
    assert where["torch"] == torch.__version__
    root = Path(environment.__file__).parents[3]
    if (root / ".git").exists():
        head = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True).stdout
        assert head[:7] in where["code"]


def test_code_inside_another_repository_is_not_taken_for_it(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    installed = tmp_path / ".venv" / "lib" / "blockmean" / "lab" / "environment.py"
    monkeypatch.setattr(environment, "__file__", str(installed))
    environment._code_version.cache_clear()
    try:
        assert environment.environment()["code"] == f"blockmean {blockmean.__version__}"
    finally:
        environment._code_version.cache_clear()
