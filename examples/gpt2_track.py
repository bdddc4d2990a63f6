"""Train GPT-2's 124M model on token files with AdamW or Anova, and record held-out loss and step time.

    torchrun --standalone --nproc-per-node 8 examples/gpt2_track.py --compile --optimizer Anova --lr 3e-3 \
        --train fineweb10B/fineweb_train_*.bin --held-out fineweb10B/fineweb_val_*.bin --record anova.jsonl

Token files are those of nanoGPT (uint16) or of modded-nanogpt (the same after a header of 1,024 bytes). A step sees the
same 512 × 1024 tokens on any number of GPUs; --device-batch is how many of the 512 sequences one GPU takes at a time.
Without torchrun it runs on one GPU, or on a CPU. With --checkpoint, an interrupted run goes on where it was saved last.

Both optimizers have the same model, data order, schedule (warm-up, then linear decay to 0), weight decay and clipping.
Compare them at the best of several --lr each, with --seed 0, 1, 2 at the best. The record is a file of JSON lines:
options and environment first, then one line per evaluation. We have run this script on CPUs only. If you have run it on
GPUs, open an issue of this project with your records attached, or add them to results/gpt2_track/ in a pull request;
runs that Anova loses are as welcome.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the model is wrapped, or it would hold on to the process group
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

from blockmean import Anova, param_groups
from blockmean.lab.environment import environment

MAGIC = 20240520  # the first number in the header of modded-nanogpt's files

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--optimizer", choices=["AdamW", "Anova"], default="Anova")
parser.add_argument("--lr", type=float, default=1e-3, help="the peak of the schedule")
parser.add_argument("--weight-decay", type=float, default=0.1)
parser.add_argument("--train", type=Path, nargs="+", required=True, metavar="FILE")
parser.add_argument("--held-out", type=Path, nargs="+", required=True, metavar="FILE")
parser.add_argument("--held-out-tokens", type=int, default=10_485_760, help="the first ones of the held-out files")
parser.add_argument("--steps", type=int, default=5000)
parser.add_argument("--warm-up", type=int, default=250, help="steps")
parser.add_argument("--batch", type=int, default=512, help="sequences in a step, over all processes")
parser.add_argument("--device-batch", type=int, default=32, help="sequences in a forward pass")
parser.add_argument("--context", type=int, default=1024)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocabulary", type=int, default=50304, help="GPT-2's 50,257 tokens, padded")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--evaluate-every", type=int, default=125, help="steps")
parser.add_argument("--record", type=Path, required=True, metavar="FILE")
parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="written after each evaluation, read at the start")
parser.add_argument("--compile", action="store_true", help="compile the model")
options = parser.parse_args()


class Windows:
    """Token files, cut into windows of context + 1 tokens; the last token of one is the first of the next."""

    def __init__(self, paths: list[Path], context: int) -> None:
        self.context = context
        self.files = [read_tokens(path) for path in paths]
        self.ends = list(accumulate((len(tokens) - 1) // context for tokens in self.files))

    def __len__(self) -> int:
        return self.ends[-1]

    def batch(self, numbers: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some windows, (windows, context) each."""
        rows = []
        for number in numbers:
            file = bisect_right(self.ends, number)
            start = (number - (self.ends[file - 1] if file else 0)) * self.context
            rows.append(self.files[file][start : start + self.context + 1])
        tokens = torch.stack(rows).to(torch.int64).to(device)
        return tokens[:, :-1], tokens[:, 1:]


