"""One training run: checked before it starts, and recorded when it ends.

rate(step) = lr × (rise over `warm_up` of the steps) × (linear to zero, if it decays)
step       = zero_grad, loss, backward, clip, optimizer.step
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from blockmean.lab import arms
from blockmean.lab.data import PREPARATIONS
from blockmean.lab.download import cache_folder
from blockmean.lab.environment import environment
from blockmean.lab.own import check_fit, is_own
from blockmean.lab.spec import RunSpec
from blockmean.lab.tasks import (
    DATASETS,
    LOSSES,
    SPLITS,
    Data,
    epoch_length,
    evaluate,
    load_data,
    make_model,
    models_of,
    require_one_of,
    steps_per_epoch,
)
from blockmean.lab.tokens import CONTEXT

Record = dict[str, Any]

DECAYS = ("none", "linear")
PART = 4
"""Windows of tokens of which gradients are taken at once: activations stay in the cache, a fifth less time."""
TEST_PART = 32
"""Windows of held-out tokens that are tested along the run; at its end all are."""


def check(spec: RunSpec) -> None:
    """Raise ValueError if the run, or writing its record, is bound to fail. Takes no data and no time."""
    if spec.tokenizer and spec.loss != "next_token":
        raise ValueError(f"The loss of a run on tokens is next_token. Got {spec.loss!r} instead.")
    if spec.tokenizer and spec.batch < 1:
        raise ValueError(f"batch must be at least 1. Got {spec.batch} instead.")
    if not spec.tokenizer:
        steps_per_epoch(spec.dataset, spec.batch)
    if not is_own(spec.model):
        require_one_of("model", spec.model, (*models_of(spec), "module:object"))
    require_one_of("optimizer", spec.optimizer, tuple(arms.known()))
    require_one_of("inputs", spec.inputs, PREPARATIONS)
    require_one_of("decay", spec.decay, DECAYS)
    require_one_of("split", spec.split, SPLITS[bool(spec.tokenizer)])
    if not 0 <= spec.warm_up < 1:
        raise ValueError(f"warm_up must be a part of the run, from 0 to below 1. Got {spec.warm_up} instead.")
    if (spec.flip or spec.crop) and (spec.tokenizer or not DATASETS[spec.dataset].image):
        raise ValueError(f"{'flip mirrors' if spec.flip else 'crop cuts'} images, and this data set is a text.")
    if not 0 <= spec.seed < 2**32:  # as NumPy wants it
        raise ValueError(f"seed must be between 0 and {2**32 - 1}. Got {spec.seed} instead.")
    if spec.steps < 1:
        raise ValueError(f"steps must be at least 1. Got {spec.steps} instead.")
    if not math.isfinite(spec.lr):
        raise ValueError(f"lr must be a finite number. Got {spec.lr} instead.")
    for name, value in spec.options.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                f"The option {name!r} must be made of finite numbers, strings, lists and True, False or None, so that "
                f"it can be recorded. Got {value!r} instead."
            ) from None
    with torch.random.fork_rng(devices=[]):
        make_optimizer(spec, make_model(spec))


def check_model(spec: RunSpec, data: Data) -> None:
    """Raise ValueError if the model cannot take the data of its run; those that are known here can."""
    if is_own(spec.model):
        with torch.random.fork_rng(devices=[]):
            model = make_model(spec)
            some = slice(max(spec.batch, 1_000))  # enough to have every class
            examples = data.train[some], data.train_targets[some]
            check_fit((spec.model, model), (spec.loss, LOSSES[spec.loss].mean), examples)


def make_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a spec for a model; ValueError if it does not take these options."""
    return arms.make(spec.optimizer, model, spec.lr, spec.options)


def rate_factor(spec: RunSpec, step: int) -> float:
    """What the rate of a step, counted from 0, is multiplied by."""
    rising = round(spec.warm_up * spec.steps)
    if step < rising:
        return (step + 1) / rising
    return (spec.steps - step) / (spec.steps - rising) if spec.decay == "linear" else 1.0


