"""The report: one HTML page with the verdicts first, then the evidence part by part.

The page is a tree of elements, so no text can be left unescaped. It needs no script and no other file.
"""

from __future__ import annotations

import base64
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple
from xml.etree.ElementTree import Element

from blockmean import __version__
from blockmean.lab.environment import environment
from blockmean.lab.paper import PARTS
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.protocol import anova_study, studies
from blockmean.lab.picture import Picture

TITLE = "Block Mean Approximation, reproduced"
PAPER = "Block Mean Approximation for Efficient Second Order Optimization"
SIGNS = {Verdict.HOLDS: "✓", Verdict.FAILS: "✗", Verdict.NOISE: "≈", Verdict.UNKNOWN: "–"}
VERBS = {
    Verdict.HOLDS: "holds",
    Verdict.FAILS: "does not hold",
    Verdict.NOISE: "is within noise",
    Verdict.UNKNOWN: "has no verdict",
}
EVIDENCE = "docs/evidence.md"
"""Where the project compares Anova with AdamW and others, in a checkout."""
LARGEST_SVG = 2_000_000
"""A larger SVG, in bytes, gives way to the PNG: a matrix drawn cell by cell can outweigh the rest of the page."""
NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
NUMBER = r"[-+−±≈<>]?\s*\d"
INLINE = {"a", "cite", "code", "span", "strong"}


class Part(NamedTuple):
    """One part of the paper; `missing` gives the reason if it could not be made."""

    name: str
    title: str
    outcome: Outcome
    missing: str | None

    @property
    def short_title(self) -> str:
        """The title up to its colon, or the name: what fits into a list of contents."""
        first, colon, _ = self.title.partition(":")
        return first if colon else self.name.capitalize()

    @property
    def anchor(self) -> str:
        return f"part-{self.name}"

    @property
    def verdicts_anchor(self) -> str:
        return f"verdicts-{self.name}"


def write_report(
    outcomes: Mapping[str, Outcome],
    config: ReportConfig,
    path: Path,
    missing: Mapping[str, str] = {},
    titles: Mapping[str, str] | None = None,
) -> Path:
    """Write all findings into one HTML file.

    Args:
        outcomes: the findings of each part.
        missing: the parts that could not be made, with the reason.
        titles: headings of the parts, in order; by default the first line of each part's module docstring.
    """
    titles = _titles() if titles is None else titles
    names = sorted({**outcomes, **missing}, key=[*titles, *outcomes, *missing].index)
    parts = [Part(name, titles.get(name, name), outcomes.get(name, Outcome()), missing.get(name)) for name in names]
    machine = {key: "not known" if value is None else str(value) for key, value in environment().items()}
    head = _element(
        "head",
        _element("meta", charset="utf-8"),
        _element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _element("meta", http_equiv="Content-Security-Policy", content=NOTHING_FROM_OUTSIDE),
        _element("title", TITLE),
        _element("style", Path(__file__).with_name("report.css").read_text(encoding="utf-8")),
    )
    main = _element("main", _verdicts(parts), *map(_part, parts), _settings(config), _environment(machine))
    header = _header(parts, titles, config, machine, _evidence(config, path))
    body = _element("body", _contents(parts), _element("div", header, main, class_="page"))
    page = ET.tostring(_element("html", head, body, lang="en"), encoding="unicode", method="html")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<!DOCTYPE html>\n{page}", encoding="utf-8")
    return path


def _titles() -> dict[str, str]:
    files = {name: sys.modules[part.__module__].__doc__ or name for name, part in PARTS.items()}
    return {name: text.partition("\n")[0].removesuffix(".") for name, text in files.items()}


def _header(
    parts: list[Part], titles: Mapping[str, str], config: ReportConfig, machine: Mapping[str, str], evidence: str | None
) -> Element:
    """What this page is, a summary of the verdicts, and where the evidence for Anova is."""
    claims = [claim for part in parts for claim in part.outcome.claims]
    exact, findings = ([claim for claim in claims if claim.exact == kind] for kind in (True, False))
    summary: list[Element | str] = ["What holds of ", _element("cite", PAPER)]
    summary += [" (Lu, Harandi, Hartley and Pascanu, 2018), and what this library's Anova adds. BMA is the paper's "]
    summary += ["AdaGrad with block means, diag has one rate per parameter, and full the whole matrix. “Within noise” "]
    summary += ["means that the 95% interval over the seeds includes no difference."]
    made = f"{config.profile} profile, blockmean {__version__}, code {machine['code']}, "
    made += f"{machine['date'][:16].replace('T', ' ')} UTC."
    if config.profile != "paper":
        made += " On MNIST and CIFAR-10 with more seeds, in hours: `blockmean reproduce --profile paper --data-dir …`"
    wrong = any(claim.verdict is Verdict.FAILS for claim in exact)
    alarm = "✗ An exact claim does not hold. This is no finding: the software is wrong, trust no number on this page."
    counts = [
        _element("li", _element("strong", f"{len(found)} {kind} "), *_counts(found))
        for kind, found in (("exact claims", exact), ("findings", findings))
        if found
    ]
    overviews = [part.outcome.overview for part in parts if part.outcome.overview is not None]
    return _element(
        "header",
        _element("h1", TITLE, id="summary"),
        _element("p", *summary),
        *([_element("p", alarm, class_="notice fails", role="alert")] if wrong else []),
        _element("ul", *(_element("li", *s) for s in _sentences(parts, titles, evidence)), class_="sentences"),
        *([_overview(overviews)] if overviews else []),
        _element("ul", *counts, class_="counts"),
        _element("p", *_text(made), class_="quiet"),
    )


