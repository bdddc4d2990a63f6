"""Redraw pictures in docs/img/ (`make docs`). Timings come from records, never from a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from blockmean.lab.paper import PARTS, ReportConfig
from blockmean.lab.picture import save

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "img"
RECORD = ROOT / "benchmarks" / "results" / "algebra.json"

# operation in the record: (name in the picture, colour, line)
SHOWN = {
    "dense SciPy, eigh @ v": ("dense, SciPy", "tab:purple", "-"),
    "dense torch, eigh @ v": ("dense, torch", "tab:red", "-"),
    "inverse_sqrt @ v, interleaved blocks": ("block mean, interleaved blocks", "tab:cyan", "-"),
    "inverse_sqrt @ v, uneven blocks": ("block mean, uneven blocks", "tab:green", "-"),
    "inverse_sqrt @ v": ("block mean, equal blocks", "tab:blue", "-"),
    "read and write v": ("v * 2", "0.3", "--"),
    "read v": ("v.sum()", "0.3", ":"),
}


def algebra_cost(record: dict[str, Any], out: Path) -> list[Path]:
    """Time and peak memory of one inverse square root and its product with v, against d and L."""
    figure = Figure(figsize=(10.5, 4.0), layout="constrained")
    time_d, time_L, memory_d = figure.subplots(1, 3)
    of_d = [point for point in record["points"] if point["sweep"] == "d"]
    of_L = [point for point in record["points"] if point["sweep"] == "L"]
    for name in SHOWN:
        _draw(time_d, of_d, "d", "seconds", name)
        _draw(time_L, of_L, "L", "seconds", name)
        _draw(memory_d, of_d, "d", "peak_bytes", name)
    time_d.set(title=f"time, L = {of_d[0]['L']} blocks", xlabel="d, entries", ylabel="seconds")
    time_L.set(title=f"time, d = {of_L[0]['d']:,} entries", xlabel="L, blocks", ylabel="seconds")
    memory_d.set(title=f"peak memory, L = {of_d[0]['L']} blocks", xlabel="d, entries", ylabel="bytes")
    for ax in (time_d, time_L, memory_d):
        ax.set(xscale="log", yscale="log")
        ax.grid(alpha=0.3)
    figure.suptitle("M$^{-1/2}$v, root included: median and quartiles, one thread, float32", fontsize=11)
    figure.legend(*time_d.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    picture = save(figure, out / "algebra_cost")
    return [picture.svg, picture.png]


def _draw(ax: Axes, points: list[dict[str, Any]], against: str, what: str, name: str) -> None:
    """One line of one panel; skip points where the operation was not measured."""
    label, colour, line = SHOWN[name]
    found = [(point[against], point[what][name]) for point in points if name in (point[what] or {})]
    if what == "seconds":
        quartiles = ([y[quartile] for _, y in found] for quartile in ("lower", "upper"))
        ax.fill_between([x for x, _ in found], *quartiles, color=colour, alpha=0.2)
        found = [(x, y["median"]) for x, y in found]
    else:  # the system counts pages in batches: less than 256 KiB is noise
        found = [(x, y) for x, y in found if y is not None and y >= 2**18]
    if found:
        ax.plot(*zip(*found, strict=True), color=colour, linestyle=line, marker=".", label=label)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        config = ReportConfig(out, out / "records")
        pictures = [picture.svg for name in ("fig2", "fig3") for picture in PARTS[name](config).pictures]
        pictures += algebra_cost(json.loads(RECORD.read_text()), out)
        for picture in pictures:
            if picture.suffix == ".svg":
                print(shutil.copy(picture, IMAGES))


if __name__ == "__main__":
    main()
