"""What the authors ran, from their released code, and what we run beside it; how much of it, says the profile."""

from __future__ import annotations

from typing import Any

from blockmean.lab.study import Stage, Study

RATES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)

# Their ε and floors. The floor of 1e-10 belongs to Algorithm 1 as printed; our own forms keep the library's defaults.
DIAGONAL: dict[str, Any] = {"optimizer": "Adagrad", "options": {"eps": 1e-10}}
PAPER: dict[str, Any] = {
    "optimizer": "AdaGradBMA",
    "options": {"variant": "paper", "eps": 1e-10, "eigenvalue_floor": 1e-10},
}
LARGE_ARMS = {"diag": DIAGONAL, "BMA": PAPER}
SMALL_ARMS = {
    **LARGE_ARMS,
    "BMA consistent": {"optimizer": "AdaGradBMA", "options": {"variant": "consistent"}},
    "BMA weighted": {"optimizer": "AdaGradBMA", "options": {"variant": "weighted"}},
    "full": {"optimizer": "AdaGradFull", "options": {"eigenvalue_floor": 1e-8}},
}
# The project's own addition: Algorithm 1 with the library's floor of 0.1, blocks of one kernel each, and Adam.
OWN_ARMS: dict[str, dict[str, Any]] = {
    "BMA, our floor": {"optimizer": "AdaGradBMA", "options": {"variant": "paper"}},
    "BMA weighted, per kernel": {
        "optimizer": "AdaGradBMA",
        "options": {"variant": "weighted", "partition": "kernel", "coupling": "none"},
    },
    "Adam": {"optimizer": "Adam", "options": {}},
    "AdamBMA": {"optimizer": "AdamBMA", "options": {}},
}


def studies(profile: str, seeds: int | None = None, epochs: int | None = None) -> list[Study]:
    """The studies of a profile, most important first.

    Args:
        profile: "quick" (the embedded digits) or "paper" (MNIST and CIFAR-10).
        seeds: how many fresh seeds for the best rate of each arm, instead of the profile's.
        epochs: epochs of these runs, instead of the profile's.
    """

    def study(dataset: str, model: str, arms: dict[str, dict[str, Any]], tuning: Stage, final: Stage) -> Study:
        final = Stage(final.seeds if seeds is None else tuple(range(seeds)), epochs or final.epochs)
        return Study(f"{dataset}-{model}", dataset, model, arms, RATES, tuning, final, flip=dataset == "cifar10")

    small = {**SMALL_ARMS, **OWN_ARMS}
    if profile == "quick":
        return [study("digits", "small", small, Stage((100,), 3), Stage((0, 1, 2), 6))]
    if profile == "paper":
        few, many = Stage((100, 101), epochs=3), Stage((0, 1, 2, 3, 4), epochs=20)
        return [
            *(study(data, "small", small, few, many) for data in ("mnist", "cifar10")),
            *(study(data, "large", LARGE_ARMS, Stage((100,), 1), Stage((0, 1), 5)) for data in ("mnist", "cifar10")),
        ]
    raise ValueError(f"profile must be one of quick, paper. Got {profile!r} instead.")
