"""Figure 1: what the dependency of two parameters does to gradient descent, and to methods that exploit it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from blockmean import AdaGradBMA, AdaGradFull
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.protocol import RATES
from blockmean.lab.picture import save

Q = torch.tensor([[1.0, -0.8], [-0.8, 1.0]], dtype=torch.float64)
WORST = torch.tensor([2.5, 2.0], dtype=torch.float64)
"""The slowest start for gradient descent: its components along the eigenvectors are as 1/λ₁ to 1/λ₂."""
STEPS = 20
STARTS = 8
"""Points on half a circle around the minimum, off the axes of f; the other half gives the same by symmetry."""
FINE_RATES = tuple(2 ** (k / 2) for k in range(-2, 8))

Loss = Callable[[Tensor], Tensor]
Maker = Callable[[list[Tensor], float], torch.optim.Optimizer]

ADAGRAD: dict[str, Maker] = {
    "AdaGrad-diag": lambda params, lr: torch.optim.Adagrad(params, lr, eps=1e-10),
    "AdaGrad-full": lambda params, lr: AdaGradFull(params, lr),
    "AdaGrad-BMA": lambda params, lr: AdaGradBMA(params, lr, partition="element"),
    "AdaGrad-BMA, the authors' floor": lambda params, lr: AdaGradBMA(
        params, lr, partition="element", eigenvalue_floor=1e-10
    ),
    "AdaGrad-BMA, consistent": lambda params, lr: AdaGradBMA(params, lr, partition="element", variant="consistent"),
}
# Colour and width of each line; a wide one shows under a thin one.
STYLES = {
    "gradient descent": ("tab:red", 1.2),
    "Newton": ("tab:cyan", 4.0),
    "gradient descent, transformed": ("tab:purple", 1.2),
    "AdaGrad-diag": ("0.25", 1.2),
    "AdaGrad-full": ("tab:green", 4.0),
    "AdaGrad-BMA": ("tab:blue", 1.2),
}


class Path(NamedTuple):
    """The points that a method visits, (steps + 1, 2), and the share of f that is left at each."""

    points: Tensor
    left: Tensor
    rate: float = 1.0


def fig1(config: ReportConfig) -> Outcome:
    """Gradient descent zig-zags on the paper's quadratic, and takes one step once reparametrised; AdaGrad on it."""
    eigenvalues, U = torch.linalg.eigh(Q)
    U = U * (U.mT @ WORST).sign()  # eigenvectors have no sign of their own
    T = eigenvalues.sqrt().diag() @ U.mT  # ξ = Tθ makes ½ θᵀQθ into ½ ξᵀξ
    descent = _descend(_quadratic, WORST, STEPS)
    transformed = _descend(_sphere, T @ WORST, 1)
    newton = _path(_quadratic, _newton(_quadratic, WORST, 1, 1.0))
    adagrad = {name: _best(make, RATES) for name, make in ADAGRAD.items()}
    ahead = _ahead()
    drawn = {name: adagrad[name] for name in ("AdaGrad-diag", "AdaGrad-full", "AdaGrad-BMA")}

    figure = Figure(figsize=(9.6, 8.6), layout="constrained")
    (top_left, top_right), (low_left, low_right) = figure.subplots(2, 2)
    first = {"gradient descent": descent, "Newton": newton}
    _draw_paths(top_left, _quadratic, first, "θ", "(a) original: line search zig-zags")
    _draw_paths(top_right, _sphere, {"gradient descent, transformed": transformed}, "ξ", "(b) transformed: one step")
    _draw_paths(low_left, _quadratic, drawn, "θ", "(c) AdaGrad, the best of the paper's rates")
    _draw_values(low_right, {**first, "gradient descent, transformed": transformed, **drawn})
    caption = (
        "f(θ) = ½ θᵀQθ, Q = [[1, −.8], [−.8, 1]], from the worst starting point. (a) Gradient descent with exact line "
        "search, and Newton's method. (b) Gradient descent in ξ = Λ^½Uᵀθ. (c) AdaGrad with the diagonal, the full and "
        "the block mean matrix. (d) What is left of f after each step; a point at the bottom is 0 up to rounding."
    )

    rate = float(((eigenvalues[1] - eigenvalues[0]) / eigenvalues.sum()) ** 2)
    ratios = descent.left[1:] / descent.left[:-1]
    apart = max(_newton_deviation(A) for A in (T, torch.tensor([[2.0, 1.0], [-0.5, 0.3]], dtype=torch.float64)))
    claims = [
        Claim(
            f"§2: gradient descent with the best step sizes keeps ((λ₁−λ₂)/(λ₁+λ₂))² = {rate:.2f} of f per step",
            f"{float(ratios.min()):.10f} to {float(ratios.max()):.10f} over {STEPS} steps from the worst point",
            Verdict.of(float((ratios / rate - 1).abs().max()) < 1e-10),
            exact=True,
        ),
        _one_step("§2: it needs a single step in ξ = Λ^½Uᵀθ", transformed),
        _one_step("§1: Newton's method needs a single step on a quadratic", newton),
        Claim(
            "Appendix: Newton's method is invariant to a reparametrisation ξ = Aθ",
            f"‖ξ_t − Aθ_t‖ ≤ {apart:.0e} ‖ξ_0‖ in 10 steps with η = ½ on f + ¼ Σξ⁴, for two A",
            Verdict.of(apart < 1e-13),
            exact=True,
        ),
        Claim(
            "§2: algorithms that exploit the dependency can prevail over those that do not",
            f"starts, out of {STARTS} on a circle, with less of f left than with AdaGrad-diag after {STEPS} steps: "
            + "; ".join(f"{name.removeprefix('AdaGrad-')}: {count}" for name, count in ahead.items()),
            Verdict.of(ahead["AdaGrad-full"] == STARTS),
        ),
    ]
    table = Table(
        f"AdaGrad on the quadratic of Figure 1: the share of f left after {STEPS} steps from the start in the picture, "
        f"and the number of starts, out of {STARTS} on a circle, from which it is less than with the diagonal method",
        ["method", "best η of the paper's five", "left", f"best η of {len(FINE_RATES)}", "left", "less than diag"],
        [
            [name, *_cells(adagrad[name]), *_cells(_best(make, FINE_RATES)), str(ahead.get(name, "–"))]
            for name, make in ADAGRAD.items()
        ],
    )
    notes = [
        "Each of the two parameters is a block of its own here, so the block mean leaves nothing out: AdaGrad-BMA and "
        "AdaGrad-full differ in that G⁻¹ is Z^-½ F^-½ Z^-½ in one and (ZFZ)^-½ in the other; and Algorithm 1 as "
        "printed corrects by sums of the raw gradient, which “consistent” does not. Unless stated otherwise, the "
        "floor for eigenvalues is the library's, 0.1; the authors' is 10⁻¹⁰. From the circle every method takes the "
        "better of η = 1 and 0.1: with the paper's smaller rates the diagonal method does not get there in time.",
        "The paper prints ξ = Λ^½Uθ for Q = UΛUᵀ. It means Λ^½Uᵀθ, which is computed here.",
    ]
    return Outcome(claims, [save(figure, config.out / "fig1", caption)], [table], notes)


