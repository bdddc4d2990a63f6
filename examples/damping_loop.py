"""Levenberg-Marquardt damping with the Gauss-Newton matrix in block-mean form.

    python examples/damping_loop.py

Every step trusts the quadratic model m(Δ) = f + gᵀΔ + ½ΔᵀGΔ only as far as its last prediction was good. G is the
block mean of the generalised Gauss-Newton matrix. With Δ = −(G + δI)⁻¹g and the gain ratio

    ρ = (decrease of the loss) / (decrease that the model predicted)

the loop raises the damping δ if ρ < ¼, lowers it if ρ > ¾, and skips a step that would raise the loss. There is no
learning rate. For comparison, gradient descent with a line search takes the same number of steps; it has nothing to
tune either.

The loop works: the loss falls at every step it takes, and δ settles. But it does not show that the block mean is a good
model of the loss: a line search along the plain gradient gets as far or further. The last lines of output show why.
Along the gradient, the exact G is several times its block mean: inside a block the gradient does not avoid the
directions of large curvature, while λ_i is the mean over all directions. So ρ keeps δ high.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from blockmean import curvature
from blockmean.lab import data

STEPS = 30
SEEDS = (0, 1, 2)
PARTITION = "unit"
FACTOR = 3.0  # raises or lowers the damping


class Step(NamedTuple):
    """The state after a step."""

    loss: float
    ratio: float  # ρ
    damping: float  # δ of the step


class Task:
    """A net of 1,210 parameters on 250 digits of 7 × 7 pixels, as a function of its flattened parameters."""

    def __init__(self, seed: int) -> None:
        images = data.load("digits", inputs="raw")
        self.x = nn.functional.avg_pool2d(images.train[:250], 4).flatten(1)
        self.y = images.train_labels[:250]
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(49, 20), nn.ReLU(), nn.Linear(20, 10))

    @property
    def theta(self) -> Tensor:
        return parameters_to_vector(self.model.parameters()).detach()

    def move(self, theta: Tensor) -> None:
        vector_to_parameters(theta, self.model.parameters())

    def gradient(self) -> Tensor:
        loss = cross_entropy(self.model(self.x), self.y)
        return parameters_to_vector(torch.autograd.grad(loss, list(self.model.parameters())))

    @torch.no_grad()
    def loss(self, theta: Tensor | None = None) -> float:
        before = self.theta
        if theta is not None:
            self.move(theta)
        found = float(cross_entropy(self.model(self.x), self.y))
        self.move(before)
        return found


def gauss_newton(task: Task, damping: float = 1.0) -> list[Step]:
    """The Levenberg-Marquardt loop."""
    steps: list[Step] = []
    loss, moved = task.loss(), True
    for _ in range(STEPS):
        if moved:  # after a skipped step, gradient and matrix are still the same
            theta, g = task.theta, task.gradient()
            G = curvature.ggn(task.model, cross_entropy, (task.x, task.y), PARTITION).matrix
        step = -G.damped(damping).solve(g)
        predicted = -float(g @ step + step @ (G @ step) / 2)
        after = task.loss(theta + step)
        ratio = (loss - after) / predicted
        moved = ratio > 0
        if moved:
            task.move(theta + step)
            loss = after
        steps.append(Step(loss, ratio, damping))
        if not ratio >= 0.25:  # NaN too
            damping *= FACTOR
        elif ratio > 0.75:
            damping /= FACTOR
    return steps


def curvature_along_gradient(task: Task) -> tuple[float, float]:
    """gᵀGg / gᵀg with the exact G, and with its block mean."""
    g = task.gradient()
    given = task.model, cross_entropy, (task.x, task.y)
    # One block per entry gives the full matrix. For cross-entropy the Fisher matrix equals the Gauss-Newton matrix.
    exact = curvature.fisher(*given, "element").matrix
    approximate = curvature.ggn(*given, PARTITION).matrix
    return float(g @ (exact @ g) / (g @ g)), float(g @ (approximate @ g) / (g @ g))


def gradient_descent(task: Task, length: float = 1.0) -> list[float]:
    """The loss after each step; the step length is found by doubling and halving the last one."""
    losses = []
    for _ in range(STEPS):
        theta, g = task.theta, task.gradient()
        loss = task.loss(theta - length * g)
        for factor in (2.0, 0.5):
            while (other := task.loss(theta - factor * length * g)) < loss:
                loss, length = other, factor * length
        task.move(theta - length * g)
        losses.append(loss)
    return losses


def main() -> None:
    torch.set_num_threads(1)  # more do not help on a net this small
    for seed in SEEDS:
        start = time.perf_counter()
        task = Task(seed)
        steps = gauss_newton(task)
        middle = time.perf_counter()
        losses = gradient_descent(Task(seed))
        end = time.perf_counter()
        if seed == SEEDS[0]:
            print(f"Loss {Task(seed).loss():.4f} at the start; Gauss-Newton, block mean per {PARTITION}, with damping")
            print(f"{'step':>5}{'loss':>10}{'ρ':>8}{'δ':>10}")
            for i, step in enumerate(steps, 1):
                if i <= 5 or i % 5 == 0:
                    print(f"{i:5}{step.loss:10.4f}{step.ratio:8.2f}{step.damping:10.2g}")
            print(f"\nLoss after {STEPS} steps")
        print(f"seed {seed}: {steps[-1].loss:.4f} with the block mean in {middle - start:.1f} s,", end=" ")
        print(f"{losses[-1]:.4f} with the gradient and a line search in {end - middle:.1f} s")
        exact, approximate = curvature_along_gradient(task)
        print(f"        curvature along the gradient there: exactly {exact:.3f}, by the block mean {approximate:.3f}")


if __name__ == "__main__":
    main()
