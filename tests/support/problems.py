"""Small networks and data in float64, on which optimizers are compared with their dense twins."""

import torch
from torch import nn

from support.reference import labels_of, modules_of


def small_net():
    """Two convolutions and a linear layer: 61 entries in parameters of every kind that a partition knows."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 5, bias=True)
    ).double()


def paper_net():
    """The paper's small model on MNIST: 322 parameters."""
    layers, channels = [], 1
    for _ in range(4):
        layers += [nn.Conv2d(channels, 3, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = 3
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3, 10)).double()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).numpy()


def gradient(model, inputs, targets):
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    return flat([p.grad for p in model.parameters()])


def data(seed, n, size, classes):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.rand(n, 1, size, size, generator=rng, dtype=torch.float64)  # like pixels, not centred
    return inputs, torch.randint(classes, (n,), generator=rng)


def blocks_of(model, partition, coupling, leave_plain=True):
    """The block of every entry and the coupling group of every block, as the dense twins expect them."""
    names = [name for name, _ in model.named_parameters()]
    shapes = [tuple(p.shape) for p in model.parameters()]
    labels = labels_of(shapes, partition, names, leave_plain)
    return labels, modules_of(labels, shapes, names, coupling)