def _quadratic(theta: Tensor) -> Tensor:
    return 0.5 * (theta @ Q * theta).sum(-1)


def _sphere(xi: Tensor) -> Tensor:
    return 0.5 * xi.square().sum(-1)


def _path(loss: Loss, points: list[Tensor], rate: float = 1.0) -> Path:
    values = loss(torch.stack(points))
    return Path(torch.stack(points), values / values[0], rate)


def _descend(loss: Loss, start: Tensor, steps: int, make: Maker | None = None, rate: float = 1.0) -> Path:
    """Follow an optimizer; without one, gradient descent with exact line search: η = gᵀg / gᵀHg."""
    point = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([point]) if make is None else make([point], rate)
    points = [start]
    for _ in range(steps):
        optimizer.zero_grad()
        loss(point).backward()
        if make is None and point.grad is not None:
            H = torch.autograd.functional.hessian(loss, points[-1])
            optimizer.param_groups[0]["lr"] = float(point.grad @ point.grad / (point.grad @ H @ point.grad))
        optimizer.step()
        points.append(point.detach().clone())
    return _path(loss, points, rate)


def _best(make: Maker, rates: Iterable[float], start: Tensor = WORST) -> Path:
    """The path at the learning rate that leaves least of f."""
    return min((_descend(_quadratic, start, STEPS, make, rate) for rate in rates), key=lambda path: path.left[-1])


