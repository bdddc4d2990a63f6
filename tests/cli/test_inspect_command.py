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
from blockmean.cli.inspect import _abbreviated
from blockmean.lab.data import load
from blockmean.lab.inspect import Request, _means, inspect
from blockmean.lab.models import MODELS

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OWN = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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

def batches():
    while True:  # endless, as some loaders are
        yield data()

pair = data()
loader = DataLoader(TensorDataset(*pair), batch_size=16, shuffle=True)
model = nn.Linear(4, 2)

def of_width(width):
    return nn.Linear(4, width)

def of_nothing(*unused, width=2):
    return nn.Linear(4, width)

class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.linear(x), "hidden": x}

def keyed_loss(outputs, targets):
    return half_mse(outputs["logits"], targets)

def one_argument(outputs):
    return outputs.mean()

def per_sample(outputs, targets):
    return (outputs - targets).square().sum(1)

def dict_batches():
    return [{"x": torch.zeros(3, 4)}]

def ragged():
    return [(torch.zeros(3, 4), torch.zeros(3)), (torch.zeros(3, 5), torch.zeros(3))]

def no_batches():
    return []

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


def saved(folder: Path, suffix: str = "json") -> Path:
    """The one file of this kind in a folder."""
    (path,) = folder.glob(f"coupling-*.{suffix}")
    return path


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


def test_it_says_how_far_it_is():
    told: dict[str, list[int]] = {}
    request = Request("small", samples=250, train_steps=3, norm_probes=0)
    inspect(request, on_progress=lambda what, done, total: told.setdefault(f"{what} of {total}", []).append(done))
    assert told.pop("means of 20") == list(range(1, 21))
    assert told == {"training of 3": [1, 2, 3], "curvature of 250": [0, 100, 200, 250]}


def test_a_matrix_that_cannot_be_had_is_refused_before_training(own, monkeypatch):
    monkeypatch.setattr(torch.optim, "AdamW", lambda *_, **__: pytest.fail("it trained"))
    request = Request(f"{own}:build", data=f"{own}:data", loss=f"{own}:half_mse", matrix="fisher", train_steps=9)
    with pytest.raises(ValueError, match="fisher must know the likelihood"):
        inspect(request)


