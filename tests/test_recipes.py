"""Recipes run as they are, and the frameworks they are for train, save and resume with our optimizers."""

from __future__ import annotations

import ast
import contextlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.scripts import import_or_skip, run_script

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "examples" / "recipes"
# The packages that a recipe needs beyond torch.
NEEDS = {
    "plain_loop": (),
    "char_gpt": (),
    "any_logger": (),
    "torchtitan_container": (),
    "tensorboard_log": ("tensorboard", "matplotlib"),
    "hugging_face": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "timm_registry": ("timm",),
    "axolotl_plugin": ("axolotl",),
}
LONGER = {"char_gpt"}  # than 40 lines, and up to 60: it has a model and a schedule of its own
LOSS = re.compile(r"loss:? (\d+\.\d+)|, (\d+\.\d+) in the last")


def run(name: str, *arguments: str, cwd: Path) -> str:
    """The output of a recipe; warnings are errors unless another package may have caused them."""
    for package in NEEDS[name]:
        import_or_skip(package)
    script = RECIPES / f"{name}.py"
    if not set(NEEDS[name]) - {"tensorboard", "matplotlib"}:
        with contextlib.chdir(cwd):
            return run_script(script, *arguments)
    command = [sys.executable, str(script), *arguments]  # frameworks have warnings, loggers and state of their own
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(first or last) for first, last in LOSS.findall(printed)]


def test_every_recipe_is_listed_here_is_short_and_has_its_section():
    files = sorted(RECIPES.glob("*.py"))
    assert {file.stem for file in files} == set(NEEDS)
    page = (ROOT / "docs" / "recipes.md").read_text()
    for file in files:
        assert len(file.read_text().splitlines()) < (60 if file.stem in LONGER else 40), file.name
        assert f"](../examples/recipes/{file.name})" in page
        assert f"examples/recipes/{file.name}" in file.read_text().split('"""')[1]  # how to run it


def test_the_page_shows_lines_that_the_recipes_have():
    page = (ROOT / "docs" / "recipes.md").read_text()
    sections = [section for section in page.split("\n## ") if "```py\n" in section]
    assert len(sections) == len(NEEDS)
    for section in sections:
        (name,) = set(re.findall(r"\(../examples/recipes/(\w+)\.py\)", section))
        (shown,) = re.findall(r"```py\n(.*?)```", section, re.DOTALL)
        lines = {line.strip() for line in (RECIPES / f"{name}.py").read_text().splitlines()}
        assert {line.strip() for line in shown.splitlines()} <= lines, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "plain_loop",
        "char_gpt",
        "torchtitan_container",
        "hugging_face",
        "lightning_module",
        "accelerate_loop",
        "timm_registry",
    ],
)
def test_the_recipe_learns(name: str, tmp_path: Path):
    found = losses(run(name, cwd=tmp_path))
    assert len(found) >= 2
    assert found[-1] < 0.9 * found[0]
    assert not list(tmp_path.iterdir())  # nothing is left behind


@pytest.mark.slow
def test_the_character_gpt_reads_a_file(tmp_path: Path):
    text = "to and fro, to and fro, on and on. " * 50
    (tmp_path / "text.txt").write_text(text)
    found = losses(run("char_gpt", "text.txt", cwd=tmp_path))
    frequencies = [text.count(c) / len(text) for c in set(text)]
    assert found[-1] < -sum(p * math.log(p) for p in frequencies)  # context counts, not only how frequent they are


@pytest.mark.slow
def test_the_logger_has_the_numbers_of_every_fiftieth_step(tmp_path: Path):
    rows = [ast.literal_eval(line) for line in run("any_logger", cwd=tmp_path).splitlines()]
    assert [row["step"] for row in rows] == [50, 100, 150, 200]
    for row in rows:
        assert list(row) == ["step", "rate/0", "means/0.weight", "means/2.weight"]
        assert row["rate/0"] == 3e-3
        assert 0 < row["means/0.weight"] <= 1


@pytest.mark.slow
def test_tensorboard_has_the_coupling_of_blocks_its_picture_and_the_shares_of_means(tmp_path: Path):
    run("tensorboard_log", "logs", cwd=tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = {}
    for name in ("AdamBMA", "Anova"):
        events = EventAccumulator(str(tmp_path / "logs" / name))
        events.Reload()
        tags[name] = events.Tags()
        assert len(events.Scalars("loss")) == 200
    assert tags["AdamBMA"]["images"] == ["coupling"]
    assert any(tag.startswith("coupling/A_ii/0.weight") for tag in tags["AdamBMA"]["scalars"])
    assert {"means/0.weight", "means/2.weight"} <= set(tags["Anova"]["scalars"])