def _ahead() -> dict[str, int]:
    """The number of starts from which a method leaves less of f than the diagonal one, with the better of two rates."""
    angles = (torch.arange(STARTS, dtype=torch.float64) + 0.5) * torch.pi / STARTS
    starts = WORST.norm() * torch.stack([angles.cos(), angles.sin()], 1)
    left = {name: [float(_best(make, RATES[:2], start).left[-1]) for start in starts] for name, make in ADAGRAD.items()}
    diagonal = left.pop("AdaGrad-diag")
    return {name: sum(map(operator.lt, ours, diagonal)) for name, ours in left.items()}


def _newton(loss: Loss, start: Tensor, steps: int, rate: float) -> list[Tensor]:
    """θ ← θ − η H⁻¹ g."""
    points = [start]
    for _ in range(steps):
        H = torch.autograd.functional.hessian(loss, points[-1])
        g = torch.autograd.functional.jacobian(loss, points[-1])
        points.append(points[-1] - rate * torch.linalg.solve(H, g))
    return points


def _newton_deviation(A: Tensor) -> float:
    """The distance of Newton's steps on g(θ) = f(Aθ), mapped by A, from those on a non-quadratic f, with η = ½."""

    def loss(xi: Tensor) -> Tensor:
        return _quadratic(xi) + 0.25 * (xi**4).sum()

    xi = torch.stack(_newton(loss, WORST, 10, 0.5))
    theta = torch.stack(_newton(lambda x: loss(A @ x), torch.linalg.solve(A, WORST), 10, 0.5))
    return float((xi - theta @ A.mT).norm(dim=1).max() / WORST.norm())


def _one_step(claim: str, path: Path) -> Claim:
    left = float(path.left[1])
    return Claim(
        claim, f"f falls to {left:.0e} of its value", Verdict.of(left < 1e-28), exact=True
    )  # rounding, squared


def _cells(path: Path) -> list[str]:
    return [f"{path.rate:.3g}", f"{float(path.left[-1]):.1e}"]


def _draw_paths(ax: Axes, loss: Loss, paths: dict[str, Path], symbol: str, title: str) -> None:
    """Paths over the contours of f, on one scale for both axes."""
    side = torch.linspace(-1.0, 3.0, 81, dtype=torch.float64)
    first, second = torch.meshgrid(side, side, indexing="xy")
    levels = [0.02 * 2.0**k for k in range(10)]
    values = loss(torch.stack([first, second], -1))
    ax.contour(side.numpy(), side.numpy(), values.numpy(), levels=levels, colors="0.8", linewidths=0.8)
    for name, path in paths.items():
        ax.plot(*path.points.mT.numpy(), label=name, **_style(name))
    x, y = next(iter(paths.values())).points[0].tolist()
    ax.plot(x, y, "o", color="0.2", markersize=7)
    ax.annotate("start", (x, y), xytext=(6, 6), textcoords="offset points")
    ax.plot(0, 0, "*", color="0.2", markersize=11, zorder=5)
    ax.annotate("minimum", (0, 0), xytext=(8, -14), textcoords="offset points")
    ax.set(title=title, xlabel=f"{symbol}₁", ylabel=f"{symbol}₂", xlim=(-1, 3), ylim=(-1, 3), aspect="equal")
    ax.legend(loc="upper left", fontsize=9)


def _draw_values(ax: Axes, paths: dict[str, Path]) -> None:
    """What is left of f against steps; values below the floor are drawn on it."""
    floor = 1e-5
    for name, path in paths.items():
        ax.plot(path.left.clamp_min(floor).numpy(), label=name, clip_on=False, **_style(name))
    ax.set(title="(d) what is left of f", xlabel="steps", ylabel="f(θ) / f(start)", yscale="log", ylim=(floor, 1.0))
    ax.set_xlim(0, STEPS)
    ax.set_xticks(range(0, STEPS + 1, 5))
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9)


def _style(name: str) -> dict[str, Any]:
    colour, width = STYLES[name]
    return {
        "color": colour,
        "linewidth": width,
        "marker": ".",
        "markersize": 4 + width,
        "alpha": 0.5 if width > 2 else 1.0,
    }
