"""The pictures in docs/img: each is on a page, and can be read on a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = sorted((ROOT / "docs" / "img").glob("*.svg"))
HEAT_MAPS = ("curvature", "fig2", "fig3")
"""Their names and numbers have no room on a phone, whatever their size."""


def test_every_picture_is_on_a_page():
    text = "".join(page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")))
    assert PICTURES
    assert [picture.name for picture in PICTURES if f"img/{picture.name}" not in text] == []


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.stem)
def test_curves_and_bars_are_narrow_enough_for_a_phone(picture: Path):
    width = re.search(r'width="([\d.]+)pt"', picture.read_text())
    assert width is not None
    # At 343 pixels, the width of a phone without its margins, letters of 9 points are 6 pixels high or more.
    assert float(width[1]) <= 525 or picture.stem.startswith(HEAT_MAPS)
