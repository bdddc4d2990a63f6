"""Every Python block of the documentation runs, and every link leads somewhere."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from support.scripts import load_script

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""Code, and what it prints where the page shows that."""
NUMBER = re.compile(r"\d[\d,]*\.?\d*")
LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


@pytest.fixture(autouse=True)
def _keep_torch_as_it_was():
    dtype, state = torch.get_default_dtype(), torch.get_rng_state()
    yield
    torch.set_default_dtype(dtype)
    torch.set_rng_state(state)


def run_blocks(text: str, name: str) -> int:
    """Run all ```python blocks in one namespace, those with prompts as doctests; returns how many there are."""
    namespace: dict[str, object] = {}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    blocks = list(BLOCK.finditer(text))
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        if block[1].lstrip().startswith(">>>"):
            test = doctest.DocTestParser().get_doctest(block[1], namespace, name, name, line)
            said: list[str] = []
            runner.run(test, out=said.append, clear_globs=False)
            assert not runner.failures, "".join(said)
            namespace = test.globs
        else:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * line + block[1], name, "exec"), namespace)
            if block[2]:
                check_output(printed.getvalue(), block[2])
    return len(blocks)


def check_output(found: str, shown: str) -> None:
    """Raise unless words are equal and numbers near: runs of training differ between processors."""
    assert NUMBER.sub("#", found).split() == NUMBER.sub("#", shown).split()
    numbers = ([float(x.replace(",", "")) for x in NUMBER.findall(text)] for text in (found, shown))
    for one, other in zip(*numbers, strict=True):
        assert one == pytest.approx(other, rel=0.1, abs=0.005)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    run_blocks(page.read_text(), page.name)


def test_the_pages_that_promise_it_have_blocks():
    names = ("README.md", "docs/theory.md", "docs/analysis-of-variance.md", "docs/curvature.md", "docs/tutorial.md")
    for page in (*(ROOT / name for name in names), *ROOT.glob("docs/optimizers/*.md")):
        assert BLOCK.search(page.read_text()), page


def test_a_wrong_block_is_noticed():
    with pytest.raises(AssertionError, match="Expected"):
        run_blocks("```python\n>>> 1 + 1\n3\n```\n", "wrong")
    with pytest.raises(ZeroDivisionError):
        run_blocks("```python\nx = 0\n```\ntext\n```python\n1 / x\n```\n", "wrong")
    for shown in ("loss 0.2", "lost 0.1"):
        with pytest.raises(AssertionError):
            run_blocks(f"```python\nprint('loss 0.1')\n```\n\n```\n{shown}\n```\n", "wrong")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    targets = [target for target, _ in LINK.findall(page.read_text()) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def count_words(text: str) -> int:
    """The words of a page besides code, tables, pictures and marks."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "    ", "![", "<!--"))]
    return sum(len(line.split()) for line in lines)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path):
    if page.name not in ("CHANGELOG.md", "decisions.md", "log.md"):
        assert count_words(page.read_text()) <= 1800


def test_words_in_code_and_tables_do_not_count():
    assert count_words("A page\n\n```python\nx = 1\n```\n| a | b |\n    x ← 1\n![p](p.svg)\nof words\n") == 4


def test_the_parts_of_a_gradient_can_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = load_script(ROOT / "docs" / "figures.py")
    monkeypatch.setattr(figures, "STEPS", 1)
    assert {picture.name for picture in figures.anova_parts(tmp_path)} == {"anova_parts.svg", "anova_parts.png"}


def test_the_pages_say_what_the_records_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # words are compared, and pictures take long
    results = load_script(ROOT / "docs" / "results.py")
    found = results.outcomes(tmp_path)
    for page, text in results.pages(found, results.race()).items():
        assert text == page.read_text(), f"run `make docs` for {page}"
    with pytest.raises(ValueError, match="must have the lines"):  # and not lose what follows
        results.filled("<!-- claims: made by `make docs` -->", {"claims": ""})
