"""GPU code without a GPU: compiled for one, counted, or run with tensors that have no memory.

Speed cannot be seen here, nor numbers: `support.interpreted` has those.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockmean.blocks import memory_order

# ------------------------------------------------------------ kernels of Triton

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
SHARED = {"sm_80": 99 << 10, "sm_90": 99 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a program may have; of NVIDIA's those of sm_86, sm_89 and sm_120, the least of all."""

OPTIONS = {"num_warps", "num_stages"}


class Launch(NamedTuple):
    """What a kernel was launched with."""

    name: str
    arguments: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


class Recorder:
    """In place of a module of kernels: keeps a list of launches and runs none."""

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        if name == "tl":
            return self.kernels.tl

        class Kernel:
            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return launched

        def launched(*args: Any, **kwargs: Any) -> None:
            arguments = dict(zip(getattr(self.kernels, name).arg_names, args, strict=False))
            options = {key: value for key, value in kwargs.items() if key in OPTIONS}
            constants = {key: value for key, value in kwargs.items() if key not in OPTIONS}
            self.launches.append(Launch(name, arguments, constants, options))

        return Kernel()


def build(kernel: Any, launch: Launch, target: str) -> Any:
    """A kernel as it is compiled for a target; needs no driver."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys(launch.constants, "constexpr")
    for name, value in launch.arguments.items():
        pointers = {torch.int64: "*i64", torch.float32: "*fp32"}
        kinds[name] = pointers[value.dtype] if isinstance(value, Tensor) else "fp32"
    names = list(kernel.arg_names)
    kinds = {name: kinds[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if kinds[name].startswith("*")}
    source = ASTSource(kernel, kinds, launch.constants, aligned)
    return compile(source, target=GPUTarget(*TARGETS[target]), options=launch.options)


class Resources(NamedTuple):
    """What a thread and a program need."""

    registers: int
    spilled: int  # bytes of a thread's stack
    shared: int  # bytes


def resources(compiled: Any) -> Resources:
    """From the assembler's own report."""
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        found = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"]))
        return Resources(int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), shared)
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", report))
    return Resources(int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"]), shared)


# ------------------------------------------------------------ operations of torch


def fake_cuda() -> None:
    """Let a build of torch without CUDA make fake tensors on "cuda": its device guard becomes that of "meta"."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    kinds = torch._C._autograd.DeviceType
    if guards[int(kinds.CUDA)] is None:
        guards[int(kinds.CUDA)] = guards[int(kinds.Meta)]


FREE = {
    "_unsafe_view",  # behind batched products: a view, though it is not marked as one
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
    "alias",
    "set_",
}
WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero"}
TENSORS, BLOCKS, CHUNK = (770, 448, 336, 252, 210), 2240, 65536  # MultiTensorApply.cuh of CUDA 13


class Launches(TorchDispatchMode):
    """Counts launches, waits for the device and copies between it and the host, inside FakeTensorMode.

    Tensors there have no values. All that a step reads on the host are its counters, which are `steps`.
    """

    def __init__(self, steps: int = 0) -> None:
        super().__init__()
        self.steps = steps
        self.launches, self.waits, self.copies = Counter[str](), Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, given = func._schema.name.split("::")[1], _tensors((args, kwargs))
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if name in WAITS and given[0].device.type == "cuda":
            self.waits[name] += 1
            return True if given[0].dtype == torch.bool else 1
        if name in WAITS and getattr(given[0], "constant", None) is None:
            return bool(self.steps) if given[0].dtype == torch.bool else self.steps
        out = func(*args, **kwargs)
        devices = {x.device.type for x in given + _tensors(out)}
        if "cuda" in devices and "cpu" in devices and "copy" in name:
            self.copies[name] += 1
        if (
            "cuda" in devices
            and not func.is_view
            and name not in FREE
            and sum(x.numel() for x in given + _tensors(out))
        ):
            self.launches[name] += self._grouped(args, name) if name.startswith(("_foreach", "_fused")) else 1
        return out

    @staticmethod
    def _grouped(args: Any, name: str) -> int:
        """Launches of one operation on lists, as torch groups them."""
        lists = [x for x in args if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
        lists = [x for x in lists if x[0].device.type == "cuda"]
        if not name.startswith("_fused"):  # lists that differ, or have gaps, are taken tensor by tensor
            laid_out = [[(x.shape, x.stride()) for x in values] for values in lists]
            alike = all(one == laid_out[0] for one in laid_out)
            if not alike or any(memory_order(*one) is None for one in laid_out[0]):
                return len(lists[0])
        depth = min(len(lists) + (not name.endswith("_")), len(TENSORS))
        count = tensors = blocks = 0
        for x in lists[0]:
            chunks = math.ceil(x.numel() / CHUNK)
            tensors += chunks > 0
            for chunk in range(chunks):
                blocks += 1
                last = chunk == chunks - 1
                if (tensors == TENSORS[depth - 1] and last) or blocks == BLOCKS:
                    count, blocks, tensors = count + 1, 0, int(not last)
        return count + (blocks > 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
