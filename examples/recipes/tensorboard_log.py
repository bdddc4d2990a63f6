"""TensorBoard: how the blocks of AdamBMA depend on each other, and the shares of Anova's means.

python examples/recipes/tensorboard_log.py [folder]       needs tensorboard and matplotlib; `tensorboard --logdir runs`
"""

import sys

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from blockmean import AdamBMA, Anova
from blockmean.plot import CouplingRecorder

folder = sys.argv[1] if len(sys.argv) > 1 else "runs"
torch.manual_seed(0)
teacher = nn.Linear(32, 10).requires_grad_(False)
for optimizer_class in (AdamBMA, Anova):
    name = optimizer_class.__name__
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = optimizer_class(model.named_parameters(), lr=3e-3)
    with SummaryWriter(f"{folder}/{name}") as writer:
        if optimizer_class is AdamBMA:
            CouplingRecorder(optimizer, every=50, writer=writer)  # hooks into `step`: the loop stays as it is
        for step, x in enumerate(torch.rand(200, 64, 32), start=1):
            loss = nn.functional.mse_loss(model(x), teacher(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            writer.add_scalar("loss", loss, step)
            if optimizer_class is Anova and step % 50 == 0:
                for matrix in optimizer.block_statistics():
                    writer.add_scalar(f"means/{matrix.parameter}", 1 - matrix.shares.remainder, step)
    print(f"{name}: loss {loss.item():.5f} after {step} steps")
