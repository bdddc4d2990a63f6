"""Figure 5: training loss and test error of AdaGrad and its approximations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from itertools import chain, filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from blockmean.lab.compare import (
    Findings,
    Study,
    differences,
    diverged,
    format_difference,
    interval,
    last_loss,
    mean_columns,
    provenance,
    results_table,
    unfinished,
    verdict,
)
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.protocol import OWN_ARMS, RATES, SMALL_ARMS, studies
from blockmean.lab.picture import Picture, save
from blockmean.lab.tasks import steps_per_epoch
from blockmean.lab.train import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THE_PAPERS = {"diag": "one rate per parameter", "BMA": "block means", "full": "the whole matrix"}
QUANTITIES = ("train_loss", "test_error")
PANELS = ["mnist-small", "mnist-large", "cifar10-small", "cifar10-large"]  # in the order of the paper
TITLES = {"digits": "MNIST, 4,000 digits", "mnist": "MNIST", "cifar10": "CIFAR-10"}
COLOURS = {
    "diag": "0.25",
    "BMA": "tab:blue",
    "full": "tab:green",
    "BMA consistent": "tab:orange",
    "BMA weighted": "tab:red",
    "BMA, our floor": "tab:cyan",
    "BMA weighted, per kernel": "tab:purple",
    "Adam": "tab:brown",
    "AdamBMA": "tab:pink",
    "AdamW": "black",
    "Anova": "crimson",
}
# Where the authors' curves on CIFAR-10 end, read off their plots: (epoch, training loss, test error), one run each.
AUTHORS = {
    "cifar10-small": {"diag": (50, 757, 0.557), "BMA": (50, 735, 0.545), "full": (50, 718, 0.535)},
    "cifar10-large": {"diag": (30, 385, 0.32), "BMA": (30, 375, 0.305)},
}
# And where they begin: the training loss of the first epoch.
AUTHORS_FIRST = {"cifar10-small": {"diag": 910, "BMA": 857, "full": 840}}

DIFFERENCE = "difference from diag"
CHANCE = math.log(10)
"""The loss of a network that gives every class the same probability."""


class StudyResult(NamedTuple):
    """A study and what its records say."""

    study: Study
    findings: Findings
    published: bool

    @property
    def results(self) -> dict[str, list[Record]]:
        return self.findings.results

    @property
    def title(self) -> str:
        where = " (published records)" if self.published else ""
        return f"{TITLES[self.study.task.dataset]}, {self.study.task.model} model{where}"

    @property
    def batches(self) -> int:
        return steps_per_epoch(self.study.task.dataset, self.study.task.batch)

    def loss(self, record: Record) -> float:
        """Last training loss, summed over the batches of the epoch as the authors do; infinite if it diverged."""
        return last_loss(record) * self.batches


def error(record: Record) -> float:
    """Last test error; infinite if the run diverged."""
    return math.inf if diverged(record) else float(record["test_error"])


def fig5(config: ReportConfig) -> Outcome:
    """Training loss and test error per epoch: AdaGrad diagonal, block mean and full, and the project's own forms."""
    found = find(config)
    ready = [one for one in found if one.results]
    started = [one for one in found if one.findings.started]
    pictures = [draw(ready, set(SMALL_ARMS), config.out / "fig5")] if ready else []
    own = [one for one in ready if one.results.keys() & OWN_ARMS.keys()]
    if own:
        pictures.append(draw(own, {"diag", *OWN_ARMS}, config.out / "fig5-own"))
    notes = [
        "For each optimizer, short runs choose the learning rate out of 1, 0.1 … 0.0001 with the smallest training "
        "loss; that rate then runs with fresh seeds. Equal seeds mean equal initial weights and equal batches, so "
        "differences are taken seed by seed; ± is a 95% interval.",
        "“BMA” is Algorithm 1 as printed, with the authors' floor for eigenvalues; “consistent” and “weighted” are the "
        "other two variants with the library's defaults. All have one block per tensor.",
        "A run is stuck if its final loss is that of guessing, ln 10: its output no longer depends on the image. It "
        "counts in all numbers, but is not drawn. A run that diverged counts as infinitely bad. There is no verdict "
        "until all runs of the compared optimizers are there. “edge” marks a rate that is the largest or smallest "
        "tried: a better one may lie beyond.",
    ]
    if any(one.published for one in ready):
        notes.append(
            "Panels marked “published records” were not run now: they show the records that come with the project. "
            "`blockmean reproduce --profile paper --data-dir …` makes these runs on your machine."
        )
    names = dict.fromkeys([one.study.name for one in found] + PANELS)
    missing = [name for name in names if name not in {one.study.name for one in started}]
    if missing:
        notes.append(f"There are no records here of {', '.join(missing)}.")
    notes += [f"{one.title}: {provenance(one.findings.every)}." for one in started if one.findings.every]
    tables = [table for one in started for table in (_results(one), *_first_epochs(one), *_rates(one))]
    unusable = [problem for one in found for problem in one.findings.unusable]
    claims = [claim for one in found for claim in _claims(one)]
    shown = [one for one in ready if not one.published] or ready
    overview = draw_overview(shown[0], config.out / "fig5-overview") if shown else None
    return Outcome(claims, pictures, tables, notes, unusable, overview)


