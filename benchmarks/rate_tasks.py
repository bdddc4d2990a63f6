"""The tasks on which Anova and AdamW are compared at equal learning rates (anova_rates.py).

The tasks of the race; four where a method that sees what rows and columns share starts slowly: a byte GPT with
warm-up, decay to zero, weight decay and clipping (`gpt`); embeddings that are also the output layer, of bytes (`tied`)
and of 20,000 words (`tied-20k`); and fine-tuning of a trained network to digits that are rotated (`finetune`). Then
three that were no part of any choice: words with separate embeddings (`words`), rows that rarely have a gradient
(`factors`), and targets far from what a new network gives (`regression`). Last, noise: fresh samples, eight at a time,
with decay to zero (`stream`), and an expert that one step in fifty uses, with few samples and with many (`expert`,
`expert-fresh`).
"""

from __future__ import annotations

import argparse
import gzip
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockmean.lab.tasks import LOSSES, TASKS, load_data, make_model
from blockmean.lab.tokens import GPT
from blockmean.lab.train import batches_of

Batches = Iterator[tuple[Tensor, Tensor]]

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
