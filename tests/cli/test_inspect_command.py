"""`blockmean inspect`: the table, the report, the files, and every message about what cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from blockmean import cli, curvature
from blockmean.lab.data import load
from blockmean.lab.inspect import Request, inspect
from blockmean.lab.models import MODELS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OWN = """
import torch
from torch import nn

built = []

def build():
    built.append(nn.Sequential(nn.Linear(4, 3), nn.Dropout(), nn.Tanh(), nn.Linear(3, 2)))
    return built[-1]

def data():
    x = torch.rand(60, 4, generator=torch.Generator().manual_seed(0))
    return x, x[:, :2] - x[:, 2:]

def half_mse(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1).mean()

def text():
    return "no model"

def one_tensor():
    return torch.zeros(3)

def uneven():
    return torch.zeros(3, 4), torch.zeros(2)

def broken():
    raise KeyError("in the user's own code")

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the current folder."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    name = f"own_{tmp_path.name.replace('-', '_')}"  # each test its own: modules are imported once
    (tmp_path / f"{name}.py").write_text(OWN)
    yield name
    sys.modules.pop(name, None)


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["inspect", *arguments], env={"COLUMNS": "200"})


def words(text: str) -> str:
    """One line, however it was wrapped."""
    return " ".join(text.split())


def test_the_matrix_is_that_of_the_library_on_the_drawn_samples():
    found = inspect(Request("small", samples=40, seed=3, norm_probes=0))
    torch.manual_seed(3)
    model = MODELS["small"]((1, 28, 28)).eval()
    images = load("digits")
    chosen = torch.randperm(len(images.train), generator=torch.Generator().manual_seed(3))[:40]
    loss = nn.functional.cross_entropy
    expected = curvature.empirical_fisher(model, loss, (images.train[chosen], images.train_labels[chosen]))
    torch.testing.assert_close(found.matrix.A, expected.matrix.A, rtol=0, atol=0)
    torch.testing.assert_close(found.matrix.lam, expected.matrix.lam, rtol=0, atol=0)


def test_rows_say_what_the_matrix_is():
    found = inspect(Request("small", samples=50, partition="unit", norm_probes=0))
    dense = found.matrix.to_dense().double()
    labels = found.matrix.partition.labels
    block_sums = torch.stack([dense[labels == i].sum(0) for i in range(len(found.rows))])
    A = torch.stack([block_sums[:, labels == j].sum(1) for j in range(len(found.rows))], 1)
    A /= torch.outer(found.matrix.partition.sizes, found.matrix.partition.sizes).sqrt()
    scale = A.diagonal().abs().sqrt()
    for i, row in enumerate(found.rows):
        own = dense[labels == i][:, labels == i]
        assert row.size == len(own)
        assert pytest.approx(float(A[i, i]), rel=1e-4, abs=1e-8) == row.A  # the dense one is summed up in float32
        assert row.share == pytest.approx(float(own.trace() / dense.trace()), rel=1e-4)
        if row.partner is not None:
            j = found.matrix.partition.names.index(row.partner)
            assert j != i
            assert row.correlation == pytest.approx(float(A[i, j] / scale[i] / scale[j]), rel=1e-3, abs=1e-6)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    assert [row.block for row in found.rows if row.partner is None] == ["13.bias"]  # softmax: it sums to zero


def test_a_single_entry_has_no_lambda_and_a_single_block_no_partner(own):
    rows = inspect(Request(f"{own}:build", data=f"{own}:data", loss="mse", partition="element")).rows
    assert {row.lam for row in rows} == {None}
    (row,) = inspect(Request(f"{own}:build", data=f"{own}:data", loss="mse", partition="all")).rows
    assert row.partner is row.correlation is None
    assert row.share == pytest.approx(1.0)


@pytest.mark.parametrize("matrix", ["empirical_fisher", "fisher", "ggn", "hessian"])
def test_every_matrix_has_a_record_in_plain_values(matrix: str):
    record = inspect(Request("small", matrix=matrix, samples=20, norm_probes=2)).record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["report"]["matrix"].lower().startswith(matrix[:3].replace("ggn", "gen"))
    assert len(record["report"]["lam_error"]) == 10
    assert (record["report"]["probes"] > 0) == (matrix == "hessian")


