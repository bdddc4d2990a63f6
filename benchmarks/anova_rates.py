"""Anova beside AdamW at the same learning rates: can AdamW's users keep theirs?

    python benchmarks/anova_rates.py --data-dir FOLDER [--tasks mlp tied …] [--rates 1e-4 3e-4 …] [--seeds 0 1 …]
    python benchmarks/anova_rates.py --table

The tasks are in rate_tasks.py. The loss is the mean over the last tenth of the steps, but for the last three tasks.
There it is one on held-out data after the last step: without noise in `stream`, and of the rare expert. Equal seeds
mean equal weights and batches.
Every run is a line of benchmarks/results/anova_rates.jsonl and is not repeated.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import nn

import blockmean
from blockmean.lab.arms import seed_everything, state_bytes
from blockmean.lab.environment import environment
from rate_tasks import SETTINGS

Make = Callable[..., torch.optim.Optimizer]

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
OPTIMIZERS: dict[str, Make] = {"AdamW": torch.optim.AdamW, "Anova": blockmean.Anova}
DEFAULTS = {name: inspect.signature(make).parameters["lr"].default for name, make in OPTIMIZERS.items()}
"""The rates when none is given; arms of other names have Anova's options."""
TOLERANCE = 0.03
"""How far behind AdamW, at AdamW's own rates up to its best one, counts as not behind."""
LAST = 10
"""The loss is the mean over one part in this many of the steps, the last."""


def run(name: str, make: Make, rate: float, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train once, on one thread; the loss is None if it is not finite."""
    setting = SETTINGS[name]
    torch.set_num_threads(1)
    seed_everything(seed)
    model, loss_of, batches, held_out = setting.problem(seed, setting.steps)
    optimizer = make(model.parameters(), lr=rate, **{"weight_decay": setting.weight_decay, **options})
    losses: list[float] = []
    seconds = step_seconds = 0.0
    for step in range(setting.steps):
        inputs, targets = next(batches)
        began = time.process_time()
        for group in optimizer.param_groups:
            group["lr"] = rate * setting.factor(step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        if setting.clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        before = time.process_time()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.step()
        ended = time.process_time()
        seconds, step_seconds = seconds + ended - began, step_seconds + ended - before
    final = statistics.mean(losses[-max(1, setting.steps // LAST) :])
    if held_out is not None and math.isfinite(losses[-1]):
        with torch.no_grad():
            final = loss_of(model(held_out[0]), held_out[1]).item()
    early = statistics.mean(losses[: max(1, setting.steps // LAST)])
    return {
        "loss": final if math.isfinite(final) else None,
        "first_tenth": early if math.isfinite(early) else None,
        "seconds": round(seconds, 3),
        "step_seconds": round(step_seconds, 3),
        "steps": len(losses),
        "state_bytes": state_bytes(optimizer),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


def find(name: str) -> Make:
    """AdamW, Anova, or the class that 'module:Class' names."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    module, _, attribute = name.partition(":")
    made: Make = getattr(importlib.import_module(module), attribute)
    return made


def read(path: Path) -> list[dict[str, Any]]:
    """The records so far; a last line that was cut off does not count."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What tells runs apart."""
    return record["task"], record["arm"], record["rate"], record["seed"]


# ---------------------------------------------------------------- the comparison


def means(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, dict[float, float]]]:
    """Mean loss over seeds by task, arm and rate; infinite if a run diverged."""
    seeds: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for record in records:
        loss = math.inf if record["loss"] is None else record["loss"]
        seeds[record["task"], record["arm"], record["rate"]].append(loss)
    found: dict[str, dict[str, dict[float, float]]] = defaultdict(lambda: defaultdict(dict))
    for (task, arm, rate), losses in sorted(seeds.items()):
        found[task][arm][rate] = statistics.mean(losses)
    return found


def paired(records: Iterable[dict[str, Any]]) -> dict[str, dict[float, tuple[float, float]]]:
    """Mean losses of AdamW and Anova by task and rate, over the seeds that both have; tasks in the order above."""
    losses = {key(record): math.inf if record["loss"] is None else record["loss"] for record in records}
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for task in SETTINGS:
        for rate in sorted({rate for name, _, rate, _ in losses if name == task}):
            both = [(losses.get((task, "AdamW", rate, s)), losses.get((task, "Anova", rate, s))) for s in range(100)]
            runs = [pair for pair in both if None not in pair]
            if runs:
                found.setdefault(task, {})[rate] = tuple(map(statistics.mean, zip(*runs, strict=True)))
    return found


