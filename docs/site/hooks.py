"""What mkdocs does beyond its settings: a place for every public name, links that leave docs/, formulas."""

from __future__ import annotations

import html
import inspect
import logging
import os
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import blockmean
from blockmean import curvature, optim, plot

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages that lie beside docs/; mkdocs takes README.md for the start page."""

LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s#]+")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
PLACE = re.compile(r"^::: (\S+)", re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.blockmean")  # a warning ends a strict build


# ---------------------------------------------------------------- every public name has a place


def public_names() -> dict[str, Any]:
    """Every public name with its object; a module stands for the names in it."""
    found = {f"{m.__name__}.{name}": getattr(m, name) for m in (blockmean, curvature, plot) for name in m.__all__}
    found |= {f"blockmean.optim.{name}": getattr(optim, name) for name in optim.__all__ if name not in vars(blockmean)}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def public_members() -> Iterator[tuple[str, Any]]:
    """The methods and properties that public classes add to what they inherit, with their objects."""
    for name, cls in public_names().items():
        for member, value in vars(cls).items() if inspect.isclass(cls) else ():
            is_new = not member.startswith("_") and not any(hasattr(base, member) for base in cls.__bases__)
            if is_new and (inspect.isroutine(value) or isinstance(value, property | cached_property)):
                yield f"{name}.{member}", getattr(cls, member)


def undocumented() -> list[str]:
    """Public classes, functions, methods and properties without a docstring, which the reference would leave out."""
    objects = [(name, value) for name, value in public_names().items() if callable(value)]
    return [name for name, value in [*objects, *public_members()] if not inspect.getdoc(value)]


def place_of(name: str, value: Any) -> str:
    """What the reference calls a name: where a module has the same name, `blockmean.curvature.ggn`, the one in it."""
    return f"{name}.{value.__name__}" if name in sys.modules else name


def misplaced(folder: Path = DOCS / "api") -> list[str]:
    """Places of public names that are not those of one line "::: place" in the pages of a folder."""
    lines = [place for page in sorted(folder.glob("*.md")) for place in PLACE.findall(page.read_text())]
    wanted = [place_of(name, value) for name, value in public_names().items()]
    return [place for place in wanted if lines.count(place) != 1]


def on_pre_build(config: Any) -> None:
    for place in misplaced():
        log.warning("docs/api/*.md must have one line '::: %s'.", place)
    for name in undocumented():
        log.warning("%s needs a docstring: the API reference leaves it out.", name)


# ---------------------------------------------------------------- links that leave docs/


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside docs/: the pages named above, and every file or folder that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    def add(path: Path) -> None:
        uri = site_uri(path)
        if files.get_file_from_path(uri) or not path.exists():
            return
        if path.is_file():
            files.append(File.generated(config, uri, abs_src_path=str(path)))
            return
        inside = sorted(path.iterdir())
        text = "\n".join([f"# {path.relative_to(ROOT)}", "", *(f"- [{file.name}]({file.name})" for file in inside)])
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
        for file in inside:
            add(file)

    for name in PAGES:
        add(ROOT / name)
    for page in list(files.documentation_pages()):
        for link in LINK.findall(page.content_string):
            add(target(page.src_uri, link))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    return LINK.sub(lambda link: os.path.relpath(site_uri(target(uri, link[0])), Path(uri).parent), markdown)


def target(page: str, link: str) -> Path:
    """The file or folder that a page links to."""
    return Path(os.path.normpath((ROOT if page in PAGES else (DOCS / page).parent) / link))


def site_uri(path: Path) -> str:
    """Its place in the site, whose root is docs/; what lies outside keeps its path, and a folder becomes a list."""
    uri = os.path.relpath(path, DOCS if path.is_relative_to(DOCS) else ROOT)
    return f"{uri}/index.md" if path.is_dir() else uri


# ---------------------------------------------------------------- formulas


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Turn LaTeX into MathML, which browsers draw without a script."""
    from latex2mathml.converter import convert

    def formula(found: re.Match[str]) -> str:
        latex = html.unescape(found[2]).strip()
        return convert(latex) if found[1] == "span" else f'<div class="formula">{convert(latex, display="block")}</div>'

    return FORMULA.sub(formula, content)
