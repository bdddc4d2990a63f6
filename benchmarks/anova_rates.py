"""Anova beside AdamW at the same learning rates: can AdamW's users keep theirs?

    python benchmarks/anova_rates.py --data-dir FOLDER [--tasks mlp tied …] [--rates 1e-4 3e-4 …] [--seeds 0 1 …]
    python benchmarks/anova_rates.py --table

The tasks of the race; four where a method that sees what rows and columns share starts slowly: a byte GPT with
warm-up, decay to zero, weight decay and clipping (`gpt`); embeddings that are also the output layer, of bytes (`tied`)
and of 20,000 words (`tied-20k`); and fine-tuning of a trained network to digits that are rotated (`finetune`). Then
three that were no part of any choice: words with separate embeddings (`words`), rows that rarely have a gradient
(`factors`), and targets far from what a new network gives (`regression`). Last, noise: fresh
samples, eight at a time, with decay to zero (`stream`), and an expert that one step in fifty uses, with few samples and
with many (`expert`, `expert-fresh`).

The loss is the mean over the last tenth of the steps, but for the last three tasks. There it is one on held-out data
after the last step: without noise in `stream`, and of the rare expert. Equal seeds mean equal weights and batches.
Every run is a line of benchmarks/results/anova_rates.jsonl and is not repeated.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import inspect
import json
import math
import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import Tensor, nn
from torch.nn import functional

import blockmean
from blockmean.lab.arms import seed_everything, state_bytes
from blockmean.lab.environment import environment
from blockmean.lab.tasks import LOSSES, TASKS, load_data, make_model
from blockmean.lab.tokens import GPT
from blockmean.lab.train import batches_of

Batches = Iterator[tuple[Tensor, Tensor]]
Make = Callable[..., torch.optim.Optimizer]

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
OPTIMIZERS: dict[str, Make] = {"AdamW": torch.optim.AdamW, "Anova": blockmean.Anova}
DEFAULTS = {name: inspect.signature(make).parameters["lr"].default for name, make in OPTIMIZERS.items()}
"""The rates when none is given; arms of other names have Anova's options."""
TOLERANCE = 0.03
"""How far behind AdamW, at AdamW's own rates up to its best one, counts as not behind."""
LAST = 10
"""The loss is the mean over one part in this many of the steps, the last."""
RARE, HELD_OUT = 50, 2_000
"""The rare expert is used in one step of this many; and how many held-out samples there are."""


class Problem(NamedTuple):
    """What a seed gives: a model, its loss, and batches without end or for as many steps as there are."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batches: Batches
    held_out: tuple[Tensor, Tensor] | None = None  # if given, the loss on it after the last step is the one that counts


class Setting(NamedTuple):
    """How a task is trained, but for optimizer and rate."""

    title: str
    steps: int
    problem: Callable[[int, int], Problem]  # seed, steps
    weight_decay: float = 0.0
    clip: float = math.inf
    warm_up: int = 0
    decays: bool = False

    def factor(self, step: int) -> float:
        """What the rate is multiplied by: a linear rise, then, if it decays, half a cosine to zero."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        share = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return 0.5 * (1 + math.cos(math.pi * share)) if self.decays else 1.0


# ---------------------------------------------------------------- the tasks


def raced(name: str) -> Setting:
    """A task of the race, which has neither weight decay nor schedule."""
    task = TASKS[name]

    def problem(seed: int, steps: int) -> Problem:
        spec = task.spec({"optimizer": "AdamW"}, lr=1e-3, seed=seed, steps=steps)
        model = make_model(spec)
        return Problem(model, LOSSES[task.loss].mean, batches_of(load_data(spec), spec))

    return Setting(task.title, task.steps, problem)


@cache
def manual() -> bytes:
    """The documentation of Python as plain text."""
    folder = os.environ.get("BLOCKMEAN_DATA")
    if not folder:
        raise SystemExit("Say where text/python-docs.txt.gz is, with --data-dir or BLOCKMEAN_DATA.")
    return gzip.decompress((Path(folder) / "text" / "python-docs.txt.gz").read_bytes())


