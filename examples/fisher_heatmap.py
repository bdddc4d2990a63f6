"""Which layers have gradients that depend on each other? Plot the empirical Fisher matrix of a model.

python examples/fisher_heatmap.py [picture.png]
"""

import sys

import torch

from blockmean import curvature, plot
from blockmean.lab import data, models

images = data.load("digits")
torch.manual_seed(0)
model = models.small((1, 28, 28))
fisher = curvature.empirical_fisher(
    model, torch.nn.functional.cross_entropy, (images.train[:500], images.train_labels[:500]), norm_probes=8
)
file = sys.argv[1] if len(sys.argv) > 1 else "fisher.png"
plot.coupling(fisher, title="empirical Fisher, small net, at initialisation").figure.savefig(file, dpi=150)
print(f"{fisher.report}\nwritten to {file}")
