"""Fill docs/results.md with what the records in results/ say, and draw its pictures: part of `make docs`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from blockmean.lab.paper import PARTS, Outcome, Setting

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
START, END = "<!-- from the records: `make docs` -->", "<!-- end -->"


def outcome(out: Path) -> Outcome:
    """Figure 5 as the published records give it."""
    return PARTS["fig5"](Setting(out, ROOT / "results", profile="paper"))


def markdown(found: Outcome) -> str:
    """All claims with their verdicts, and all tables."""
    claims = [[claim.claim, claim.measured, f"**{claim.verdict}**"] for claim in found.claims]
    sections = [_table(["claim of the paper", "measured", "verdict"], claims)]
    for table in found.tables:
        sections += [f"### {table.title}", _table(table.header, table.rows)]
    return "\n\n".join(sections)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def filled(page: str, found: Outcome) -> str:
    """The page with everything between the two marks made anew."""
    before, _, rest = page.partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n\n{markdown(found)}\n\n{END}{after}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = outcome(Path(folder))
        for picture in found.pictures:
            print(shutil.copy(picture.svg, ROOT / "docs" / "img"))
    PAGE.write_text(filled(PAGE.read_text(), found))
    print(PAGE)
