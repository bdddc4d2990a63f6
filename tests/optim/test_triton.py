"""Anova's Triton kernels: interpreted against a dense reference, compiled for three GPUs, and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from blockmean.optim.batches import MEANS
from blockmean.optim.kernels import triton_anova
from blockmean.optim.kernels.triton_anova import Shape, TritonMatrices, TritonStep, scratch_lengths, why_not
from support.accelerator import SHARED, TARGETS, Launch, Launches, Recorder, build, fake_cuda, resources
from support.anova_reference import Matrix, Rates

TESTS = Path(__file__).parents[1]
CASES = ("several", "usual", "many", "dtypes", "unaligned", "bad", "alone", "whole_steps", "traffic")

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
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


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Records what would be launched."""
    from blockmean.optim.kernels import triton_kernels

    recorder = Recorder(triton_kernels)
    monkeypatch.setattr(triton_anova, "_kernels", lambda: recorder)
    return recorder


def take_step(*shapes: tuple[int, int, int, int], dtype: torch.dtype = torch.float32, shift: int = 0) -> None:
    """A step of matrices of these shapes, with gradients that do not start at multiples of 16 bytes if `shift` is 1."""
    states = [Matrix(*shape, np.random.default_rng(0)).tensors() for shape in shapes]
    params = [state["exp_avg"].to(dtype, copy=True) for state in states]
    grads = [torch.zeros(param.numel() + shift, dtype=dtype)[shift:].view_as(param) for param in params]
    step = TritonStep(params, grads, states, asdict(Rates()), [False] * len(shapes), None, {})
    step.read()
    step.write()


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
@pytest.mark.parametrize("case", ["usual", "many", "unaligned"])
def test_tiles_as_they_are_many_means_and_gradients_that_start_anywhere(interpreted: Any, case: str) -> None:
    assert_close(interpreted[case])


@pytest.mark.slow
def test_several_dtypes_in_a_list_and_16_bits_are_rounded_once(interpreted: Any) -> None:
    assert_close(interpreted["dtypes"])


@pytest.mark.slow
def test_a_bad_gradient_shows_in_the_totals_and_leaves_every_bit_as_it_was(interpreted: Any) -> None:
    assert interpreted["bad"] == {"finite": [False, False, True], "read only": True, "untouched": True}


@pytest.mark.slow
def test_a_matrix_takes_the_same_step_whatever_else_is_in_the_list(interpreted: Any) -> None:
    assert interpreted["alone"] is True


@pytest.mark.slow
def test_anova_ends_where_it_does_with_torchs_operations(interpreted: Any) -> None:
    """Eight steps with starts, refreshes and weight decay, of matrices of several shapes; learning rate 0.01."""
    assert interpreted["whole_steps"]["launched"] and interpreted["whole_steps"]["error"] < 1e-5


# ------------------------------------------------------------ cost


@pytest.mark.slow
def test_bytes_of_global_memory_for_a_parameter(interpreted: Any) -> None:
    """768 × 768, float32, k = q = 32. A fused AdamW has 28; large matrices come down to 26.3."""
    found = interpreted["traffic"]
    print(json.dumps(found, indent=1))
    assert found["project"] < 5.6  # G 4, parts written 1 + 0.17, U and V
    assert found["update"] < 20.8  # 20, left and right
    assert sum(found.values()) < 31


NAMES = ["project", "add", "update_sides", "add", "update_grand", "precondition", "update"]


def test_launches_of_a_step_do_not_depend_on_the_number_of_matrices(recorder: Recorder) -> None:
    take_step((16, 24, 3, 4))
    take_step((16, 24, 3, 4), (40, 80, 32, 32), (700, 296, 1, 1))
    assert [launch.name for launch in recorder.launches] == NAMES * 2


