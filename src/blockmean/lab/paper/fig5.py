"""Figure 5: training loss and test error of AdaGrad and its approximations, from records alone."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from blockmean.lab.paper.outcome import Claim, Outcome, Setting, Table, Verdict
from blockmean.lab.paper.protocol import OWN_ARMS, SMALL_ARMS, studies
from blockmean.lab.picture import Picture, save
from blockmean.lab.study import Interval, Study, last_loss, paired
from blockmean.lab.train import Record, steps_per_epoch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUANTITIES = ("train_loss", "test_error")
PANELS = ["mnist-small", "mnist-large", "cifar10-small", "cifar10-large"]  # in the order of the paper
TITLES = {"digits": "MNIST, 4,000 digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
COLOURS = {
    "diag": "0.25",
    "BMA": "tab:blue",
    "full": "tab:green",
    "BMA consistent": "tab:orange",
    "BMA weighted": "tab:red",
    "BMA weighted, per kernel": "tab:purple",
    "Adam": "tab:brown",
    "AdamBMA": "tab:pink",
}
# The authors' curves on CIFAR-10, read off their plots: (epoch, training loss, test error), one seed.
AUTHORS = {
    "cifar10-small": {"diag": (50, 757, 0.557), "BMA": (50, 735, 0.545), "full": (50, 718, 0.535)},
    "cifar10-large": {"diag": (30, 385, 0.32), "BMA": (30, 375, 0.305)},
}

TOO_FEW = "fewer than two seeds"


class Found(NamedTuple):
    """A study that can be drawn, and per arm the records of its best rate."""

    study: Study
    folder: Path
    results: dict[str, list[Record]]
    published: bool

    @property
    def title(self) -> str:
        where = " (published records)" if self.published else ""
        return f"{TITLES[self.study.dataset]}, {self.study.model} model{where}"

    @property
    def batches(self) -> int:
        return steps_per_epoch(self.study.dataset, self.study.batch)

    def loss(self, record: Record) -> float:
        """Last training loss, summed over the batches of the epoch as the authors plot it."""
        return last_loss(record) * self.batches


def fig5(setting: Setting) -> Outcome:
    """Training loss and test error per epoch: AdaGrad diagonal, block mean and full, and the project's own forms."""
    found = find(setting)
    pictures = []
    for name, arms in (("fig5", set(SMALL_ARMS)), ("fig5-own", {"diag", *OWN_ARMS})):
        drawn = [one for one in found if name == "fig5" or one.results.keys() & OWN_ARMS.keys()]
        if drawn:
            pictures.append(_draw(drawn, arms, setting.out / name))
    notes = [
        "Each optimizer takes the learning rate out of 1, 0.1 … 0.0001 that gives the smallest training loss in a few "
        "short runs, and then runs with fresh seeds. Equal seeds mean equal initial weights and equal batches, so that "
        "differences are taken seed by seed; ± is a 95% interval.",
        "“BMA” is Algorithm 1 as printed, with the authors' floor for eigenvalues; “consistent” and “weighted” are the "
        "other two variants with the library's defaults, all with one block per tensor.",
    ]
    if any(one.published for one in found):
        notes.append(
            "Panels marked “published records” were not run now: they are drawn from the records that come with the "
            "project. `blockmean reproduce --profile paper --data-dir …` makes them anew."
        )
    missing = [study.name for study in studies("paper") if study.name not in {one.study.name for one in found}]
    if missing:
        notes.append(f"There are no records here of {', '.join(missing)}.")
    tables = [table for one in found for table in (_results(one), _rates(one))]
    return Outcome([claim for one in found for claim in _claims(one)], pictures, tables, notes)


def find(setting: Setting) -> list[Found]:
    """The studies that have records: those of this profile, and published ones where it has none."""
    places = [(studies(setting.profile, setting.seeds, setting.epochs), setting.records, False)]
    if setting.published is not None:
        places.append((studies("paper"), setting.published, True))
    found: dict[str, Found] = {}
    for wanted, folder, published in places:
        for study in wanted:
            results = study.results(folder / study.name) if study.name not in found else {}
            if results:
                found[study.name] = Found(study, folder / study.name, results, published)
    order = [study.name for study in studies("quick")] + PANELS
    return sorted(found.values(), key=lambda one: order.index(one.study.name))


def _draw(found: list[Found], arms: set[str], path: Path) -> Picture:
    figure = Figure(figsize=(9.5, 3.1 * len(found)), layout="constrained")
    for one, axes in zip(found, figure.subplots(len(found), 2, squeeze=False), strict=True):
        for ax, quantity, unit in zip(axes, QUANTITIES, (one.batches, 1), strict=True):
            for arm in one.results:
                if arm in arms:
                    curve(ax, arm, [[epoch[quantity] * unit for epoch in run["epochs"]] for run in one.results[arm]])
            for arm, (epoch, *ends) in AUTHORS.get(one.study.name, {}).items():
                if arm in arms:
                    _end_point(ax, arm, epoch, ends[QUANTITIES.index(quantity)])
            ax.set(title=one.title, xlabel="epoch", ylabel="test error")
            ax.title.set_fontsize(10)
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(f"training loss, summed over\nthe {one.batches} batches of an epoch")
        axes[0].legend(fontsize=8)
    counts = {len(records) for one in found for records in one.results.values()}
    seeds = " or ".join(map(str, sorted(counts)))
    caption = f"Mean over {seeds} seeds, the thin lines, with a band from the smallest to the largest."
    if any(one.study.name in AUTHORS for one in found):
        caption += " Triangles at the right edge: where the authors' curves end (one seed, more epochs than ours)."
    return save(figure, path, caption)


