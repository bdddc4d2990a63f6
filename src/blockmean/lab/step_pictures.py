"""Pictures of what steps cost, drawn from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from blockmean.lab.picture import Picture, save
from blockmean.lab.steps import SWEEPS, Costs

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
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ax = figure.subplots()
    width = 0.8 / len(COLOURS)
    for i, (name, colour) in enumerate(COLOURS.items()):
        at = [j + (i - (len(COLOURS) - 1) / 2) * width for j, one in enumerate(found) if name in one.measured]
        rows = [one.measured[name]["beside_fused"] for one in found if name in one.measured]
        heights = [row["median"] for row in rows]
        spread = [[row["median"] - row["lower"] for row in rows], [row["upper"] - row["median"] for row in rows]]
        if not rows:
            continue
        ax.bar(at, heights, width, color=colour, label=name, yerr=spread, error_kw={"linewidth": 0.8})
    ax.axhline(1, color="black", linewidth=0.8)
    ax.set(yscale="log", ylabel="step, times torch's fused step")
    ax.set_xticks(
        range(len(found)), [f"{one.network}\n{_short(one.parameters)}\nin {one.tensors} tensors" for one in found]
    )
    _plain_numbers(ax)
    ax.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9, frameon=False)
    threads = f"{found[0].threads} thread{'s' if found[0].threads > 1 else ''}"
    caption = f"Time of a step beside torch's fused Adagrad (AdaGradBMA) or AdamW (all others), {threads}, log scale; "
    return save(figure, path, caption + "whiskers are quartiles; a missing bar took too long or does not apply.")


def draw_sweeps(found: dict[str, list[Costs]], path: Path) -> Picture:
    """What the cost of a step grows with: parameters, blocks and means."""
    figure = Figure(figsize=(10, 3.3), layout="constrained")
    panels = dict(zip(SWEEPS, figure.subplots(1, 3), strict=True))
    for sweep in ("parameters", "blocks"):
        ax = panels[sweep]
        for name in ("AdaGradBMA", "AdamBMA", "Anova"):
            ready = [one for one in found[sweep] if name in one.measured]
            xs = [one.parameters if sweep == "parameters" else one.tensors for one in ready]
            ys = [one.measured[name]["beside_fused"]["median"] for one in ready]
            if ready:
                ax.plot(xs, ys, "o-", color=COLOURS[name], label=name, markersize=3)
        ax.axhline(1, color="black", linewidth=0.8)
    for one in found["means"]:
        points = {int(name.split("=")[1]): row for name, row in one.measured.items() if "means=" in name}
        ys = [row["beside_fused"]["median"] for row in points.values()]
        panels["means"].plot(list(points), ys, "o-", color=COLOURS["Anova"], label="Anova", markersize=3)
    labels = {
        "parameters": "parameters in 32 matrices",
        "blocks": "blocks in 2²⁰ parameters",
        "means": "means per side",
    }
    for sweep, ax in panels.items():
        ax.set_xscale("symlog" if sweep == "means" else "log", base=2 if sweep == "means" else 10)
        ax.set(yscale="log", xlabel=labels[sweep])
        _plain_numbers(ax)
        if sweep == "means":
            ax.set_xticks([0, 1, 2, 4, 8, 16, 32, 64], ["0", "1", "2", "4", "8", "16", "32", "64"])
        ax.grid(alpha=0.3)
        ax.legend(fontsize=8, frameon=False)
    panels["parameters"].set_ylabel("step, times torch's fused step")
    return save(figure, path, "Time of a step beside torch's fused one, against what it grows with; log scales.")


def _plain_numbers(ax: Axes) -> None:
    for which in ("major", "minor"):
        getattr(ax.yaxis, f"set_{which}_formatter")(
            FuncFormatter(lambda y, _: f"{y:g}" if f"{y:g}"[0] in "125" else "")
        )


def _short(count: int) -> str:
    return f"{count / 1e6:.0f}M" if count >= 1e6 else f"{count / 1e3:.0f}k" if count >= 1e3 else str(count)
