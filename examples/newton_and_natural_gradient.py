"""One Newton step and one natural-gradient step in block-mean form, compared with the gradient and the exact steps.

    python examples/newton_and_natural_gradient.py

The paper's small net (322 parameters) at initialisation and early in training, on 200 real digits. It is small enough
for the exact matrices, which are block means with one block per parameter. The directions are

    gradient            g
    natural gradient    (F + δI)⁻¹ g,    F the Fisher matrix, equal to the Gauss-Newton matrix of cross-entropy
    Newton              (|H| + δI)⁻¹ g,  H the Hessian; it is indefinite, so use the absolute eigenvalues

with δ a tenth of the mean eigenvalue. A direction does not say how far to go, so each is followed twice: until the
predictions have changed by the same amount, KL(before ‖ after) = 0.01 on average over the images, and to the lowest
loss on its line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from blockmean import BlockMean, curvature
from blockmean.lab import data, models

IMAGES = 200
WARM_UP = (0, 60)  # steps of Adam before the comparison
DAMPING = 0.1  # of the mean eigenvalue
RADIUS = 0.01  # KL


class Line(NamedTuple):
    """The losses along a direction."""

    blocks: int | None
    at_radius: float  # the loss where KL = RADIUS
    lowest: float  # on the whole line


class Problem:
    """The network as a function of its flattened parameters θ, on one fixed batch."""

    def __init__(self, warm_up: int) -> None:
        images = data.load("digits")
        self.x, self.y = images.train[:IMAGES], images.train_labels[:IMAGES]
        torch.manual_seed(0)
        self.model = models.small((1, 28, 28))
        self._warm_up(warm_up)
        self.theta = parameters_to_vector(self.model.parameters()).detach()
        self.before = self.outputs(self.theta).log_softmax(1)
        gradients = torch.autograd.grad(cross_entropy(self.model(self.x), self.y), list(self.model.parameters()))
        self.gradient = parameters_to_vector(gradients).double()

    def _warm_up(self, steps: int) -> None:
        optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        for _ in range(steps):
            batch = torch.randint(IMAGES, (100,))
            optimizer.zero_grad()
            cross_entropy(self.model(self.x[batch]), self.y[batch]).backward()
            optimizer.step()

    @torch.no_grad()
    def outputs(self, theta: Tensor) -> Tensor:
        vector_to_parameters(theta.float(), self.model.parameters())
        outputs: Tensor = self.model(self.x)
        vector_to_parameters(self.theta, self.model.parameters())
        return outputs

    def loss(self, step: Tensor | float = 0.0) -> float:
        return float(cross_entropy(self.outputs(self.theta - step), self.y))

    def change(self, step: Tensor) -> float:
        """KL(before ‖ after), averaged over the images."""
        after = self.outputs(self.theta - step).log_softmax(1)
        return float(nn.functional.kl_div(after, self.before, reduction="batchmean", log_target=True))

    def follow(self, direction: Tensor, blocks: int | None) -> Line:
        """Follow −direction to the radius, and try 1/64 to 64 times that length for the lowest loss."""
        radius = _length(lambda t: self.change(t * direction), RADIUS)
        lengths = radius * 2 ** torch.linspace(-6, 6, 25)
        return Line(blocks, self.loss(radius * direction), min(self.loss(t * direction) for t in lengths))

    def precondition(self, matrix: BlockMean) -> Tensor:
        matrix = matrix.to(torch.float64)
        mean = matrix.trace() / matrix.shape[-1]
        return matrix.damped(DAMPING * mean).solve(self.gradient)


def _length(change: Callable[[float], float], radius: float) -> float:
    """The length t at which change(t) first reaches the radius, to a thousandth."""
    t = 1e-6
    while change(2 * t) < radius:
        t *= 2
    low, high = t, 2 * t
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (middle, high) if change(middle) < radius else (low, middle)
    return low


def compare(warm_up: int) -> tuple[float, dict[str, Line]]:
    """The initial loss, and the losses along every direction."""
    problem = Problem(warm_up)
    given = problem.model, cross_entropy, (problem.x, problem.y)
    lines = {"gradient": problem.follow(problem.gradient, None)}
    for by in ("tensor", "unit", "kernel", "element"):
        F = curvature.fisher(*given, partition=by).matrix
        lines[f"natural gradient, {by}"] = problem.follow(problem.precondition(F), F.partition.num_blocks)
    for by in ("tensor", "element"):
        H = curvature.hessian(*given, partition=by, num_probes=4).matrix
        step = problem.precondition(H.apply(torch.abs))
        lines[f"Newton, {by}"] = problem.follow(step, H.partition.num_blocks)
    return problem.loss(), lines


def main() -> None:
    torch.set_num_threads(1)  # more do not help on a net this small
    for warm_up in WARM_UP:
        loss, lines = compare(warm_up)
        print(f"After {warm_up} steps of Adam the loss is {loss:.4f}. What one step takes off it:")
        print(f"{'direction':28}{'blocks':>8}{'at KL = ' + str(RADIUS):>14}{'line search':>14}")
        for name, line in lines.items():
            name = name.replace("element", "exact")
            print(f"{name:28}{line.blocks or '–':>8}{loss - line.at_radius:14.4f}{loss - line.lowest:14.4f}")
        print()


if __name__ == "__main__":
    main()
