"""What reproducing one part of the paper gives: claims that were checked, and pictures that were written."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure


class Claim(NamedTuple):
    """One statement of the paper, what was measured for it, and whether it holds."""

    claim: str
    measured: str
    holds: bool


class Outcome(NamedTuple):
    """The claims and the pictures of one part."""

    claims: list[Claim]
    pictures: list[Path]


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as `path`.svg and `path`.png, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = [path.with_suffix(".svg"), path.with_suffix(".png")]
    # matplotlib puts the date and random identifiers into an SVG unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(written[0], metadata={"Date": None}, dpi=200)
    figure.savefig(written[1], dpi=150)
    return written