def read_tokens(path: Path) -> Tensor:
    """The tokens of a file, mapped into memory, uint16."""
    numbers = torch.from_file(str(path), size=path.stat().st_size // 2, dtype=torch.uint16)
    has_header = len(numbers) > 512 and int(numbers[:2].view(torch.int32)) == MAGIC
    return numbers[512:] if has_header else numbers


class Block(nn.Module):
    """Causal attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, context, 3 · width) → three of (batch, heads, context, width / heads)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """GPT-2 without biases; the output layer shares its weight with the embedding."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:  # layers that add to the residual stream start smaller
                nn.init.normal_(param, std=0.02 / ((2 * layers) ** 0.5 if "out." in name or "down." in name else 1))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return cross_entropy(logits.flatten(0, 1), targets.flatten())  # in float32 under autocast


def factor(step: int) -> float:
    """The learning rate of steps 1, 2, … as a share of its peak: linear warm-up, linear decay."""
    return min(step / max(options.warm_up, 1), (options.steps + 1 - step) / (options.steps + 1 - options.warm_up))


def now(device: torch.device) -> float:
    """Seconds, once the device has done all it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def held_out_loss(model: nn.Module, windows: Windows, device: torch.device, rank: int, world: int) -> float:
    """The mean loss over the held-out tokens, shared between the processes."""
    count = min(len(windows), options.held_out_tokens // options.context)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for start in range(rank * options.device_batch, count, world * options.device_batch):
        numbers = list(range(start, min(start + options.device_batch, count)))
        with torch.autocast(device.type, torch.bfloat16):
            total += model(*windows.batch(numbers, device)) * len(numbers)
    if world > 1:
        dist.all_reduce(total)
    return float(total) / count


def train(device: torch.device, rank: int, world: int) -> None:
    data, held_out = Windows(options.train, options.context), Windows(options.held_out, options.context)
    parts = options.batch // options.device_batch  # forward passes of a step, over all processes
    if options.batch % (options.device_batch * world):
        raise SystemExit(f"--batch must be a multiple of --device-batch times {world} processes, got {options.batch}")
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(options.seed)).tolist()

    torch.manual_seed(options.seed)
    model = GPT(options.vocabulary, options.context, options.layers, options.heads, options.width).to(device)
    groups = param_groups(model, options.weight_decay, embeddings=True)  # as nanoGPT does: all matrices decay
    if options.optimizer == "AdamW":
        optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
    else:
        optimizer = Anova(groups, lr=options.lr, betas=(0.9, 0.95))
    parallel = forward = torch.compile(model) if options.compile else model
    if world > 1:
        parallel = DistributedDataParallel(forward, device_ids=[device] if device.type == "cuda" else None)

    start, seconds, record = 0, 0.0, []
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, seconds, record = saved["step"], saved["seconds"], saved["record"]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    here = {"gpu": gpu, "processes": world, "cuda": torch.version.cuda, **environment()}
    size = sum(param.numel() for param in model.parameters())
    head = {"event": "start", "step": start, "parameters": size, "options": vars(options), "environment": here}
    record.append(json.dumps(head, default=str))

    losses, step_times, optimizer_times = torch.zeros((), device=device), [], []
    for step in range(start + 1, options.steps + 1):
        began = now(device)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * factor(step)
        first = (step - 1) * options.batch
        for part in range(rank, parts, world):  # a part has the same windows on any number of processes
            place = first + part * options.device_batch
            numbers = [order[i % len(order)] for i in range(place, place + options.device_batch)]
            alone = world > 1 and part + world < parts  # gradients are averaged over processes after the last part
            with parallel.no_sync() if alone else contextlib.nullcontext():
                with torch.autocast(device.type, torch.bfloat16):
                    loss = parallel(*data.batch(numbers, device)) * world / parts
                loss.backward()
            losses += loss.detach() / world
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = now(device)
        optimizer.step()
        optimizer.zero_grad()
        ended = now(device)
        step_times.append(1000 * (ended - began))
        optimizer_times.append(1000 * (ended - before))
        seconds += ended - began
        if step % options.evaluate_every and step != options.steps:
            continue

        if world > 1:
            dist.all_reduce(losses)
        line = {
            "event": "evaluation",
            "step": step,
            "tokens": step * options.batch * options.context,
            "held_out_loss": held_out_loss(forward, held_out, device, rank, world),
            "train_loss": float(losses) / len(step_times),  # these, and the times, since the last evaluation
            "step_ms": statistics.median(step_times),
            "optimizer_ms": statistics.median(optimizer_times),
            "seconds": seconds,  # of training, without evaluations
            "peak_memory_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        }
        record.append(json.dumps(line))
        losses, step_times, optimizer_times = torch.zeros((), device=device), [], []
        if rank == 0:
            print(f"step {step}: held-out loss {line['held_out_loss']:.4f}, {line['step_ms']:.1f} ms", flush=True)
            options.record.write_text("\n".join([*record, ""]))
            if options.checkpoint:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                new = options.checkpoint.with_suffix(".new")
                torch.save({"step": step, "seconds": seconds, "record": record, **states}, new)
                new.replace(options.checkpoint)  # a crash never leaves half a checkpoint


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
if world > 1:
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
train(device, rank, world)
if world > 1:
    dist.destroy_process_group()
