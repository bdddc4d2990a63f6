"""The race: tasks, arms and measures, on records made by hand and on real tiny runs."""

import json
import math
import os
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from blockmean.lab import arms, tasks, train
from blockmean.lab.arms import ARMS, BASELINE, Unsuitable, hidden_matrices, make, state_bytes
from blockmean.lab.compare import MedianRange, median_range
from blockmean.lab.race import (
    final_loss,
    make_race,
    missing_packages,
    notes,
    results,
    seconds_after,
    smoothed,
    steps_to,
    summary,
    table,
)
from blockmean.lab.race_pictures import draw_overview, draw_task
from blockmean.lab.records import Records, append
from blockmean.lab.tasks import PROFILES, TASKS, evaluate, load_data, make_model
from blockmean.lab.text import WINDOWS, CharacterTransformer, read_text
from blockmean.lab.train import run, time_marks

QUICK = PROFILES["quick"]
PEERS_HERE = not missing_packages()


def spec_of(task="mlp-raw", arm=BASELINE, steps=40, lr=1e-2, seed=0, profile=QUICK):
    return replace(profile[task], steps=steps).spec(ARMS[arm].settings(), lr, seed, curve=True)


def record_of(spec, losses, seconds=1.0, **changed):
    """A record as `run` writes it, with chosen losses and the same seconds for every step."""
    marks = [mark for mark in time_marks(spec.steps) if mark <= len(losses)]
    record = {
        "spec": asdict(spec),
        "environment": {},
        "epochs": [{"train_loss": 1.0, "test_loss": 1.0, "test_error": 0.5}] * (spec.steps // 31),
        "diverged_at": None if len(losses) == spec.steps else len(losses),
        "train_loss": 1.0,
        "test_loss": losses[-1],
        "test_error": 0.5,
        "seconds": seconds * len(losses),
        "step_seconds": 0.25 * seconds * len(losses),
        "parameters": 100,
        "state_bytes": 800,
        "losses": losses,
        "seconds_at": [seconds * mark for mark in marks],
        **changed,
    }
    return json.loads(json.dumps(record))


# Tasks


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_a_model_that_fits_its_loss(name):
    task = TASKS[name]
    torch.manual_seed(0)
    model = make_model(task)
    if task.dataset == "shakespeare":
        inputs, targets = torch.randint(65, (2, 64)), torch.randint(65, (2, 64))
    else:
        inputs = torch.rand(2, *tasks.DATASETS[task.dataset].image)
        targets = inputs.flatten(1) if task.loss == "reconstruction" else torch.tensor([3, 7])
    loss = tasks.LOSSES[task.loss]
    found = evaluate(model, loss, inputs, targets)
    assert model.training
    classes = 65 if task.dataset == "shakespeare" else 10
    guess = {"cross_entropy": math.log(classes), "reconstruction": 784 * math.log(2)}
    assert found["test_loss"] == pytest.approx(guess[task.loss], rel=0.15)
    assert 0 <= found["test_error"] <= 1


def test_the_sizes_of_the_models_are_those_of_the_race():
    sizes = {name: sum(p.numel() for p in make_model(task).parameters()) for name, task in TASKS.items()}
    assert sizes["mlp-raw"] == sizes["mlp"] == 55_050
    assert sizes["cnn"] == 66_570
    assert sizes["resnet"] == 44_230
    assert sizes["autoencoder"] == 219_804
    assert sizes["transformer-192"] == 1_817_153


def test_the_autoencoder_is_judged_on_its_own_pixels():
    data = load_data(QUICK["autoencoder"])
    assert data.train_targets.shape == (4000, 784)
    assert torch.equal(data.train.flatten(1), data.train_targets)
    assert 0 <= float(data.train.min()) <= float(data.train.max()) <= 1


def test_the_last_tenth_of_a_text_is_held_out():
    data = load_data(QUICK["transformer-64"])
    assert (len(data.train), len(data.test)) == (5400, 600)
    assert torch.equal(data.train[0, 1:], data.train_targets[0, :-1])
    for name, windows in WINDOWS.items():
        assert tasks.DATASETS[name].examples == 9 * windows // 10


def test_missing_text_is_named_in_words(tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="neither --data-dir nor BLOCKMEAN_DATA is given"):
        tasks.verify_data(TASKS["transformer-64"])
    with pytest.raises(FileNotFoundError, match=r"does not have it.*--profile quick"):
        tasks.verify_data(TASKS["transformer-64"], tmp_path)


def test_another_text_is_refused(tmp_path):
    path = tmp_path / "text" / "tinyshakespeare.txt"
    path.parent.mkdir()
    path.write_bytes(b"First Citizen:\n")
    with pytest.raises(
        ValueError, match=r"tinyshakespeare.txt has only 15 bytes instead of 1115394. Put the 1,115,394"
    ):
        tasks.verify_data(TASKS["transformer-64"], tmp_path)
    path.write_bytes(b"x" * 1_115_394)
    with pytest.raises(ValueError, match=r"the sha256 checksum [0-9a-f]{64} instead of 86c4e6aa9d.*data set\. Put the"):
        tasks.verify_data(TASKS["transformer-64"], tmp_path)


@pytest.mark.skipif("BLOCKMEAN_DATA" not in os.environ, reason="needs tiny Shakespeare")
def test_shakespeare_has_the_windows_and_the_characters_that_models_are_made_for():
    text = read_text("shakespeare")
    assert text.vocabulary == 65
    assert text.inputs.shape == text.targets.shape == (17_428, 64)
    assert text.inputs[0, :5].tolist() == [18, 47, 56, 57, 58]  # "First"


def test_windows_of_another_length_cover_the_same_text():
    long, short = read_text("manual"), read_text("manual", context=32)
    assert torch.equal(long.inputs.flatten(), short.inputs.flatten())
    assert torch.equal(short.inputs[:, 1:], short.targets[:, :-1])


def test_a_manual_that_is_too_short_is_refused(monkeypatch):
    monkeypatch.setitem(WINDOWS, "manual", 10**6)
    with pytest.raises(ValueError, match=r"The manual inside this Python has \d+ characters; 64000001 are needed"):
        read_text("manual", context=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "mlp"}, "model must be one of transformer-64, transformer-192, module:object. Got 'mlp'"),
        ({"flip": True}, "flip mirrors images, and this data set is a text."),
        ({"loss": "hinge"}, "loss must be one of cross_entropy, next_token, reconstruction. Got 'hinge'"),
        ({"batch": 6000}, "A batch of 6000 cannot be drawn from 5400 windows."),
    ],
)
def test_a_text_task_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(replace(spec_of("transformer-64"), **change))


