"""Runs as a study makes them: byte pairs, schedules, clipping, crops, weight decay and weights to continue from."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from blockmean.lab import arms, tasks, tokens, train
from blockmean.lab.arms import make
from blockmean.lab.race import missing_packages
from blockmean.lab.records import Records, append
from blockmean.lab.spec import RunSpec
from blockmean.lab.study_cells import ARMS, AXES
from blockmean.lab.tasks import LOSSES, epoch_length, load_data, make_model
from blockmean.lab.tokens import CONTEXT, GPT, GPTS, VOCABULARY, encode, read_tokens, train_tokenizer
from blockmean.lab.train import batches_of, means_of_parts, rate_factor, run

pytest.importorskip("tokenizers")

SPEC = RunSpec(
    "manual",
    "gpt-16",
    "AdamW",
    4e-3,
    seed=3,
    steps=8,
    options={"betas": [0.9, 0.95], "weight_decay": 0.1},
    batch=6,
    loss="next_token",
    points=4,
    warm_up=0.25,
    decay="linear",
    clip=1.0,
    tokenizer="manual",
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Tokens are made once for all tests here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKMEAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield Path(str(tmp_path_factory.getbasetemp()))


# Tokens


def test_byte_pairs_say_the_text_again_and_come_from_its_training_part():
    text = "def naïve():\n    return 'ß'\n\n" * 50
    coder = train_tokenizer(text)
    assert coder.decode(encode(coder, text).tolist()) == text
    unseen = "λ → 学\n"
    assert coder.decode(encode(coder, unseen).tolist()) == unseen


def test_a_twentieth_of_a_text_is_held_out_and_kept_in_the_cache(monkeypatch):
    found = read_tokens("manual", "manual")
    share = len(found.test) / (len(found.test) + len(found.train))
    assert 0.03 < share < 0.07
    assert 1_900 < int(found.train.max()) < VOCABULARY
    read_tokens.cache_clear()
    monkeypatch.setattr(tokens, "train_tokenizer", pytest.fail)
    again = read_tokens("manual", "manual")
    assert all(torch.equal(*pair) for pair in zip(found, again, strict=True))


def test_held_out_pieces_come_from_all_of_a_text():
    text = "".join(f"{number:07} λ\n" for number in range(100_000))
    piece = len(text) // 400  # of very long texts tokens.PIECE
    train, test = tokens.parts_of(text.encode(), "pieces")
    assert len(train) + len(test) == len(text)
    assert len(test) == 20 * piece
    assert text.index(test[:piece]) == 19 * piece
    assert test[:piece] not in train
    rest, validation = tokens.parts_of(text.encode(), "validation")
    assert text.index(validation[:piece]) == 18 * piece
    assert len(rest) + len(validation) + len(test) == len(text)
    assert test[:piece] not in rest and validation[:piece] not in rest
    assert "".join(tokens.parts_of(text.encode(), "end")) == text
    assert tokens.parts_of(b"", "pieces") == ("", "")


def test_settings_for_images_are_chosen_by_training_images_that_are_left_out():
    spec = RunSpec("digits", "small", "AdamW", 1e-2, seed=0, steps=3, batch=50)
    whole, part = load_data(spec), load_data(replace(spec, split="validation"))
    assert torch.equal(torch.cat([part.train, part.test]), whole.train)
    assert torch.equal(torch.cat([part.train_targets, part.test_targets]), whole.train_targets)
    assert len(part.test) == len(whole.train) // 10
    with pytest.raises(ValueError, match="split must be one of end, validation"):
        run(replace(spec, split="pieces"))


def test_held_out_windows_predict_the_token_after_each():
    data = load_data(SPEC)
    assert data.test.shape[1] == CONTEXT
    assert torch.equal(data.test.flatten()[1:], data.test_targets.flatten()[:-1])


def test_a_text_of_the_users_own_is_read_plain_or_packed(tmp_path):
    import gzip

    text = ("The quick brown fox jumps over the lazy dog.\n" * 400).encode()
    (tmp_path / "own.txt").write_bytes(text)
    (tmp_path / "own.txt.gz").write_bytes(gzip.compress(text))
    plain, packed = (read_tokens(str(tmp_path / name), "manual") for name in ("own.txt", "own.txt.gz"))
    assert torch.equal(plain.train, packed.train)


def test_documentation_that_is_missing_is_named_in_words(tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"python-docs.txt.gz was not found: neither.*--text.*--profile quick"):
        tasks.verify_data(replace(SPEC, dataset="python-docs"))
    with pytest.raises(FileNotFoundError, match="does not have it"):
        tasks.verify_data(replace(SPEC, dataset="python-docs"), tmp_path)


# Models


def test_the_sizes_of_the_models_are_those_of_the_study():
    def inner(model):
        outer = (model.embed, model.position_embed, model.lm_head)
        return sum(p.numel() for p in model.parameters()) - sum(m.weight.numel() for m in outer)

    sizes = {name: inner(make_gpt((VOCABULARY, CONTEXT))) for name, make_gpt in GPTS.items()}
    assert sizes["gpt-96"] == 335_712
    assert sizes["gpt-160"] == 1_237_440
    resnet = tasks.MODELS["resnet10"]((3, 32, 32))
    assert sum(p.numel() for p in resnet.parameters()) == 263_770


def test_a_gpt_sees_no_token_of_the_future():
    torch.manual_seed(0)
    model = GPT(20, 16, layers=2, context=8)
    codes = torch.randint(20, (2, 8))
    other = codes.clone()
    other[:, 5:] = (other[:, 5:] + 1) % 20
    a, b = model(codes), model(other)
    torch.testing.assert_close(a[:, :5], b[:, :5])
    assert not torch.allclose(a[:, 5:], b[:, 5:])
    assert LOSSES["next_token"].mean(a, codes).item() == pytest.approx(math.log(20), rel=0.1)


# Runs


def test_the_rate_rises_and_falls_to_zero():
    factors = [rate_factor(SPEC, step) for step in range(8)]
    assert factors == pytest.approx([1 / 2, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert {rate_factor(replace(SPEC, warm_up=0.0, decay="none"), step) for step in range(8)} == {1.0}


def without_times(record):
    epochs = [{name: value for name, value in epoch.items() if name != "seconds"} for epoch in record["epochs"]]
    kept = {name: value for name, value in record.items() if "seconds" not in name and name != "environment"}
    return {**kept, "epochs": epochs}


def test_a_run_learns_is_recorded_in_few_bytes_and_repeats_itself(tmp_path):
    spec = replace(SPEC, steps=20, batch=4, lr=0.03)
    record = run(spec)
    assert without_times(record) == without_times(run(spec))
    assert record["test_loss"] < math.log(VOCABULARY) - 0.3
    assert len(record["losses"]) == 4
    assert len(json.dumps(record)) + 200 * len("7.1234, ") < 8_000
    assert len(record["epochs"]) == 20 == spec.steps // epoch_length(spec)
    assert [epoch["seconds"] for epoch in record["epochs"]] == sorted(epoch["seconds"] for epoch in record["epochs"])
    append(tmp_path / "records.jsonl", spec.key, record)
    assert Records(tmp_path / "records.jsonl").of([spec]) == [json.loads(json.dumps(record))]


def test_gradients_of_parts_add_up_to_that_of_the_batch():
    data = load_data(SPEC)
    inputs, targets = next(batches_of(data, SPEC))  # six windows: a part of four, and one of two
    found = []
    for part in (train.PART, len(inputs)):
        torch.manual_seed(0)
        model = make_model(SPEC)
        loss = train._backward(model, LOSSES["next_token"].mean, inputs, targets, part)
        found.append((loss, [p.grad for p in model.parameters()]))
    (loss, gradients), (whole, others) = found
    assert loss == pytest.approx(whole, rel=1e-6)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def test_clipping_bounds_the_gradient(monkeypatch):
    norms = []

    def watch(optimizer):
        every = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.cat([g.flatten() for g in every]).norm()))
        return True

    monkeypatch.setattr(train, "_stepped", watch)
    run(replace(SPEC, clip=0.01, steps=2))
    assert norms[-2:] == pytest.approx([0.01, 0.01], rel=1e-3)  # those before are a twin's, which warms up torch


PEERS_HERE = not missing_packages()


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
@pytest.mark.parametrize("name", [name for name in ARMS if name != "SGD"])
def test_every_arm_starts_with_the_same_weights_and_batches_and_takes_its_settings(name):
    arm = ARMS[name]
    options = {"num_embeds": 16} if name == "Adam-mini" else {}
    settings = replace(arm, options={**arm.options, **options}).settings(arm.start)
    seen = []
    spec = replace(SPEC, steps=3, **settings, lr=arm.start[0])
    record = run(spec, on_step=lambda step, loss: seen.append(loss))
    expected = []
    run(replace(SPEC, steps=1), on_step=lambda step, loss: expected.append(loss))
    assert seen[0] == expected[0]
    assert record["diverged_at"] is None
    assert seen[2] != seen[0]


@pytest.mark.skipif(not PEERS_HERE, reason="needs the extra `race`")
@pytest.mark.parametrize("name", ARMS)
def test_weight_decay_is_for_matrices_in_every_arm(name):
    model = GPT(20, 16, layers=1, context=8)
    arm = ARMS[name]
    options = {"num_embeds": 16} if name == "Adam-mini" else {}
    settings = replace(arm, options={**arm.options, **options}).settings(arm.start)
    optimizer = make(settings["optimizer"], model, 0.1, settings["options"])
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    wanted = arm.start[1]
    assert {name: decays[id(p)] for name, p in model.named_parameters()} == {
        name: wanted if p.ndim > 1 else 0.0 for name, p in model.named_parameters()
    }
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


def test_the_rate_of_muon_and_its_adamw_is_set_in_one_place():
    model = GPT(20, 16, layers=1, context=8)
    optimizer = make("MuonAdamW", model, 0.1, {"weight_decay": 0.1, "betas": [0.8, 0.9], "momentum": 0.7})
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randint(20, (2, 8))).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.muon.param_groups[0]["momentum"] == 0.7
    assert optimizer.adamw.param_groups[0]["betas"] == (0.8, 0.9)


def test_a_run_continues_from_the_weights_of_another():
    first = replace(SPEC, steps=8, lr=0.03)
    spec = replace(SPEC, steps=1, seed=5, start=asdict(first))
    seen: list[float] = []
    for one in (replace(spec, start={}), spec, spec):  # the last one takes the weights from the cache
        run(one, on_step=lambda step, loss: seen.append(loss))
    assert seen[1] == seen[2] < seen[0] - 0.1


def test_crops_are_pieces_of_the_padded_image():
    images = torch.rand(5, 3, 8, 8) + 1
    shifts = torch.tensor([[2, 2], [0, 0], [4, 4], [2, 0], [1, 3]])
    found = train._cropped(images, shifts, 2)
    assert torch.equal(found[0], images[0])
    for i, (down, right) in enumerate(shifts.tolist()):
        padded = torch.nn.functional.pad(images[i], [2] * 4)
        assert torch.equal(found[i], padded[:, down : down + 8, right : right + 8])


def test_cropped_runs_differ_from_plain_ones_and_repeat_themselves():
    spec = RunSpec("digits", "small", "AdamW", 1e-2, seed=0, steps=3, batch=50, crop=4)
    a, b, plain = (run(one)["test_loss"] for one in (spec, spec, replace(spec, crop=0)))
    assert a == b != plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "cross_entropy"}, "The loss of a run on tokens is next_token"),
        ({"decay": "cosine"}, "decay must be one of none, linear. Got 'cosine'"),
        ({"warm_up": 1.0}, "warm_up must be a part of the run"),
        ({"crop": 4}, "crop cuts images, and this data set is a text."),
        ({"model": "mlp"}, "model must be one of gpt-16, gpt-64, gpt-96, gpt-160, module:object. Got 'mlp'"),
        ({"batch": 0}, "batch must be at least 1"),
    ],
)
def test_a_run_that_makes_no_sense_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(replace(SPEC, **change))


def test_means_of_parts_keep_the_mean():
    assert means_of_parts([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert means_of_parts([1, 2, 3], 200) == [1, 2, 3]
    assert means_of_parts([], 200) == []


def test_the_start_of_every_arm_is_on_the_grid():
    for name, arm in ARMS.items():
        for axis, value in zip(AXES, arm.start, strict=True):
            assert value in axis.values or name == "SGD", (name, axis.name)
    assert arms.known()
