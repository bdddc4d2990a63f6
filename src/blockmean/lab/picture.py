"""Figures on disk: as SVG and PNG, the same bytes for the same figure."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure


class Picture(NamedTuple):
    """A figure on disk, as `path`.svg and `path`.png, and what it shows."""

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
    # matplotlib puts the date and random identifiers into an SVG unless told otherwise.
    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(picture.svg, metadata={"Date": None}, dpi=200)
    figure.savefig(picture.png, dpi=150)
    return picture
