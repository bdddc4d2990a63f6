"""Every example runs as it is and prints correct numbers."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from blockmean import BlockMean, Partition
from support.scripts import load_script, run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
NUMBER = r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?"


def load(name: str) -> ModuleType:
    """An example as a module, without running `main`."""
    return load_script(EXAMPLES / f"{name}.py")


def run(name: str, *arguments: str) -> str:
    """The output of an example, with warnings as errors."""
    return run_script(EXAMPLES / f"{name}.py", *arguments)


def row(printed: str, start: str) -> list[float]:
    """The numbers on the first line that starts with the given words."""
    line = next(line for line in printed.splitlines() if line.strip().startswith(start))
    return [float(x) for x in re.findall(NUMBER, line.strip().removeprefix(start).replace(",", ""))]


# ---------------------------------------------------------------- newton_invariance

ROUNDING = 1e-12  # 10 steps with matrices of condition about 10², in float64
ABSORBED = {
    "permutation inside blocks": {"gradient", "Newton", "diagonal", "block mean"},
    "rotation of what sums to zero": {"gradient", "Newton", "block mean"},
    "one scale per block": {"Newton", "diagonal", "block mean"},
    "block-mean matrix": {"Newton", "block mean"},
    "block-mean matrix × rotation": {"Newton", "block mean"},
    "one scale per entry": {"Newton", "diagonal"},
    "any matrix": {"Newton"},
}


def test_each_method_absorbs_its_reparametrisations_and_no_others():
    table = load("newton_invariance").table()
    found = {name: {method for method, value in row.items() if value < ROUNDING} for name, row in table.items()}
    assert found == ABSORBED
    others = [value for row in table.values() for value in row.values() if value >= ROUNDING]
    assert min(others) > 0.01


def test_the_block_mean_also_absorbs_an_exchange_of_what_sums_to_zero_in_equal_blocks():
    partition = Partition.from_sizes([3, 3, 2])
    R = partition.expand(partition.sizes.double().rsqrt().diag()).mT  # (d, L)
    swap = torch.eye(8, dtype=torch.float64)[[3, 4, 5, 0, 1, 2, 6, 7]]
    T = R @ R.mT + (torch.eye(8).double() - R @ R.mT) @ swap  # means stay, the rest changes places
    H = torch.randn(8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    H = H @ H.mT
    after = BlockMean.fit(T.mT @ H @ T, partition).to_dense()
    assert torch.allclose(after, T.mT @ BlockMean.fit(H, partition).to_dense() @ T, rtol=0, atol=1e-12)
    assert not torch.allclose(after, BlockMean.fit(H, partition).to_dense(), rtol=0, atol=0.1)


@pytest.mark.slow
def test_newton_invariance_prints_its_table():
    printed = run("newton_invariance")
    assert max(row(printed, "block-mean matrix ")[1::2]) < ROUNDING < row(printed, "any matrix")[3]


# ---------------------------------------------------------------- gaussian


def test_the_block_mean_of_the_sample_covariance_is_the_maximum_likelihood_estimate():
    found = load("gaussian").small()
    assert found.density_error < 1e-13
    assert found.slope_at_fit < 1e-11 < 0.1 < found.slope_at_truth
    assert found.gain > 0


def test_no_other_covariance_near_the_fit_is_as_likely():
    module, random = load("gaussian"), torch.Generator().manual_seed(1)
    partition = Partition.from_sizes([4, 1, 7])
    rows = module.sample(module.random_covariance(partition, random), 50, random)
    fit = BlockMean.from_rows(rows, partition, weight=1 / 50)
    best = module.log_likelihood(rows, fit).sum()
    for _ in range(20):
        change = BlockMean.fit(torch.randn(12, 12, generator=random, dtype=torch.float64), partition)
        near = fit + (change + change.T) * 0.01
        assert module.log_likelihood(rows, near).sum() < best


def test_as_many_samples_as_blocks_are_enough_for_a_fit_and_one_less_is_not():
    module, random = load("gaussian"), torch.Generator().manual_seed(2)
    partition = Partition.from_sizes([20, 30, 10, 40])
    rows = module.sample(module.random_covariance(partition, random), 4, random)
    assert BlockMean.from_rows(rows, partition).is_positive_definite()
    assert not BlockMean.from_rows(rows[:3], partition).is_positive_definite()


def test_samples_have_the_covariance_they_are_drawn_from():
    module, random = load("gaussian"), torch.Generator().manual_seed(3)
    truth = module.random_covariance(Partition.from_sizes([3, 2]), random)
    rows = module.sample(truth, 40_000, random)
    # The variance of an estimated covariance is (Σ_ij² + Σ_ii Σ_jj) / N.
    dense = truth.to_dense()
    error = ((dense.square() + dense.diagonal().outer(dense.diagonal())) / len(rows)).sqrt()
    assert bool(((rows.mT @ rows / len(rows) - dense).abs() < 5 * error).all())


def test_the_process_agrees_with_dense_algebra_and_learns_the_noise():
    found = load("gaussian").process()
    assert found.dense_error < 1e-9  # rounding times a condition number of 10³
    assert found.noise == pytest.approx(0.5, abs=5 * 0.5 / (2 * 20_000) ** 0.5)  # five standard errors
    assert 0.5 < found.calibration < 1.5
    assert found.error < 0.05


@pytest.mark.slow
def test_gaussian_prints_what_it_found_with_a_million_entries():
    printed = run("gaussian")
    assert "8 TB" in printed
    fresh, expected = row(printed, "log-density of a fresh sample per entry")
    # A sum of 10⁶ squares is off by √(d/2); a fit to 100 samples, by about 10⁻⁴ per entry.
    assert fresh == pytest.approx(expected, abs=5e-3)


# ---------------------------------------------------------------- steps on real nets


def test_the_damping_loop_lowers_the_loss_and_follows_its_rule(monkeypatch: pytest.MonkeyPatch):
    module = load("damping_loop")
    monkeypatch.setattr(module, "STEPS", 6)
    start = module.Task(0).loss()
    steps = module.gauss_newton(module.Task(0))
    losses = [start, *(step.loss for step in steps)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * start
    assert any(step.ratio < 0 for step in steps)  # includes a refused step
    for before, step, after in zip(losses, steps, steps[1:], strict=False):
        assert (step.loss < before) == (step.ratio > 0)
        factor = 3 if step.ratio < 0.25 else 1 / 3 if step.ratio > 0.75 else 1
        assert after.damping == pytest.approx(factor * step.damping)


@pytest.mark.study
def test_the_damping_loop_prints_both_methods_and_why():
    printed = run("damping_loop")
    (start,) = re.findall(rf"Loss ({NUMBER}) at the start", printed)
    found = re.findall(rf"seed \d: ({NUMBER}) with the block mean in .*, ({NUMBER}) with the gradient", printed)
    assert len(found) == 3
    assert all(float(value) < 0.5 * float(start) for pair in found for value in pair)
    for exact, approximate in re.findall(rf"exactly ({NUMBER}), by the block mean ({NUMBER})", printed):
        assert float(exact) > 2 * float(approximate)


@pytest.mark.study
def test_one_step_early_in_training_gains_more_the_finer_the_blocks():
    first, printed = run("newton_and_natural_gradient").split("\n\n")[:2]
    gain = {by: row(printed, f"natural gradient, {by}")[1] for by in ("tensor", "unit", "kernel", "exact")}
    assert gain["tensor"] < gain["unit"] < gain["kernel"] < gain["exact"]
    gradient = row(printed, "gradient")[0]
    assert gain["kernel"] > 1.3 * gradient > 0
    assert row(printed, "Newton, exact")[1] > row(printed, "Newton, tensor")[1] > gradient
    # At initialisation the gradient wins, even over the exact matrix: the page says so.
    assert row(first, "gradient")[0] > row(first, "natural gradient, exact")[1]


@pytest.mark.slow
def test_fisher_heatmap_writes_a_picture(tmp_path: Path):
    file = tmp_path / "picture.png"
    printed = run("fisher_heatmap", str(file))
    assert "empirical Fisher over 500 samples: 322 parameters in 10 blocks" in printed
    assert file.read_bytes().startswith(b"\x89PNG")
    assert file.stat().st_size > 20_000
