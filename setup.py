"""Build the native kernels, and the page of a package index. All else about the package is in pyproject.toml.

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
from setuptools.command.build_ext import build_ext

HERE = Path("src/blockmean/optim/native")
# Compiled once for every instruction set, of which the module chooses one when it is loaded.
# With what each adds to the flags below.
KERNELS: dict[str, list[str]] = {"kernels.cpp": [], "spectrum.cpp": [], "anova.cpp": ["-ffp-contract=fast"]}
REST = ["module.cpp", "pool.cpp", "solve.cpp", "watch.cpp"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
X86 = {"plain": [], "avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": ["-mavx2", "-mfma", "-mf16c", *AVX512]}
if stand_in := os.environ.get("BLOCKMEAN_STAND_IN"):  # a header with the intrinsics of AVX-512, to test without it
    X86["avx512"] = [*X86["avx2"], "-DVECTOR_BYTES=64", "-include", stand_in]
VARIANTS = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"plain": []}
# No -ffast-math: where it reaches the linker, it switches denormal numbers off for the whole process.
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi"]
# Python asks for the opposite of both: -fwrapv costs time in loops, -g makes the module seven times as large.
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
    """Compile the kernels several times, each time with other flags."""

    def build_extension(self, ext: Extension) -> None:
        if sys.platform == "win32":
            raise OSError("the kernels need gcc or clang")
        flags = FLAGS + (SANITIZE if os.environ.get("BLOCKMEAN_SANITIZE") else [])
        macros = [("Py_LIMITED_API", "0x030B0000")]

        def compiled(variant: str, source: str) -> list[str]:
            return self.compiler.compile(
                [str(HERE / source)],
                output_dir=str(Path(self.build_temp) / variant),
                macros=[*macros, ("VARIANT", variant)],
                extra_postargs=flags + VARIANTS[variant] + KERNELS[source],
            )

        # The slowest first, and as many at a time as there are processors.
        jobs = [(variant, source) for source in reversed(KERNELS) for variant in reversed(VARIANTS)]
        for variant in VARIANTS:
            (Path(self.build_temp) / variant / HERE).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            ext.extra_objects += [one for found in pool.map(compiled, *zip(*jobs, strict=True)) for one in found]
        ext.extra_compile_args = [*flags, *(["-DSTAND_IN"] if stand_in else [])]
        ext.extra_link_args = ["-pthread", *(["-fsanitize=address,undefined"] if "-g" in flags else [])]
        super().build_extension(ext)


setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    ext_modules=[
        Extension(
            "blockmean.optim.native._kernels",
            sources=[str(HERE / source) for source in REST],
            depends=[str(path) for path in sorted(HERE.glob("*.[ch]pp"))],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