def _contents(parts: list[Part]) -> Element:
    """The table of contents, which stays in view: beside the page, or as a bar above it."""
    links = [_element("a", "Summary", href="#summary"), _element("a", "Verdicts", href="#verdicts")]
    links += [_element("a", part.short_title, href=f"#{part.anchor}", title=part.title) for part in parts]
    links += [_element("a", word, href=f"#{word.lower()}") for word in ("Settings", "Environment")]
    return _element("nav", _element("ul", *(_element("li", link) for link in links)), aria_label="Contents")


def _evidence(config: ReportConfig, path: Path) -> str | None:
    """The address of the page on Anova as seen from the report; None outside a checkout of the project."""
    page = None if config.published is None else config.published.parent / EVIDENCE
    return None if page is None or not page.exists() else Path(os.path.relpath(page, path.parent)).as_posix()


def _sentences(parts: list[Part], titles: Mapping[str, str], evidence: str | None) -> list[list[Element | str]]:
    """What came out, and what is missing, in words that follow from the verdicts alone.

    The mathematics, then each part with several findings, those with one together, and what Anova adds.
    """
    exact = [claim.verdict for part in parts for claim in part.outcome.claims if claim.exact]
    holding = (
        f"{exact.count(Verdict.HOLDS)} of {len(exact)} exact claims hold" if exact else "no exact claim was checked"
    )
    sentences: list[list[Element | str]] = [["The mathematics: ", _element("strong", holding), "."]]
    single: list[list[Element | str]] = []
    for part in sorted(parts, key=lambda part: part.outcome.overview is None):  # first what the picture shows
        found = _findings(part)
        link = _element("a", part.short_title, href=f"#{part.anchor}")
        if len(found) > 1:
            sentences.append([link, ": ", *_listed(found), "."])
        elif found:
            single.append([link, ": ", *found[0]])
    if single:
        sentences.append([*_listed(single), "."])
    for part in parts:
        if part.outcome.summary:
            where = _element("code", EVIDENCE) if evidence is None else _element("a", "the evidence", href=evidence)
            link = _element("a", part.short_title, href=f"#{part.anchor}")
            told = part.outcome.summary.removeprefix(part.short_title)
            sentences.append([link, *_text(told), "; more tasks and optimizers: ", where, "."])
    missing = [part for part in parts if part.missing is not None]
    if missing:
        sentences.append([_element("strong", "Could not be made: "), *_joined(map(_link, missing)), "."])
    damaged = {_link(part): len(part.outcome.unusable) for part in parts if part.outcome.unusable}
    if damaged:
        count = sum(damaged.values())
        what = "record that cannot be used" if count == 1 else "records that cannot be used"
        sentences.append([_element("strong", f"Counted as missing: {count} {what}"), ", see ", *_joined(damaged), "."])
    absent = [name for name in titles if name not in {part.name for part in parts}]
    if absent:
        advice = f"{', '.join(absent)}; `blockmean report` makes the whole page."
        sentences.append([_element("strong", "Not asked for: "), *_text(advice)])
    return sentences


def _findings(part: Part) -> list[list[Element | str]]:
    """For each statement of a part that measurements decide: the statement, and its verdicts in words."""
    statements: dict[str, list[Claim]] = {}
    for claim in part.outcome.claims:
        if not claim.exact:
            statements.setdefault(_statement(claim), []).append(claim)
    found = []
    for statement, claims in statements.items():
        reasons = dict.fromkeys(claim.measured for claim in claims if claim.verdict is Verdict.UNKNOWN)
        why = f" ({'; '.join(reasons)})" if reasons else ""
        verdict = _verdict_in_words([claim.verdict for claim in claims])
        found.append([*_text(f"“{statement}” "), verdict, *_text(why)])
    return found


def _statement(claim: Claim) -> str:
    """A claim without the task before its colon and the remark in brackets behind it: what several tasks share."""
    return re.sub(r"\s*\([^()]*\)$", "", claim.claim.partition(": ")[2] or claim.claim)


