"""The experiments of the paper, from the authors' released code, and our additions, in two sizes."""

from __future__ import annotations

from typing import Any

from blockmean.lab.compare import Stage, Study
from blockmean.lab.tasks import Task, steps_per_epoch

BATCH = 100
RATES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
ADAM_RATES = (3e-2, 1e-2, 3e-3, 1e-3)

# Their ε and floors: 1e-10 for Algorithm 1 as printed. The other variants keep the library's defaults.
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
# Our additions: Algorithm 1 with the library's floor of 0.1, one block per kernel, and Adam (without weight decay).
OWN_ARMS: dict[str, dict[str, Any]] = {
    "BMA, our floor": {"optimizer": "AdaGradBMA", "options": {"variant": "paper"}},
    "BMA weighted, per kernel": {
        "optimizer": "AdaGradBMA",
        "options": {"variant": "weighted", "partition": "kernel", "coupling": "none"},
    },
    "Adam": {"optimizer": "Adam", "options": {}},
    "AdamBMA": {"optimizer": "AdamBMA", "options": {"weight_decay": 0.0}},
}


def studies(profile: str, seeds: int | None = None, epochs: int | None = None) -> list[Study]:
    """The studies of a profile, most important first.

    Args:
        profile: "quick" (the embedded digits) or "paper" (MNIST and CIFAR-10).
        seeds: number of fresh seeds for the best rate of each arm; by default that of the profile.
        epochs: epochs of these runs; by default those of the profile.
    """

    def study(dataset: str, model: str, arms: dict[str, dict[str, Any]], tuning: Stage, final: Stage) -> Study:
        final = Stage(final.seeds if seeds is None else tuple(range(seeds)), epochs or final.steps)
        per_epoch = steps_per_epoch(dataset, BATCH)
        tuning, final = (stage._replace(steps=stage.steps * per_epoch) for stage in (tuning, final))
        task = Task(dataset, model, batch=BATCH, flip=dataset == "cifar10")
        return Study(f"{dataset}-{model}", task, arms, RATES, tuning, final)

    small = {**SMALL_ARMS, **OWN_ARMS}
    # Stages in epochs.
    if profile == "quick":
        return [study("digits", "small", small, Stage((100,), 3), Stage((0, 1, 2), 6))]
    if profile == "paper":
        few, many = Stage((100, 101), 3), Stage((0, 1, 2, 3, 4), 20)
        return [
            *(study(data, "small", small, few, many) for data in ("mnist", "cifar10")),
            *(study(data, "large", LARGE_ARMS, Stage((100,), 1), Stage((0, 1), 5)) for data in ("mnist", "cifar10")),
        ]
    raise ValueError(f"profile must be one of quick, paper. Got {profile!r} instead.")


def anova_study(seeds: int | None = None, epochs: int | None = None) -> Study:
    """Anova beside AdamW, both without weight decay, on data that every installation has: the same in all profiles."""
    per_epoch = steps_per_epoch("digits", BATCH)
    fresh = (0, 1, 2, 3, 4) if seeds is None else tuple(range(seeds))
    return Study(
        "digits-mlp",
        Task("digits", "mlp", batch=BATCH),
        {name: {"optimizer": name, "options": {"weight_decay": 0.0}} for name in ("AdamW", "Anova")},
        ADAM_RATES,
        Stage((100,), 5 * per_epoch),
        Stage(fresh, (epochs or 5) * per_epoch),
    )
