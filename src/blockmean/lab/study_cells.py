"""What a study compares, as data: the axes of its searches, its arms, its cells. Adding one is adding a row.

Keys of records hash what is here: what has been published stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from blockmean.lab.study_search import Axis, Point
from blockmean.lab.tasks import Task

BASELINE = "AdamW"

RATE = Axis("lr", tuple(float(f"{1e-3 * 2.0**k:.6g}") for k in range(-7, 13)))
AXES = (
    RATE,
    Axis("weight_decay", (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)),
    Axis("beta2", (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9995)),
    Axis("beta1", (0.5, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99)),
    Axis("warm_up", (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)),
)
"""In the order in which they are searched. The grids go on beyond what is usual: no optimum should be at their edge."""

SGD_DECAY = Axis("weight_decay", (0.0, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005))
"""SGD's decay is part of the gradient, and multiplied by a rate a hundred times larger."""


@dataclass(frozen=True)
class Arm:
    """An optimizer with the settings its search starts from: usual ones for language models, its authors' betas.

    All have updates of AdamW's size but SGD. So they start at the rate that the first runs of AdamW's search led to,
    and have their budget left for the other settings; AdamW itself starts at a quarter of it, with twice the budget.
    """

    optimizer: str
    start: Point = (0.008, 0.1, 0.95, 0.9, 0.05)
    """Rate, weight decay, β₂, β₁ and warm-up."""
    options: Mapping[str, Any] = field(default_factory=dict)
    axes: tuple[str, ...] = tuple(axis.name for axis in AXES)
    colour: str = "0.5"

    def settings(self, point: Point) -> dict[str, Any]:
        """What the spec of a run takes."""
        value = dict(zip((axis.name for axis in AXES), point, strict=True))
        own: dict[str, Any] = {"betas": [value["beta1"], value["beta2"]]}
        if self.optimizer == "SGD":
            own = {"momentum": value["beta1"]}
        elif self.optimizer == "MuonAdamW":  # the betas are AdamW's, of embeddings, output, biases and gains
            own = {"momentum": value["beta1"], "betas": [0.9, value["beta2"]]}
        options = {**self.options, **own, "weight_decay": value["weight_decay"]}
        return {"optimizer": self.optimizer, "options": options, "warm_up": value["warm_up"]}


SOAP = {"max_precondition_dim": 1024}
"""Vocabularies have no basis of their own, as in the experiments of SOAP's authors."""
ARMS = {
    BASELINE: Arm("AdamW", (0.002, 0.1, 0.95, 0.9, 0.05), colour="0.2"),
    # torch's NAdam begins with half of β₁ and has 90% of it after 10⁴ steps; with this decay it has all of it at once.
    "NAdamW": Arm("NAdam", options={"decoupled_weight_decay": True, "momentum_decay": 1e3}, colour="tab:brown"),
    "Muon + AdamW": Arm("MuonAdamW", (0.008, 0.1, 0.95, 0.95, 0.05), colour="tab:purple"),
    "SOAP": Arm("SOAP", (0.008, 0.1, 0.95, 0.95, 0.05), {**SOAP, "precondition_frequency": 1}, colour="tab:green"),
    "SOAP, every 10": Arm(
        "SOAP", (0.008, 0.1, 0.95, 0.95, 0.05), {**SOAP, "precondition_frequency": 10}, colour="tab:olive"
    ),
    "SGD": Arm(
        "SGD", (0.128, 0.0005, 0.95, 0.9, 0.05), {"nesterov": True}, ("lr", "weight_decay", "beta1", "warm_up"), "0.6"
    ),
    "AdamBMA": Arm("AdamBMA", colour="tab:blue"),
    "Adam-mini": Arm("AdamMini", options={"num_heads": 4}, colour="tab:pink"),
    "Anova": Arm("Anova", colour="tab:red"),
}
"""Adding an arm is adding a row; in this order they run. Anova is the last: it is ours."""

