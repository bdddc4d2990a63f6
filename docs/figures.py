"""Redraw pictures in docs/img/ (`make docs`). Timings come from records, never from a run.

The pictures of Anova train small networks for a hundred steps each, on data that every installation has: one thread and
fixed seeds, so that the same machine draws the same pictures.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from blockmean import Anova, plot
from blockmean.lab.environment import use_threads
from blockmean.lab.paper import PARTS, ReportConfig
from blockmean.lab.picture import save
from blockmean.lab.tasks import LOSSES, PROFILES, load_data, make_model
from blockmean.optim.batches import means_in

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
    figure = Figure(figsize=(6.2, 5.6), layout="constrained")
    (time_d, time_L), (memory_d, legend) = figure.subplots(2, 2)
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
    figure.suptitle("M$^{-1/2}$v, root included: median and quartiles, one thread, float32", fontsize=10)
    legend.set_axis_off()
    legend.legend(*time_d.get_legend_handles_labels(), loc="center", fontsize=9, frameon=False)
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


STEPS = 100


def train(task_name: str) -> tuple[nn.Module, Anova]:
    """A hundred steps of a task of the quick race, and the gradient of one more batch, which no mean has seen."""
    task = PROFILES["quick"][task_name]
    data = load_data(task)
    torch.manual_seed(0)
    model = make_model(task)
    optimizer = Anova(model, lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS + 1):
        chosen = torch.randint(len(data.train), (task.batch,), generator=generator)
        optimizer.zero_grad()
        LOSSES[task.loss].mean(model(data.train[chosen]), data.train_targets[chosen]).backward()
        if step < STEPS:
            optimizer.step()
    return model, optimizer


def parts_of(G: Tensor, U: Tensor, V: Tensor) -> dict[str, Tensor]:
    """A matrix and the four parts of its analysis of variance, which add up to it."""
    left, right = U @ U.T, V @ V.T
    grand = left @ G @ right
    unit, inputs = G @ right - grand, left @ G - grand
    names = ("gradient", "grand means", "means per unit", "means per input", "remainder")
    return dict(zip(names, (G, grand, unit, inputs, G - grand - unit - inputs), strict=True))


def anova_parts(out: Path) -> list[Path]:
    """The gradient of the first layer of an MLP, split with plain and with learned weights."""
    model, optimizer = train("mlp-raw")
    weight = next(p for p in model.parameters() if p.ndim == 2)
    G, (U, V, *_) = weight.grad, means_in(optimizer.state[weight])
    assert G is not None
    plain = [torch.full((side, 1), side**-0.5) for side in G.shape]
    k = U.shape[2]
    columns = {
        "textbook: one plain mean": parts_of(G, *plain),
        f"learned: {k} means over units, {k} over inputs": parts_of(G, U[0], V[0]),
    }
    shown = slice(12 * 28, 16 * 28)  # the pixels of four rows in the middle of an image
    limit = float(G[:, shown].abs().flatten().quantile(0.99))
    figure = Figure(figsize=(6.2, 5.6), layout="constrained")
    axes = figure.subplots(5, 2)
    for column, (title, parts) in enumerate(columns.items()):
        for row, (name, part) in enumerate(parts.items()):
            ax = axes[row, column]
            ax.imshow(
                part[:, shown].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="none"
            )
            ax.set(xticks=[], yticks=[])
            share = float(part.square().sum() / G.square().sum())
            ax.set_title(f"{title}\n{name}" if row == 0 else f"{name}, {share:.0%}", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("64 units", fontsize=8)
    for ax in axes[-1]:
        ax.set_xlabel("inputs: pixels of four rows of the image", fontsize=8)
    picture = save(figure, out / "anova_parts")
    return [picture.svg, picture.png]


def anova_shares(out: Path) -> list[Path]:
    """The shares of means in the gradients of three networks."""
    titles = {"mlp-raw": "MLP, digits", "cnn": "CNN, digits", "transformer-64": "character transformer, Python manual"}
    figure = Figure(figsize=(5.6, 5.6), layout="constrained")
    axes = dict(zip(titles, figure.subplots(3, 1, height_ratios=(3, 4, 10)), strict=True))
    for name, ax in axes.items():
        found = train(name)[1].block_statistics()
        found = [
            replace(s, parameter=s.parameter.replace("blocks.layers.", "").replace("self_attn.", "")) for s in found
        ]
        plot.shares(found, ax)
        ax.set_title(titles[name], fontsize=9)
        if name != "transformer-64":
            ax.set_xlabel("")
        if name == "mlp-raw":
            legend = ax.get_legend()
            texts = [text.get_text() for text in legend.get_texts()]
            figure.legend(legend.legend_handles, texts, loc="outside upper center", ncols=3, fontsize=8, frameon=False)
        ax.get_legend().remove()
    picture = save(figure, out / "anova_shares")
    return [picture.svg, picture.png]


def main() -> None:
    use_threads(1)
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        config = ReportConfig(out, out / "records")
        pictures = [PARTS[name](config).pictures[0].svg for name in ("fig2", "fig3")]
        pictures += algebra_cost(json.loads(RECORD.read_text()), out) + anova_parts(out) + anova_shares(out)
        for picture in pictures:
            if picture.suffix == ".svg":
                print(shutil.copy(picture, IMAGES))


if __name__ == "__main__":
    main()