def test_table_report_and_files(tmp_path: Path):
    out = tmp_path / "new"
    result = run("small", "--matrix", "ggn", "--samples", "30", "--norm-probes", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    record = json.loads((out / "coupling.json").read_text(), parse_constant=pytest.fail)
    assert record["request"]["matrix"] == "ggn"
    assert record["report"]["samples"] == 30
    assert "N = 30" in record["report"]["equation"]
    assert 0 < record["report"]["explained"] < 1
    assert len(record["blocks"]) == len(record["A"]) == len(record["A"][0]) == 10
    assert record["environment"]["torch"] == torch.__version__
    for row in record["blocks"]:
        assert row["block"] in result.output
        assert f"{row['A']:.3g}" in result.output
    assert record["report"]["equation"] in result.output
    assert "over 30 samples: 322 parameters in 10 blocks" in result.output
    assert (out / "coupling.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = ET.parse(out / "coupling.svg").getroot()
    assert picture.tag.endswith("svg")
    assert all(str(out / f"coupling.{suffix}") in result.output for suffix in ("png", "svg", "json"))
    assert not plt.get_fignums()


def test_long_tables_say_what_they_leave_out(tmp_path: Path):
    result = run("small", "--partition", "unit", "--samples", "30", "--rows", "5", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "coupling.json").read_text())
    shares = sorted((row["share"] for row in record["blocks"]), reverse=True)
    assert f"22 further blocks, with {sum(shares[5:]):.1%} of the trace, are in coupling.json." in result.output
    shown = [row["block"] for row in record["blocks"] if f"{row['A']:.3g} " in result.output]
    assert len(shown) == 5
    assert min(row["share"] for row in record["blocks"] if row["block"] in shown) == shares[4]


def test_equal_seeds_give_equal_pictures_and_numbers(tmp_path: Path):
    for name in "ab":
        options = ("--samples", "20", "--train-steps", "2", "--partition", "module", "--out", str(tmp_path / name))
        assert run("small", *options).exit_code == 0
    for suffix in ("png", "svg"):
        a, b = ((tmp_path / name / f"coupling.{suffix}").read_bytes() for name in "ab")
        assert a == b
    a, b = (json.loads((tmp_path / name / "coupling.json").read_text())["A"] for name in "ab")
    assert a == b
    assert inspect(Request("small", samples=20, train_steps=2, partition="module", seed=1)).matrix.A.tolist() != a


def test_training_lowers_the_loss_and_is_told(own):
    losses, titles = [], []
    for steps in (0, 300):
        found = inspect(Request(f"{own}:build", data=f"{own}:data", loss="mse", train_steps=steps))
        titles.append(found.title.partition(", ")[2])
        module = sys.modules[own]
        x, y = module.data()
        assert not module.built[-1].training  # dropout is off where curvature is taken
        losses.append(nn.functional.mse_loss(module.built[-1](x), y).item())
    assert losses[1] < 0.7 * losses[0]
    assert titles == ["as initialised", "after 300 steps"]


def test_an_own_model_with_own_data_and_loss(own, tmp_path: Path):
    arguments = (f"{own}:build", "--data", f"{own}:data", "--loss", f"{own}:half_mse", "--matrix", "ggn")
    result = run(*arguments, "--train-steps", "3", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "over 60 samples: 23 parameters in 4 blocks" in result.output  # fewer than asked for, and it says so
    assert "3.weight" in result.output


def test_an_own_model_on_a_data_set_that_is_there(own, tmp_path: Path, monkeypatch):
    (Path.cwd() / f"{own}.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
    )
    result = run(f"{own}:build", "--samples", "20", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "7,850 parameters in 2 blocks" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny"], "model must be small or large or mlp or cnn or 'module:function'. Got 'tiny' instead."),
        (["no_such_module:build"], "cannot be imported: No module named 'no_such_module'"),
        (["{own}:nothing"], "there is no function nothing in"),
        (["{own}:number"], "there is no function number in"),
        (["{own}:text"], "must return a torch.nn.Module. Got str instead."),
        (["{own}:build", "--data", "{own}:one_tensor"], "must return two tensors, (inputs, targets). Got tensor("),
        (["{own}:build", "--data", "{own}:uneven"], "Got 3 inputs and 2 targets."),
        (["{own}:build", "--data", "digits"], "data must be 'module:function'. Got 'digits' instead."),
        (["{own}:build"], "do not fit together: mat1 and mat2 shapes cannot be multiplied"),
        (["small", "--data", "{own}:data"], "takes images (n, channels, height, width). Got inputs [60, 4]."),
        (["small", "--loss", "mse"], "do not fit together: Using a target size"),
        (["small", "--loss", "hinge"], "loss must be cross_entropy or mse or 'module:function'. Got 'hinge'"),
        (["small", "--matrix", "kfac"], "matrix must be one of empirical_fisher, fisher, ggn, hessian. Got 'kfac'"),
        (["small", "--partition", "rows"], "'by' parameter of Partition.of must be"),
        (["mlp", "--partition", "element"], "cuts mlp into 55,050 blocks, more than the 4,096 whose matrix can be"),
        (["small", "--dataset", "svhn"], "dataset must be one of digits"),
        (["small", "--samples", "0"], "samples must be at least 1. Got 0 instead."),
        (["small", "--train-steps", "-1"], "train_steps must be at least 0. Got -1 instead."),
        (["small", "--norm-probes", "-1"], "norm_probes must be at least 0. Got -1 instead."),
        (
            ["{own}:build", "--data", "{own}:data", "--loss", "{own}:half_mse", "--matrix", "fisher"],
            "fisher must know the likelihood behind the loss",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(own, tmp_path: Path, arguments, message):
    result = run(*(argument.format(own=own) for argument in arguments), "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert message in words(result.output)
    assert not (tmp_path / "out").exists()


def test_errors_in_the_users_own_code_keep_their_traceback(own, tmp_path: Path):
    result = run(f"{own}:broken", "--out", str(tmp_path))
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1


def test_as_a_user_calls_it_with_a_module_of_the_current_folder(own, tmp_path: Path):
    command = [str(Path(sys.executable).parent / "blockmean"), "inspect", f"{own}:build", "--data", f"{own}:data"]
    result = subprocess.run([*command, "--loss", "mse", "--out", "seen"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "seen/coupling.png" in result.stdout
    assert (tmp_path / "seen" / "coupling.png").stat().st_size > 1000