# Runs with a curve


def test_a_run_keeps_the_loss_and_the_time_of_its_steps(tmp_path):
    spec, path = spec_of(steps=40), tmp_path / "study.jsonl"
    record = run(spec)
    assert len(record["losses"]) == 40
    assert len(record["seconds_at"]) == len(time_marks(40)) == 40
    assert record["seconds_at"] == sorted(record["seconds_at"])
    assert record["seconds_at"][-1] == pytest.approx(record["seconds"], abs=1e-3)
    assert record["losses"][-1] < 0.5 * record["losses"][0]
    assert all(float(f"{loss:.5g}") == loss for loss in record["losses"])
    assert record["state_bytes"] == 2 * 4 * 55_050 + 4 * 6  # two moments, and a step for each of six tensors
    append(path, spec.key, record)
    assert Records(path).of([spec]) == [json.loads(json.dumps(record))]
    assert "losses" not in run(replace(spec, curve=False, steps=2))


def test_warming_up_changes_no_number():
    with_curve, without = (run(replace(spec_of(steps=5), curve=curve)) for curve in (True, False))
    assert with_curve["test_loss"] == without["test_loss"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"losses": [1.0] * 39}, "steps are missing"),
        ({"seconds_at": [1.0] * 39}, "steps are missing"),
        ({"losses": [None] * 40}, "losses must be a number"),
        ({"seconds_at": [2.0, 1.0] * 20}, "seconds_at must be a number from 2 to inf. Got 1.0"),
        ({"state_bytes": None}, "state_bytes must be a number"),
    ],
)
def test_a_curve_with_holes_is_not_used(tmp_path, change, complaint):
    spec, path = spec_of(steps=40), tmp_path / "study.jsonl"
    append(path, spec.key, record_of(spec, [1.0] * 40))
    assert Records(path).of([spec])
    append(path, spec.key, {**record_of(spec, [1.0] * 40), **change})
    known = Records(path)
    assert not known.of([spec])
    assert complaint in known.unusable[0]


