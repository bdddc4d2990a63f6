"""The input of a part of the paper (a ReportConfig) and its output (claims, pictures, tables, notes)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from blockmean.lab.compare import Table, Verdict
from blockmean.lab.picture import Picture

__all__ = ["Claim", "Outcome", "ReportConfig", "Table", "Verdict"]


class Claim(NamedTuple):
    """One statement of the paper, what was measured for it, and the verdict.

    An exact claim is mathematics: if it does not hold, the software is wrong. Any other is a finding, either way.
    """

    claim: str
    measured: str
    verdict: Verdict
    exact: bool = False


@dataclass(frozen=True)
class Outcome:
    """The findings of one part. Notes say what a reader needs to know to trust them."""

    claims: list[Claim] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)
    """One sentence for each record that is there and cannot be used."""
    overview: Picture | None = None
    """The findings at a glance, for the top of the report."""
    summary: str = ""
    """A sentence for the top of the report, where claims of the paper do not say it."""


@dataclass(frozen=True)
class ReportConfig:
    """Where records and pictures are, and how much to run."""

    out: Path
    """The folder for pictures."""
    records: Path
    """The folder for records: a file per study, and one for measurements."""
    profile: str = "quick"
    data_dir: Path | None = None
    seeds: int | None = None
    epochs: int | None = None
    published: Path | None = None
    """The folder with the project's own records, for studies that this profile does not run."""
    measure: bool = True
    """Whether to take a measurement that has no record yet."""
    on_progress: Callable[[str, int, int], None] = field(default=lambda what, done, total: None, compare=False)
    """Called with (what, done, total) while something takes long."""