def find(config: ReportConfig) -> list[StudyResult]:
    """The studies of this profile, and those others of the paper that have published records."""
    own = studies(config.profile, config.seeds, config.epochs)
    found = [StudyResult(study, study.findings(config.records), published=False) for study in own]
    if config.published is not None:
        others = [study for study in studies("paper") if study.name not in {one.name for one in own}]
        read = [StudyResult(study, study.findings(config.published), published=True) for study in others]
        found += [one for one in read if one.findings.started]
    order = [study.name for study in studies("quick")] + PANELS
    return sorted(found, key=lambda one: order.index(one.study.name))


def draw(found: list[StudyResult], arms: set[str], path: Path) -> Picture:
    figure = Figure(figsize=(7.2, 2.7 * len(found)), layout="constrained")
    for one, axes in zip(found, figure.subplots(len(found), 2, squeeze=False), strict=True):
        for ax, quantity, unit in zip(axes, QUANTITIES, (one.batches, 1), strict=True):
            curves(ax, {arm: records for arm, records in one.results.items() if arm in arms}, quantity, unit)
            for arm, (epoch, *ends) in AUTHORS.get(one.study.name, {}).items():
                if arm in arms:
                    _end_point(ax, arm, epoch, ends[QUANTITIES.index(quantity)])
            ax.set(title=one.title, xlabel="epoch", ylabel="test error, share of images")
            ax.title.set_fontsize(9)
            ax.grid(alpha=0.3)
        axes[0].set_ylabel(f"training loss, summed over\nthe {one.batches} batches of an epoch")
        axes[0].legend(fontsize=8)
    shown = [records for one in found for arm, records in one.results.items() if arm in arms]
    seeds = " or ".join(map(str, sorted({len(records) for records in shown})))
    caption = f"Thick: the mean over {seeds} seeds; thin: each seed; bands: from the smallest to the largest."
    if any(map(_stuck, chain.from_iterable(shown))):
        caption += " Runs that are stuck are not drawn, only counted."
    if any(one.study.name in AUTHORS for one in found):
        caption += " Triangles at the right edge: where the authors' curves end (one run, more epochs than ours)."
    return save(figure, path, caption)


def draw_overview(one: StudyResult, path: Path) -> Picture:
    """The training loss of the paper's three methods in one study, small enough for a phone."""
    results = {arm: one.results[arm] for arm in THE_PAPERS if arm in one.results}
    figure, ax = overview_panel(results, f"The paper: AdaGrad\n{one.title}", one.batches)
    ax.set_ylabel(f"training loss, summed\nover {one.batches} batches")
    failed = [record for records in results.values() for record in records if _failed(record)]
    caption = "The paper's AdaGrad with the diagonal, the block means and the whole matrix."
    if failed:
        caption += f" {len(failed)} of {sum(map(len, results.values()))} runs diverged or got stuck at guessing."
    return save(figure, path, caption)


