"""Anova's Triton kernels: interpreted against a dense reference, compiled for three GPUs, and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blockmean.optim.kernels import triton_anova
from blockmean.optim.kernels.triton_anova import Numbers, Shape, TritonMatrices, padded, why_not
from support.accelerator import SHARED, TARGETS, Launch, Launches, Recorder, build, fake_cuda, resources
from support.anova_reference import Matrix

TESTS = Path(__file__).parents[1]
CASES = ("several", "usual", "many", "types", "transposed", "bad", "alone", "whole_steps", "traffic")

pytestmark = [
    pytest.mark.skipif(why_not("cuda") is not None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this process has to compile"),
    pytest.mark.xdist_group("triton"),
]


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """All cases, from one process: it imports torch once."""
    path = os.pathsep.join([str(TESTS), *sys.path])
    result = subprocess.run(
        [sys.executable, "-m", "support.interpreted", *CASES],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def example(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, dict[str, Tensor], Numbers]:
    matrix = Matrix(*shape, np.random.default_rng(0))
    param = torch.tensor(matrix.param).to(dtype)
    return param, param.clone(), matrix.tensors(), Numbers(torch.ones(1), 0.9, 0.95, 0.999, 0.0, 1e-8, 1.0)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Launches of a step of matrices of these shapes."""

    def launches(*shapes: Shape, dtype: torch.dtype = torch.float32, precision: str | None = None) -> list[Launch]:
        recorder = Recorder(kernels())
        monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
        matrices = TritonMatrices(shapes, "cpu", precision)
        matrices.read(*zip(*(example(shape, dtype) for shape in shapes), strict=True))
        matrices.write(torch.ones(1))
        return recorder.launches

    yield launches


def kernels() -> Any:
    from blockmean.optim.kernels import triton_kernels

    return triton_kernels


# ------------------------------------------------------------ numbers

# Sums of up to 10³ terms in float32, over the largest entry of each tensor.
CLOSE = 2e-6


def assert_close(errors: dict[str, float]) -> None:
    # The step is of order 1 in units of lr; what v_E cancels is left in it.
    assert {name: error for name, error in errors.items() if not error < (2e-5 if name == "step" else CLOSE)} == {}


@pytest.mark.slow
def test_steps_of_several_matrices_are_those_of_a_dense_reference(interpreted: Any) -> None:
    for errors in interpreted["several"]:
        assert_close(errors)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["usual", "many", "transposed"])
def test_tiles_as_they_are_many_means_and_gradients_that_are_not_contiguous(interpreted: Any, case: str) -> None:
    assert_close(interpreted[case])


@pytest.mark.slow
def test_parameters_and_gradients_of_16_bits_are_rounded_once(interpreted: Any) -> None:
    assert len(interpreted["types"]) == 3
    for errors in interpreted["types"].values():
        assert_close(errors)


@pytest.mark.slow
def test_a_bad_gradient_shows_in_the_totals_and_leaves_every_bit_as_it_was(interpreted: Any) -> None:
    assert interpreted["bad"] == {"finite": [False, False, True], "read only": True, "untouched": True}


@pytest.mark.slow
def test_a_matrix_takes_the_same_step_whatever_else_is_in_the_list(interpreted: Any) -> None:
    assert interpreted["alone"] is True


@pytest.mark.slow
def test_anova_ends_where_it_does_with_torchs_operations(interpreted: Any) -> None:
    """Twelve steps with starts, refreshes and weight decay, of matrices of several shapes; learning rate 0.01."""
    assert interpreted["whole_steps"]["launched"] and interpreted["whole_steps"]["error"] < 1e-5


# ------------------------------------------------------------ cost


@pytest.mark.slow
def test_bytes_of_global_memory_for_a_parameter(interpreted: Any) -> None:
    """768 × 768, float32, k = q = 32. A fused AdamW has 28; large matrices come down to 25.5."""
    asked, distinct = interpreted["traffic"]["asked"], interpreted["traffic"]["distinct"]
    print(json.dumps(interpreted["traffic"], indent=1))
    assert distinct["project"] < 5.2  # G 4, parts written 1 + 0.25, U and V
    assert distinct["update"] < 20.8  # 20, left and right
    assert sum(distinct.values()) < 31
    assert sum(asked.values()) < 36  # with what the cache has


def test_launches_of_a_step_do_not_depend_on_the_number_of_matrices(record: Any) -> None:
    names = ["project", "collect", "gather", "unit_side", "input_side", "gather", "grand", "direct", "update"]
    assert [launch.name for launch in record(Shape(16, 24, 3, 4))] == names
    even = [Shape(16, 24, 3, 4), Shape(40, 80, 32, 32), Shape(700, 300 - 4, 0, 1)]
    assert [launch.name for launch in record(*even)] == names
    odd = record(*even, Shape(8, 27, 2, 2))
    assert [launch.name for launch in odd] == ["project", *names, "update"]
    assert [launch.constants["ALIGNED"] for launch in odd if launch.name == "update"] == [True, False]


