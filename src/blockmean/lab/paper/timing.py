"""What the iterations of Table 4 cost: measured once, on one thread, and kept as a record."""

from __future__ import annotations

import copy
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockmean.lab.data import load
from blockmean.lab.environment import environment
from blockmean.lab.models import MODELS
from blockmean.lab.paper.protocol import DIAGONAL, PAPER, SMALL_ARMS
from blockmean.lab.train import OPTIMIZERS, Record

SELDOM = "BMA, D every 10 steps"
LARGE: dict[str, dict[str, Any]] = {
    "diag": DIAGONAL,
    "BMA": PAPER,
    SELDOM: {**PAPER, "options": {**PAPER["options"], "refresh_every": 10}},
}
ARMS = {"small": {"full": SMALL_ARMS["full"], **LARGE}, "large": LARGE}
ROUNDS = {"quick": {"small": 20, "large": 15}, "paper": {"small": 100, "large": 60}}
BATCH = 100
STEPS = 10  # of an optimizer in a row: one of them renews D, also where that is seldom


def timings(path: Path, profile: str) -> Record:
    """The record at `path`; where there is none that can be used, everything is measured and written there."""
    spec = {"rounds": ROUNDS[profile], "batch": BATCH, "steps": STEPS, "arms": ARMS}
    record = _read(path, spec)
    if record is None:
        models = {name: _measure(name, ROUNDS[profile][name]) for name in ARMS}
        record = {"spec": spec, "environment": environment(), "models": models}
        _write(path, record)
    return record


def _measure(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of each round, on one thread: a forward and backward pass, and a step of every optimizer."""
    torch.set_num_threads(1)
    images = load("digits")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = MODELS[name]((1, 28, 28))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's own stubs lack it
    params, optimizers = {}, {}
    for arm, how in ARMS[name].items():
        params[arm] = list(copy.deepcopy(model).parameters())
        optimizers[arm] = OPTIMIZERS[how["optimizer"]](params[arm], lr=1e-3, **how["options"])
    forward_backward: list[float] = []
    step: dict[str, list[float]] = {arm: [] for arm in optimizers}
    order = list(optimizers)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds + 1):
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


def _read(path: Path, spec: dict[str, Any]) -> Record | None:
    """The record of this measurement, or None where there is none that can be used; a bad one is named."""
    if not path.exists():
        return None
    try:
        record: Record = json.loads(path.read_text())
        if not isinstance(record, dict) or not record.keys() >= {"spec", "models", "environment"}:
            raise ValueError("it is not the record of a timing")
        if record["spec"] != json.loads(json.dumps(spec)):
            raise ValueError("it belongs to another measurement")
        for name, arms in ARMS.items():
            samples = record["models"][name]
            counts = {len(samples["forward_backward"]), *(len(samples["step"][arm]) for arm in arms)}
            if counts != {spec["rounds"][name]}:
                raise ValueError("rounds are missing")
    except (ValueError, KeyError, TypeError) as error:  # broken JSON and broken UTF-8 are ValueErrors too
        print(f"{path} cannot be used ({error}); it is measured again.", file=sys.stderr)
        return None
    return record


def _write(path: Path, record: Record) -> None:
    """In one move, so that an interruption leaves either nothing or all of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    unfinished.write_text(json.dumps(record, allow_nan=False) + "\n")
    unfinished.replace(path)
