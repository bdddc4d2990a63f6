"""The source distribution has every tracked file, and its metadata is complete."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from email.message import Message
from pathlib import Path

import pytest

import blockmean

ROOT = Path(__file__).parents[1]
MADE = re.compile(r"PKG-INFO|setup\.cfg|src/blockmean\.egg-info/.*")  # by setuptools
BUILD = "import sys; from setuptools import build_meta; print(build_meta.{}(sys.argv[1]))"


def tracked() -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=False)
    if done.returncode or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing to compare with")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def build(what: str, source: Path, folder: Path, **variables: str) -> Path:
    """What the build backend makes of a source tree: its name is the last thing it prints."""
    folder.mkdir()
    env = {**{key: value for key, value in os.environ.items() if key != "BLOCKMEAN_URL"}, **variables}
    command = [sys.executable, "-c", BUILD.format(what), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=source, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files."""
    copy = tmp_path_factory.mktemp("source")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.mark.packaging
def test_the_source_distribution_has_every_tracked_file_and_tests_run_from_it(source: Path, tmp_path: Path):
    (source / "src/blockmean/optim/kernels/libblockmean.so").touch()  # what a build leaves behind stays behind
    archive = build("build_sdist", source, tmp_path / "dist")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in (member.name for member in tar if member.isfile())}
        tar.extractall(tmp_path / "unpacked", filter="data")
    assert {name for name in names if not MADE.fullmatch(name)} == set(tracked())
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    env = {**os.environ, "PYTHONPATH": str(unpacked / "src"), "OMP_NUM_THREADS": "1"}
    some = [f"tests/{name}.py" for name in ("lab/test_spec", "test_architecture", "test_recipes", "test_sdist")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow and not packaging", *some]
    done = subprocess.run(command, capture_output=True, text=True, cwd=unpacked, env=env, check=False)
    assert done.returncode == 0, done.stdout


def metadata(source: Path, folder: Path, **variables: str) -> Message:
    return email.message_from_string(
        (build("prepare_metadata_for_build_wheel", source, folder, **variables) / "METADATA").read_text()
    )


@pytest.mark.packaging
def test_metadata_has_the_one_version_and_the_readme(source: Path, tmp_path: Path):
    found = metadata(source, tmp_path / "plain")
    assert found["Version"] == blockmean.__version__
    assert found["Author"] == "The blockmean developers"
    assert found["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in found.get_all("Classifier")
    assert found.get_payload().strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.packaging
def test_links_of_the_readme_are_absolute_once_the_address_is_known(source: Path, tmp_path: Path):
    page = metadata(source, tmp_path / "released", BLOCKMEAN_URL="https://example.org/blockmean/v1/").get_payload()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert all(link.startswith("https://") for link in links)
    known = [link.removeprefix("https://example.org/blockmean/v1/") for link in links if "example.org" in link]
    assert any(link.startswith("docs/img/") for link in known)
    assert all((ROOT / link.partition("#")[0]).exists() for link in known)


def test_the_version_is_written_once_and_no_address_is_invented():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"] and "version" not in project
    assert "urls" not in project
    assert "version" not in re.findall(r"^\w+", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)


def test_the_paper_is_cited_alike_in_both_places():
    readme, citation = ((ROOT / name).read_text() for name in ("README.md", "CITATION.cff"))
    (bibtex,) = re.findall(r"```bibtex\n(.*?)```", readme, re.DOTALL)
    for family, given in re.findall(r"(\w+), (\w+)(?= and |\})", bibtex):
        assert f"given-names: {given}, family-names: {family}" in citation
    for field in ("title", "journal"):
        (value,) = re.findall(rf"{field}\s*= \{{(.*)\}}", bibtex)
        assert value in citation
