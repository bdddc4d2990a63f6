"""The cost of the iterations in Table 4, measured on one thread."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
from torch import nn

from blockmean.lab.arms import OPTIMIZERS
from blockmean.lab.data import load
from blockmean.lab.paper.measurement import load_or_measure
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.paper.protocol import DIAGONAL, PAPER, SMALL_ARMS
from blockmean.lab.records import require_number
from blockmean.lab.tasks import network
from blockmean.lab.train import Record

EVERY_10 = "BMA, D every 10 steps"
FUSED = "diag, fused"  # torch's compiled step, as ours is
LARGE: dict[str, dict[str, Any]] = {
    "diag": DIAGONAL,
    FUSED: {**DIAGONAL, "options": {**DIAGONAL["options"], "fused": True}},
    "BMA": PAPER,
    EVERY_10: {**PAPER, "options": {**PAPER["options"], "refresh_every": 10}},
}
ARMS = {"small": {"full": SMALL_ARMS["full"], **LARGE}, "large": LARGE}
ROUNDS = {"quick": {"small": 20, "large": 15}, "paper": {"small": 100, "large": 60}}
BATCH = 100
STEPS = 10  # of an optimizer in a row; one of them renews D even if that happens only every 10 steps
SHORTEST, LONGEST = 1e-6, 1e9  # milliseconds that can have been measured


def timings(config: ReportConfig) -> Record:
    """The times of all rounds of a profile, as a record."""
    rounds = ROUNDS[config.profile]
    spec = {"rounds": rounds, "batch": BATCH, "steps": STEPS, "arms": ARMS}
    return load_or_measure(
        config,
        "table4",
        spec,
        lambda: {"models": {name: _measure(name, rounds[name], config) for name in ARMS}},
        _require_all_rounds,
    )


def _measure(name: str, rounds: int, config: ReportConfig) -> dict[str, Any]:
    """Milliseconds of a forward and backward pass, and of a step of every optimizer, in each round."""
    torch.set_num_threads(1)
    images = load("digits")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network(name, images.train)
    params, optimizers = {}, {}
    for arm, how in ARMS[name].items():
        params[arm] = list(copy.deepcopy(model).parameters())
        optimizers[arm] = OPTIMIZERS[how["optimizer"]](params[arm], lr=1e-3, **how["options"])
    forward_backward: list[float] = []
    step: dict[str, list[float]] = {arm: [] for arm in optimizers}
    order = list(optimizers)
    shuffle = random.Random(0).shuffle
    for done in range(rounds + 1):
        config.on_progress(f"iterations of Table 4, {name} model", done, rounds)
        batch = torch.randint(len(images.train), (BATCH,), generator=generator)
        inputs = images.train[batch].contiguous(memory_format=torch.channels_last)
        began = time.process_time()
        model.zero_grad()
        nn.functional.cross_entropy(model(inputs), images.train_labels[batch]).backward()
        forward_backward.append(1e3 * (time.process_time() - began))
        shuffle(order)
        for arm in order:
            for own, param in zip(params[arm], model.parameters(), strict=True):
                own.grad = None if param.grad is None else param.grad.clone()
            began = time.process_time()
            for _ in range(STEPS):
                optimizers[arm].step()
            step[arm].append(1e3 * (time.process_time() - began) / STEPS)
    # The first round pays for caches, states and lazy imports.
    return {"forward_backward": forward_backward[1:], "step": {arm: times[1:] for arm, times in step.items()}}


def _require_all_rounds(record: Record) -> None:
    """Every round has a positive number of milliseconds for the pass and for each optimizer."""
    for name, arms in ARMS.items():
        samples = record["models"][name]
        for times in (samples["forward_backward"], *(samples["step"][arm] for arm in arms)):
            if len(times) != record["spec"]["rounds"][name]:
                raise ValueError("rounds are missing")
            for milliseconds in times:
                require_number({"a time in ms": milliseconds}, "a time in ms", SHORTEST, LONGEST)