def test_the_table_is_copied_only_if_something_in_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
    recorder, copied = Recorder(kernels()), []
    matrices = TritonMatrices([Shape(16, 24, 3, 4)], "cpu")
    monkeypatch.setattr(matrices, "_on_host", lambda values: copied.append(values) or torch.tensor(values))
    param, grad, state, numbers = example(Shape(16, 24, 3, 4))
    for given in (grad, grad, grad.clone()):
        matrices.read([param], [given], [state], [numbers])
        matrices.write(torch.ones(1))
    assert len(copied) == 2 and len(copied[0]) == triton_anova.COLUMNS == kernels().FIELDS.value
    matrices.read([param], [given], [state], [numbers._replace(weight_decay=0.1)])
    assert len(copied) == 3


def test_rows_that_do_not_start_at_16_bytes_are_not_loaded_as_if_they_did(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(kernels())
    monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
    param, grad, state, numbers = example(Shape(16, 24, 3, 4))
    shifted = torch.zeros(grad.numel() + 1)[1:].view_as(grad)
    TritonMatrices([Shape(16, 24, 3, 4)], "cpu").read([param], [shifted], [state], [numbers])
    assert recorder.launches[0].constants["ALIGNED"] is False


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(launches: list[Launch], target: str) -> dict[str, Any]:
    """Each kernel, compiled: no spills, and no more shared memory than there is."""
    found = {}
    for launch in {launch.name: launch for launch in launches}.values():
        found[launch.name] = build(getattr(kernels(), launch.name), launch, target)
        need = resources(found[launch.name])
        print(target, launch.name, need)
        assert need.spilled == 0 and need.shared <= SHARED[target], (launch, need)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_without_spills(record: Any, target: str) -> None:
    precision = "ieee" if target == "gfx942" else "tf32x3"
    launches = record(Shape(64, 64, 32, 32), precision=precision)
    found = compiled(launches, target)
    half = record(Shape(64, 64, 32, 32), dtype=torch.bfloat16, precision=precision)
    found_half = compiled([launch for launch in half if "GRAD_TYPE" in launch.constants], target)
    if target == "sm_80":
        assert "ld.global.v4" in found["project"].asm["ptx"] and "ld.global.v4" in found["update"].asm["ptx"]
        assert "cvt.rn.bf16" in found_half["update"].asm["ptx"]  # rounded, which the interpreter does not do


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("means", [64, 128])
def test_many_means_compile_without_spills(record: Any, means: int) -> None:
    launches = record(Shape(128, 128, means, means), precision="tf32x3")
    compiled([launch for launch in launches if launch.name not in ("collect", "gather")], "sm_80")


# ------------------------------------------------------------ what is refused


def test_why_not() -> None:
    assert why_not("cpu") == "parameters are on cpu, not on a GPU"
    assert why_not("cuda", [Shape(300, 300, 32, 32)]) is None
    assert "at most 128" in str(why_not("cuda", [Shape(300, 300, 129, 1)]))
    assert "32 bits" in str(why_not("cuda", [Shape(2, 2**25, 1, 1)]))
    assert [padded(n) for n in (0, 1, 16, 17, 32, 100)] == [16, 16, 16, 32, 32, 128]


def test_nothing_but_a_launch_imports_triton() -> None:
    code = (
        "import sys, blockmean.optim.kernels.triton_anova as t; t.why_not('cuda'); assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


def test_what_does_not_fit_the_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot have k = 5"):
        TritonMatrices([Shape(4, 9, 5, 1)], "cpu")
    with pytest.raises(ValueError, match="no matrices"):
        TritonMatrices([], "cpu")
    with pytest.raises(ValueError, match="precision must be"):
        TritonMatrices([Shape(4, 9, 1, 1)], "cpu", precision="tf32")
    matrices = TritonMatrices([Shape(16, 24, 3, 4)], "cpu")
    param, grad, state, numbers = example(Shape(16, 24, 3, 4))
    with pytest.raises(ValueError, match="exp_avg of matrix 0: 384 entries"):
        matrices.read([param], [grad], [state | {"exp_avg": torch.zeros(3)}], [numbers])
    with pytest.raises(ValueError, match="param of matrix 0 is not contiguous"):
        matrices.read([torch.zeros(24, 16).T], [grad], [state], [numbers])
    with pytest.raises(ValueError, match="parameters must be float32, bfloat16 or float16"):
        matrices.read([param.double()], [grad], [state], [numbers])
    with pytest.raises(RuntimeError, match="without read"):
        matrices.write(torch.ones(1))


def test_ok_is_one_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
    recorder, matrices = Recorder(kernels()), TritonMatrices([Shape(16, 24, 3, 4)], "cpu")
    param, grad, state, numbers = example(Shape(16, 24, 3, 4))
    matrices.read([param], [grad], [state], [numbers])
    with pytest.raises(ValueError, match="ok must be one float32"):
        matrices.write(torch.ones(1, dtype=torch.bool))


# ------------------------------------------------------------ the tools


def test_launches_of_a_known_optimizer_are_counted() -> None:
    fake_cuda()
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(64, 64, device="cuda:0")) for _ in range(3)]
        for param in params:
            param.grad = torch.empty_like(param)
        optimizer = torch.optim.AdamW(params, foreach=True)
        optimizer.step()
        with Launches() as count:
            optimizer.step()
    assert count.launches.total() == 8 and not count.waits and not count.copies
