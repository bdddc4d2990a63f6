"""What steps cost: networks, measurements in processes of their own, records that resume, tables and pictures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from blockmean import cli
from blockmean.lab import steps
from blockmean.lab.step_pictures import draw_costs
from blockmean.lab.steps import NETWORKS, OF_A_SWEEP, STEPPERS, SWEEPS, Costs, Stepper

SIZES = {
    "paper-small": (322, 10),
    "paper-large": (140_906, 34),
    "resnet-18": (11_689_512, 62),
    "linear-50M": (50_000_400, 150),
    "gpt-2": (124_439_808, 148),
}


def bench(*arguments: str):
    return CliRunner().invoke(cli.app, ["bench", "step", *arguments], env={"COLUMNS": "200"})


def cost(name: str = "4x8", **rows: float) -> Costs:
    """A record in which fused steps take a second and the others a multiple of it."""
    made = {}
    for stepper, seconds in rows.items():
        spread = {"median": seconds, "lower": 0.9 * seconds, "upper": 1.1 * seconds}
        one = {
            "seconds": spread,
            "beside_default": spread,
            "beside_fused": spread,
            "bytes_per_parameter": 8.0,
            "operations": 10 * 2 * 6 * 256,
        }
        made[stepper] = one
    speed = {"stream_bytes_per_second": 56 * 256, "product_operations_per_second": 10_000}
    return Costs(name, 1, made, speed, 256, 4)


def test_networks_have_the_tensors_of_their_models():
    with torch.device("meta"):
        for name, (parameters, tensors) in SIZES.items():
            if name.startswith("paper"):
                continue
            model = steps.network(name)
            assert (steps.parameters(model), len(list(model.parameters()))) == (parameters, tensors), name
    for name in ("paper-small", "paper-large"):
        model = steps.network(name)
        assert (steps.parameters(model), len(list(model.parameters()))) == SIZES[name]
    assert set(SIZES) == set(NETWORKS)
    assert [tuple(p.shape) for p in steps.network("2x5").parameters()] == [(5, 5)] * 2


def test_sweeps_change_one_thing():
    shapes = {name: [p.shape for p in steps.network(name).parameters()] for names in SWEEPS.values() for name in names}
    assert {len(shapes[name]) for name in SWEEPS["parameters"]} == {32}
    assert {sum(map(math.prod, shapes[name])) for name in SWEEPS["blocks"]} == {2**20}
    assert len({STEPPERS[name].options["means"] for name in OF_A_SWEEP["means"]}) == len(OF_A_SWEEP["means"])


def test_a_step_is_measured_beside_both_forms_of_torch_and_resumes(tmp_path: Path):
    path = tmp_path / "steps.jsonl"
    arguments = ["--networks", "2x12", "--optimizers", "AdaGradBMA; Anova", "--repetitions", "3", "--out", str(path)]
    result = bench(*arguments)
    assert result.exit_code == 0, result.output
    (costs,) = steps.read(path, ["2x12"], 1)
    assert list(costs.measured) == ["AdaGradBMA", "Anova"] and (costs.parameters, costs.tensors) == (288, 2)
    for row in costs.measured.values():
        assert row["seconds"]["median"] > 0 < row["beside_fused"]["lower"] <= row["beside_fused"]["upper"]
        assert row["environment"]["threads"] == 1
    assert costs.rows["Anova"]["operations"] == 4 * 2 * 6 * 288  # 6 means on both sides
    assert costs.rows["AdaGradBMA"]["operations"] == 0
    means = 3 * 7 * (12 + 12) * 2  # bases, sketches and averages of 7 means on both sides, of two matrices
    assert costs.rows["Anova"]["bytes_per_parameter"] > 4 + 4 * means / 288
    assert "2x12: 288 parameters in 2 tensors, 1 thread" in result.output and "Anova" in result.output
    assert "measurements ━" in result.output  # a bar

    before = path.read_text()
    assert bench(*arguments).exit_code == 0
    assert path.read_text() == before
    path.write_text(before.splitlines(keepends=True)[0])
    assert "Anova" not in bench(*arguments, "--show-only").output
    again = bench(*arguments)
    assert "2x12, Anova:" in again.output and "2x12, AdaGradBMA:" not in again.output


def test_what_cannot_be_measured_is_named(tmp_path: Path):
    arguments = ["--networks", "paper-small", "--optimizers", "Muon + AdamW", "--repetitions", "3"]
    result = bench(*arguments, "--out", str(tmp_path / "steps.jsonl"))
    assert result.exit_code == 0
    assert "paper-small: no Muon + AdamW. Muon takes matrices of hidden layers" in result.output
    late = steps.measure_alone("AdamW", "2x8", 1, 3, longest=0.01)
    assert late == {"missing": "did not finish within 0.01 s"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--networks", "vgg"], "There is no network 'vgg'"),
        (["--optimizers", "Adamant"], "There is no optimizer Adamant"),
        (["--sweep", "layers"], "There is no sweep 'layers'"),
        (["--optimizers", ""], "Give names, separated by ';'. Got '' instead."),
    ],
)
def test_unknown_names_are_refused_before_anything_runs(arguments: list[str], said: str, tmp_path: Path):
    result = bench(*arguments, "--out", str(tmp_path / "steps.jsonl"))
    assert result.exit_code == 2 and said in result.output
    assert not (tmp_path / "steps.jsonl").exists()


def test_list_names_networks_and_optimizers():
    lines = bench("--list").output.splitlines()
    assert lines == [f"network    {name}" for name in NETWORKS] + [f"optimizer  {name}" for name in STEPPERS]


def test_seconds_are_those_of_the_fused_step_times_the_ratio():
    costs = cost(**{"AdamW, fused": 3.0, "AdamBMA": 2.0})
    costs.rows["AdamBMA"]["seconds"] = {"median": 70.0}  # in a minute in which the machine was busy
    assert costs.seconds("AdamBMA") == 6
    assert cost(AdamBMA=2.0).seconds("AdamBMA") == 2


def test_shares_of_what_the_machine_can_do():
    costs = cost(**{"AdamW, fused": 1.0, "AdamBMA": 2.0, "Anova": 4.0})
    assert costs.share_of_stream("AdamW, fused") == pytest.approx(28 / 56)
    assert costs.share_of_stream("AdamBMA") == pytest.approx(32 / 56 / 2)
    assert costs.share_of_stream("Anova") is None
    assert costs.share_of_product() == pytest.approx(10 * 2 * 6 * 256 / 4 / 10_000)
    assert cost(AdamBMA=1.0).share_of_product() is None


def test_every_optimizer_of_a_family_stands_beside_torch():
    for name, stepper in STEPPERS.items():
        default, fused = steps.yardsticks(name)
        assert STEPPERS[default] == Stepper(stepper.family, {}, stepper.family)
        assert STEPPERS[fused].options == {"fused": True}


def test_pictures_are_drawn_from_records(tmp_path: Path):
    found = [cost(AdamBMA=1.5, Anova=3.0, SOAP=40.0), cost("8x8", AdamBMA=1.2)]
    assert draw_costs(found, tmp_path / "costs").caption
    assert {path.name for path in tmp_path.iterdir()} == {"costs.png", "costs.svg"}
