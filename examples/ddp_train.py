"""Train a character transformer on several processes, each with the whole model (DistributedDataParallel).

    torchrun --standalone --nproc-per-node 2 examples/ddp_train.py

Gradients are averaged by the time the optimizer sees them, so it takes the same step on every process and communicates
nothing. Start the script again, and it goes on from the last complete checkpoint.

For restarts by torchrun (--max-restarts 1) set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: it would otherwise keep one store
for all attempts, in which processes may find the addresses of those that have died.

The text is tiny Shakespeare if --data-dir or $BLOCKMEAN_DATA has it, or else the manual inside Python itself.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # now, not when the model is wrapped: it would hold on to the process group (see below)
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import blockmean
from blockmean.lab.text import CharacterTransformer, read_text

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--optimizer", default="Anova", help="or AdamBMA, AdaGradBMA, NaturalGradientBMA")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32, help="windows of text in a step, over all processes")
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--checkpoints", type=Path, default=Path("out/ddp_train"))
parser.add_argument("--data-dir", type=Path)
options = parser.parse_args()


def train(gpu: torch.device | None) -> None:
    rank, world, device = dist.get_rank(), dist.get_world_size(), gpu or torch.device("cpu")
    try:
        text = read_text("shakespeare", options.data_dir)
    except FileNotFoundError:
        text = read_text("manual")

    torch.manual_seed(0)
    model = CharacterTransformer(text.vocabulary, width=64, layers=2, context=text.inputs.shape[1]).to(device)
    parallel = DistributedDataParallel(model, device_ids=None if gpu is None else [gpu])
    optimizer = getattr(blockmean, options.optimizer)(model.named_parameters(), lr=options.lr)

    start, latest = 0, options.checkpoints / "latest.pt"
    if latest.exists():
        saved = torch.load(latest, map_location=device, weights_only=True)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if rank == 0:
            print(f"goes on after step {start}", flush=True)

    began = time.perf_counter()
    for step in range(start + 1, options.steps + 1):
        # A batch depends on the step alone, so a run that was interrupted sees what it would have seen.
        rows = torch.randint(len(text.inputs), (options.batch,), generator=torch.Generator().manual_seed(step))
        inputs, targets = (x[rows[rank::world]].to(device) for x in (text.inputs, text.targets))
        optimizer.zero_grad()
        loss = cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            dist.all_reduce(mean := loss.detach() / world)
            if rank == 0:
                tokens = options.batch * text.inputs.shape[1]
                rate = (step - start) * tokens / (time.perf_counter() - began)
                print(f"step {step}: loss {mean:.4f}, {step * tokens:,} tokens, {rate:,.0f} per second", flush=True)
        if rank == 0 and (step % options.save_every == 0 or step == options.steps):
            options.checkpoints.mkdir(parents=True, exist_ok=True)
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, latest.with_suffix(".new"))
            latest.with_suffix(".new").replace(latest)  # in one stroke: a crash never leaves half a checkpoint


gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
dist.init_process_group(device_id=gpu)
train(gpu)
# Ends gloo's threads, if nothing else has the process group: the model is gone with the variables of train(). A thread
# that outlives this line and lets go of a tensor while Python is closing down would abort the process.
dist.destroy_process_group()