def run(
    spec: RunSpec,
    data_dir: Path | None = None,
    on_step: Callable[[int, float], None] | None = None,
    keep: Callable[[nn.Module], None] | None = None,
) -> Record:
    """Train once, on one thread, and return the record; a value that is not finite is None in it.

    `keep` is called with the trained model.

    Equal seeds mean equal initial weights and equal batches, whatever the optimizer: runs can be compared in pairs. A
    run that diverges ends there, and its record says at which step.
    """
    check(spec)
    torch.set_num_threads(1)
    where = environment()
    began = time.process_time()
    data = load_data(spec, data_dir)
    data_seconds = time.process_time() - began
    start = _weights(spec, data_dir) if spec.start else None
    if spec.curve or spec.points:
        _warm_up(spec, data)
    arms.seed_everything(spec.seed)
    loss_of = LOSSES[spec.loss]
    model = make_model(spec)
    if start is not None:
        model.load_state_dict(start)
    optimizer = make_optimizer(spec, model)
    rates = [group["lr"] for group in optimizer.param_groups]
    per_epoch = epoch_length(spec)
    marks = set(time_marks(spec.steps))

    def test(some: slice = slice(None)) -> dict[str, float | None]:
        with _evaluation(model, optimizer, spec, data):
            part = PART if spec.tokenizer else 1_000
            return evaluate(model, loss_of, data.test[some], data.test_targets[some], part)

    epochs: list[dict[str, Any]] = []
    losses: list[float] = []
    seconds_at: list[float] = []
    diverged_at = None
    seconds = step_seconds = 0.0
    arms.switch(optimizer, "train")
    for step, (inputs, targets) in enumerate(batches_of(data, spec)):
        began = time.process_time()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rate_factor(spec, step)
        optimizer.zero_grad()
        losses.append(_backward(model, loss_of.mean, inputs, targets, PART if spec.tokenizer else len(inputs)))
        if spec.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), spec.clip)
        before = time.process_time()
        if not _stepped(optimizer):
            losses[-1] = math.nan
        ended = time.process_time()
        seconds, step_seconds = seconds + ended - began, step_seconds + ended - before
        if not math.isfinite(losses[-1]):
            losses.pop()
            diverged_at = step
            break
        if step + 1 in marks:
            seconds_at.append(round(seconds, 4))
        if on_step is not None:
            on_step(step, losses[-1])
        if (step + 1) % per_epoch == 0:
            mean = {"train_loss": sum(losses[-per_epoch:]) / per_epoch}
            epochs.append({**mean, **test(slice(TEST_PART if spec.tokenizer else None))})
            if spec.points:
                epochs[-1]["seconds"] = round(seconds, 2)
    # Of images the last epoch has had its test, if it is whole.
    whole = bool(epochs) and diverged_at is None and spec.steps % per_epoch == 0 and not spec.points
    tested = epochs[-1] if whole else test()
    if spec.tokenizer:
        train = tested if diverged_at is not None else {"test_loss": sum(losses[-per_epoch:]) / per_epoch}
    else:
        some = 1_000 if spec.curve or spec.points else 10_000  # a curve says more about the training loss
        with _evaluation(model, optimizer, spec, data):
            train = evaluate(model, loss_of, data.train[:some], data.train_targets[:some])
    if diverged_at is None and None in (train["test_loss"], tested["test_loss"]):
        diverged_at = spec.steps - 1  # the last step broke the weights, and no batch came after it
    curve: Record = {"losses": list(map(_rounded, losses)), "seconds_at": seconds_at} if spec.curve else {}
    if spec.points:
        curve = {"losses": list(map(_rounded, means_of_parts(losses, spec.points)))}
    if keep is not None:
        keep(model)
    return {
        "spec": asdict(spec),
        "environment": where,
        "epochs": epochs,  # train_loss: mean over the epoch's batches while training; tests come after the epoch
        "diverged_at": diverged_at,
        "train_loss": None if diverged_at is not None else train["test_loss"],  # of some examples, at the end
        "test_loss": tested["test_loss"],
        "test_error": tested["test_error"],
        "data_seconds": round(data_seconds, 3),  # near 0 if this process had read the data before
        "seconds": round(seconds, 3),  # training, without reading data and without evaluation
        "step_seconds": round(step_seconds, 3),  # the optimizer's part of these
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "state_bytes": arms.state_bytes(optimizer),
        **curve,  # the loss of every step, and the seconds after each of `time_marks`
    }


