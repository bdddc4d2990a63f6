"""Fill the tables of the pages in docs/ and of README.md from the records in results/ and draw their pictures.

Part of `make docs`.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from matplotlib.figure import Figure

from blockmean.lab.arms import ARMS
from blockmean.lab.compare import MedianRange, Table, format_number
from blockmean.lab.paper import PARTS, Outcome, ReportConfig, Verdict
from blockmean.lab.paper.fig5 import COLOURS, StudyResult, curves, draw, find
from blockmean.lab.paper.protocol import SMALL_ARMS
from blockmean.lab.picture import Picture, save
from blockmean.lab.race import TaskResult, held_out_loss, make_race, notes, results, table
from blockmean.lab.race_pictures import draw_overview
from blockmean.lab.step_pictures import draw_costs
from blockmean.lab.steps import NETWORKS, SWEEPS, Costs, read
from blockmean.lab.steps import notes as step_notes
from blockmean.lab.steps import table as step_table
from blockmean.lab.study import Study, make_study
from blockmean.lab.study_cells import BASELINE
from blockmean.lab.study_pictures import draw_cell
from blockmean.lab.study_results import notes as study_notes
from blockmean.lab.study_results import saved, tokens_curve
from blockmean.lab.study_results import tables as study_cell_tables

ROOT = Path(__file__).parent.parent
PAGE, RACE_PAGE, FRONT = ROOT / "docs" / "results.md", ROOT / "docs" / "race.md", ROOT / "README.md"
COST_PAGE, STUDY_PAGE = (ROOT / "docs" / name for name in ("performance.md", "evidence.md"))
RACE, STUDY, STEPS = (ROOT / "results" / name for name in ("race", "study", "step-times.jsonl"))
FRONT_TASKS = ("gpt", "cnn", "resnet", "regression", "factors", "expert")
"""In the picture of the front page; the page on evidence has all."""
SHOWN = ("AdamW", "SOAP", "Anova")
"""The arms in the brief table of the race."""
EPOCH, ITERATIONS = (ROOT / "benchmarks" / "results" / f"{name}.json" for name in ("epoch", "step_cost"))
COMPARED = ("AdaGradBMA", "AdamW", "AdamBMA", "Anova", "Adam-mini", "SOAP", "Shampoo", "Muon + AdamW")
"""The optimizers in the first table of the page about costs."""


def config(out: Path) -> ReportConfig:
    """The published records, and a folder for pictures."""
    return ReportConfig(out, ROOT / "results", profile="paper", measure=False)


def outcomes(out: Path) -> dict[str, Outcome]:
    """All parts of the paper, Figure 5 first."""
    return {name: PARTS[name](config(out)) for name in sorted(PARTS, key=lambda name: name != "fig5")}


def pictures(out: Path) -> list[Picture]:
    """An overview of all studies, and the curves of each data set."""
    ready = [one for one in find(config(out)) if one.results]
    by_data = {name: [one for one in ready if one.study.task.dataset == name] for name in ("mnist", "cifar10")}
    drawn = [draw(studies, set(SMALL_ARMS), out / f"fig5-{name}") for name, studies in by_data.items()]
    return [overview(ready, out / "overview"), *drawn]


def overview(studies: list[StudyResult], path: Path) -> Picture:
    """The training loss of every study in one small picture."""
    figure = Figure(figsize=(6.4, 2.3 * ((len(studies) + 1) // 2)), layout="constrained")
    panels = list(figure.subplots((len(studies) + 1) // 2, 2, squeeze=False).flat)
    for ax in panels[len(studies) :]:
        ax.remove()
    for one, ax in zip(studies, panels, strict=False):
        curves(ax, one.results, "train_loss")
        ax.set(xlabel="epoch", ylabel="training loss per batch")
        ax.set_title(one.title, fontsize=10)
        ax.grid(alpha=0.3)
        lost = [label for label in ax.get_legend_handles_labels()[1] if label not in COLOURS]  # as "BMA (1 stuck of 5)"
        ax.text(0.98, 0.95, "\n".join(lost), transform=ax.transAxes, ha="right", va="top", fontsize=8)
    lines = {line.get_color(): line for ax in figure.axes for line in ax.get_legend_handles_labels()[0]}
    names = [arm for arm, colour in COLOURS.items() if colour in lines]
    figure.legend([lines[COLOURS[arm]] for arm in names], names, loc="outside lower center", ncols=3, fontsize=8)
    return save(figure, path)


def claims(found: Iterable[Outcome]) -> str:
    """Every claim that measurements decide, with its verdict; mathematical claims must hold."""
    rows = []
    for claim in (claim for outcome in found for claim in outcome.claims):
        if not claim.exact:
            rows.append([claim.claim, claim.measured, f"**{claim.verdict}**"])
        elif claim.verdict is not Verdict.HOLDS:
            raise AssertionError(f"{claim.claim}: {claim.measured}")
    return Table("", ["claim of the paper", "measured", "verdict"], rows).markdown()


def tables(found: Outcome) -> str:
    """All tables of a part."""
    return "\n\n".join(map(_titled, found.tables))


def _titled(table: Table) -> str:
    return f"### {table.title}\n\n{table.markdown()}"


def epoch() -> str:
    """Medians of the parts of an epoch, as measured by benchmarks/epoch.py."""
    rows = json.loads(EPOCH.read_text())["epochs"]
    columns = list(next(iter(rows.values()))[0])
    cells = [[arm, *(f"{median(row[name] for row in found):.1f}" for name in columns)] for arm, found in rows.items()]
    return Table("", ["seconds", *columns], cells).markdown()


def benchmark(name: str) -> dict[str, Any]:
    """What a script of benchmarks/ defines."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return vars(importlib.import_module(name))


