"""Table 4: the cost of an iteration."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from scipy.stats import quantile_test

from blockmean.lab.paper.outcome import Claim, Outcome, ReportConfig, Table, Verdict
from blockmean.lab.paper.timing import ARMS, BATCH, EVERY_10, FUSED, STEPS, timings

PRINTED = {"small": {"full": 16.85, "diag": 5.70, "BMA": 10.07}, "large": {"diag": 7.55, "BMA": 19.12}}  # ms


class Interval(NamedTuple):
    """A median with a 95% confidence interval that assumes nothing about the distribution."""

    median: float
    lower: float
    upper: float

    def __str__(self) -> str:
        decimals = 2 if self.upper - self.lower > 0.02 else 3
        return f"{self.median:.{decimals}f} [{self.lower:.{decimals}f}, {self.upper:.{decimals}f}]"


def table4(config: ReportConfig) -> Outcome:
    """Milliseconds per iteration of full, diagonal and block mean AdaGrad on both models, as ratios to the diagonal."""
    record = timings(config)
    claims, rows = [], []
    for name, arms in ARMS.items():
        samples, printed = record["models"][name], PRINTED[name]
        steps: dict[str, list[float]] = samples["step"]
        whole = {arm: [a + b for a, b in zip(samples["forward_backward"], steps[arm], strict=True)] for arm in arms}
        for arm in arms:
            milliseconds = printed.get(arm)
            rows.append(
                [
                    f"{name} model, {arm}",
                    f"{statistics.median(whole[arm]):.2f}",
                    _ratio_to_diag(whole, arm),
                    "–" if milliseconds is None else f"{milliseconds / printed['diag']:.2f} ({milliseconds:.2f} ms)",
                    f"{statistics.median(steps[arm]):.2f}",
                    _ratio_to_diag(steps, arm),
                ]
            )
        claims += _claims(name, whole, steps)
    where = {"cpu": "?", "date": "?", "load": "?", **record["environment"]}
    table = Table(
        f"Table 4: time per iteration on the embedded digits, batch {BATCH}",
        ["", "ms", "ratio to diag", "the paper's ratio", "optimizer alone, ms", "its ratio to diag"],
        rows,
    )
    notes = [
        f"Measured on {where['cpu']}, on one thread, in processor time, on {str(where['date'])[:10]} at a load of "
        f"{where['load']}. Every round times one forward and backward pass, and then {STEPS} steps of each optimizer "
        "with its gradients, in random order; an iteration is the pass and one of these steps. Ratios are medians "
        "over the rounds, with 95% intervals. “diag” is torch's default Adagrad, “diag, fused” its compiled form; BMA "
        "is compiled too. The paper does not name its machine; the last column leaves out the cost of the pass.",
    ]
    return Outcome(claims, tables=[table], notes=notes)


def _ratio_to_diag(samples: dict[str, list[float]], arm: str) -> str:
    return "1" if arm == "diag" else str(_ratio(samples[arm], samples["diag"]))


def _claims(name: str, whole: dict[str, list[float]], steps: dict[str, list[float]]) -> list[Claim]:
    printed = PRINTED[name]
    # Like with like: both are compiled.
    dearer, alone = _ratio(whole[FUSED], whole["BMA"]), _ratio(steps["BMA"], steps[FUSED])
    extra = f"{statistics.median(steps['BMA']) - statistics.median(steps[FUSED]):+.2f}".replace("-", "−")
    refreshed = _ratio(steps[EVERY_10], steps["BMA"])
    claims = [
        Claim(
            f"Table 4, {name} model: an iteration of BMA takes longer than one of diag "
            f"({printed['BMA'] / printed['diag']:.2f} times, +{printed['BMA'] - printed['diag']:.1f} ms)",
            f"{_ratio(whole['BMA'], whole[FUSED])} times torch's fused diag, {extra} ms; the optimizer alone "
            f"{alone} times ({_ratio(steps['BMA'], steps['diag'])} times torch's default)",
            _compare(dearer, 1.0),
        ),
        Claim(
            f"§7, {name} model: updating G⁻¹ only every several steps lowers the cost",
            f"every {STEPS} steps: {refreshed} times the time of the optimizer",
            _compare(refreshed, 1.0),
        ),
    ]
    if "full" in whole:
        claims.append(
            Claim(
                f"Table 4, {name} model: an iteration of BMA takes less time than one of full "
                f"({printed['BMA'] / printed['full']:.2f} times)",
                f"{_ratio(whole['BMA'], whole['full'])} times; the optimizer alone "
                f"{_ratio(steps['BMA'], steps['full'])} times",
                _compare(_ratio(whole["BMA"], whole["full"]), 1.0),
            )
        )
    return claims


def _compare(ours: Interval, theirs: float) -> Verdict:
    """HOLDS if the ratio is at most `theirs`, beyond noise."""
    if ours.upper <= theirs:
        return Verdict.HOLDS
    return Verdict.FAILS if ours.lower > theirs else Verdict.NOISE  # also if there are too few rounds for an interval


def _ratio(ours: list[float], theirs: list[float]) -> Interval:
    """The median of the ratios within a round, with its interval by the sign test."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Interval(statistics.median(ratios), *quantile_test(ratios, p=0.5).confidence_interval())
