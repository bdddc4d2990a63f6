"""The lab: reading data, training once, and records that are made only once."""

import gzip
import io
import json
import struct
import tarfile
from dataclasses import asdict, replace

import pytest
import torch

from blockmean.lab import data, records
from blockmean.lab.models import MODELS
from blockmean.lab.train import Spec, run

SPEC = Spec(dataset="digits", model="small", optimizer="AdaGradBMA", lr=0.1, seed=0, steps=5, batch=50)


@pytest.fixture(scope="module")
def digits():
    return data.load("digits", "raw")


def test_embedded_digits_are_split_by_class_into_400_and_100(digits):
    assert digits.train.shape == (4000, 1, 28, 28)
    assert digits.test.shape == (1000, 1, 28, 28)
    assert digits.train_labels.bincount().tolist() == [400] * 10
    assert digits.test_labels.bincount().tolist() == [100] * 10
    assert digits.train.min() == 0
    assert digits.train.max() == 1


def test_preparations(digits):
    normalised, centred = (data.load("digits", inputs) for inputs in ("normalised", "centred"))
    torch.testing.assert_close(normalised.train * 0.3081 + 0.1307, digits.train)
    assert centred.train.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(centred.test - centred.test[0], digits.test - digits.test[0])
    with pytest.raises(ValueError, match=r"must be one of raw, normalised, centred. Got 'whitened'"):
        data.load("digits", "whitened")
    with pytest.raises(ValueError, match=r"must be one of digits, mnist, cifar10. Got 'imagenet'"):
        data.load("imagenet")


def write_mnist(folder, **changed):
    shapes = {
        "train-images-idx3-ubyte.gz": (60_000, 28, 28),
        "train-labels-idx1-ubyte.gz": (60_000,),
        "t10k-images-idx3-ubyte.gz": (10_000, 28, 28),
        "t10k-labels-idx1-ubyte.gz": (10_000,),
    }
    for name, shape in shapes.items():
        head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        size = torch.Size(shape).numel()
        (folder / name).write_bytes(changed.get(name) or gzip.compress(head + bytes([7]) * size, 1))


def test_mnist_is_read_from_its_idx_files_in_a_folder_or_its_subfolder(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    write_mnist(tmp_path / "mnist")
    monkeypatch.setenv("BLOCKMEAN_DATA", str(tmp_path))
    images = data.load("mnist", "raw")
    assert images.train.shape == (60_000, 1, 28, 28)
    assert torch.equal(images.test_labels, torch.full((10_000,), 7))
    assert data.load("mnist", "raw", tmp_path / "mnist").test.shape == (10_000, 1, 28, 28)


@pytest.mark.parametrize("content", [b"\x00\x00\x08\x01" + bytes(20), bytes(100)], ids=["labels", "zeros"])
def test_wrong_idx_files_are_named(tmp_path, content):
    write_mnist(tmp_path, **{"train-images-idx3-ubyte.gz": gzip.compress(content)})
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is not the idx file .* \[60000, 28, 28\]"):
        data.load("mnist", "raw", tmp_path)


def test_data_that_is_not_there_says_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"neither --data-dir nor BLOCKMEAN_DATA .* 'digits'"):
        data.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"there is no cifar-10-binary.tar.gz in"):
        data.load("cifar10", data_dir=tmp_path)


def write_cifar(path, names):
    with tarfile.open(path, "w:gz") as archive:
        for number, name in enumerate(names):
            content = bytes([number % 10]) + bytes([number * 10]) * 3072
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = 2 * len(content)
            archive.addfile(info, io.BytesIO(2 * content))


BATCHES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def test_cifar_is_read_out_of_its_archive(tmp_path):
    write_cifar(tmp_path / "cifar-10-binary.tar.gz", BATCHES)
    images = data.load("cifar10", "raw", tmp_path)
    assert images.train.shape == (10, 3, 32, 32)
    assert images.train_labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert float(images.test[0, 0, 0, 0]) == pytest.approx(50 / 255)
    assert list(tmp_path.iterdir()) == [tmp_path / "cifar-10-binary.tar.gz"]


def test_an_incomplete_archive_is_named(tmp_path):
    write_cifar(tmp_path / "cifar-10-binary.tar.gz", BATCHES[:-1])
    with pytest.raises(ValueError, match=r"cifar-10-binary.tar.gz lacks test_batch.bin"):
        data.load("cifar10", data_dir=tmp_path)


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


def test_equal_specs_give_equal_runs_and_other_optimizers_start_alike():
    first, again = run(SPEC), run(SPEC)
    assert without_times(first) == without_times(again)
    assert len(first["losses"]) == 5
    other = run(replace(SPEC, optimizer="Adagrad", lr=0.03))
    assert other["losses"][0] == first["losses"][0]
    assert other["losses"][1] != first["losses"][1]
    assert 0 < first["test_error"] < 1


def test_a_run_that_diverges_ends_with_null():
    record = run(replace(SPEC, model="mlp", optimizer="SGD", lr=1e30, steps=20))
    assert record["losses"][-1] is None
    assert record["train_loss"] is None
    assert len(record["losses"]) < 20
    json.dumps(record, allow_nan=False)


def test_records_are_made_once_and_corrupt_ones_again(tmp_path, capsys):
    specs = [SPEC, replace(SPEC, seed=1)]
    made = list(records.run_all(specs, tmp_path))
    assert len(list(tmp_path.glob("*.json"))) == 2
    stamp = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    again = list(records.run_all(specs, tmp_path))
    assert stamp == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert sorted(map(json.dumps, made)) == sorted(map(json.dumps, again))

    broken = tmp_path / f"{SPEC.key}.json"
    broken.write_text(broken.read_text()[:100])
    assert records.read(tmp_path, SPEC) is None
    assert f"{broken} is not valid JSON" in capsys.readouterr().err
    foreign = json.loads((tmp_path / f"{specs[1].key}.json").read_text())
    broken.write_text(json.dumps(foreign))
    assert records.read(tmp_path, SPEC) is None
    assert "belongs to another run" in capsys.readouterr().err
    list(records.run_all([SPEC], tmp_path))
    assert records.read(tmp_path, SPEC)["spec"] == asdict(SPEC)


def test_specs_that_cannot_run_say_why():
    with pytest.raises(ValueError, match=r"A batch of 5000 cannot be drawn from 4000 images"):
        run(replace(SPEC, batch=5000))
    with pytest.raises(ValueError, match=r"model must be one of small, .* Got 'huge'"):
        run(replace(SPEC, model="huge"))
    with pytest.raises(ValueError, match=r"optimizer must be one of Adagrad, .* Got 'Lion'"):
        run(replace(SPEC, optimizer="Lion"))


def test_records_say_where_and_with_which_code_they_were_made():
    record = run(SPEC)
    assert record["environment"]["threads"] == 1
    assert record["environment"]["torch"] == torch.__version__