def overview_panel(results: dict[str, list[Record]], title: str, unit: float = 1.0) -> tuple[Figure, Axes]:
    """A figure of one panel for the top of the report, its legend inside."""
    figure = Figure(figsize=(4.8, 2.9), layout="constrained")
    ax = figure.subplots()
    curves(ax, results, "train_loss", unit)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel("epoch")
    ax.grid(alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    named = []
    for label in labels:
        arm, bracket, failures = label.partition(" (")
        named.append(f"{arm}: {THE_PAPERS[arm]}{bracket}{failures}" if arm in THE_PAPERS else label)
    handles.append(Patch(color="0.5", alpha=0.3, linewidth=0))
    ax.legend(handles, [*named, "bands: smallest to largest seed"], loc="best", fontsize=9)
    return figure, ax


def curves(ax: Axes, results: dict[str, list[Record]], quantity: str, unit: float = 1.0) -> None:
    """Draw the runs of all arms. Stuck runs are only counted in the legend: they would flatten all others."""
    for arm, records in results.items():
        _curve(ax, arm, records, quantity, unit)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def _curve(ax: Axes, arm: str, records: list[Record], quantity: str, unit: float) -> None:
    """The mean over seeds, with a band from the smallest to the largest and a thin line for each seed."""
    moving = list(filterfalse(_stuck, records)) or records
    runs = [[epoch[quantity] * unit for epoch in record["epochs"]] for record in moving]
    failures = _describe_failures(records)
    label = f"{arm} ({failures} of {len(records)})" if failures else arm
    values = list(zip(*runs, strict=False))  # a run that diverged is shorter
    epochs = range(1, len(values) + 1)
    marker = "." if len(values) == 1 else None  # a line of one point cannot be seen
    ax.plot(epochs, [statistics.mean(row) for row in values], color=COLOURS[arm], label=label, marker=marker)
    for run in runs:  # one seed that fails must not look like a wide spread of all
        ax.plot(range(1, len(run) + 1), run, color=COLOURS[arm], linewidth=0.5, alpha=0.6)
    ax.fill_between(epochs, list(map(min, values)), list(map(max, values)), color=COLOURS[arm], alpha=0.15, linewidth=0)


def _end_point(ax: Axes, arm: str, epoch: int, value: float) -> None:
    """A triangle at the right edge, with the epoch of the authors' last point."""
    ax.plot(1.0, value, marker="<", color=COLOURS[arm], transform=ax.get_yaxis_transform(), clip_on=False)
    ax.annotate(
        f"{epoch}", (1.02, value), xycoords=ax.get_yaxis_transform(), fontsize=7, color=COLOURS[arm], va="center"
    )


def _claims(one: StudyResult) -> list[Claim]:
    """What the paper says of this figure, for one task."""
    ours = f"{one.title}: AdaGrad-BMA"
    claims = [
        _smaller(one, f"{ours} reaches a smaller training loss than diag", one.loss),
        _smaller(one, f"{ours} has a smaller test error than diag", error),
    ]
    if "full" in one.study.arms:
        nearer = "its training loss is nearer to full's than to diag's"
        claims.append(_similar(one, f"{ours} has a similar speed of convergence to full (taken as: {nearer})"))
    return claims


def _smaller(one: StudyResult, claim: str, value: Callable[[Record], float]) -> Claim:
    missing = unfinished(one.study, one.findings, "diag", "BMA")
    if missing:
        return Claim(claim, missing, Verdict.UNKNOWN)
    found = differences(one.results["BMA"], one.results["diag"], value)
    smaller = sum(x < 0 for x in found)
    measured = [f"BMA − diag: {format_difference(found)}", f"smaller with {smaller} of {len(found)} seeds"]
    failures = [f"{arm}: {what}" for arm in ("diag", "BMA") if (what := _describe_failures(one.results[arm]))]
    if failures:
        ours, theirs = (list(filterfalse(_failed, one.results[arm])) for arm in ("BMA", "diag"))
        measured += [*failures, f"without: {format_difference(differences(ours, theirs, value))}"]
    return Claim(claim, "; ".join(measured), verdict(found))


def _similar(one: StudyResult, claim: str) -> Claim:
    """The paper's “similar speed of convergence”, made precise."""
    missing = unfinished(one.study, one.findings, "diag", "BMA", "full")
    if missing:
        return Claim(claim, missing, Verdict.UNKNOWN)
    diag, bma, full = (one.results[arm] for arm in ("diag", "BMA", "full"))
    lead = differences(full, diag, one.loss)
    behind = differences(bma, full, one.loss)
    past = [a + b / 2 for a, b in zip(behind, lead, strict=True)]  # BMA − (diag + full)/2
    parts = {"BMA − full": behind, "full − diag": lead, "BMA − their middle": past}
    measured = "; ".join(f"{what}: {format_difference(values)}" for what, values in parts.items())
    # If full is no better than diag, there is no speed to be similar to.
    return Claim(claim, measured, verdict(past) if verdict(lead) is Verdict.HOLDS else Verdict.NOISE)


def _describe_failures(records: list[Record]) -> str:
    """How many runs diverged or do no better than guessing."""
    counts = {"diverged": sum(map(diverged, records)), "stuck": sum(map(_stuck, records))}
    return ", ".join(f"{count} {what}" for what, count in counts.items() if count)


def _stuck(record: Record) -> bool:
    return CHANCE * 0.99 < last_loss(record) < math.inf


def _failed(record: Record) -> bool:
    return diverged(record) or _stuck(record)


def _results(one: StudyResult) -> Table:
    columns = [
        *mean_columns(one.study, one.findings, "diag", one.loss, "training loss", ".1f", DIFFERENCE),
        *mean_columns(one.study, one.findings, "diag", error, "test error", ".4f", DIFFERENCE),
    ]
    title = f"{one.title}: the best rate of each, {_after(one.study.epochs(one.study.final))}"
    return results_table(one.study, one.findings, columns, title, lambda arm: _describe_failures(one.results[arm]))


def _first_epochs(one: StudyResult) -> list[Table]:
    """The training loss of the first epoch, ours and the authors', if theirs is known: who is fast early on?"""
    theirs = AUTHORS_FIRST.get(one.study.name, {})
    diag = one.results.get("diag", [])

    def first(record: Record) -> float:
        return float(record["epochs"][0]["train_loss"]) * one.batches if record["epochs"] else math.inf

    rows = [
        [
            arm,
            str(theirs[arm]),
            f"{theirs[arm] - theirs['diag']:+d}".replace("-", "−") if arm != "diag" else "–",
            f"{statistics.mean(map(first, records)):.1f}",
            str(interval(differences(records, diag, first)) or "–") if arm != "diag" else "–",
        ]
        for arm, records in one.results.items()
        if arm in theirs
    ]
    header = ["optimizer", "the authors' run", DIFFERENCE, f"our mean of {len(diag)} seeds", DIFFERENCE]
    return [Table(f"{one.title}: training loss of the first epoch", header, rows)] if rows else []


def _rates(one: StudyResult) -> list[Table]:
    """The training loss with every rate, from which the best was chosen."""
    header = ["optimizer", *(f"{rate:g}" for rate in RATES)]
    rows = [
        [arm, *("diverged" if math.isinf(loss) else f"{loss * one.batches:.1f}" for loss in losses.values())]
        for arm, losses in one.findings.tuned.items()
    ]
    title = f"{one.title}: training loss with each learning rate, {_after(one.study.epochs(one.study.tuning))}"
    return [Table(title, header, rows)] if rows else []


def _after(epochs: int) -> str:
    return "after 1 epoch" if epochs == 1 else f"after {epochs} epochs"
