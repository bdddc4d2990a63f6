"""Keys of runs: the published records keep theirs, whatever fields are added to a spec."""

import json
import runpy
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from blockmean.lab.paper.protocol import studies
from blockmean.lab.records import Records, append
from blockmean.lab.spec import ORIGINAL_FIELDS, RunSpec

RESULTS = Path(__file__).parents[2] / "results"
PUBLISHED = [*RESULTS.glob("*-small.jsonl"), *RESULTS.glob("*-large.jsonl"), *RESULTS.glob("race/*.jsonl")]


@dataclass(frozen=True)
class LaterSpec(RunSpec):
    """A spec of tomorrow, with two more fields."""

    warmup: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)

    __hash__ = RunSpec.__hash__


def as_later(spec: RunSpec, **changes: Any) -> LaterSpec:
    return LaterSpec(**asdict(spec), **changes)


SPEC = RunSpec("digits", "small", "AdamBMA", 0.01, seed=3, steps=40, options={"betas": (0.9, 0.99)}, batch=100)


@pytest.mark.parametrize("cls", [RunSpec, LaterSpec])
def test_every_published_record_is_found_under_its_key_and_read(cls: type[RunSpec]):
    count = 0
    for path in PUBLISHED:
        known = Records(path)
        for line in map(json.loads, path.read_text().splitlines()):
            spec = cls(**line["spec"])
            assert spec.key == line["key"]
            assert [record["spec"] for record in known.of([spec])] == [line["spec"]]
            count += 1
    assert count == 1032


def test_every_published_record_belongs_to_a_study():
    large = runpy.run_path(str(RESULTS.parent / "benchmarks" / "large_model.py"))["study"]
    every = [*studies("paper"), large("mnist"), large("cifar10")]
    found = [study.findings(RESULTS) for study in every]
    assert not any(one.unusable for one in found)
    keys = {RunSpec(**record["spec"]).key for one in found for record in one.every}
    paths = {study.file(RESULTS) for study in every}
    assert keys == {json.loads(line)["key"] for path in paths for line in path.read_text().splitlines()}


def test_a_new_field_changes_the_key_only_away_from_its_default(tmp_path: Path):
    assert as_later(SPEC).key == SPEC.key
    changed = [as_later(SPEC, warmup=5), as_later(SPEC, warmup=6), as_later(SPEC, schedule={"name": "cosine"})]
    assert len({SPEC.key, *(spec.key for spec in changed)}) == 4
    assert as_later(SPEC, schedule={"at": (1, 2)}).key == as_later(SPEC, schedule={"at": [1, 2]}).key  # as JSON


def record_of(spec: RunSpec) -> dict[str, Any]:
    epoch = {"train_loss": 1.0, "test_loss": 1.0, "test_error": 0.5}
    return {"spec": asdict(spec), "environment": {}, "epochs": [epoch], "diverged_at": None, "step_seconds": 1, **epoch}


def test_records_are_read_across_the_new_field_in_both_directions(tmp_path: Path):
    path, warm = tmp_path / "study.jsonl", as_later(SPEC, warmup=5)
    append(path, SPEC.key, record_of(SPEC))
    assert Records(path).of([as_later(SPEC)])  # an old record, new code
    assert not Records(path).of([warm])
    append(path, as_later(SPEC).key, record_of(as_later(SPEC)))  # says warmup: 0
    assert Records(path).of([as_later(SPEC)])
    append(path, warm.key, record_of(warm))
    assert Records(path).of([warm])[0]["spec"]["warmup"] == 5
    assert len(Records(path).every()) == 2


def test_a_field_of_today_always_counts():
    assert {f.name for f in fields(RunSpec)} >= set(ORIGINAL_FIELDS)
    others = {
        "dataset": "mnist", "model": "mlp", "optimizer": "SGD", "lr": 0.1, "seed": 4, "steps": 80, "options": {},
        "inputs": "raw", "batch": 50, "flip": True,
    }  # fmt: skip
    assert others.keys() == set(ORIGINAL_FIELDS)
    assert len({SPEC.key, *(replace(SPEC, **{name: value}).key for name, value in others.items())}) == 11
