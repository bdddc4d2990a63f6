"""The command line, inside this process and once as a user calls it."""

from __future__ import annotations

import builtins
import importlib
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

import blockmean
from blockmean import cli
from blockmean.lab import paper
from blockmean.lab.paper import PARTS, Claim, Outcome

run = CliRunner().invoke


def test_version():
    result = run(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"blockmean {blockmean.__version__}\n"


def test_without_a_command_it_shows_help():
    assert "reproduce" in run(cli.app, []).output


def test_list_names_every_part():
    result = run(cli.app, ["reproduce", "--list"])
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.output.splitlines()] == list(PARTS)


def test_all_parts_hold_and_write_their_pictures(tmp_path: Path):
    result = run(cli.app, ["reproduce", "--out", str(tmp_path / "new")], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "NO" not in result.output
    assert "Theorem 2" in result.output
    for name in ("fig2", "fig3"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert ET.parse(tmp_path / "new" / f"{name}.svg").getroot().tag.endswith("svg")
        assert f"{name}.svg" in result.output


def test_only_the_parts_that_are_asked_for(tmp_path: Path):
    result = run(cli.app, ["reproduce", "theorems", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert not list(tmp_path.iterdir())


def test_the_theorems_are_all_there_with_small_errors(tmp_path: Path):
    claims = PARTS["theorems"](tmp_path).claims
    names = [claim.claim.partition(":")[0] for claim in claims]
    assert names == ["Proposition 1", "Theorem 1", "Lemma 1", "Theorem 2", "any f", "any f", "eigenvalues"]
    assert all(claim.holds for claim in claims)
    assert ["as printed" in claim.measured for claim in claims[:4]] == [False, True, True, True]


def test_pictures_are_the_same_bytes_every_time(tmp_path: Path):
    first, second = (PARTS["fig3"](tmp_path / name).pictures for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_a_claim_that_does_not_hold_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    wrong = Outcome([Claim("two is three", "2", True), Claim("one is two", "1", False)], [])
    monkeypatch.setattr(paper, "PARTS", {"wrong": lambda out: wrong})
    result = run(cli.app, ["reproduce", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "NO" in result.output
    assert "one is two" in result.output


def test_an_unknown_part_lists_the_parts(tmp_path: Path):
    result = run(cli.app, ["reproduce", "fig9", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "there is no part fig9" in result.output
    assert all(name in result.output for name in PARTS)


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make importing `package` fail as if it were not installed."""
    real = builtins.__import__

    def fake(name, *rest):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", fake)


def test_without_typer_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    without("typer", monkeypatch)
    monkeypatch.delitem(sys.modules, "blockmean.cli")
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'blockmean\[lab\]'"):
        importlib.import_module("blockmean.cli")


def test_without_scipy_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("blockmean.lab.paper")]:
        monkeypatch.delitem(sys.modules, name)
    without("scipy", monkeypatch)
    result = run(cli.app, ["reproduce"])
    assert result.exit_code == 1
    assert "needs scipy: pip install 'blockmean[lab]'" in str(result.exception) + result.output


def test_as_a_user_calls_it(tmp_path: Path):
    command = [str(Path(sys.executable).parent / "blockmean"), "reproduce", "fig2", "--out", "pictures"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "pictures/fig2.png" in result.stdout
    assert (tmp_path / "pictures" / "fig2.png").stat().st_size > 1000
