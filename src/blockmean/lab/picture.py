"""Figures on disk: as SVG and PNG, the same bytes for the same figure."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure on disk, as `path`.svg and `path`.png, and its caption."""

    path: Path
    caption: str

    @property
    def svg(self) -> Path:
        return self.path.with_name(f"{self.path.name}.svg")

    @property
    def png(self) -> Path:
        return self.path.with_name(f"{self.path.name}.png")


def save(figure: Figure, path: Path, caption: str = "") -> Picture:
    """Write a figure as `path`.svg and `path`.png, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Picture(path, caption)
    # matplotlib puts the date and random identifiers into an SVG by default.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, dpi=200)
    picture.svg.write_text(re.sub(r'\bd="[^"]*"', _rounded, text.getvalue()))
    figure.savefig(picture.png, dpi=150)
    return picture


def _rounded(path: re.Match[str]) -> str:
    """The coordinates of a path to a hundredth of a point; matplotlib writes a millionth."""
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", path[0])