RIVALS = (BASELINE, "Muon + AdamW", "SOAP, every 10", "Anova")
"""The arms of the cells that cost most."""


@dataclass(frozen=True)
class Cell:
    """A task with its arms and budgets."""

    task: Task
    arms: Mapping[str, int]
    """How many runs tune each; 0 takes the settings that `like` found."""
    seeds: int
    like: str = ""
    """The cell whose best settings the searches of this one start from."""
    only_rate: bool = False
    """Whether the searches of all arms but AdamW move the rate alone."""
    baseline_seeds: int = 1
    """Of every point of AdamW's search."""
    curve: tuple[float, ...] = ()
    """AdamW also runs with these multiples of the steps."""
    curve_seeds: int = 3
    longer: str = ""
    """The cell whose AdamW belongs to this one's curve as well: the same task with more steps."""
    rates: tuple[float, ...] = ()
    """Instead of a search: every rate with every fresh seed."""
    start: str = ""
    """The cell that this one's runs continue from: its AdamW, best settings, first fresh seed."""
    ablations: Mapping[str, Arm] = field(default_factory=dict)
    """Variants of Anova, at its best settings."""
    search_less: Mapping[str, int] = field(default_factory=dict)
    """Arms that start from AdamW's best settings of this cell and search the rate only, with so many runs."""
    few_seeds: int = 3
    """Of ablations."""

    @property
    def validates(self) -> bool:
        """Whether settings are chosen on data for validation; where the end of a text is held out, by training loss."""
        return not (self.task.tokenizer and self.task.split == "end")

    def budget(self, arm: str) -> int:
        """How many runs may tune an arm; 0 if it takes the settings of another cell."""
        return self.search_less.get(arm, self.arms.get(arm, 0))

    def axes(self, arm: str, start: Point) -> tuple[Axis, ...]:
        """All axes of a search; those that do not move have the one value of its start."""
        few = (self.only_rate and arm != BASELINE) or arm in self.search_less
        moving = ("lr",) if few else ARMS[arm].axes
        grids = [SGD_DECAY if arm == "SGD" and axis.name == "weight_decay" else axis for axis in AXES]
        pairs = zip(grids, start, strict=True)
        return tuple(axis if axis.name in moving else Axis(axis.name, (value,)) for axis, value in pairs)


def _language(
    model: str, steps: int, batch: int = 16, title: str = "", text: str = "python-docs", split: str = "pieces"
) -> Task:
    return Task(
        text,
        model,
        steps,
        batch,
        loss="next_token",
        title=title,
        points=200,
        warm_up=0.05,
        decay="linear",
        clip=1.0,
        tokenizer=text,
        split=split,
    )


ABLATIONS = {
    "means=0": Arm("Anova", options={"means": 0}),
    **{f"means={k}, but for the vocabulary": Arm("PlainAnova", options={"means": k}) for k in (4, 8, 16, 64)},
    **{f"refresh_every={every}": Arm("Anova", options={"refresh_every": every}) for every in (1, 5, 20)},
    **{f"factor fixed at {c:g}": Arm("PlainAnova", options={"factor": c}) for c in (0.7, 1.0)},
    "no lift": Arm("PlainAnova", options={"no_lift": True}),
    "second moments of E per entry": Arm("PlainAnova", options={"remainder_per_entry": True}),
    "sketches G Gᵀ U and Gᵀ G V": Arm("PlainAnova", options={"own_sketches": True}),
    "means on embeddings and output": Arm("PlainAnova", options={"means_everywhere": True}),
    "cautious weight decay": Arm("PlainAnova", options={"cautious_decay": True}),
}
"""What Anova is compared with, at its best settings. `PlainAnova` is its slow twin in lab/ablations.py."""

