"""Fill docs/results.md with what the records in results/ say, and draw its pictures: part of `make docs`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from blockmean.lab.paper import Outcome, Setting
from blockmean.lab.paper.fig5 import Found, curve, fig5, find
from blockmean.lab.picture import Picture, save

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results.md"
START, END = "<!-- from the records: `make docs` -->", "<!-- end -->"


def setting(out: Path) -> Setting:
    """The published records, and a folder for pictures."""
    return Setting(out, ROOT / "results", profile="paper")


def overview(studies: list[Found], path: Path) -> Picture:
    """The training loss of every study in one small picture."""
    figure = Figure(figsize=(9.5, 2.6 * ((len(studies) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(studies) + 1) // 2, 2, squeeze=False).flat
    for one, ax in zip(studies, panels, strict=False):
        for arm, records in one.results.items():
            curve(ax, arm, [[epoch["train_loss"] for epoch in record["epochs"]] for record in records])
        ax.set(xlabel="epoch", ylabel="training loss")
        ax.set_title(one.title, fontsize=10)
        ax.grid(alpha=0.3)
    names = {label: line for ax in figure.axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=4, fontsize=8)
    return save(figure, path)


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
    before, started, rest = page.partition(START)
    _, ended, after = rest.partition(END)
    if not (started and ended):
        raise ValueError(f"{PAGE} must have the lines {START} and {END}.")
    return f"{before}{START}\n\n{markdown(found)}\n\n{END}{after}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found = fig5(setting(Path(folder)))
        for picture in (*found.pictures, overview(find(setting(Path(folder))), Path(folder) / "overview")):
            print(shutil.copy(picture.svg, ROOT / "docs" / "img"))
    PAGE.write_text(filled(PAGE.read_text(), found))
    print(PAGE)