def brief(records: Iterable[dict[str, Any]], tasks: Iterable[str] = SETTINGS) -> list[list[str]]:
    """Rows of a table: a task, AdamW at its best rate, Anova at that rate, Anova at its own best rate."""
    rows, found = [], paired(records)
    for task in filter(found.__contains__, tasks):
        rate = min(found[task], key=lambda rate: found[task][rate][0])
        (adamw, same), best = found[task][rate], min(anova for _, anova in found[task].values())
        cells = [f"{loss:.3g}" for loss in (adamw, same, best)]
        winner = 0 if adamw < min(same, best) else 2
        rows.append([SETTINGS[task].title, *(f"**{x}**" if i == winner else x for i, x in enumerate(cells))])
    return rows


def draw(records: Iterable[dict[str, Any]], tasks: Iterable[str] = SETTINGS) -> Figure:
    """Loss against learning rate, a panel for every task."""
    every = paired(records)
    found = {task: every[task] for task in tasks if task in every}
    figure = Figure(figsize=(7.2, 1.7 * math.ceil(len(found) / 3)), layout="constrained")
    panels = list(figure.subplots(math.ceil(len(found) / 3), 3, sharex=True, squeeze=False).flat)
    for ax in panels[len(found) :]:
        ax.remove()
    for (task, losses), ax in zip(found.items(), panels, strict=False):
        for i, (arm, colour) in enumerate((("AdamW", "0.2"), ("Anova", "tab:red"))):
            values = [pair[i] for pair in losses.values()]
            ax.plot(list(losses), values, "o-", color=colour, label=arm, markersize=3, linewidth=1.2)
        ax.set(xscale="log", yscale="log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 6) if high < 20 * low else (1,)))
        ax.yaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_title(SETTINGS[task].title, fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(alpha=0.3)
    for ax in panels[: len(found)][-3:]:
        ax.tick_params(labelbottom=True)
    panels[0].legend(fontsize=8, frameon=False)
    figure.supxlabel("learning rate", fontsize=9)
    figure.supylabel("loss", fontsize=9)
    return figure


def table(records: list[dict[str, Any]]) -> str:
    """Per task and arm: losses, the best of them, what the default rate loses, and the worst ratio to AdamW's loss.

    That ratio is taken at equal rates, from 1e-4 to the one that is best for AdamW.
    """
    lines = []
    for task, arms in means(records).items():
        rates = sorted({rate for losses in arms.values() for rate in losses})
        header = [
            f"{task}, lr",
            *(f"{rate:g}" for rate in rates),
            "best",
            "at the default ÷ best",
            "worst ratio to AdamW",
            "step ms",
        ]
        lines += [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
        base = arms.get("AdamW", {})
        limit = min(base, key=lambda rate: base[rate]) if base else math.inf
        for arm, losses in arms.items():
            shared = [rate for rate in losses if rate in base and 1e-4 <= rate <= limit]
            worst = max((losses[rate] / base[rate] for rate in shared), default=math.nan)
            mark = " (behind)" if worst > 1 + TOLERANCE else ""
            own = [r for r in records if r["task"] == task and r["arm"] == arm]
            cost = statistics.median(1e3 * r["step_seconds"] / r["steps"] for r in own)
            cells = [f"{losses[rate]:.4g}" if rate in losses else "" for rate in rates]
            best = min(losses.values())
            default = DEFAULTS.get(arm, DEFAULTS["Anova"])
            at_default = f"{losses[default] / best:.3f}" if default in losses else ""
            cells += [f"{best:.4g}", at_default, f"{worst:.3f}{mark}", f"{cost:.2f}"]
            lines.append(f"| {arm} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, help="has mnist, cifar10 and text")
    parser.add_argument("--tasks", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), help="AdamW, Anova or 'module:Class'")
    parser.add_argument("--options", type=json.loads, default={}, help="further arguments of the optimizers, as JSON")
    parser.add_argument("--label", default="", help="name of the arm in the records, instead of the optimizer's")
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "anova_rates.jsonl")
    parser.add_argument("--table", action="store_true", help="only print what the records say")
    given = parser.parse_args()
    if given.data_dir:
        os.environ["BLOCKMEAN_DATA"] = str(given.data_dir)
    if not given.table:
        finished = {key(record) for record in read(given.out)}
        where = environment()
        for seed in given.seeds:
            for task in given.tasks:
                for rate in given.rates:
                    for name in given.optimizers:
                        chosen = {"task": task, "arm": given.label or name, "rate": rate, "seed": seed}
                        if key(chosen) in finished:
                            continue
                        found = run(task, find(name), rate, seed, given.options)
                        record = {**chosen, "options": given.options, **found, "environment": where}
                        with given.out.open("a") as file:
                            file.write(json.dumps(record, allow_nan=False) + "\n")
                        print(task, chosen["arm"], f"{rate:g}", seed, found["loss"], found["seconds"], flush=True)
    print(table(read(given.out)))


if __name__ == "__main__":
    main()