TUNED = {BASELINE: 36, "NAdamW": 18, "Muon + AdamW": 18, "SOAP": 18, "SOAP, every 10": 18, "Anova": 18}
LESS = {"AdamBMA": 4, "Adam-mini": 4}
PUBLISHED = {
    "XS-tuning": Cell(
        _language("gpt-64", 488, title="GPT XS, tuning", split="end"),
        TUNED,
        seeds=0,
        baseline_seeds=2,
        search_less=LESS,
    ),
    "XS": Cell(
        _language("gpt-64", 488, title="GPT XS, .38M parameters, 2M tokens"),
        dict.fromkeys([*TUNED, *LESS], 0),
        seeds=8,
        like="XS-tuning",
        curve=(0.5, 2.0),
        longer="XS-4x",
        ablations=ABLATIONS,
    ),
    "XS-4x": Cell(
        _language("gpt-64", 1952, title="GPT XS, 8M tokens"),
        {BASELINE: 3, **dict.fromkeys(RIVALS[1:], 0)},
        seeds=3,
        like="XS",
        only_rate=True,
    ),
    "XS-16k": Cell(
        _language("gpt-64", 122, batch=64, title="GPT XS, 2M tokens, batch 16k"),
        {BASELINE: 6, **dict.fromkeys(RIVALS[1:], 3)},
        seeds=3,
        like="XS",
        only_rate=True,
    ),
    "finetune": Cell(
        replace(_language("gpt-64", 300, title="GPT XS, continued on Shakespeare"), dataset="shakespeare"),
        dict.fromkeys(RIVALS, 0),
        seeds=2,
        like="XS",
        only_rate=True,
        rates=(3e-5, 1e-4, 3e-4, 1e-3, 3e-3),
        start="XS",
    ),
    "S": Cell(
        _language("gpt-96", 1611, title="GPT S, .75M parameters, 6.6M tokens"),
        {BASELINE: 10, **dict.fromkeys(RIVALS[1:], 5)},
        seeds=3,
        like="XS",
        only_rate=True,
        curve=(0.5, 2.0),
        curve_seeds=2,
    ),
    "vision": Cell(
        Task(
            "cifar10",
            "resnet10",
            5850,
            128,
            flip=True,
            title="CIFAR-10, BatchNorm ResNet, .26M parameters, 15 epochs",
            points=200,
            warm_up=0.05,
            decay="linear",
            clip=1.0,
            crop=4,
        ),
        {BASELINE: 6, "SGD": 3, "SOAP, every 10": 3, "Anova": 3},
        seeds=3,
    ),
    "M": Cell(
        _language("gpt-160", 3021, title="GPT M, 1.94M parameters, 12.4M tokens"),
        {BASELINE: 2, **dict.fromkeys(RIVALS[1:], 0)},
        seeds=3,
        like="S",
        only_rate=True,
        curve=(0.5, 2.0),
        curve_seeds=1,
    ),
}
"""The published study; adding a cell is adding a row. In this order they run.

The tuning of XS held out the end of the text. All other cells hold out pieces of it: its end is an index.
"""


def _tiny(cell: Cell, steps: int) -> Cell:
    """The cell on the manual inside Python, with a tiny model, few runs and few seeds."""
    task = _language("gpt-16", steps, 4, f"{cell.task.title}: tiny", "manual")
    budgets = {arm: min(budget, 4) for arm, budget in cell.arms.items() if arm in (BASELINE, "SOAP, every 10", "Anova")}
    some = dict(list(cell.ablations.items())[:2])
    few = replace(cell, task=task, arms=budgets, ablations=some, search_less={})
    return replace(few, seeds=min(cell.seeds, 2), curve_seeds=2, few_seeds=2)


PROFILES: dict[str, dict[str, Cell]] = {
    "quick": {
        "XS-tuning": _tiny(PUBLISHED["XS-tuning"], 60),
        "XS": _tiny(PUBLISHED["XS"], 60),
        "XS-4x": _tiny(PUBLISHED["XS-4x"], 240),
        "finetune": _tiny(PUBLISHED["finetune"], 20),
    },
    "full": PUBLISHED,
}
