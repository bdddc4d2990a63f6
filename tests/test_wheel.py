"""The wheel: one for every Python and torch of a platform, with kernels that run in an environment of its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from blockmean.optim import kernels

ROOT = Path(__file__).parents[1]
STEP = """
import torch, blockmean
from blockmean.optim import kernels
assert "site-packages" in blockmean.__file__, blockmean.__file__
model = torch.nn.Linear(3, 2)
optimizer = blockmean.AdamBMA(model.parameters(), fused=True)
model(torch.ones(3)).square().sum().backward()
before = model.weight.detach().clone()
optimizer.step()
assert not torch.equal(before, model.weight)
print(kernels.instructions())
"""


def run(*command, **environment):
    env = {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **environment}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(folder):
    """A new environment that sees the torch of this one; the Python in it."""
    run(sys.executable, "-m", "venv", folder)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "torch.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
    return folder / "bin" / "python"


def build(folder, **variables):
    """The wheel of this source tree, from a copy without anything built before."""
    copy = folder / "source"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy, **variables)
    return next(Path(folder).glob("*.whl"))


@pytest.mark.packaging
@pytest.mark.skipif(not kernels.is_available(), reason="no compiler")
def test_the_wheel_steps_natively_in_an_empty_environment(tmp_path):
    wheel = build(tmp_path)
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    library = "blockmean/optim/kernels/libblockmean.so"
    assert {"blockmean/py.typed", "blockmean/lab/report.css", library} <= set(names)
    assert not [name for name in names if name.endswith(("cpp", "hpp"))]
    python = environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel)
    assert run(python, "-c", STEP).strip() == kernels.instructions()


@pytest.mark.packaging
def test_without_a_compiler_the_package_installs_and_steps(tmp_path):
    wheel = build(tmp_path, CC="/bin/false", CXX="/bin/false")
    python = environment(tmp_path / "venv")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel)
    assert run(python, "-c", STEP.replace(", fused=True", "")).strip() == "None"