@cache
def byte_codes() -> Tensor:
    return torch.frombuffer(bytearray(manual()), dtype=torch.uint8)


@cache
def word_codes(words: int) -> Tensor:
    """The text as its most frequent words, signs and line ends; code 0 stands for all others."""
    found = re.findall(rb"\w+|[^\w\s]|\n", manual())
    code = {word: i + 1 for i, (word, _) in enumerate(Counter(found).most_common(words - 1))}
    return torch.tensor([code.get(word, 0) for word in found])


def windows(codes: Tensor, seed: int, batch: int, length: int) -> Iterator[Tensor]:
    """Batches of pieces of a text, drawn at random, (batch, length)."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    while True:
        starts = torch.randint(len(codes) - length, (batch, 1), generator=generator)
        yield codes[starts + torch.arange(length)].long()


class Tied(nn.Module):
    """The next code from those before it, with one matrix for embedding and output."""

    def __init__(self, vocabulary: int, width: int = 64, context: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        hidden = nn.Linear(context * width, 128), nn.GELU(), nn.Linear(128, width), nn.LayerNorm(width)
        self.body = nn.Sequential(*hidden)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, context) → (n, vocabulary)."""
        outputs: Tensor = self.body(self.embed(codes).flatten(1)) @ self.embed.weight.T
        return outputs


class Words(nn.Module):
    """The next code from those before it, with an embedding and an output layer of their own."""

    def __init__(self, vocabulary: int, width: int = 128, context: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        hidden = nn.Linear(context * width, 128), nn.GELU(), nn.Linear(128, width), nn.LayerNorm(width)
        self.body = nn.Sequential(*hidden)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, context) → (n, vocabulary)."""
        outputs: Tensor = self.head(self.body(self.embed(codes).flatten(1)))
        return outputs


class Factors(nn.Module):
    """A matrix as the product of two embeddings, as a recommender has it."""

    def __init__(self, rows: int = 200, columns: int = 150, width: int = 16) -> None:
        super().__init__()
        self.rows, self.columns = nn.Embedding(rows, width), nn.Embedding(columns, width)
        for table in (self.rows, self.columns):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, pairs: Tensor) -> Tensor:
        """(n, 2) → (n,)."""
        entries: Tensor = (self.rows(pairs[:, 0]) * self.columns(pairs[:, 1])).sum(1)
        return entries


class Experts(nn.Module):
    """A classifier with an expert for every cluster. The first input is the cluster's number, one for a whole batch."""

    def __init__(self, clusters: int, inputs: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(inputs, width), nn.Linear(width, classes)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width)) for _ in range(clusters)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, 1 + inputs) → (n, classes). All other experts are left without a gradient."""
        hidden = self.body(x[:, 1:]).relu()
        outputs: Tensor = self.head(hidden + self.experts[int(x[0, 0])](hidden))
        return outputs


def gpt(seed: int, steps: int) -> Problem:
    drawn = windows(byte_codes(), seed, 8, 65)
    return Problem(
        GPT(256, 96, layers=3, context=64), LOSSES["next_token"].mean, ((x[:, :-1], x[:, 1:]) for x in drawn)
    )


def tied(seed: int, steps: int) -> Problem:
    """Bytes of a Python source that is in every installation."""
    codes = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    drawn = windows(codes, seed, 256, 9)
    return Problem(Tied(256), functional.cross_entropy, ((x[:, :8], x[:, 8]) for x in drawn))


def tied_words(seed: int, steps: int) -> Problem:
    drawn = windows(word_codes(20_000), seed, 256, 9)
    return Problem(Tied(20_000), functional.cross_entropy, ((x[:, :8], x[:, 8]) for x in drawn))


def words(seed: int, steps: int) -> Problem:
    drawn = windows(word_codes(2_000), seed, 256, 9)
    return Problem(Words(2_000), functional.cross_entropy, ((x[:, :8], x[:, 8]) for x in drawn))


def factors(seed: int, steps: int) -> Problem:
    """Entries of a matrix of rank 8, a few at a time: a row rarely has a gradient."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    target = torch.randn(200, 8, generator=generator) @ torch.randn(8, 150, generator=generator) / 8**0.5

    def batches() -> Batches:
        while True:
            rows, columns = (torch.randint(size, (64,), generator=generator) for size in target.shape)
            yield torch.stack([rows, columns], 1), target[rows, columns]

    return Problem(Factors(), functional.mse_loss, batches())


