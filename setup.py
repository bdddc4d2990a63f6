"""Build the native kernels, and the page of a package index. All else about the package is in pyproject.toml.

The kernels are a plain shared library that Python loads with ctypes, so one wheel serves every Python and every torch.
Without a compiler the package installs without them, and every step runs on torch's operations.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path("src/blockmean/optim/kernels")
# Compiled once for every instruction set, of which the library chooses one when it is loaded.
KERNELS = ["kernels.cpp", "anova.cpp"]
REST = "library.cpp"
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
X86 = {"plain": [], "avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": ["-mavx2", "-mfma", "-mf16c", *AVX512]}
if stand_in := os.environ.get("BLOCKMEAN_STAND_IN"):  # a header with the intrinsics of AVX-512, to test without it
    X86["avx512"] = [*X86["avx2"], "-DVECTOR_BYTES=64", "-include", stand_in]
VARIANTS = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"plain": []}
# No -ffast-math: where it reaches the linker, it switches denormal numbers off for the whole process.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi"]
# Python asks for the opposite of both: -fwrapv costs time in loops, -g makes the library seven times as large.
FLAGS += ["-fno-wrapv", "-g0"]
FLAGS += ["-ffp-contract=off"]  # the source says which products are fused
FLAGS += ["-Wno-maybe-uninitialized"]  # gcc's own AVX-512 headers
SANITIZE = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def readme() -> str:
    """README.md; its links lead to files under BLOCKMEAN_URL if that is set: a package index has no such files."""
    text = Path("README.md").read_text(encoding="utf-8")
    base = os.environ.get("BLOCKMEAN_URL", "").rstrip("/")
    return re.sub(r"\]\((?![a-z]+:|#)", f"]({base}/", text) if base else text


class BuildKernels(build_ext):
    """A shared library without Python's ABI, from kernels that are compiled several times with other flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        if sys.platform == "win32":
            raise CompileError("the kernels need gcc or clang")
        flags = FLAGS + (SANITIZE if os.environ.get("BLOCKMEAN_SANITIZE") else [])

        def compiled(source: str, variant: str, *more: str) -> list[str]:
            (Path(self.build_temp) / variant / HERE).mkdir(parents=True, exist_ok=True)
            return self.compiler.compile(
                [str(HERE / source)],
                output_dir=str(Path(self.build_temp) / variant),
                macros=[("VARIANT", variant)],
                extra_postargs=[*flags, *more],
            )

        # The slowest first, and as many at a time as there are processors.
        jobs = [(source, variant, *VARIANTS[variant]) for source in KERNELS for variant in reversed(VARIANTS)]
        jobs.append((REST, "any", *(["-DSTAND_IN"] if stand_in else [])))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [one for found in pool.map(lambda job: compiled(*job), jobs) for one in found]
        path = self.get_ext_fullpath(ext.name)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        linking = ["-pthread", *(["-fsanitize=address,undefined"] if "-g" in flags else [])]
        self.compiler.link_shared_object(objects, path, extra_postargs=linking, target_lang="c++")


class PlatformWheel(bdist_wheel):
    """One wheel for every Python of a platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "blockmean.optim.kernels.libblockmean",
            sources=[str(HERE / source) for source in [*KERNELS, REST]],
            depends=[str(path) for path in sorted(HERE.glob("*.[ch]pp"))],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": PlatformWheel},
)
