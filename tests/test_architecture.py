"""Import rules: downwards only, the lab through the public names, heavy packages only when needed."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

import blockmean

ROOT = Path(blockmean.__file__).parent

# Each part of the package and the parts it may import. Nothing else is allowed.
ALGEBRA = {"_checks", "_linalg", "blocks", "partition", "matrix"}
ALLOWED = {
    "_checks": set(),
    "_linalg": set(),
    "blocks": {"_checks", "_linalg"},
    "partition": {"_checks", "blocks"},
    "matrix": {"_checks", "_linalg", "partition"},
    "optim": {*ALGEBRA, "optim"},
    "curvature": {*ALGEBRA, "curvature"},
    "plot": {*ALGEBRA, "curvature", "optim", "plot"},
    "lab": {"lab"},  # and the public names, see below
    "cli": {"lab", "cli"},
    "__main__": {"cli"},
}
PUBLIC_MODULES = {"curvature", "optim", "plot"}
LAZY = {"matplotlib", "numpy", "pooch", "rich", "scipy", "tensorboard", "typer"}


def module_name(path: Path) -> str:
    return ".".join(["blockmean", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def part_of(module: str) -> str:
    """The part of the package: 'blockmean.optim.adagrad' → 'optim', the package itself → ''."""
    return module.removeprefix("blockmean").removeprefix(".").partition(".")[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(tree: ast.AST, *, at_import_time: bool = False) -> Iterator[tuple[str, str]]:
    """(module, name) of every import; optionally only those that run on import. Relative imports are refused."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif at_import_time and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)):
            continue
        else:
            yield from imports(node, at_import_time=at_import_time)


def inner_imports(module: str, *, at_import_time: bool = False) -> Iterator[tuple[str, str]]:
    """What a module imports from this package, as (module, name); `from blockmean import plot` is blockmean.plot."""
    for source, name in imports(ast.parse(FILES[module].read_text()), at_import_time=at_import_time):
        if source.partition(".")[0] == "blockmean":
            inner = f"{source}.{name}"
            yield (inner, "") if inner in FILES else (source, name)


@pytest.mark.parametrize("module", [name for name in FILES if part_of(name) != ""])
def test_imports_go_downwards_only(module: str) -> None:
    part = part_of(module)
    assert part in ALLOWED, f"{module} is new: say in ALLOWED what it may import, and in CONTRIBUTING.md"
    allowed = ALLOWED[part] | (PUBLIC_MODULES | {""} if part in ("lab", "cli") else set())
    for source, name in inner_imports(module):
        assert part_of(source) in allowed, f"{module} must not import {source} {name}"


def test_modules_can_be_put_in_an_order_in_which_each_imports_earlier_ones() -> None:
    order = TopologicalSorter(
        {module: {source for source, _ in inner_imports(module, at_import_time=True)} - {module} for module in FILES}
    )
    order.prepare()  # raises CycleError


@pytest.mark.parametrize("module", [name for name in FILES if part_of(name) in ("lab", "cli")])
def test_the_lab_and_the_command_line_use_public_names_only(module: str) -> None:
    for source, name in inner_imports(module):
        if part_of(source) in {"lab", part_of(module)}:
            continue
        assert source.count(".") <= 1, f"{module} reaches into {source}"
        assert not name.startswith("_") or name == "__version__", f"{module} imports {source}.{name}"
        if source == "blockmean" and name:
            assert name in blockmean.__all__, f"{module} imports blockmean.{name}, which is not public"


def test_only_the_command_line_imports_the_lab() -> None:
    users = {part_of(module) for module in FILES for source, _ in inner_imports(module) if part_of(source) == "lab"}
    assert users <= {"cli", "lab"}


def test_the_package_itself_imports_no_lab_and_no_command_line() -> None:
    assert not {part_of(source) for source, _ in inner_imports("blockmean")} & {"lab", "cli"}


@pytest.mark.parametrize("module", [name for name in FILES if part_of(name) not in ("lab", "cli")])
def test_heavy_packages_are_imported_by_what_needs_them_when_it_needs_them(module: str) -> None:
    tree = ast.parse(FILES[module].read_text())
    early = {source.partition(".")[0] for source, _ in imports(tree, at_import_time=True)}
    assert not early & LAZY


def test_importing_blockmean_leaves_torch_for_later_and_its_names_load_nothing_heavy_beyond_it() -> None:
    code = (
        "import sys; packages = lambda: {name.partition('.')[0] for name in sys.modules}; "
        "import blockmean; print(*packages()); from blockmean import *; print(*packages())"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    first, then = (set(line.split()) for line in result.stdout.splitlines())
    assert "blockmean" in first and not {"torch", *LAZY} & first
    assert "torch" in then and not (LAZY - {"numpy"}) & then  # torch imports numpy itself


def test_importing_blockmean_works_where_torch_is_all_there_is() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(LAZY)!r})); import blockmean; blockmean.BlockMean"
    # torch warns if numpy is missing; that is not ours to test.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_names_are_found_when_they_are_used_and_only_those_that_exist() -> None:
    assert set(blockmean.__all__) <= set(dir(blockmean))
    assert inspect.ismodule(blockmean.optim)
    with pytest.raises(AttributeError, match="module 'blockmean' has no attribute 'Lion'"):
        blockmean.Lion  # noqa: B018


@pytest.mark.parametrize("name", [name for name in blockmean.__all__ if name != "__version__"])
def test_every_public_name_is_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(blockmean, name))
    assert documented and len(documented) > 20


def test_the_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert blockmean.__version__ == version("blockmean")


def test_nothing_that_make_installs_brings_torchvision() -> None:
    """Built for another torch, it breaks whatever imports it if it is there, such as transformers."""
    extras = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pending = {package_of(line) for lines in extras.values() for line in lines} - {"blockmean"}
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        seen.add(name)
        try:
            lines = [line for line in requires(name) or [] if "extra ==" not in line]
        except PackageNotFoundError:  # of another platform
            continue
        pending |= {package_of(line) for line in lines} - seen
    assert {"torch", "linear-operator", "mlxtend"} <= seen
    assert not {"torchvision", "torchaudio", "backpack-for-pytorch"} & seen


def package_of(requirement: str) -> str:
    """'A_b[c]>=1; marker' → 'a-b'."""
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