def test_no_shape_is_compiled_for_itself(recorder: Recorder) -> None:
    """All that differs between shapes is in tables, whose addresses are aligned: nothing that Triton would compile."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        O, I = (8 * int(n) for n in rng.integers(2, 40, 2))
        take_step((O, I, int(rng.integers(1, 16)), int(rng.integers(1, 16))), (16, 16, 1, 1))
    assert len({(x.name, str(x.constants), str(x.options)) for x in recorder.launches}) == len(set(NAMES))
    given = [value for launch in recorder.launches for value in launch.arguments.values()]
    assert {type(value) for value in given} == {torch.Tensor, float}
    assert all(value.data_ptr() % 16 == 0 for value in given if isinstance(value, Tensor))


def test_rows_that_do_not_start_at_16_bytes_are_not_loaded_as_if_they_did(recorder: Recorder) -> None:
    take_step((16, 24, 3, 4), (8, 27, 2, 2))
    take_step((16, 24, 3, 4), shift=1)
    take_step((16, 24, 3, 4), dtype=torch.bfloat16)
    assert [x.constants["ALIGNED"] for x in recorder.launches if x.name == "project"] == [True, False, False, True]
    assert [x.constants["ALIGNED"] for x in recorder.launches if x.name == "update"] == [True, False, False, True]


def test_the_table_is_copied_only_if_something_in_it_has_changed(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Matrix(16, 24, 3, 4, np.random.default_rng(0)).tensors()
    param, grad, kept = torch.zeros(16, 24), torch.zeros(16, 24), {}
    for given in (grad, grad, grad.clone(), grad):
        TritonStep([param], [given], [state], asdict(Rates()), [False], None, kept).read()
    tables = [launch.arguments["table"] for launch in recorder.launches if launch.name == "project"]
    assert tables[0] is tables[1] and len({id(table) for table in tables}) == 3
    assert len(tables[0]) == recorder.kernels.COLUMNS.value
    wanted = [param.data_ptr(), grad.data_ptr(), *(tensor.data_ptr() for tensor in state.values()), 16, 24, 3, 4, 0]
    assert tables[0][: len(wanted)].tolist() == tables[3][: len(wanted)].tolist() == wanted
    assert tables[2][1] != grad.data_ptr()


def test_what_a_captured_graph_reads_stays_as_it_is(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    state = Matrix(16, 24, 3, 4, np.random.default_rng(0)).tensors()
    param, grad, kept = torch.zeros(16, 24), torch.zeros(16, 24), {}

    def read(given: Tensor, is_capturing: bool) -> Tensor:
        monkeypatch.setattr(TritonMatrices, "_is_capturing", lambda self: is_capturing)
        TritonStep([param], [given], [state], asdict(Rates()), [False], None, kept).read()
        return recorder.launches[-2].arguments["table"]

    with pytest.raises(RuntimeError, match="two steps before"):
        read(grad, is_capturing=True)
    eager = read(grad, is_capturing=False)
    captured = [read(grad, is_capturing=True), read(grad.clone(), is_capturing=True)]
    assert captured[0] is eager and captured[1] is not eager
    (matrices,) = kept.values()
    assert {id(table) for table in captured} <= {id(tensor) for tensor in matrices._captured}
    assert read(grad, is_capturing=False) is eager  # what is captured has not been copied yet


def test_the_kernels_find_in_the_table_what_the_host_has_put_there(recorder: Recorder) -> None:
    names = ["TOTAL", *scratch_lengths(Shape(1, 1, 1, 1), 1, 1, 1, 1), "COLUMNS"]
    assert [getattr(recorder.kernels, name).value for name in names] == list(range(10, 23))
    assert list(Matrix(2, 2, 1, 1, np.random.default_rng(0)).tensors()) == ["exp_avg", *MEANS]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(recorder: Recorder, launches: list[Launch], target: str) -> dict[str, Any]:
    """Each kernel, compiled: no spills, and no more shared memory than there is."""
    found = {}
    for launch in {launch.name: launch for launch in launches}.values():
        found[launch.name] = build(getattr(recorder.kernels, launch.name), launch, target)
        need = resources(found[launch.name])
        print(target, launch.name, need)
        assert need.spilled == 0 and need.shared <= SHARED[target] and need.registers <= 255, (launch, need)
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("target", TARGETS)
def test_everything_compiles_without_spills(recorder: Recorder, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_anova, "PRECISION", "ieee" if target == "gfx942" else "tf32x3")
    take_step((64, 64, 32, 32))
    found = compiled(recorder, recorder.launches, target)
    take_step((64, 63, 32, 32), dtype=torch.bfloat16)
    passes = [launch for launch in recorder.launches[len(NAMES) :] if "DTYPE" in launch.constants]
    found_half = compiled(recorder, passes, target)
    if target == "sm_80":
        assert "cp.async" in found["project"].asm["ptx"] and "ld.global.v4" in found["update"].asm["ptx"]
        assert "cvt.rn.bf16" in found_half["update"].asm["ptx"]  # rounded, which the interpreter does not do


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("means", [64, 128])
def test_many_means_compile_without_spills(recorder: Recorder, means: int) -> None:
    take_step((128, 128, means, means))
    compiled(recorder, [launch for launch in recorder.launches if "PAD" in launch.constants], "sm_80")


# ------------------------------------------------------------ what is refused


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert why_not(torch.device("cpu"), Shape(8, 8, 2, 2)) == "Triton has no kernels for cpu"
    assert why_not(cuda, Shape(300, 300, 32, 32)) is None
    assert "at most 128" in str(why_not(cuda, Shape(300, 300, 129, 1)))
    assert "too few bits" in str(why_not(cuda, Shape(2, 2**21, 1, 1)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert why_not(cuda, Shape(300, 300, 32, 32)) == "Triton's kernels need compute capability 8.0"
    monkeypatch.setattr(triton_anova, "find_spec", lambda name: None)
    assert why_not(cuda, Shape(300, 300, 32, 32)) == "triton is not installed"


def test_nothing_but_a_launch_imports_triton() -> None:
    code = "import sys, blockmean.optim.kernels.triton_anova; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})


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