@pytest.mark.parametrize("partition", ["tensor", "unit"])
def test_rows_say_what_the_matrix_is(partition: str):
    found = inspect(Request("small", samples=50, partition=partition, norm_probes=0))
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
    if partition == "tensor":  # softmax: the gradients of all outputs sum to zero
        assert [row.block for row in found.rows if row.partner is None] == ["13.weight", "13.bias"]


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
    record = json.loads(saved(out).read_text(), parse_constant=pytest.fail)
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
    assert saved(out, "png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    picture = ET.parse(saved(out, "svg")).getroot()
    assert picture.tag.endswith("svg")
    assert saved(out).name.startswith("coupling-small-ggn-tensor-")
    assert all(f"{saved(out, suffix)}\n" in result.output for suffix in ("png", "svg", "json"))
    assert not plt.get_fignums()


def test_long_tables_say_what_they_leave_out(tmp_path: Path):
    result = run("small", "--partition", "unit", "--samples", "30", "--rows", "5", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads(saved(tmp_path).read_text())
    shares = sorted((row["share"] for row in record["blocks"]), reverse=True)
    rest = f"{len(shares) - 5} further blocks, with {sum(shares[5:]):.1%} of the trace"
    assert f"{rest}, are in {saved(tmp_path).name}." in result.output
    shown = [row["block"] for row in record["blocks"] if f"{row['A']:.3g} " in result.output]
    assert len(shown) == 5
    assert min(row["share"] for row in record["blocks"] if row["block"] in shown) == shares[4]


LONG_NAMES = """
import torch
from torch import nn

class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.ModuleDict({"attention": nn.ModuleDict({"output": nn.Linear(4, 4)})}) for _ in range(11)]
        self.bert = nn.ModuleDict({"encoder": nn.ModuleDict({"LayersOfTheEncoder": nn.ModuleList(layers)})})
        self.classifier = nn.Linear(4, 2)

    def forward(self, x):
        for layer in self.bert["encoder"]["LayersOfTheEncoder"]:
            x = x + layer["attention"]["output"](x).tanh()
        return self.classifier(x)

def data():
    return torch.rand(30, 4), torch.arange(30) % 2
"""


def test_long_names_take_two_lines_at_most_at_80_columns(own, tmp_path: Path):
    (Path.cwd() / f"{own}.py").write_text(LONG_NAMES)
    arguments = ["inspect", f"{own}:Bert", "--data", f"{own}:data", "--out", str(tmp_path), "--norm-probes", "0"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.output.partition("of trace")[2].partition("Below each block")[0].splitlines()[2:]
    record = json.loads(saved(tmp_path).read_text())
    partners = [row["partner"] for row in record["blocks"] if row["partner"] is not None]
    assert partners
    assert len(list(filter(str.strip, lines))) == len(record["blocks"]) + len(partners)
    assert all(len(line) <= 80 for line in lines)
    for name in ("b.e.L.10.attention.output.weight", "classifier.bias"):
        assert any(line.split()[0] == name for line in lines if line.strip())
    assert f"{saved(tmp_path).name} has them in full" in result.output
    assert "Anova has no means here" in result.output
    wide = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"}).output
    assert "bert.encoder.LayersOfTheEncoder.10.attention.output.weight" in wide
    assert "Below each block" not in wide


def test_abbreviated_names_stay_apart():
    known = [f"model.layer{i}.{part}.weight" for i in (1, 12) for part in ("input_norm", "intermediate", "out")]
    short = {name: _abbreviated(name, 1, known) for name in known}
    assert short["model.layer12.input_norm.weight"] == "m.l12.inp.weight"
    assert short["model.layer1.intermediate.weight"] == "m.l1.int.weight"
    assert short["model.layer1.out.weight"] == "m.l1.o.weight"
    assert len(set(short.values())) == len(known)
    assert _abbreviated("a.ab.x", 1, ["a.a.x", "a.ab.x", "a.abc.x"]) == "a.ab.x"
    assert _abbreviated("a long name", 1, ["a long name"]) == "a long name"  # the last part stays


@pytest.mark.parametrize("columns", [80, 120])
def test_the_shares_of_anovas_means_stand_beside_chance(own, tmp_path: Path, columns: int):
    (Path.cwd() / f"{own}.py").write_text(LONG_NAMES.replace("4", "12"))
    arguments = ["inspect", f"{own}:Bert", "--data", f"{own}:data", "--out", str(tmp_path), "--norm-probes", "0"]
    result = CliRunner().invoke(cli.app, [*arguments, "--rows", "3"], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    lines = result.output.partition("What Anova's means see")[2].partition("Where means hold")[0].splitlines()
    assert max(map(len, lines)) <= columns
    means = json.loads(saved(tmp_path).read_text())["means"]
    assert len(means) == 11  # of 12 × 12; the classifier has two units
    for one in means:
        assert sum(one["shares"].values()) == pytest.approx(1)
        assert sum(one["chance"].values()) == pytest.approx(1)
        shares = [*one["shares"].values()]
        assert sum(shares[:3]) > sum([*one["chance"].values()][:3])  # 30 samples give gradients of low rank
    assert sum("%" in line for line in lines) == 3
    assert "8 smaller weights are in" in result.output
    assert "weight" in lines[-3] and "…" not in "".join(lines)


def test_looking_at_means_leaves_the_model_alone(own):
    model = nn.Linear(20, 20)
    before = [p.detach().clone() for p in model.parameters()]
    data = torch.rand(30, 20), torch.arange(30) % 20
    found = _means(model, nn.functional.cross_entropy, *data, 0, lambda *said: None)
    assert len(found) == 1
    assert all(torch.equal(a, b) and b.grad is None for a, b in zip(before, model.parameters(), strict=True))


def test_equal_seeds_give_equal_pictures_and_numbers(tmp_path: Path):
    for name in "ab":
        options = ("--samples", "20", "--train-steps", "2", "--partition", "module", "--out", str(tmp_path / name))
        assert run("small", *options).exit_code == 0
    for suffix in ("png", "svg"):
        a, b = (saved(tmp_path / name, suffix).read_bytes() for name in "ab")
        assert a == b
    a, b = (json.loads(saved(tmp_path / name).read_text())["A"] for name in "ab")
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
        (
            ["tiny"],
            "one of small, large, mlp, cnn, convnet, resnet, resnet10, module:object. Got 'tiny' instead.",
        ),
        (["no_such_module:build"], "cannot be imported: No module named 'no_such_module'"),
        (["{own}.py:build"], "Leave out the .py: {own}:build."),
        (["{own}:nothing"], "there is no nothing in"),
        (
            ["{own}:number"],
            "must be a torch.nn.Module, or a function without arguments that returns one. Got 3 instead.",
        ),
        (["{own}:of_width"], "or a function without arguments that returns one. Got of_width(width) instead."),
        (
            ["{own}:Keyed", "--data", "{own}:data"],
            "must return a tensor. Got dict with the keys logits, hidden instead",
        ),
        (
            ["{own}:Keyed", "--data", "{own}:data", "--loss", "{own}:keyed_loss", "--matrix", "ggn"],
            "must return a tensor. Got dict with the keys logits, hidden instead: wrap it in a module",
        ),
        (["small", "--loss", "{own}:one_argument"], "a function of two arguments, (outputs, targets), that returns"),
        (["small", "--loss", "{own}:number"], "that returns the mean loss. Got 3 instead."),
        (
            ["{own}:model", "--data", "{own}:pair", "--loss", "{own}:per_sample"],
            "must return the mean loss as a scalar tensor. Got a tensor of shape [2].",
        ),
        (["{own}:model", "--data", "{own}:number"], "as a DataLoader has, or a function without arguments"),
        (["{own}:model", "--data", "{own}:dict_batches"], "Got {{'x': tensor([[0., 0., 0., 0.]"),
        (["{own}:model", "--data", "{own}:ragged"], "cannot be joined: Sizes of tensors must match"),
        (["{own}:model", "--data", "{own}:no_batches"], "Got no batch at all."),
        (["{own}:model", "--data", "{own}:of_width"], "Got of_width(width) instead."),
        (["{own}:text"], "must return a torch.nn.Module. Got str instead."),
        (["{own}:build", "--data", "{own}:one_tensor"], "returns either. Got tensor([0., 0., 0.]) instead."),
        (["{own}:build", "--data", "{own}:uneven"], "Got 3 inputs and 2 targets."),
        (["{own}:build", "--data", "digits"], "data must be module:object. Got 'digits' instead."),
        (["{own}:build"], "do not fit together: mat1 and mat2 shapes cannot be multiplied"),
        (["small", "--data", "{own}:data"], "takes images (n, channels, height, width). Got inputs [60, 4]."),
        (["small", "--loss", "mse"], "do not fit together: Using a target size"),
        (
            ["{own}:Keyed", "--data", "{own}:data", "--loss", "{own}:half_mse"],
            "do not fit together: unsupported operand",
        ),
        (["small", "--loss", "hinge"], "loss must be one of cross_entropy, mse, module:object. Got 'hinge'"),
        (["small", "--matrix", "kfac"], "matrix must be one of empirical_fisher, fisher, ggn, hessian. Got 'kfac'"),
        (
            ["small", "--partition", "rows"],
            "partition must be one of tensor, unit, kernel, module, all, element. Got 'rows'",
        ),
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
    assert message.format(own=own) in words(result.output)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_computed(own, tmp_path: Path):
    arguments = (f"{own}:broken", "--out", str(tmp_path / f"{own}.py" / "out"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert "is a file. Choose another one." in words(result.output)


@pytest.mark.parametrize("data", ["pair", "loader", "batches"])
def test_own_data_may_be_tensors_a_loader_or_batches_without_end(own, data: str):
    found = inspect(Request(f"{own}:model", data=f"{own}:{data}", loss="mse", samples=60, train_steps=1))
    assert found.report.samples == 60


def test_a_loader_gives_the_matrix_of_its_samples(own):
    requests = [Request(f"{own}:model", data=f"{own}:{data}", loss="mse") for data in ("pair", "loader")]
    pair, loader = (inspect(request) for request in requests)
    assert loader.report.samples == 60
    torch.testing.assert_close(loader.matrix.A, pair.matrix.A)
    torch.testing.assert_close(loader.matrix.lam, pair.matrix.lam)


def test_an_own_loss_may_take_any_output_where_the_matrix_allows_it(own, tmp_path: Path):
    arguments = (f"{own}:Keyed", "--data", f"{own}:data", "--loss", f"{own}:keyed_loss", "--out", str(tmp_path))
    assert run(*arguments).exit_code == 0


def test_arguments_with_defaults_need_not_be_given(own, tmp_path: Path):
    assert run(f"{own}:of_nothing", "--data", f"{own}:data", "--loss", "mse", "--out", str(tmp_path)).exit_code == 0


@pytest.mark.parametrize("matrix", ["empirical_fisher", "hessian"])
def test_one_probe_leaves_no_nan_in_the_file(own, matrix: str, tmp_path: Path):
    request = (f"{own}:model", "--data", f"{own}:data", "--loss", "mse", "--matrix", matrix, "--norm-probes", "1")
    assert run(*request, "--out", str(tmp_path)).exit_code == 0
    record = json.loads(saved(tmp_path).read_text(), parse_constant=pytest.fail)
    assert record["report"]["explained"] is not None
    assert record["report"]["explained_error"] is None


def test_only_the_same_request_replaces_files_and_it_says_so(own, tmp_path: Path):
    request = (f"{own}:model", "--data", f"{own}:data", "--loss", "mse", "--out", str(tmp_path))
    first = run(*request)
    kept = {path: path.read_bytes() for path in tmp_path.glob("coupling-*")}
    assert len(kept) == 3
    assert "replaced" not in first.output
    for other in (["--matrix", "ggn"], ["--partition", "unit"], ["--seed", "1"], ["--samples", "9"]):
        assert "replaced" not in run(*request, *other).output
    assert len(list(tmp_path.glob("coupling-*"))) == 15
    assert {path: path.read_bytes() for path in kept} == kept
    again = run(*request)
    assert all(f"{path} (replaced)\n" in again.output for path in kept)
    assert len(list(tmp_path.glob("coupling-*"))) == 15


def test_errors_in_the_users_own_code_keep_their_traceback(own, tmp_path: Path):
    result = run(f"{own}:broken", "--out", str(tmp_path))
    assert isinstance(result.exception, KeyError)
    assert result.exit_code == 1


def test_as_a_user_calls_it_with_a_module_of_the_current_folder(own, tmp_path: Path):
    command = [str(Path(sys.executable).parent / "blockmean"), "inspect", f"{own}:build", "--data", f"{own}:data"]
    result = subprocess.run([*command, "--loss", "mse", "--out", "seen"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    picture = saved(tmp_path / "seen", "png")
    assert f"seen/{picture.name}" in result.stdout
    assert picture.stat().st_size > 1000