def regression(seed: int, steps: int) -> Problem:
    """Targets far from what a new network gives: all weights have to grow together."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)

    def batches() -> Batches:
        while True:
            x = torch.rand(64, 32, generator=generator)
            yield x, x.repeat(1, 2)[:, :40].cumsum(1) / 4

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 40))
    return Problem(model, functional.mse_loss, batches())


def stream(seed: int, steps: int, width: int = 256) -> Problem:
    """A linear map from samples that nobody sees twice, eight at a time: gradients are mostly noise."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    target = torch.randn(width, width, generator=generator) / width**0.5

    def batches() -> Batches:
        while True:
            x = torch.randn(8, width, generator=generator)
            yield x, x @ target.T + torch.randn(8, width, generator=generator)

    x = torch.randn(HELD_OUT, width, generator=generator)
    model = nn.Linear(width, width, bias=False)
    return Problem(model, functional.mse_loss, batches(), (x, x @ target.T))


def expert(seed: int, steps: int, samples: int = 1_024) -> Problem:
    """Four clusters with a teacher and as many samples each, a batch from one of them; the last one's turn is rare."""
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    clusters, inputs, classes = 4, 32, 10
    rare = clusters - 1

    def teach(cluster: int) -> tuple[Tensor, Tensor]:
        centre = torch.randn(inputs, generator=generator)
        first = torch.randn(inputs, 16, generator=generator) / inputs**0.5
        second = torch.randn(16, classes, generator=generator)
        noise = torch.randn(samples + HELD_OUT, inputs, generator=generator)
        number = torch.full((len(noise), 1), float(cluster))
        return torch.cat([number, centre + noise], 1), ((noise @ first).tanh() @ second).argmax(1)

    data = [teach(cluster) for cluster in range(clusters)]

    def batches() -> Batches:
        for step in count():
            common = int(torch.randint(rare, (), generator=generator))
            x, y = data[rare if step % RARE == RARE // 2 else common]
            chosen = torch.randint(samples, (64,), generator=generator)
            yield x[chosen], y[chosen]

    x, y = data[rare]
    return Problem(Experts(clusters, inputs, classes), functional.cross_entropy, batches(), (x[samples:], y[samples:]))


def finetune(seed: int, steps: int) -> Problem:
    """A network that has learned digits by AdamW is to read them rotated by a right angle."""
    spec = TASKS["mlp"].spec({"optimizer": "AdamW"}, lr=3e-3, seed=seed, steps=400 + steps)
    model = make_model(spec)
    learner = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    batches = batches_of(load_data(spec), spec)
    for _ in range(400):
        inputs, targets = next(batches)
        learner.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        learner.step()
    return Problem(model, functional.cross_entropy, ((x.rot90(dims=(-2, -1)), y) for x, y in batches))


SETTINGS = {
    **{name: raced(name) for name in TASKS},
    "gpt": Setting("byte GPT, 3 × 96", 1000, gpt, weight_decay=0.1, clip=1.0, warm_up=100, decays=True),
    "tied": Setting("tied bytes", 300, tied),
    "tied-20k": Setting("tied words, 20,000 × 64", 300, tied_words),
    "finetune": Setting("fine-tuning to rotated digits", 200, finetune),
    "words": Setting("words, 2,000 × 128", 300, words),
    "factors": Setting("factorising a matrix, 64 entries a step", 1500, factors),
    "regression": Setting("regression, targets not scaled", 400, regression),
    "stream": Setting("regression, fresh noisy samples", 1000, stream, decays=True),
    "expert": Setting("an expert used in 2% of the steps", 4000, expert),
    "expert-fresh": Setting("the same, samples hardly seen twice", 4000, partial(expert, samples=100_000)),
}


# ---------------------------------------------------------------- runs and records


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