def _verdict_in_words(verdicts: list[Verdict]) -> Element:
    """The end of a sentence: "holds", "is within noise in all 4 cases", "holds in 2 of 3 cases, does not hold in 1"."""
    found = Counter(verdicts).most_common()
    total = len(verdicts)
    (verdict, count), *others = found
    whole = "" if total == 1 else " in both cases" if total == 2 else f" in all {total} cases"
    cases = f" in {count} of {total} cases" if others else whole
    rest = "".join(f", {VERBS[other]} in {number}" for other, number in others)
    return _element("strong", f"{VERBS[verdict]}{cases}{rest}")


def _counts(claims: Iterable[Claim]) -> list[Element | str]:
    """How many claims have each verdict."""
    found = Counter(claim.verdict for claim in claims)
    return _joined((_badge(verdict, f": {found[verdict]}") for verdict in Verdict if found[verdict]), " ")


def _badge(verdict: Verdict, after: str = "") -> Element:
    """A verdict as a sign and in words, for readers who do not see its colour."""
    return _element("span", f"{SIGNS[verdict]} {verdict}{after}", class_=f"verdict {verdict.name.lower()}")


def _link(part: Part) -> Element:
    return _element("a", part.title, href=f"#{part.anchor}")


def _verdicts(parts: list[Part]) -> Element:
    """All claims, a group of rows for each part: findings first; exact claims are folded away if all of them hold."""
    section = _element(
        "section",
        _element("h2", "Verdicts"),
        _element(
            "p",
            "An exact claim is mathematics: if one does not hold, the software is wrong. A finding is a measurement "
            "and may go either way; it is within noise if the measurement cannot tell which.",
        ),
        id="verdicts",
    )
    open_ones = [part for part in parts if part.missing is not None or any(not c.exact for c in part.outcome.claims)]
    if open_ones:
        anchors = {part.name for part in open_ones}
        section.append(_claims_table([_group(part, False, part.verdicts_anchor) for part in open_ones]))
    else:
        anchors = set()
    exact = [part for part in parts if any(claim.exact for claim in part.outcome.claims)]
    if exact:
        claims = [claim for part in exact for claim in part.outcome.claims if claim.exact]
        groups = [_group(part, True, None if part.name in anchors else part.verdicts_anchor) for part in exact]
        title = _element("summary", "Exact claims: ", *_counts(claims))
        details = _element("details", title, _claims_table(groups))
        if any(claim.verdict is not Verdict.HOLDS for claim in claims):
            details.set("open", "open")
        section.append(details)
    return section


def _claims_table(groups: list[Element]) -> Element:
    header = [_element("th", word, scope="col") for word in ("Verdict", "Claim of the paper", "Measured", "Kind")]
    return _element("table", _element("thead", _element("tr", *header)), *groups, class_="claims")


def _group(part: Part, exact: bool, anchor: str | None) -> Element:
    """The exact claims of a part, or its findings and why it is missing."""
    title = _element("th", _link(part), scope="rowgroup", colspan="4")
    rows = [
        _element(
            "tr",
            _element("td", _badge(claim.verdict)),
            _element("th", *_text(claim.claim), scope="row"),
            _element("td", *_text(claim.measured)),
            _element("td", "exact" if claim.exact else "finding", class_="quiet"),
        )
        for claim in part.outcome.claims
        if claim.exact == exact
    ]
    if part.missing is not None and not exact:
        reason = _element("td", "could not be made: ", *_text(part.missing), colspan="3")
        rows.append(_element("tr", _element("td", _badge(Verdict.UNKNOWN)), reason))
    return _element("tbody", _element("tr", title), *rows, **({} if anchor is None else {"id": anchor}))


def _part(part: Part) -> Element:
    """The figures, tables and notes behind the verdicts of one part."""
    section = _element("section", _element("h2", part.title), id=part.anchor)
    if part.missing is not None:
        section.append(_element("p", "This part could not be made: ", *_text(part.missing), class_="notice unknown"))
    if part.outcome.claims:
        back = _element("a", "Verdicts", href=f"#{part.verdicts_anchor}")
        section.append(_element("p", back, ": ", *_counts(part.outcome.claims)))
    if part.outcome.unusable:
        problems = [_element("li", *_text(problem)) for problem in part.outcome.unusable]
        heading = _element("p", "Records that cannot be used, and count as missing:")
        section.append(_element("div", heading, _element("ul", *problems), class_="notice fails"))
    section.extend(_figure(picture, part.title) for picture in part.outcome.pictures)
    section.extend(_table(table) for table in part.outcome.tables)
    if part.outcome.notes:
        notes = [_element("li", *_text(note)) for note in part.outcome.notes]
        section.extend([_element("h3", "Notes"), _element("ul", *notes)])
    return section


