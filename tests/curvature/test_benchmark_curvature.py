"""The curvature benchmark runs and its record is complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.study
def test_the_quick_run_writes_a_whole_record(tmp_path: Path):
    out = tmp_path / "curvature.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "curvature.py"), "--quick", "--out", str(out)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    record = json.loads(out.read_text())
    assert record["environment"]["threads"] == 1
    time = record["time"]
    assert (time["d"], time["L"], time["images"]) == (322, {"tensor": 10, "unit": 44}, "random")
    ratio = time["ratio_to_gradients"]
    assert ratio["per-sample gradients"]["median"] == 1
    assert set(ratio) == set(time["seconds"])
    assert "empirical Fisher, tensor" in ratio
    assert [point["samples"] for point in record["memory"]] == [100, 300]
    for point in record["memory"]:
        assert point["bytes_of_all_rows"] == 4 * 322 * point["samples"]
        assert "peak_bytes" in point
    full = record["beside_full_matrix"]
    if full is not None:  # where curvlinops is installed
        assert set(full["ratio_to_gradients"]) >= {"empirical Fisher, tensor", "curvlinops, full matrix"}
        assert max(full["relative_difference"].values()) < 1e-8
    assert "× the gradients" in printed