def curve(ax: Axes, arm: str, runs: list[list[float]]) -> None:
    """The mean over seeds, as far as all of them came, with a band from the smallest to the largest; each seed thin."""
    values = list(zip(*runs, strict=False))  # a run that diverged is shorter
    epochs = range(1, len(values) + 1)
    marker = "." if len(values) == 1 else None  # a line of one point cannot be seen
    ax.plot(epochs, [statistics.mean(row) for row in values], color=COLOURS[arm], label=arm, marker=marker)
    for run in runs:  # one seed that goes astray must not pass for a wide spread of all
        ax.plot(range(1, len(run) + 1), run, color=COLOURS[arm], linewidth=0.5, alpha=0.6)
    ax.fill_between(epochs, list(map(min, values)), list(map(max, values)), color=COLOURS[arm], alpha=0.15, linewidth=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _end_point(ax: Axes, arm: str, epoch: int, value: float) -> None:
    """A triangle at the right edge, with the epoch of the authors' last point."""
    ax.plot(1.0, value, marker="<", color=COLOURS[arm], transform=ax.get_yaxis_transform(), clip_on=False)
    ax.annotate(
        f"{epoch}", (1.02, value), xycoords=ax.get_yaxis_transform(), fontsize=7, color=COLOURS[arm], va="center"
    )


def _claims(one: Found) -> list[Claim]:
    """What the paper says of this figure, for one task."""
    diag, bma, full = (one.results.get(arm, []) for arm in ("diag", "BMA", "full"))
    if not diag or not bma:
        return []

    claims = [
        _smaller(f"{one.title}: AdaGrad-BMA reaches a smaller training loss than diag", paired(bma, diag, one.loss)),
        _smaller(f"{one.title}: AdaGrad-BMA has a smaller test error than diag", paired(bma, diag, _error)),
    ]
    if full:
        claims.append(_similar(one.title, paired(bma, full, one.loss), paired(diag, full, one.loss)))
    return claims


def _error(record: Record) -> float:
    return float(record["test_error"])


def _smaller(claim: str, difference: Interval | None) -> Claim:
    if difference is None:
        return Claim(claim, TOO_FEW, Verdict.UNKNOWN)
    within_noise = abs(difference.mean) <= difference.half_width
    verdict = Verdict.NOISE if within_noise else Verdict.of(difference.mean < 0)
    return Claim(claim, f"BMA − diag: {difference}", verdict)


def _similar(task: str, ours: Interval | None, diagonal: Interval | None) -> Claim:
    """The paper's “similar speed of convergence”, made precise: at most half as far from full as diag is."""
    claim = f"{task}: AdaGrad-BMA converges about as fast as full (training loss nearer to full's than to diag's)"
    if ours is None or diagonal is None:
        return Claim(claim, TOO_FEW, Verdict.UNKNOWN)
    margin = abs(diagonal.mean) / 2
    measured = f"BMA − full: {ours}; diag − full: {diagonal}"
    if abs(ours.mean - margin) <= ours.half_width:
        return Claim(claim, measured, Verdict.NOISE)
    return Claim(claim, measured, Verdict.of(ours.mean < margin))


def _results(one: Found) -> Table:
    """Per arm what the best rate gave, beside the diagonal method."""
    header = ["optimizer", "rate", "seeds", "training loss", "beside diag", "test error", "error beside diag"]
    header += ["ms per step", "of which optimizer"]
    rows = []
    for arm, records in one.results.items():
        diag = one.results.get("diag", []) if arm != "diag" else []
        steps = sum(record["spec"]["steps"] for record in records)
        losses, errors = [one.loss(record) for record in records], [_error(record) for record in records]
        seconds = [sum(record[key] for record in records) for key in ("seconds", "step_seconds")]
        rows.append(
            [
                arm,
                f"{records[0]['spec']['lr']:g}",
                str(len(records)),
                f"{statistics.mean(losses):.1f}",
                str(paired(records, diag, one.loss) or "–"),
                f"{statistics.mean(errors):.4f}",
                str(paired(records, diag, _error) or "–"),
                f"{1000 * seconds[0] / steps:.1f}",
                f"{seconds[1] / seconds[0]:.0%}",
            ]
        )
    title = f"{one.title}: the best rate of each, after {one.study.final.epochs} epochs"
    return Table(title, header, rows)


def _rates(one: Found) -> Table:
    """The training loss with every rate, from which the best was chosen."""
    header = ["optimizer", *(f"{rate:g}" for rate in one.study.rates)]
    rows = [
        [arm, *("diverged" if math.isinf(loss) else f"{loss * one.batches:.1f}" for loss in losses.values())]
        for arm, losses in one.study.tuned(one.folder).items()
    ]
    title = f"{one.title}: training loss with each learning rate, after {one.study.tuning.epochs} epochs"
    return Table(title, header, rows)