# Arms


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
@pytest.mark.parametrize("name", ARMS)
@pytest.mark.parametrize("task", ["cnn", "resnet", "transformer-64"])
def test_every_arm_takes_steps_in_every_kind_of_model(name, task):
    torch.manual_seed(0)
    model = make_model(TASKS[task])
    text = task == "transformer-64"
    inputs = torch.randint(65, (4, 64)) if text else torch.rand(4, 3, 32, 32)
    targets = torch.randint(65, (4, 64)) if text else torch.tensor([1, 2, 3, 4])
    arm = ARMS[name]
    try:
        optimizer = make(arm.optimizer, model, arm.rates[1], arm.options)
    except Unsuitable as error:
        assert name == "Muon + AdamW"
        assert not text
        assert str(error) == "Muon takes matrices of hidden layers, and this model has none."
        return
    arms.switch(optimizer, "train")
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = tasks.LOSSES["cross_entropy"].mean(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(map(math.isfinite, losses))
    assert losses[2] != losses[0]
    # Kron keeps one moment, and so do Muon and Anova for matrices; all others keep two or more.
    few = {"Kron": 2, "Muon + AdamW": 2, "Anova": 4}.get(name, 8)
    assert state_bytes(optimizer) >= few * sum(p.numel() for p in model.parameters())


def test_every_arm_tries_four_rates_up_to_3_times_apart_and_no_weight_decay():
    for arm in ARMS.values():
        assert len(arm.rates) == 4
        ratios = [high / low for low, high in zip(arm.rates, arm.rates[1:], strict=False)]
        assert all(2 <= ratio <= 3.4 for ratio in ratios)
        assert arm.options["weight_decay"] == 0.0


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    model = CharacterTransformer(20, width=16, layers=1, context=8)
    names = {id(p): name for name, p in model.named_parameters()}
    hidden, others = ([names[id(p)] for p in part] for part in hidden_matrices(model))
    assert len(hidden) + len(others) == len(names)
    assert set(hidden) == {
        f"blocks.layers.0.{name}"
        for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight")
    }
    optimizer = make("MuonAdamW", model, 0.1, {})
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(torch.zeros(1, 8, dtype=torch.long)).square().mean().backward()
    optimizer.step()
    moved = [name for name, p in model.named_parameters() if not torch.equal(p, before[name])]
    assert set(hidden) <= set(moved)
    assert "head.weight" in moved
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    matrices = sum(p.numel() for name, p in model.named_parameters() if name in hidden)
    assert state_bytes(optimizer) >= 4 * matrices


def test_an_older_torch_without_muon_is_named(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ValueError, match=r"^Muon needs torch 2\.9 or newer\. This is torch "):
        make("MuonAdamW", CharacterTransformer(20, width=16, layers=1, context=8), 0.1, {})


def test_controls_are_those_that_must_tie_with_adamw():
    assert [name for name, arm in ARMS.items() if arm.control] == ["AdamW again", "Anova means=0"]


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
def test_options_that_a_peer_would_swallow_are_refused():
    with pytest.raises(ValueError, match=r"SOAP has no option precondition_every\. It has betas, shampoo_beta"):
        make("SOAP", nn.Linear(2, 2), 0.1, {"precondition_every": 3})


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
def test_a_schedule_free_run_is_not_disturbed_by_a_test_in_the_middle():
    spec = replace(spec_of("mlp-raw", "Schedule-Free"), batch=2000)
    short, long = run(replace(spec, steps=2)), run(replace(spec, steps=4))
    assert long["epochs"][0] == short["epochs"][0]
    assert long["losses"][:2] == short["losses"]
    assert long["losses"][3] < long["losses"][0]


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
def test_a_schedule_free_model_has_the_batch_norm_of_its_averaged_weights_while_it_is_judged():
    spec = replace(spec_of("cnn", "Schedule-Free", lr=0.1), model="resnet", batch=4)
    data = load_data(spec)
    torch.manual_seed(0)
    model = make_model(spec)
    optimizer = make(spec.optimizer, model, spec.lr, spec.options)
    arms.switch(optimizer, "train")
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data.train[:8]), data.train_targets[:8]).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with train._evaluation(model, optimizer, spec, data):
        changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"0.weight", "1.running_mean", "1.running_var"} <= changed
    after = model.state_dict()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=1e-5, atol=1e-6)  # weights go there and back by arithmetic