def large_model() -> str:
    """What benchmarks/large_model.py shows."""
    script = benchmark("large_model")
    parts = []
    for dataset, title in (("mnist", "MNIST"), ("cifar10", "CIFAR-10")):
        study = script["study"](dataset)
        for seeds, find_records in (("tuning", script["records"]), ("fresh", script["fresh_records"])):
            found = find_records(study, ROOT / "results")
            if any(found.values()):
                parts += [f"{title}, {seeds} seeds:", script["table"](study, found)]
    return "\n\n".join(parts)


def race() -> list[TaskResult]:
    """The published race, as far as it has been run."""
    return results(make_race(profile="full"), RACE)


def race_tables(found: Sequence[TaskResult]) -> str:
    """A table per task, and what is missing."""
    shown = [
        f"### {one.task.title}\n\n{one.task.steps} steps; {one.target_text}.\n\n{table(one).markdown()}"
        for one in found
        if one.arms
    ]
    return "\n\n".join([*shown, "\n".join(f"- {note}" for note in notes(found))])


def rates() -> dict[str, Any]:
    """The script that compares Anova with AdamW at equal rates, and its records."""
    script = benchmark("anova_rates")
    return {**script, "records": script["read"](ROOT / "benchmarks" / "results" / "anova_rates.jsonl")}


def rates_table(script: Mapping[str, Any]) -> str:
    """AdamW at its best rate, Anova at that rate and at its own best."""
    header = ["loss", "AdamW, best rate", "Anova, AdamW's best rate", "Anova, best of these rates"]
    return Table("", header, script["brief"](script["records"])).markdown()


def race_brief(found: Sequence[TaskResult]) -> str:
    """Loss after equal steps, and steps and seconds to AdamW's loss, for a few arms."""
    rivals = SHOWN[1:]
    header = [
        "task",
        *(f"loss, {arm}" for arm in SHOWN),
        *(f"{x}, {arm}" for x in ("steps", "seconds") for arm in rivals),
    ]
    rows = []
    for one in found:
        if all(arm in one.arms for arm in SHOWN):
            shown, own = ([one.arms[arm] for arm in names] for names in (SHOWN, rivals))
            losses = [f"{mean(arm.final_loss):#.3g}".rstrip(".") for arm in shown]
            ratios = [_times(one, x) for x in (*(arm.steps_ratio for arm in own), *(arm.seconds_ratio for arm in own))]
            rows.append([one.task.title, *losses, *ratios])
    return Table("", header, rows).markdown()


def study_brief(study: Study, name: str = "XS") -> str:
    """Of every arm whose runs are all made: loss, tokens for AdamW's loss, and state; the best in bold."""
    found, cell = study.findings(name), study.cells[name]
    curve, rows = tokens_curve(study, name), []
    for arm, records in found.final.items():
        if len(records) == cell.seeds:
            ratio = saved(curve, records, found.final[BASELINE])
            tokens = 1.0 if arm == BASELINE or ratio is None else ratio.ratio
            loss = mean(map(held_out_loss, records))
            rows.append((arm, loss, tokens, records[-1]["state_bytes"] / records[-1]["parameters"]))
    rows.sort(key=lambda row: row[1])
    best = [min(row[i] for row in rows) for i in (1, 2, 3)]
    forms = (".3f", ".2f", ".1f")
    cells = [
        [row[0], *(f"{'**' * (x == b)}{x:{f}}{'**' * (x == b)}" for x, b, f in zip(row[1:], best, forms, strict=True))]
        for row in rows
    ]
    header = ["", "held-out loss", "tokens ÷ AdamW's for the same loss", "state, bytes per parameter"]
    return Table("", header, cells).markdown()