def _figure(picture: Picture, title: str) -> Element:
    box = _element(
        "div",
        _image(picture, title),
        class_="scroll picture",
        tabindex="0",
        role="region",
        aria_label=picture.path.name,
    )
    caption = [_element("figcaption", *_text(picture.caption))] if picture.caption else []
    return _element("figure", box, *caption)


def _overview(pictures: list[Picture]) -> Element:
    """Small pictures beside each other, or one below the other where there is no room."""
    box = _element("div", *(_image(picture, "What came out, at a glance") for picture in pictures), class_="overview")
    return _element("figure", box, _element("figcaption", *_text(" ".join(picture.caption for picture in pictures))))


def _image(picture: Picture, title: str) -> Element:
    """A picture as an image element: matplotlib repeats identifiers across files, so its SVGs cannot share a page."""
    file = picture.svg if picture.svg.stat().st_size <= LARGEST_SVG else picture.png
    kind = "svg+xml" if file == picture.svg else "png"
    data = base64.b64encode(file.read_bytes()).decode()
    return _element("img", src=f"data:image/{kind};base64,{data}", alt=f"{title} ({picture.path.name})")


def _table(table: Table) -> Element:
    """A table under its title; columns of numbers are right-aligned."""
    columns = list(zip(table.header, *table.rows, strict=True))
    classes = ["number" if any(re.match(NUMBER, cell) for cell in column[1:]) else "words" for column in columns]
    header = [_element("th", *_text(t), scope="col", class_=c) for t, c in zip(table.header, classes, strict=True)]
    rows = [
        _element(
            "tr",
            _element("th", *_text(first), scope="row"),
            *(_element("td", *_text(cell), class_=c) for cell, c in zip(rest, classes[1:], strict=True)),
        )
        for first, *rest in table.rows
    ]
    cells = _element("table", _element("thead", _element("tr", *header)), _element("tbody", *rows))
    box = _element("div", cells, class_="scroll", tabindex="0", role="region", aria_label=table.title)
    return _element("figure", _element("figcaption", *_text(table.title)), box)


def _settings(config: ReportConfig) -> Element:
    given = {
        "profile": config.profile,
        "seeds": "those of the profile" if config.seeds is None else config.seeds,
        "epochs": "those of the profile" if config.epochs is None else config.epochs,
        "data folder": config.data_dir or "none given",
        "records": config.records,
        "published records": config.published or "none",
        "pictures": config.out,
    }
    rows = [
        [
            study.name,
            ", ".join(study.arms),
            f"{len(study.rates)} × {len(study.tuning.seeds)} × {study.epochs(study.tuning)}",
            f"{len(study.final.seeds)} × {study.epochs(study.final)}",
        ]
        for study in [
            *studies(config.profile, config.seeds, config.epochs),
            anova_study(config.seeds, config.epochs),
        ]
    ]
    header = ["study", "optimizers", "tuning: rates × seeds × epochs", "final runs: seeds × epochs"]
    protocol = Table("The studies of this profile; every optimizer gets the same", header, rows)
    return _element("section", _element("h2", "Settings"), _list(given), _table(protocol), id="settings")


def _environment(machine: Mapping[str, str]) -> Element:
    where = _element("p", "The machine that wrote this page. Every record names the machine on which it was measured.")
    return _element("section", _element("h2", "Environment"), where, _list(machine), id="environment")


def _list(values: Mapping[str, object]) -> Element:
    return _element("dl", *(_element("div", _element("dt", k), _element("dd", str(v))) for k, v in values.items()))


def _text(text: str) -> list[Element | str]:
    """Plain text in which `backticks` mark code."""
    pieces = re.split(r"`([^`]+)`", text)
    return [_code(piece) if i % 2 else piece for i, piece in enumerate(pieces)]


def _code(text: str) -> Element:
    """Code, word by word: otherwise a browser breaks lines after the dashes of an option."""
    return _element("code", *_joined((_element("span", word) for word in text.split()), " "))


def _listed(clauses: Iterable[list[Element | str]]) -> list[Element | str]:
    """Clauses of a sentence, with semicolons between them."""
    return [piece for clause in clauses for piece in ("; ", *clause)][1:]


def _joined(elements: Iterable[Element], separator: str = ", ") -> list[Element | str]:
    return [piece for element in elements for piece in (separator, element)][1:]


def _element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """An element with its children; `class_` and `aria_label` stand for class and aria-label."""
    element = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if not isinstance(child, str):
            element.append(child)
            child.tail = "" if child.tag in INLINE else "\n"
        elif len(element):
            element[-1].tail = f"{element[-1].tail or ''}{child}"
        else:
            element.text = f"{element.text or ''}{child}"
    return element