def test_an_error_that_is_no_divergence_is_not_hidden(monkeypatch):
    class Refuses(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("only matrices")

    monkeypatch.setitem(arms.OPTIMIZERS, "AdamW", Refuses)
    with pytest.raises(ValueError, match="only matrices"):
        run(replace(spec_of(), options={}))


# Measures


def test_the_target_is_reached_when_a_whole_window_is_at_or_below_it():
    spec = spec_of(steps=40)  # a window of two steps
    record = record_of(spec, [0.1] + [float(loss) for loss in range(40, 1, -1)], seconds=2.0)
    assert smoothed(record)[:3] == [0.1, 20.05, 39.5]
    assert steps_to(record, 10.0) == 33  # the losses 10 and 9; 11 and 10 are above
    assert steps_to(record, 2.5) == 40
    assert steps_to(record, 2.4) == math.inf
    assert seconds_after(record, 33) == 66.0
    assert seconds_after(record, math.inf) == math.inf
    assert final_loss(record) == 3.5  # 5, 4, 3, 2


def test_seconds_are_interpolated_between_percents():
    spec = spec_of(steps=200)
    record = record_of(spec, [1.0] * 200, epochs=[])
    assert len(record["seconds_at"]) == 100
    assert seconds_after(record, 7) == pytest.approx(7.0)
    assert seconds_after(record, 200) == 200.0


def test_a_median_counts_misses_as_infinite_and_has_the_range_beside_it():
    assert median_range([0.5]) is None
    found = median_range([0.7, 0.5, math.inf, 0.6, 0.8])
    assert found == MedianRange(0.7, 0.5, math.inf)
    assert str(found) == "0.70 (0.50–∞)"
    assert median_range([1.0, math.inf]) == MedianRange(math.inf, 1.0, math.inf)


def by_hand(tmp_path, finals, seeds=5, tuning=None, target=(1.0, 1.0)):
    """A race of one task with chosen losses per arm and seed; None diverges. All arms prefer their third rate.

    `target`: the losses of the further runs that set the target, beside the 1.0 of the tuning run.
    """
    race = make_race(["mlp-raw"], list(finals), "quick", seeds, steps=40)
    study = race.studies()["mlp-raw"]
    path = study.file(tmp_path)
    for arm, values in finals.items():
        best = (tuning or {}).get(arm, study.rates_of(arm)[2])
        for spec in study.specs(arm, study.rates_of(arm), study.tuning):
            append(path, spec.key, record_of(spec, falling(1.0 if spec.lr == best else 2.0)))
        further = study.target_specs({arm: best})
        ends = [*zip(further, target, strict=False)]
        ends += [*zip(study.specs(arm, [best], study.final), values, strict=False)]
        for spec, end in ends:
            losses = falling(1.0)[:7] if end is None else falling(end)
            changed = {"train_loss": None, "epochs": []} if end is None else {}
            append(path, spec.key, record_of(spec, losses, 1.0 if arm == BASELINE else 3.0, **changed))
    return race


def falling(end):
    """40 losses in a straight line, whose last four have a mean of `end`."""
    return [end + 0.1 * (38.5 - step) for step in range(1, 41)]


AHEAD = [0.9, 1.0, 0.95, 1.0, 0.98]


def test_ratios_misses_and_differences_are_paired_by_seed(tmp_path):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": [0.4, 0.5, 0.5, 0.5, None], "NAdam": [3.0] * 5})
    (one,) = results(race, tmp_path)
    assert one.target == pytest.approx(1.0)
    adamw, ours, nadam = one.arms[BASELINE], one.arms["AdamBMA"], one.arms["NAdam"]
    assert adamw.steps == [38, 39, 39, 39, 39]
    assert ours.steps[:4] == [33, 34, 34, 34]
    assert ours.steps[4] == math.inf
    assert (ours.misses, ours.diverged) == (1, 1)
    assert ours.steps_ratio.median == pytest.approx(34 / 39)
    assert ours.seconds_ratio.median == pytest.approx(3 * 34 / 39)
    assert ours.steps_ratio.high == math.inf
    assert ours.loss_difference is None  # one run diverged
    assert ours.verdict == "worse"  # it is infinitely bad
    assert nadam.misses == 5
    assert nadam.steps_ratio == MedianRange(math.inf, math.inf, math.inf)
    assert nadam.loss_difference.mean == pytest.approx(3.0 - sum(AHEAD) / 5)
    assert nadam.verdict == "worse"
    assert (adamw.steps_ratio, adamw.verdict) == (None, "no verdict")
    shown = table(one)
    assert shown.title == "Digits MLP, raw pixels, 40 steps: target 1"
    rows = {row[0]: row for row in shown.rows}
    assert list(rows) == [BASELINE, "NAdam", "AdamBMA"]  # the best final loss first; a run that diverged is infinite
    assert rows["NAdam"][2] == "5, 5 missed"
    assert shown.header[3:11] == [
        "final loss", "− AdamW's", "verdict", "steps to target", "× AdamW's", "seconds to target", "× AdamW's",
        "iteration × AdamW's",
    ]  # fmt: skip
    assert rows["NAdam"][3] == "3" and rows["NAdam"][4].startswith("+2.03")
    assert rows["NAdam"][5:11] == ["worse", "∞", "∞ (∞–∞)", "∞", "∞ (∞–∞)", "3.00 (3.00–3.00)"]
    assert rows[BASELINE][4:11] == ["–", "–", "39", "–", "39", "–", "–"]
    assert rows["AdamBMA"][2:5] == ["5, 1 missed, 1 diverged", "∞", "–"]
    assert rows["AdamBMA"][10] == "3.00 (3.00–3.00)"  # per step, although the run that diverged is shorter
    plain = summary(race, [one])
    json.dumps(plain, allow_nan=False)
    assert plain["tasks"]["mlp-raw"]["arms"]["NAdam"]["steps"] == [None] * 5
    assert plain["tasks"]["mlp-raw"]["arms"]["NAdam"]["misses"] == 5


def test_where_adamw_misses_its_whole_run_counts(tmp_path):
    race = by_hand(tmp_path, {BASELINE: [0.9, 5.0, 0.9], "AdamBMA": [0.9, 0.9, 0.9]}, seeds=3)
    (one,) = results(race, tmp_path)
    assert one.arms[BASELINE].misses == 1
    assert one.arms["AdamBMA"].steps_ratio == MedianRange(1.0, 38 / 40, 1.0)
    shown = table(one)
    assert shown.title.endswith("target 1, missed by AdamW with 1 of 3 seeds")
    assert shown.rows[0][7] == "≤ 1.00 (0.95–1.00)"  # it would have taken AdamW longer


def test_where_both_miss_the_ratio_is_infinite(tmp_path):
    race = by_hand(tmp_path, {BASELINE: [0.9, 5.0, 0.9], "AdamBMA": [0.9, 5.0, 0.9]}, seeds=3)
    (one,) = results(race, tmp_path)
    assert one.arms["AdamBMA"].steps_ratio == MedianRange(1.0, 1.0, math.inf)


def test_a_bound_on_an_infinite_ratio_says_nothing_and_is_not_shown(tmp_path):
    race = by_hand(tmp_path, {BASELINE: [0.9, 5.0, 0.9], "AdamBMA": [5.0, 5.0, 0.9]}, seeds=3)
    (one,) = results(race, tmp_path)
    assert one.is_bound
    assert one.times(one.arms["AdamBMA"].steps_ratio) == "∞ (1.00–∞)"


def test_the_target_is_the_mean_of_three_runs_of_adamw(tmp_path):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": AHEAD}, target=(1.2, 1.1))
    (one,) = results(race, tmp_path)
    assert one.target == pytest.approx(1.1)
    assert [record["spec"]["seed"] for record in one.findings.target] == [100, 101, 102]
    study = one.study
    assert study.is_complete(tmp_path)
    assert {(spec.optimizer, spec.lr) for spec in study.target_specs(one.findings.best)} == {("AdamW", 1e-2)}
    assert study.total_steps() == 40 * (8 + 2 + 10)
    for tuned, further in ((2, (102,)), (3, ()), (5, ())):
        (study,) = make_race(["mlp-raw"], [BASELINE], "quick", tuning_seeds=tuned).studies().values()
        assert study.target.seeds == further


@pytest.mark.parametrize("target", [(1.0,), (1.0, None)])
def test_without_a_target_losses_are_shown_and_the_runs_that_set_it_are_missed(tmp_path, target):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": [0.5] * 5}, target=target)
    (one,) = results(race, tmp_path)
    assert one.target is None
    assert one.study.is_complete(tmp_path) == (len(target) == 2)
    assert notes([one]) == ["mlp-raw: no target yet. AdamW has 2 of the 3 runs that set it."]
    shown = table(one)
    assert shown.title.endswith(": no target yet")
    (ours,) = (row for row in shown.rows if row[0] == "AdamBMA")
    assert ours[2:4] == ["5", "0.5"] and ours[5:11] == ["better", "–", "–", "–", "–", "3.00 (3.00–3.00)"]
    json.dumps(summary(race, [one]), allow_nan=False)
    assert draw_task(one, tmp_path / "task").png.exists()


def test_the_control_is_paired_although_its_seeds_are_others(tmp_path):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamW again": AHEAD})
    (one,) = results(race, tmp_path)
    again = one.arms["AdamW again"]
    assert again.seeds == [1000, 1001, 1002, 1003, 1004]
    assert again.steps_ratio == MedianRange(1.0, 1.0, 1.0)
    assert (again.loss_difference.mean, again.verdict) == (0.0, "within noise")


def test_a_best_rate_at_the_edge_is_marked(tmp_path):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": AHEAD}, tuning={"AdamBMA": 3e-2})
    (one,) = results(race, tmp_path)
    assert {row[0]: row[1] for row in table(one).rows} == {BASELINE: "0.01", "AdamBMA": "0.03 (edge)"}


def test_half_a_race_is_shown_and_what_is_missing_is_named(tmp_path):
    by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": [0.5, 0.4]})
    full = make_race(["mlp-raw", "mlp"], [BASELINE, "AdamBMA", "NAdam"], "quick", steps=40)
    one, other = results(full, tmp_path)
    assert list(one.arms) == [BASELINE, "AdamBMA"]
    assert one.missing == ["NAdam"]
    assert (other.target, other.arms) == (None, {})
    assert notes([one, other]) == [
        "mlp-raw: no final runs yet of NAdam.",
        "mlp: no target yet. AdamW has 0 of the 3 runs that set it.",
        "mlp: no final runs yet of AdamW; NAdam; AdamBMA.",
    ]
    assert {row[0]: row[2] for row in table(one).rows} == {BASELINE: "5", "AdamBMA": "2 of 5"}
    picture = draw_task(one, tmp_path / "task")
    assert "Not run yet: NAdam." in picture.caption
    overview = draw_overview([one], tmp_path / "overview")
    assert "No runs of SOAP" in overview.caption
    for drawn in (picture, overview):
        assert drawn.png.stat().st_size > 5000
        text = drawn.svg.read_text()  # matplotlib leaves the text of a legend beside its outlines, as a comment
        assert all(f"<!-- {label} -->" in text for label in (BASELINE, "AdamBMA", "target"))
        assert "<!-- NAdam -->" not in text


def test_an_arm_that_diverges_with_every_rate_is_named(tmp_path):
    race = by_hand(tmp_path, {BASELINE: AHEAD, "AdamBMA": []})
    study = race.studies()["mlp-raw"]
    for spec in study.specs("AdamBMA", study.rates_of("AdamBMA"), study.tuning):
        append(tmp_path / "mlp-raw.jsonl", spec.key, record_of(spec, [1.0, 2.0], train_loss=None, epochs=[]))
    assert notes(results(race, tmp_path)) == ["mlp-raw: AdamBMA diverged with every rate."]


# What is run, and in which order


def test_adamw_sets_the_target_first_and_then_arms_run_in_turn():
    study = make_race(["mlp-raw"], ["AdamBMA", "NAdam"], "quick", seeds=2).studies()["mlp-raw"]
    tuning = [(spec.optimizer, spec.lr) for spec in study.tuning_specs()]
    assert [name for name, _ in tuning] == ["AdamW"] * 4 + ["NAdam", "AdamBMA"] * 4
    final = study.final_specs({"AdamW": 1e-2, "NAdam": 1e-3, "AdamBMA": 1e-2})
    assert [(spec.optimizer, spec.seed) for spec in final] == [
        ("AdamW", 0), ("NAdam", 0), ("AdamBMA", 0), ("AdamW", 1), ("NAdam", 1), ("AdamBMA", 1),
    ]  # fmt: skip
    assert not {spec.seed for spec in study.tuning_specs()} & {spec.seed for spec in final}


def test_an_arm_with_nothing_to_do_is_left_out_and_named():
    race = make_race(["cnn", "mlp"], ["Muon + AdamW"], "quick")
    assert race.left_out["cnn"] == {"Muon + AdamW": "Muon takes matrices of hidden layers, and this model has none."}
    assert list(race.studies()["cnn"].arms) == ["AdamW"]
    assert list(race.studies()["mlp"].arms) == ["AdamW", "Muon + AdamW"]


def test_anova_without_means_ties_adamw():
    theirs = run(spec_of("mlp-raw", BASELINE, steps=30))
    ours = run(spec_of("mlp-raw", "Anova means=0", steps=30))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)


def test_adambma_without_its_correction_ties_adamw():
    theirs = run(spec_of("mlp-raw", BASELINE, steps=30))
    ours = run(replace(spec_of("mlp-raw", "AdamBMA", steps=30), options={"weight_decay": 0.0, "correction": False}))
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)  # 30 steps of rounding
