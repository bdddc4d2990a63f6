"""Scripts, run inside this process: one of their own would import torch again, which takes longer than most of them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import runpy
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch


def import_or_skip(package: str) -> ModuleType:
    """A package that not everybody has; a test is skipped without it, or if it fails to import."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")
    except RuntimeError as error:  # a torchvision for another torch: see "Installing" in docs/recipes.md
        pytest.skip(f"{package} does not import here: {error}")


@contextlib.contextmanager
def _as_started(path: Path, *arguments: str):
    """The arguments and the import path of a script; torch is left as it was."""
    dtype, state, threads = torch.get_default_dtype(), torch.get_rng_state(), torch.get_num_threads()
    with patch.object(sys, "argv", [str(path), *arguments]), patch.object(sys, "path", [str(path.parent), *sys.path]):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(state)
            torch.set_num_threads(threads)


def run_script(path: Path, *arguments: str) -> str:
    """What a script prints as `__main__`. Warnings are errors, as in all tests; nothing may go to stderr."""
    printed, errors = io.StringIO(), io.StringIO()
    with _as_started(path, *arguments), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        runpy.run_path(str(path), run_name="__main__")
    assert not errors.getvalue()
    return printed.getvalue()


def load_script(path: Path) -> ModuleType:
    """A script as a module, without what it does as `__main__`; it may import others of its folder."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