def _times(one: TaskResult, ratio: MedianRange | None) -> str:
    return "–" if ratio is None else f"{'≤ ' * one.is_bound}{format_number(ratio.median, '.2f')}"


def controls(found: Sequence[TaskResult]) -> str:
    """What arms that must tie with AdamW seem to win or lose."""
    header = ["task", "control", "final loss − AdamW's", "verdict", "steps × AdamW's", "seconds × AdamW's"]
    rows = [
        [
            one.task.title,
            arm,
            str(own.loss_difference or "–"),
            own.verdict,
            one.times(own.steps_ratio),
            one.times(own.seconds_ratio),
        ]
        for one in found
        for arm, own in one.arms.items()
        if ARMS[arm].control
    ]
    return Table("", header, rows).markdown() if rows else "No control has run yet."


def step_brief(found: Sequence[Costs]) -> str:
    """Every optimizer beside torch's fused one, network by network."""

    def cell(one: Costs, name: str) -> str:
        row = one.rows.get(name, {})
        if "missing" in row:
            return "too long" if "did not finish" in row["missing"] else "–"
        return f"{row['beside_fused']['median']:.2f}" if row else ""

    rows = [[name, *(cell(one, name) for one in found)] for name in COMPARED if any(name in one.rows for one in found)]
    return Table("", ["", *(one.network for one in found)], rows).markdown() if found else "Not measured yet."


def iterations() -> str:
    """What benchmarks/step_cost.py measured."""
    record = json.loads(ITERATIONS.read_text())
    ratios = {(row["optimizer"], row["task"]): f"{row['ratio']['median']:.2f}" for row in record["rows"]}
    tasks = [task for arm, task in ratios if arm == "Anova"]
    rows = [[arm, *(ratios.get((arm, task), "–") for task in tasks)] for arm in ("AdamW", "AdamBMA", "Anova", "SOAP")]
    paper = [f"{ratio} on {task}" for (arm, task), ratio in ratios.items() if arm == "AdaGradBMA"]
    beside_fused = f"`AdaGradBMA`, times torch's fused Adagrad: {', '.join(paper)}.\n\n" if paper else ""
    beyond = record["peak_beyond_adamw"]
    memory = "Peak memory of three steps of 12 Linear(1000, 1000), beyond AdamW's, in numbers per parameter: "
    memory += ", ".join(f"{arm} {beyond[arm]:.2f}" for arm in ("Anova", "SOAP")) + "."
    return f"{Table('', ['', *tasks], rows).markdown()}\n\n{beside_fused}{memory}"


def limits(found: Sequence[Costs]) -> str:
    """What optimizers take of what the machine can do."""

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    names = ("AdaGradBMA", "AdamBMA")
    rows = [
        [
            one.network,
            *(share(one.share_of_stream(name) if name in one.measured else None) for name in names),
            share(one.share_of_product()),
            f"{one.machine['stream_bytes_per_second'] / 1e9:.0f} GB/s",
            f"{one.machine['product_operations_per_second'] / 1e9:.0f} GF/s",
        ]
        for one in found
    ]
    return Table("", ["", *names, "Anova, of a product", "stream", "product"], rows).markdown()


def products(found: Sequence[Costs], few: int = 8, many: int = 32) -> str:
    """The rate of Anova's products alone: what more means cost, all else being equal."""
    lines = []
    for one in found:
        less, more = (f"Anova, means={count}" for count in (few, many))
        if {less, more} <= one.measured.keys():
            seconds = one.seconds(more) - one.seconds(less)
            rate = (one.rows[more]["operations"] - one.rows[less]["operations"]) / seconds
            share = rate / one.machine["product_operations_per_second"]
            lines.append(
                f"The products alone (`--sweep means`): {many} means instead of {few} take {seconds * 1e3:.0f} ms "
                f"longer, which is {rate / 1e9:.0f} GF/s, {share:.0%} of a product."
            )
    return "\n\n".join(lines) or "Not measured yet."


