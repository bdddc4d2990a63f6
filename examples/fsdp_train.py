"""Train a character transformer whose parameters, gradients and optimizer state are sharded over processes (FSDP2).

    torchrun --standalone --nproc-per-node 2 examples/fsdp_train.py

The optimizer sees that its parameters are DTensors and takes the step that a single process would take. Checkpoints are
those of torch.distributed. Start the script again, with any number of processes: it goes on from the last complete one.

For restarts by torchrun (--max-restarts 1) set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: it would otherwise keep one store
for all attempts, in which processes may find the addresses of those that have died.

The text is tiny Shakespeare if --data-dir or $BLOCKMEAN_DATA has it, or else the manual inside Python itself.
"""

import argparse
import os
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import blockmean
from blockmean.lab.text import CharacterTransformer, read_text

# The transformer returns a transposed view; nothing changes it in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")

parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--optimizer", default="Anova", help="or AdamBMA, AdaGradBMA, NaturalGradientBMA")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32, help="windows of text in a step, over all processes")
parser.add_argument("--save-every", type=int, default=50)
parser.add_argument("--checkpoints", type=Path, default=Path("out/fsdp_train"))
parser.add_argument("--data-dir", type=Path)
options = parser.parse_args()

gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else None
dist.init_process_group(device_id=gpu)
rank, world, device = dist.get_rank(), dist.get_world_size(), gpu or torch.device("cpu")
try:
    text = read_text("shakespeare", options.data_dir)
except FileNotFoundError:
    text = read_text("manual")

torch.manual_seed(0)  # the same model on all processes, before it is sharded
model = CharacterTransformer(text.vocabulary, width=64, layers=2, context=text.inputs.shape[1]).to(device)
for layer in model.blocks.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = getattr(blockmean, options.optimizer)(model.named_parameters(), lr=options.lr)

start, latest = 0, options.checkpoints / "latest"
if latest.exists():
    start = int(latest.read_text())
    weights, state = get_state_dict(model, optimizer)  # of the right shapes, for load to fill
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=options.checkpoints / f"step-{start}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    if rank == 0:
        print(f"goes on after step {start}", flush=True)

began = time.perf_counter()
for step in range(start + 1, options.steps + 1):
    # A batch depends on the step alone, so a run that was interrupted sees what it would have seen.
    rows = torch.randint(len(text.inputs), (options.batch,), generator=torch.Generator().manual_seed(step))
    inputs, targets = (x[rows[rank::world]].to(device) for x in (text.inputs, text.targets))
    optimizer.zero_grad()
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        dist.all_reduce(mean := loss.detach() / world)
        if rank == 0:
            tokens = options.batch * text.inputs.shape[1]
            rate = (step - start) * tokens / (time.perf_counter() - began)
            print(f"step {step}: loss {mean:.4f}, {step * tokens:,} tokens, {rate:,.0f} per second", flush=True)
    if step % options.save_every == 0 or step == options.steps:
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=options.checkpoints / f"step-{step}")
        if rank == 0:  # all processes have written theirs: only now does it become the latest, in one stroke
            latest.with_suffix(".new").write_text(str(step))
            latest.with_suffix(".new").replace(latest)
dist.destroy_process_group()
