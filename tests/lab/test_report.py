"""The report: what it shows, that it needs nothing but itself, and how it looks in a real browser."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from blockmean.lab import report
from blockmean.lab.paper import PARTS
from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.protocol import studies
from blockmean.lab.picture import Picture, save
from blockmean.lab.report import SIGNS, write_report

ROOT = Path(__file__).parents[2]
VOID = {"br", "hr", "img", "link", "meta"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TITLES = {
    "theorems": "Theorems: <exact> & all",
    "fig4": "Figure 4: how layers are coupled",
    "fig5": "Figure 5: training",
}


class Page(HTMLParser):
    """Elements in their order, rows of tables as text, all text but the style; nesting is checked on the way."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data
        if {"th", "td"} & set(self.open):
            self.rows[-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def picture(folder: Path, name: str, caption: str = "") -> Picture:
    figure = Figure(figsize=(9.5, 3.0))
    figure.subplots().plot([3, 1, 2])
    return save(figure, folder / name, caption)


def outcomes(folder: Path) -> dict[str, Outcome]:
    """One part of each kind: in another order than the headings, with what markup must not swallow."""
    theorems = [Claim(f"Theorem {i}: <λ_i & b_ij> > 0", f"relative error {i}e-16", Verdict.HOLDS, True) for i in (1, 2)]
    findings = [
        Claim("BMA < diag & “full”", "−3.2 ± 1.1 <b>&amp;", Verdict.HOLDS),
        Claim("a smaller test error", "+0.01 ± 0.002", Verdict.FAILS),
        Claim("about as fast as full", "BMA − full: −3.0 ± 1.2; diag − full: −2.7 ± 3.9, " * 3, Verdict.NOISE),
        Claim("on CIFAR-10 " + "too " * 40, "fewer than two seeds", Verdict.UNKNOWN),
    ]
    header = ["optimizer", *(f"column number {i}" for i in range(11))]
    rows = [["BMA weighted, per kernel", *(f"−0.0{i}{j} ± 0.0012" for i in range(11))] for j in range(8)]
    wide = Table("Twelve <columns>", header, rows)
    pictures = [picture(folder, "fig5", "Mean over 3 seeds & their <band>."), picture(folder, "fig5-own")]
    notes = [
        "Run `blockmean reproduce --data-dir <folder>` again.",
        "A single ` stays.",
        "/a/long/path" * 12,
    ]
    return {"fig5": Outcome(findings, pictures, [wide], notes), "theorems": Outcome(theorems)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return outcomes(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def path(found: dict[str, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    config = ReportConfig(folder, Path("records <here>"), data_dir=Path("/data/a & b"), seeds=2)
    missing = {"fig4": "no data: give `--data-dir` <a folder>"}
    return write_report(found, config, folder / "new" / "report.html", missing, TITLES)


@pytest.fixture(scope="module")
def page(path: Path) -> Page:
    return Page(path)


class Browser:
    """A real browser, driven over the pipe of its debugging protocol. It is gone after a minute, whatever happens."""

    def __init__(self, profile: Path) -> None:
        self.numbers = itertools.count()
        self.said: list[str] = []
        self.session: dict[str, str] = {}
        read, their_write = os.pipe()
        their_read, self.to = os.pipe()
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
        # Chromium reads from descriptor 3 and writes to descriptor 4.
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank 3<&{their_read} 4>&{their_write}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, str(CHROMIUM), str(profile)],
            pass_fds=(their_read, their_write),
            stderr=subprocess.DEVNULL,
        )
        self.limit = threading.Timer(60, self.process.kill)
        self.limit.start()
        os.close(their_read)
        os.close(their_write)
        self.answers = os.fdopen(read, "rb")

    def open(self, path: Path) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Log", "Runtime", "Page"):
            self.send(f"{domain}.enable")
        self.send("Page.navigate", url=path.as_uri())
        self.wait("Page.loadEventFired")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params, **self.session}
        os.write(self.to, json.dumps(message).encode() + b"\0")
        return self.wait(number)

    def wait(self, awaited: int | str) -> dict[str, Any]:
        """The answer to a message, or the event of this name; what the console says meanwhile is kept."""
        while True:
            received = bytearray()
            while (byte := self.answers.read(1)) != b"\0":
                assert byte, "the browser is gone"
                received += byte
            message = json.loads(received)
            assert "error" not in message, message
            if message.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                self.said.append(received.decode())
            if awaited in (message.get("id"), message.get("method")):
                return dict(message.get("result", {}))

    def evaluate(self, expression: str) -> Any:
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, width: int, scheme: str) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def close(self) -> None:
        os.close(self.to)  # Chromium ends when the pipe does
        self.answers.close()
        self.process.wait()
        self.limit.cancel()


@pytest.fixture(scope="module")
def browser(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    try:
        browser.open(path)
        yield browser
    finally:
        browser.close()


def test_every_claim_is_there_with_its_measurement_and_verdict(page: Page, found: dict[str, Outcome]):
    for claim in (claim for outcome in found.values() for claim in outcome.claims):
        kind = "exact" if claim.exact else "finding"
        row = [f"{SIGNS[claim.verdict]} {claim.verdict}", claim.claim, claim.measured, kind]
        assert row in page.rows


def test_the_summary_counts_verdicts(page: Page):
    counts = ["2 exact claims ✓ holds: 2", "4 findings ✓ holds: 1 ✗ does not hold: 1 ≈ within noise: 1 – no verdict: 1"]
    for line in counts:
        assert line in page.text
    assert "--profile paper --data-dir" in page.text


def test_the_summary_says_in_sentences_what_came_out(page: Page):
    for sentence in (
        "The mathematics: 2 of 2 exact claims hold.",
        "Figure 5: “BMA < diag & “full”” holds; “a smaller test error” does not hold; “about as fast as full” is "
        "within noise; “on CIFAR-10",
        "has no verdict (fewer than two seeds).",
        "Could not be made: Figure 4: how layers are coupled.",
    ):
        assert sentence in page.text
    before_verdicts = page.text.index("An exact claim is mathematics")
    assert page.text.index("The mathematics: ") < before_verdicts


@pytest.mark.parametrize(
    ("verdicts", "words"),
    [
        ([Verdict.HOLDS] * 3, "holds in all 3 cases"),
        ([Verdict.NOISE] * 2, "is within noise in both cases"),
        ([Verdict.FAILS, Verdict.NOISE, Verdict.NOISE], "is within noise in 2 of 3 cases, does not hold in 1"),
        ([Verdict.HOLDS, Verdict.UNKNOWN], "holds in 1 of 2 cases, has no verdict in 1 (no runs)"),
    ],
)
def test_claims_that_differ_only_in_their_task_share_a_sentence(verdicts: list[Verdict], words: str, tmp_path: Path):
    claims = [Claim(f"Task {i}: BMA wins ({i} times)", "no runs", verdict) for i, verdict in enumerate(verdicts)]
    config = ReportConfig(tmp_path, tmp_path)
    text = Page(write_report({"fig5": Outcome(claims)}, config, tmp_path / "report.html")).text
    assert f"Figure 5: “BMA wins” {words}." in text
    assert "no exact claim was checked" in text


def test_five_sentences_say_what_holds_and_what_anova_adds(tmp_path: Path):
    finding = Claim("it wins", "by 2", Verdict.HOLDS)
    found = {
        "theorems": Outcome([Claim("Theorem 1", "0", Verdict.HOLDS, exact=True)]),
        **{name: Outcome([finding]) for name in ("fig1", "fig4")},
        **{name: Outcome([finding, finding._replace(claim="it is cheap")]) for name in ("table4", "fig5")},
        "anova": Outcome(summary="Anova beside AdamW: lower"),
    }
    every = {name: found.get(name, Outcome()) for name in PARTS}
    page = Page(write_report(every, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html"))
    sentences = page.text[page.text.index("The mathematics") : page.text.index("6 findings")].strip().splitlines()
    assert list(filter(None, sentences))[:5] == [
        "The mathematics: 1 of 1 exact claims hold.",
        "Table 4: “it wins” holds; “it is cheap” holds.",
        "Figure 5: “it wins” holds; “it is cheap” holds.",
        "Figure 1: “it wins” holds; Figure 4: “it wins” holds.",
        "Anova beside AdamW: lower; more tasks and optimizers: docs/evidence.md.",
    ]


def test_the_evidence_is_linked_where_the_report_stands_in_a_checkout(tmp_path: Path):
    config = ReportConfig(tmp_path, tmp_path, published=tmp_path / "results")
    path = tmp_path / "out" / "report.html"
    found = {"anova": Outcome(summary="Anova wins")}
    assert "../docs/evidence.md" not in write_report(found, config, path).read_text()  # there is no such page
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "evidence.md").touch()
    links = Page(write_report(found, config, path)).all("a")
    assert (path.parent / next(str(a["href"]) for a in links if not str(a["href"]).startswith("#"))).exists()


def test_records_that_cannot_be_used_are_counted_at_the_top(tmp_path: Path):
    outcomes = {"fig5": Outcome(unusable=["a.json cannot be used"]), "fig4": Outcome(unusable=["b.json", "c.json"])}
    text = Page(write_report(outcomes, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html")).text
    assert "Counted as missing: 3 records that cannot be used, see Figure 4" in text


def test_overviews_share_the_first_figure_which_stands_before_the_verdicts(found: dict[str, Outcome], tmp_path: Path):
    overviews = [picture(tmp_path, name, f"{name} at a glance.") for name in ("paper", "anova")]
    outcomes = {**found, "fig5": replace(found["fig5"], overview=overviews[0]), "anova": Outcome(overview=overviews[1])}
    page = Page(write_report(outcomes, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html"))
    assert len(page.all("img")) == 2 + len(found["fig5"].pictures)
    for image, overview in zip(page.all("img"), overviews, strict=False):
        assert base64.b64decode(str(image["src"]).partition(";base64,")[2]) == overview.svg.read_bytes()
    tags = [(tag, attributes.get("id")) for tag, attributes in page.elements]
    assert tags.index(("img", None)) < tags.index(("section", "verdicts"))
    assert page.text.index("paper at a glance. anova at a glance.") < page.text.index("An exact claim is mathematics")


def test_exact_claims_are_folded_away_until_one_fails(page: Page, tmp_path: Path):
    assert page.all("details") == [{}]
    broken = {"theorems": Outcome([Claim("Theorem 1", "relative error 0.3", Verdict.FAILS, exact=True)])}
    opened = Page(write_report(broken, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html"))
    assert [list(details) for details in opened.all("details")] == [["open"]]


def test_the_full_study_is_not_advertised_to_those_who_made_it(tmp_path: Path):
    config = ReportConfig(tmp_path, tmp_path, profile="paper")
    text = Page(write_report({}, config, tmp_path / "report.html")).text
    assert "paper profile" in text
    assert "--profile" not in text
    assert "cifar10-large" in text  # among the studies


def test_verdicts_come_first_and_parts_in_the_order_of_their_titles(page: Page):
    assert [attributes.get("id") for attributes in page.all("section")] == [
        "verdicts", "part-theorems", "part-fig4", "part-fig5", "settings", "environment",
    ]  # fmt: skip
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_parts_without_a_title_come_last_under_their_name(found: dict[str, Outcome], tmp_path: Path):
    page = Page(
        write_report(found, ReportConfig(tmp_path, tmp_path), tmp_path / "r.html", titles={"theorems": "Algebra"})
    )
    headings = [page.text.rindex(f"\n{heading}\n") for heading in ("Algebra", "fig5", "Settings")]
    assert headings == sorted(headings)


def test_titles_are_what_the_files_of_the_parts_say(tmp_path: Path):
    page = Page(
        write_report({}, ReportConfig(tmp_path, tmp_path), tmp_path / "r.html", dict.fromkeys(PARTS, "no time"))
    )
    for part in PARTS.values():
        title = str(sys.modules[part.__module__].__doc__).splitlines()[0].removesuffix(".")
        assert f"\n{title}\n" in page.text
    assert [a["id"] for a in page.all("section")][1:-2] == [f"part-{name}" for name in PARTS]


def test_a_part_that_could_not_be_made_is_named_with_the_reason(page: Page):
    assert page.text.count("could not be made: no data: give --data-dir <a folder>") == 2
    assert "Could not be made: Figure 4: how layers are coupled" in page.text
    assert ["– no verdict", "could not be made: no data: give --data-dir <a folder>"] in page.rows


def test_parts_that_were_not_asked_for_are_named(found: dict[str, Outcome], tmp_path: Path):
    some, every = ({name: found.get(name, Outcome()) for name in names} for names in (["fig4", "theorems"], PARTS))
    config = ReportConfig(tmp_path, tmp_path)
    text = Page(write_report(some, config, tmp_path / "some.html")).text
    assert f"Not asked for: {', '.join(name for name in PARTS if name not in some)}; blockmean report" in text
    assert "Not asked for" not in Page(write_report(every, config, tmp_path / "all.html")).text


def test_figures_tables_and_notes_are_there(page: Page, found: dict[str, Outcome]):
    part = found["fig5"]
    images = [str(image["src"]).partition(";base64,") for image in page.all("img")]
    assert [(kind, base64.b64decode(data)) for kind, _, data in images] == [
        ("data:image/svg+xml", picture.svg.read_bytes()) for picture in part.pictures
    ]
    assert all(image["alt"] for image in page.all("img"))
    assert part.pictures[0].caption in page.text
    assert part.tables[0].title in page.text
    for row in [part.tables[0].header, *part.tables[0].rows]:
        assert row in page.rows
    for note in ("Run blockmean reproduce --data-dir <folder> again.", *part.notes[1:]):
        assert note in page.text


def test_columns_of_numbers_are_aligned_to_the_right(page: Page):
    assert {attributes["class"] for tag, attributes in page.elements if tag == "td" and "class" in attributes} == {
        "number", "words", "quiet",
    }  # fmt: skip


def test_a_huge_svg_gives_way_to_its_png(found: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(report, "LARGEST_SVG", 1000)
    page = Page(write_report({"fig5": found["fig5"]}, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html"))
    png = base64.b64encode(found["fig5"].pictures[0].png.read_bytes()).decode()
    assert page.all("img")[0]["src"] == f"data:image/png;base64,{png}"


def test_an_exact_claim_that_fails_raises_alarm(page: Page, tmp_path: Path):
    broken = {"theorems": Outcome([Claim("Theorem 1", "relative error 0.3", Verdict.FAILS, exact=True)])}
    alarm = "the software is wrong, trust no number"
    assert alarm in Page(write_report(broken, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html")).text
    assert alarm not in page.text  # a finding that fails is none


def test_settings_and_environment(page: Page):
    for text in ("/data/a & b", "records <here>", "those of the profile", "digits-small", torch.__version__):
        assert text in page.text
    assert ["digits-small", ", ".join(studies("quick")[0].arms), "5 × 1 × 3", "2 × 6"] in page.rows


def test_it_needs_nothing_but_itself(page: Page, path: Path):
    assert not page.all("script") and not page.all("link")
    for _, attributes in page.elements:
        assert str(attributes.get("src", "data:")).startswith("data:")
        assert str(attributes.get("href", "#")).startswith("#")
    assert not re.search(r"https?://|url\(|@import", path.read_text(encoding="utf-8"))


def test_identifiers_are_unique_and_links_lead_to_one(page: Page):
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {str(link["href"]).removeprefix("#") for link in page.all("a")}
    assert links <= set(ids)
    assert links >= {"verdicts", "part-theorems", "part-fig4", "part-fig5", "settings", "environment"}


def test_headers_of_tables_say_what_they_head(page: Page):
    assert {header.get("scope") for header in page.all("th")} == {"col", "row", "rowgroup"}
    assert page.all("html") == [{"lang": "en"}]


def test_the_style_is_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "lab/report.css" in settings["package-data"]["blockmean"]


SHAPES = [(width, scheme) for width in (360, 1280) for scheme in ("light", "dark")]

LOW_CONTRAST = """(() => {
  const channels = colour => colour.match(/[\\d.]+/g).map(Number);
  const luminance = colour => channels(colour).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const background = element => {
    for (; element; element = element.parentElement) {
      const colour = getComputedStyle(element).backgroundColor;
      if (channels(colour)[3] !== 0) return colour;
    }
  };
  const contrast = element => {
    const [low, high] = [getComputedStyle(element).color, background(element)].map(luminance).sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const written = [...document.body.querySelectorAll('*')]
    .filter(element => [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
  return {written: written.length, poor: written.filter(e => !(contrast(e) >= 4.5)).map(e => e.outerHTML)};
})()"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), SHAPES)
def test_in_a_browser_it_fits_and_can_be_read(browser: Browser, width: int, scheme: str):
    browser.show(width, scheme)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate("[...document.querySelectorAll('.scroll')].map(b => [b.scrollWidth, b.clientWidth])")
    assert boxes and any(inner > outer for inner, outer in boxes)  # what is wide scrolls inside its box
    kinds = browser.evaluate("[...document.querySelectorAll('.claims .quiet')].map(kind => kind.clientWidth)")
    assert kinds and min(kinds) > 40  # columns of long text do not squeeze the others
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (scheme == "dark")
    found = browser.evaluate(LOW_CONTRAST)
    assert found["written"] > 100
    assert not found["poor"]


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_contents_and_first_columns_stay_in_view(browser: Browser, width: int):
    browser.show(width, "light")
    browser.evaluate("scrollTo(0, document.documentElement.scrollHeight / 2)")
    bar, page = (
        browser.evaluate(
            f"(r => [r.left, r.top, r.right, r.bottom])(document.querySelector('{name}').getBoundingClientRect())"
        )
        for name in ("nav", ".page")
    )
    assert browser.evaluate("scrollY") > 300
    assert bar[1] == 0
    assert bar[2] <= page[0] if width > 1200 else bar[3] < 60  # beside the page, or a low bar above it
    browser.evaluate("scrollTo(0, 0)")
    places = browser.evaluate(
        """[...document.querySelectorAll('.scroll')].filter(box => box.querySelector('table')).map(box => {
             box.scrollLeft = 0;
             const [first, second] = box.querySelector('tbody tr').children;
             const before = [first.getBoundingClientRect().left, second.getBoundingClientRect().left];
             box.scrollLeft = 150;
             return [box.scrollLeft, first.getBoundingClientRect().left - before[0],
                     second.getBoundingClientRect().left - before[1]];
           })"""
    )
    moved = [place for place in places if place[0]]
    assert moved
    for distance, first, second in moved:
        assert abs(first) < 2 and second == pytest.approx(-distance, abs=1)


@pytest.mark.slow
def test_in_a_browser_pictures_are_drawn_and_links_lead_somewhere(browser: Browser, found: dict[str, Outcome]):
    assert browser.evaluate("document.URL").startswith("file://")
    drawn = browser.evaluate("[...document.images].map(image => image.complete && image.naturalWidth > 300)")
    assert drawn == [True] * len(found["fig5"].pictures)
    targets = browser.evaluate(
        "[...document.links].map(a => {a.click(); return document.querySelectorAll(':target').length})"
    )
    assert targets and set(targets) == {1}
    assert not browser.said


@pytest.mark.slow
def test_in_a_browser_the_overview_is_not_cut(browser: Browser, tmp_path: Path):
    figure = Figure(figsize=(4.8, 2.9))
    overviews = {name: Outcome(overview=save(figure, tmp_path / name)) for name in ("fig5", "anova")}
    browser.open(write_report(overviews, ReportConfig(tmp_path, tmp_path), tmp_path / "report.html"))
    for width, rows in ((375, 2), (1280, 1)):
        browser.show(width, "light")
        boxes = browser.evaluate(
            "[...document.images].map(i => i.getBoundingClientRect()).map(r => [r.left, r.right, r.top, r.width])"
        )
        assert len({top for _, _, top, _ in boxes}) == rows
        assert all(left >= 0 and right <= width and size > 300 for left, right, _, size in boxes)