def sweeps() -> str:
    """What a step costs beside torch's fused one, as parameters, blocks and means grow."""
    parts = []
    for what, of in (("parameters", "32 square matrices of side"), ("blocks", "2²⁰ parameters as")):
        found = read(STEPS, SWEEPS[what], 1)
        names = [name for name in COMPARED if any(name in one.measured for one in found)]
        rows = [
            [
                name,
                *(f"{one.rows[name]['beside_fused']['median']:.2f}" if name in one.measured else "" for one in found),
            ]
            for name in names
        ]
        sizes = [one.network.split("x")[1] if what == "parameters" else one.network for one in found]
        parts += [Table("", [of, *sizes], rows).markdown()] if rows else []
    for one in read(STEPS, SWEEPS["means"], 1):
        names = sorted((name for name in one.measured if "means=" in name), key=lambda name: int(name.split("=")[1]))
        cells = [f"{one.rows[name]['beside_fused']['median']:.2f}" for name in names]
        header = ["means, 12 matrices of side 577", *(name.split("=")[1] for name in names)]
        parts.append(Table("", header, [["Anova", *cells]]).markdown())
    return "\n\n".join(parts) or "Not measured yet."


def step_tables(found: Iterable[Costs]) -> str:
    """Everything, a table per network."""
    lines = []
    for one in found:
        lines += [_titled(step_table(one)), *(f"- {note}" for note in step_notes(one))]
    return "\n\n".join(lines)


def study_tables(study: Study) -> str:
    """The tables of every cell, and a picture of those that have final runs."""
    parts = []
    for name in sorted(study.cells, key=lambda name: not study.cells[name].seeds):  # what is only tuned comes last
        shown = study_cell_tables(study, name) if study.records(name).every() else []
        if study.findings(name).final and name != "XS":  # that one is on top of the page
            parts.append(f"![{name}: held-out loss against tokens and seconds](img/study-{name}.svg)")
        for one in shown:
            title, _, what = one.title.partition(": ")
            headings = [f"### {title}"] if one is shown[0] else []
            headings += [f"#### {what[0].upper()}{what[1:]}"] if what else []
            parts.append("\n\n".join([*headings, one.markdown()]))
    return "\n\n".join(parts) or "No runs yet."


def filled(page: str, contents: Mapping[str, str]) -> str:
    """A page with everything between its marks replaced."""
    for name, content in contents.items():
        start, end = f"<!-- {name}: made by `make docs` -->", f"<!-- end of {name} -->"
        before, started, rest = page.partition(start)
        _, ended, after = rest.partition(end)
        if not (started and ended):
            raise ValueError(f"The page must have the lines {start} and {end}.")
        page = f"{before}{start}\n\n{content}\n\n{end}{after}"
    return page


def pages(found: dict[str, Outcome], raced: Sequence[TaskResult]) -> dict[Path, str]:
    """Every page with its tables filled in."""
    one = read(STEPS, list(NETWORKS), 1)
    means = read(STEPS, SWEEPS["means"], 1)
    study, rates_script = make_study(STUDY), rates()
    contents = {
        COST_PAGE: {
            "brief": step_brief(one),
            "iterations": iterations(),
            "limits": f"{limits(one)}\n\n{products(means)}",
            "sweeps": sweeps(),
            "steps": step_tables(one),
        },
        PAGE: {
            "claims": claims(found.values()),
            "fig5": tables(found["fig5"]),
            "table4": tables(found["table4"]),
            "epoch": epoch(),
            "large": large_model(),
        },
        RACE_PAGE: {"controls": controls(raced), "race": race_tables(raced)},
        FRONT: {"study": study_brief(study)},
        STUDY_PAGE: {
            "rates": rates_table(rates_script),
            "race": race_brief(raced),
            "status": "\n".join(f"- {note}" for note in study_notes(study)) or "All runs are made.",
            "results": study_tables(study),
        },
    }
    return {page: filled(page.read_text(), own) for page, own in contents.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        found, raced = outcomes(Path(folder)), race()
        own = [picture for picture in found["fig5"].pictures if picture.path.name == "fig5-own"]
        ready = [one for one in raced if one.arms]
        own += [draw_overview(ready, Path(folder) / "race")] if ready else []
        costs = read(STEPS, list(NETWORKS), 1)
        own += [draw_costs(costs, Path(folder) / "step_costs")] if costs else []
        script = rates()
        for name, tasks in (("rates", script["SETTINGS"]), ("rates-some", FRONT_TASKS)):
            own.append(save(script["draw"](script["records"], tasks), Path(folder) / name))
        study = make_study(STUDY)
        own += [
            draw_cell(study, name, Path(folder) / f"study-{name}") for name in study.cells if study.findings(name).final
        ]
        for picture in (*pictures(Path(folder)), *own):
            print(shutil.copy(picture.svg, ROOT / "docs" / "img"))
    for page, text in pages(found, raced).items():
        page.write_text(text)
        print(page)
