"""Anova: the library's own optimizer beside AdamW."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from blockmean.lab.compare import (
    Verdict,
    differences,
    format_number,
    last_loss,
    mean_columns,
    provenance,
    results_table,
    unfinished,
    verdict,
)
from blockmean.lab.paper.fig5 import error, overview_panel
from blockmean.lab.paper.outcome import Outcome, ReportConfig
from blockmean.lab.paper.protocol import anova_study
from blockmean.lab.picture import save
from blockmean.lab.train import Record

TITLE = "MLP, 4,000 digits"
BESIDE = {
    Verdict.HOLDS: "lower beyond noise",
    Verdict.FAILS: "higher beyond noise",
    Verdict.NOISE: "no difference beyond noise",
}


def anova(config: ReportConfig) -> Outcome:
    """Training loss and test error of Anova and AdamW, each at its best rate, on the embedded digits."""
    study, title = anova_study(config.seeds, config.epochs), TITLE
    found = study.findings(config.records)
    if not found.started and config.published is not None:
        study, title = anova_study(), f"{TITLE} (published records)"
        found = study.findings(config.published)
    missing = unfinished(study, found, "AdamW", "Anova")
    if missing:
        return Outcome(notes=[f"There is no comparison yet: {missing}."], unusable=found.unusable)
    ours, theirs = found.results["Anova"], found.results["AdamW"]
    rates = len(study.rates_of("Anova"))
    summary = (
        f"Anova beside AdamW on the embedded digits (MLP, {len(ours)} seeds, the best of {rates} rates each): "
        f"training loss {_beside(ours, theirs, last_loss, '.4f')}; test error {_beside(ours, theirs, error, '.1%')}"
    )
    figure, ax = overview_panel(found.results, f"Anova beside AdamW\n{title}")
    ax.set(yscale="log", ylabel="training loss (log scale)")
    caption = "Anova and AdamW, each at its best learning rate. Thick lines: means over seeds; thin lines: each seed."
    columns = [
        *mean_columns(study, found, "AdamW", last_loss, "training loss", ".4f", "difference from AdamW"),
        *mean_columns(study, found, "AdamW", error, "test error", ".4f", "difference from AdamW"),
    ]
    epochs = study.epochs(study.final)
    notes = [
        "Equal seeds mean equal initial weights and batches; differences are taken seed by seed, ± is a 95% interval. "
        "No weight decay, no schedule; all other options are the defaults. One small task says little about others.",
        f"{provenance(found.every)}.",
    ]
    return Outcome(
        tables=[results_table(study, found, columns, f"{title}: the best rate of each, {epochs} epochs")],
        notes=notes,
        unusable=found.unusable,
        overview=save(figure, config.out / "anova", caption),
        summary=summary,
    )


def _beside(ours: list[Record], theirs: list[Record], value: Callable[[Record], float], spec: str) -> str:
    """Both means, and whether they differ beyond noise."""
    means = (format_number(statistics.mean(map(value, records)), spec) for records in (ours, theirs))
    return "{} instead of {}".format(*means) + f" ({BESIDE[verdict(differences(ours, theirs, value))]})"
