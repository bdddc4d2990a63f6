"""TensorBoard: how the blocks of AdamBMA depend on each other, and the shares of Anova's means.

python examples/recipes/tensorboard_log.py [folder]       needs tensorboard and matplotlib

Then `tensorboard --logdir runs`. `CouplingRecorder` hooks into `step`: the loop stays as it is.
"""

import sys

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from blockmean import AdamBMA, Anova
from blockmean.plot import CouplingRecorder

folder = sys.argv[1] if len(sys.argv) > 1 else "runs"


def train(optimizer, model, writer):
    """200 steps towards a random network, with the loss in TensorBoard."""
    teacher = nn.Linear(32, 10).requires_grad_(False)
    for step in range(1, 201):
        x = torch.rand(64, 32)
        loss = nn.functional.mse_loss(model(x), teacher(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        writer.add_scalar("loss", loss, step)
    print(f"{type(optimizer).__name__}: loss {loss.item():.5f} after {step} steps")


def write_shares(writer, every):
    """A hook for Anova: how much of the gradient of every matrix lies in its means."""

    def after_step(optimizer, *_):
        step = int(max(state["step"] for state in optimizer.state.values()))
        if step % every == 0:
            for matrix in optimizer.block_statistics():
                writer.add_scalar(f"means/{matrix.parameter}", 1 - matrix.shares.remainder, step)

    return after_step


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = AdamBMA(model.named_parameters(), lr=3e-3)
with SummaryWriter(f"{folder}/AdamBMA") as writer, CouplingRecorder(optimizer, every=50, writer=writer):
    train(optimizer, model, writer)

model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = Anova(model.named_parameters(), lr=3e-3)
with SummaryWriter(f"{folder}/Anova") as writer:
    optimizer.register_step_post_hook(write_shares(writer, every=50))
    train(optimizer, model, writer)
