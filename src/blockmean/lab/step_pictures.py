"""Pictures of what steps cost, drawn from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from blockmean.lab.picture import Picture, save
from blockmean.lab.steps import Costs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "AdamW": "0.55",
    "AdaGradBMA": "tab:cyan",
    "AdamBMA": "tab:blue",
    "Anova": "tab:red",
    "Adam-mini": "tab:brown",
    "SOAP": "tab:green",
    "Shampoo": "tab:olive",
    "Muon + AdamW": "tab:purple",
}
"""What the overview shows, in order."""


def draw_costs(found: Sequence[Costs], path: Path) -> Picture:
    """The step of every optimizer beside torch's fused one, network by network."""
    shown = {name: colour for name, colour in COLOURS.items() if any(name in one.measured for one in found)}
    figure = Figure(figsize=(5.6, 1.0 + 0.14 * len(shown) * len(found)), layout="constrained")
    ax = figure.subplots()
    height = 0.84 / len(shown)
    for i, (name, colour) in enumerate(shown.items()):
        at = [j + (i - (len(shown) - 1) / 2) * height for j, one in enumerate(found) if name in one.measured]
        rows = [one.measured[name]["beside_fused"] for one in found if name in one.measured]
        widths = [row["median"] for row in rows]
        spread = [[row["median"] - row["lower"] for row in rows], [row["upper"] - row["median"] for row in rows]]
        ax.barh(at, widths, height, color=colour, label=name, xerr=spread, error_kw={"linewidth": 0.8})
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set(xscale="log", xlabel="step, times torch's fused step (log scale)", ylim=(len(found) - 0.5, -0.5))
    ax.set_yticks(
        range(len(found)), [f"{one.network}\n{_short(one.parameters)} in {one.tensors} tensors" for one in found]
    )
    ax.tick_params(axis="y", labelsize=9)
    _plain_numbers(ax)
    ax.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False)
    threads = f"{found[0].threads} thread{'s' if found[0].threads > 1 else ''}"
    caption = f"Time of a step beside torch's fused Adagrad (AdaGradBMA) or AdamW (all others), {threads}, log scale; "
    return save(figure, path, caption + "whiskers are quartiles; a missing bar took too long or does not apply.")


def _plain_numbers(ax: Axes) -> None:
    for which in ("major", "minor"):
        getattr(ax.xaxis, f"set_{which}_formatter")(
            FuncFormatter(lambda x, _: f"{x:g}" if f"{x:g}"[0] in "125" else "")
        )


def _short(count: int) -> str:
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1e3 else str(count)