def _backward(
    model: nn.Module, mean: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor, part: int
) -> float:
    """The mean loss of a batch, whose gradient is added up part by part."""
    total = 0.0
    for x, y in zip(inputs.split(part), targets.split(part), strict=True):
        loss = mean(model(x), y) * (len(x) / len(inputs))
        loss.backward()
        total += loss.item()
    return total


def means_of_parts(values: Sequence[float], parts: int) -> list[float]:
    """The means of consecutive parts, as many as there are asked for or as there are values."""
    parts = min(parts, len(values))
    edges = [len(values) * i // parts for i in range(parts + 1)] if parts else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _weights(spec: RunSpec, data_dir: Path | None) -> dict[str, Tensor]:
    """The weights at the end of the run that this one continues; they are kept in the cache folder."""
    first = RunSpec(**spec.start)
    path = cache_folder() / "weights" / f"{first.key}.pt"
    if not path.exists():
        trained: list[nn.Module] = []
        run(first, data_dir, keep=trained.append)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        torch.save(trained[0].state_dict(), unfinished)
        unfinished.replace(path)
    weights: dict[str, Tensor] = torch.load(path, weights_only=True)
    return weights


def time_marks(steps: int) -> list[int]:
    """The numbers of steps after which a record has the time: every percent of the run."""
    return sorted({math.ceil(steps * percent / 100) for percent in range(1, 101)})


def _stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Take a step; False if numbers got out of hand, so that the optimizer refused it."""
    try:
        optimizer.step()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # not in its stubs
        return False
    except ValueError:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise  # it refuses something else, and not because the run diverged
        return False
    return True


def _warm_up(spec: RunSpec, data: Data) -> None:
    """Two steps of a twin, so that no run pays for what torch loads in the first steps of a process."""
    with torch.random.fork_rng(devices=[]):
        model = make_model(spec)
        optimizer = make_optimizer(spec, model)
        arms.switch(optimizer, "train")
        for inputs, targets in islice(batches_of(data, spec), 2):
            optimizer.zero_grad()
            _backward(model, LOSSES[spec.loss].mean, inputs, targets, PART if spec.tokenizer else len(inputs))
            _stepped(optimizer)


@contextmanager
def _evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, spec: RunSpec, data: Data) -> Iterator[None]:
    """Show the weights that are to be judged, then go on training.

    A schedule-free optimizer judges other weights than it trains, for which BatchNorm has the wrong averages: they are
    taken again from 50 batches, as its authors advise, and put back afterwards.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    arms.switch(optimizer, "eval")
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with torch.no_grad():
            for inputs, _ in islice(batches_of(data, replace(spec, steps=50)), 50):
                model(inputs)
    yield
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
    arms.switch(optimizer, "train")


def batches_of(data: Data, spec: RunSpec) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, in a new order every epoch; the examples left over at the end of an epoch are not used.

    Windows of tokens start anywhere.
    """
    examples, targets = data[:2]
    count = len(examples)
    generator = torch.Generator().manual_seed(spec.seed + 1_000_003)
    left = spec.steps
    if spec.tokenizer:
        places = torch.arange(CONTEXT + 1)
        for _ in range(left):
            drawn = examples[torch.randint(count - CONTEXT, (spec.batch, 1), generator=generator) + places].long()
            yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        return
    while left > 0:
        order = torch.randperm(count, generator=generator)
        mirrored = torch.rand(count, generator=generator) < 0.5 if spec.flip else None
        shifts = torch.randint(2 * spec.crop + 1, (count, 2), generator=generator) if spec.crop else None
        for batch in order[: count - count % spec.batch].split(spec.batch)[:left]:
            inputs = examples[batch]
            if mirrored is not None:
                inputs = torch.where(mirrored[batch].view(-1, 1, 1, 1), inputs.flip(-1), inputs)
            if shifts is not None:
                inputs = _cropped(inputs, shifts[batch], spec.crop)
            yield inputs, targets[batch]
            left -= 1


def _cropped(images: Tensor, shifts: Tensor, margin: int) -> Tensor:
    """Pieces of the same size from images with a margin, each at its own place."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, [margin] * 4)
    rows = (shifts[:, :1] + torch.arange(height))[:, :, None]
    columns = (shifts[:, 1:] + torch.arange(width))[:, None, :]
    pieces = padded.permute(0, 2, 3, 1)[torch.arange(len(images))[:, None, None], rows, columns]
    return pieces.permute(0, 3, 1, 2)  # channels last in memory
