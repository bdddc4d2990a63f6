"""The choice of an instruction set, and kernels for processors that the tests do not run on.

test_native.py has the steps of every instruction set that this machine can run.
"""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from blockmean.optim import kernels

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "blockmean" / "optim" / "kernels"
EMULATOR = shutil.which("qemu-aarch64")


def python(*arguments, instructions, timeout=600):
    # The paths of this process, so that the same package is imported.
    paths = [str(ROOT / "src"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "BLOCKMEAN_INSTRUCTIONS": instructions, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


needs_kernels = pytest.mark.skipif(not kernels.is_available(), reason="the kernels were not built")


@needs_kernels
def test_the_environment_chooses_the_instruction_set():
    show = "from blockmean.optim import kernels; print(kernels.instructions())"
    assert python("-c", show, instructions="plain").stdout.strip() == "plain"
    assert python("-c", show, instructions="").stdout.strip() == kernels.instructions()
    failed = python("-c", show, instructions="sse9")
    assert failed.returncode and "BLOCKMEAN_INSTRUCTIONS=sse9 is not among what this machine can run: " in failed.stderr
    assert "plain." in failed.stderr


def flags():
    """How setup.py compiles; it cannot be imported without building."""
    text = (ROOT / "setup.py").read_text()
    names: dict[str, object] = {"os": os, "platform": platform, "Path": Path}
    start, end = text.index("HERE ="), text.index("class BuildKernels")
    exec(text[start:end], names)
    return names


@pytest.mark.packaging
@pytest.mark.parametrize("target", ["this machine", "aarch64"])
def test_the_plain_kernels_agree_with_loops(target, tmp_path):
    """The whole library, which needs no headers of Python; a few rows against plain loops in double, under qemu."""
    compiler = shutil.which("aarch64-linux-gnu-g++" if target == "aarch64" else "g++")
    if compiler is None:
        pytest.skip(f"no compiler for {target}")
    known = flags()
    objects = []
    for source in [*known["KERNELS"], known["REST"]]:
        out = tmp_path / f"{source}.o"
        macros = ["-DVARIANT=plain", "-DONLY_PLAIN"]
        command = [compiler, *known["FLAGS"], *macros, "-Werror", "-c", KERNELS / source, "-o", out]
        subprocess.run(command, check=True, timeout=300)
        objects.append(out)
    program = tmp_path / "check"
    check = Path(__file__).with_name("kernels_check.cpp")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-static", f"-I{KERNELS}", check, *objects, "-pthread", "-o", program],
        check=True,
        timeout=300,
    )
    if target == "aarch64" and EMULATOR is None:
        pytest.skip("compiled, but there is no qemu-aarch64 to run it")
    command = [EMULATOR, program] if target == "aarch64" else [program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
