"""The documentation as pages: every public name has a place, dead links end the build, and it works offline."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import blockmean

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api"
FOREIGN = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//""")
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install '.[docs]'"
)


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------- public names


def test_every_public_name_has_one_place_in_the_reference(hooks: ModuleType) -> None:
    assert set(blockmean.__all__) - {"curvature", "plot"} <= {
        name.removeprefix("blockmean.") for name in hooks.public_names()
    }
    assert {"blockmean.curvature.Report", "blockmean.plot.shares", "blockmean.optim.Diagnosis"} <= {
        *hooks.public_names()
    }
    assert not hooks.misplaced()


def test_every_public_method_has_a_docstring(hooks: ModuleType) -> None:
    members = dict(hooks.public_members())
    assert {"blockmean.BlockMean.solve", "blockmean.Partition.names", "blockmean.BlockMean.A"} <= members.keys()
    assert not hooks.undocumented()


def test_a_name_that_loses_its_place_is_noticed(hooks: ModuleType, tmp_path: Path) -> None:
    for page in API.glob("*.md"):
        (tmp_path / page.name).write_text(page.read_text().replace("::: blockmean.Partition\n", ""))
    assert hooks.misplaced(tmp_path) == ["blockmean.Partition"]


def test_a_name_without_a_docstring_is_noticed(hooks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blockmean.BlockMean.solve, "__doc__", None)
    monkeypatch.setattr(blockmean.curvature.ggn, "__doc__", None)
    assert hooks.undocumented() == ["blockmean.curvature.ggn", "blockmean.BlockMean.solve"]


def test_a_new_name_ends_the_build(
    hooks: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def novelty() -> None: ...

    monkeypatch.setattr(blockmean.plot, "novelty", novelty, raising=False)
    monkeypatch.setattr(blockmean.plot, "__all__", [*blockmean.plot.__all__, "novelty"])
    hooks.on_pre_build(config=None)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mkdocs.")]
    assert warnings == [
        "docs/api/*.md must have one line '::: blockmean.plot.novelty'.",
        "blockmean.plot.novelty needs a docstring: the API reference leaves it out.",
    ]


# ---------------------------------------------------------------- the build


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def small_site(tmp_path: Path) -> Path:
    """A site of one page with our settings."""
    root = tmp_path / "small"
    shutil.copytree(ROOT / "docs" / "site", root / "docs" / "site")
    shutil.copytree(API, root / "docs" / "api")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (root / name).write_text("# A page\n")
    settings = (ROOT / "mkdocs.yml").read_text()
    nav = "nav: [README.md, CONTRIBUTING.md, CHANGELOG.md]\nnot_in_nav: /api/*\n"
    settings = re.sub(r"^nav:\n(?: .*\n)+", nav, settings, flags=re.MULTILINE)
    settings = re.sub(r"^exclude_docs: \|\n", "exclude_docs: |\n  /api\n", settings, flags=re.MULTILINE)
    (root / "mkdocs.yml").write_text(settings)
    return root


@needs_mkdocs
def test_dead_links_and_names_without_a_place_end_the_build(small_site: Path) -> None:
    (small_site / "README.md").write_text(
        "# A page\n[a](docs/gone.md) [b](#gone) [c](CHANGELOG.md#gone) [d](gone.json)\n"
    )
    page = small_site / "docs" / "api" / "algebra.md"
    page.write_text(page.read_text().replace("::: blockmean.Partition\n", ""))
    done = build(small_site, small_site / "out")
    assert done.returncode == 1
    complaints = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    wanted = ("'::: blockmean.Partition'", "'gone.md'", "'#gone'", "'CHANGELOG.md#gone'", "'gone.json'")
    assert len(complaints) == len(wanted)
    assert all(any(text in line for line in complaints) for text in wanted), done.stderr


@needs_mkdocs
def test_a_live_link_does_not(small_site: Path) -> None:
    (small_site / "README.md").write_text("# A page\n[alive](CHANGELOG.md#a-page), [record](records), $x^2$\n")
    (small_site / "records").mkdir()
    (small_site / "records" / "one.json").write_text("{}")
    done = build(small_site, small_site / "out")
    assert done.returncode == 0, done.stderr
    start = (small_site / "out" / "index.html").read_text()
    assert 'href="CHANGELOG.html#a-page"' in start and "<msup>" in start
    assert 'href="records/index.html"' in start
    assert 'href="one.json"' in (small_site / "out" / "records" / "index.html").read_text()
    assert (small_site / "out" / "records" / "one.json").read_text() == "{}"


def names_in(inventory: Path) -> Iterator[str]:
    """The names in an inventory as Sphinx has it: four lines of text, then compressed lines that start with a name."""
    for line in zlib.decompress(inventory.read_bytes().split(b"\n", 4)[4]).decode().splitlines():
        yield line.split(" ", 1)[0]


@needs_mkdocs
@pytest.mark.slow
def test_the_whole_site_builds_with_all_names_and_nothing_from_other_hosts(hooks: ModuleType, tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    placed = set(names_in(tmp_path / "objects.inv"))
    names = {hooks.place_of(name, value) for name, value in hooks.public_names().items()}
    members = {name for name, _ in hooks.public_members()}
    assert len(members) > 40
    assert names | members <= placed
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 15
    assert not [page.name for page in pages if FOREIGN.search(page.read_text())]
    assert FOREIGN.search('<script src="https://elsewhere/x.js">')


def test_the_snippets_run_before_the_site_is_built() -> None:
    command = ["make", "--dry-run", "--always-make", "PYTHON=python3", "site"]
    steps = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert steps.index("tests/test_docs.py") < steps.index("mkdocs build --strict")
