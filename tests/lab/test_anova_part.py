"""The part of the report that compares Anova with AdamW, from records."""

from pathlib import Path

import pytest
from test_compare import record_of

from blockmean.lab.paper.anova import anova
from blockmean.lab.paper.outcome import ReportConfig
from blockmean.lab.paper.protocol import anova_study
from blockmean.lab.records import append


def write_records(folder: Path, losses: dict[str, list[float]]) -> None:
    """Both arms prefer the rate 0.01, and end with these losses per seed."""
    study = anova_study()
    for arm, values in losses.items():
        tuning = [
            (spec, 1.0 if spec.lr == 0.01 else 2.0) for spec in study.specs(arm, study.rates_of(arm), study.tuning)
        ]
        final = zip(study.specs(arm, [0.01], study.final), values, strict=False)
        for spec, loss in (*tuning, *final):
            append(study.file(folder), spec.key, record_of(spec, loss, test_error=loss / 10))


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([0.1, 0.2, 0.1, 0.2, 0.1], "training loss 0.1400 instead of 1.0200 (lower beyond noise)"),
        ([2.1, 2.2, 2.1, 2.0, 2.2], "training loss 2.1200 instead of 1.0200 (higher beyond noise)"),
        ([1.2, 0.8, 1.3, 0.9, 1.0], "training loss 1.0400 instead of 1.0200 (no difference beyond noise)"),
    ],
)
def test_the_summary_says_what_the_records_say(ours: list[float], words: str, tmp_path: Path):
    write_records(tmp_path / "records", {"AdamW": [1.0, 1.1, 1.0, 0.9, 1.1], "Anova": ours})
    found = anova(ReportConfig(tmp_path, tmp_path / "records"))
    assert found.summary.startswith(
        "Anova beside AdamW on the embedded digits (MLP, 5 seeds, the best of 4 rates each)"
    )
    assert words in found.summary
    assert f"test error {sum(ours) / 50:.1%} instead of 10.2%" in found.summary
    assert [row[:3] for row in found.tables[0].rows] == [["AdamW", "0.01", "5"], ["Anova", "0.01", "5"]]
    assert found.overview is not None and found.overview.svg.exists()
    assert not found.claims  # the paper says nothing of Anova


def test_it_waits_for_all_runs(tmp_path: Path):
    write_records(tmp_path / "records", {"AdamW": [1.0, 1.1, 1.0, 0.9, 1.1], "Anova": [0.1]})
    found = anova(ReportConfig(tmp_path, tmp_path / "records"))
    assert found.notes == ["There is no comparison yet: Anova has 1 of 5 runs."]
    assert found.overview is None and not found.summary


def test_published_records_stand_in_for_missing_ones_and_say_so(tmp_path: Path):
    write_records(tmp_path / "results", {"AdamW": [1.0] * 5, "Anova": [0.5] * 5})
    found = anova(ReportConfig(tmp_path, tmp_path / "records", published=tmp_path / "results"))
    assert "(published records)" in found.tables[0].title
