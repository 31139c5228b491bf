"""Errors, percentiles and verdicts by hand, and what the command prints."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fitune.cli.app import app
from fitune.estimate.memory import predict_memory
from fitune.records.mapping import case_of
from fitune.records.read import read_records
from fitune.records.summary import check_rows, errors_of, percentile
from fitune.records.timeline import allocated_terms
from fitune.spec.plan import ChunkedLoss, Recompute

RUNS = Path(__file__).with_name("runs.jsonl")


def test_median_percentile_and_bias_by_hand() -> None:
    errors = errors_of([-0.10, 0.02, 0.04, -0.01, 0.20])
    assert errors.count == 5
    assert errors.median_abs_error == 0.04
    assert errors.p90_abs_error == pytest.approx(0.10 + 0.6 * 0.10)  # rank 3.6 of 0.01 0.02 0.04 0.10 0.20
    assert errors.bias == pytest.approx(0.03)


def test_percentile_of_one_value_is_that_value() -> None:
    assert percentile([0.3], 0.9) == 0.3


def test_nothing_to_compare_is_none_and_not_zero() -> None:
    errors = errors_of([])
    assert errors.count == 0
    assert errors.median_abs_error is errors.p90_abs_error is errors.bias is None


def test_only_trusted_rows_are_evidence() -> None:
    rows = read_records(RUNS)
    trusted, every = check_rows(rows), check_rows(rows, confidence=("high", "medium", "low", ""))
    assert every.memory.count == trusted.memory.count + 1
    assert trusted.represented == every.represented == len(rows) - 2


def test_an_oom_row_has_a_verdict_and_no_error() -> None:
    summary = check_rows(read_records(RUNS))
    oom = next(c for c in summary.compared if c.row.outcome == "oom")
    assert oom.memory_error is None
    assert oom.fits is False
    assert (summary.verdicts.oom, summary.verdicts.oom_not_fit) == (1, 1.0)


def test_rows_and_skipped_add_up_by_source() -> None:
    summary = check_rows(read_records(RUNS))
    assert summary.rows == summary.represented + len(summary.skipped)
    assert sum(source.rows for source in summary.per_source) == summary.rows
    assert {skipped.row.id for skipped in summary.skipped} == {"tensor-parallel", "length-not-stated"}


def test_json_has_the_promised_keys() -> None:
    result = CliRunner().invoke(app, ["records", "check", str(RUNS), "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert list(data) == [
        "rows", "represented", "memory", "speed", "verdicts", "per_source", "skipped",
    ]  # fmt: skip
    for part in ("memory", "speed"):
        assert list(data[part]) == ["count", "median_abs_error", "p90_abs_error", "bias"]
    assert list(data["verdicts"]) == ["ok_fit", "oom_not_fit"]
    assert data["rows"] == 13
    assert data["memory"]["median_abs_error"] < 0.05
    assert {"id": "tensor-parallel", "why": "tp = 8: no plan has tensor parallelism"} in data["skipped"]


def test_text_names_the_confidence_the_sources_and_what_is_not_represented() -> None:
    result = CliRunner().invoke(app, ["records", "check", str(RUNS), "--rows"])
    assert result.exit_code == 0
    assert "high or medium confidence" in result.stdout
    assert "tensor-parallel: tp = 8" in result.stdout
    assert "full-one-device" in result.stdout


def test_a_confidence_that_is_none_is_refused() -> None:
    result = CliRunner().invoke(app, ["records", "check", str(RUNS), "--confidence", "hihg"])
    assert result.exit_code != 0
    assert "did you mean 'high'" in str(result.exception)


def test_a_run_of_ours_is_priced_by_the_estimate_as_it_is(tmp_path: Path) -> None:
    """Results of fitune go through the same door: no habit of another trainer, recompute and chunk as planned."""
    facts = json.loads(RUNS.read_text().splitlines()[3])
    ours = {
        **facts,
        "source": "fitune results",
        "must_assume": None,
        "recompute_blocks": 8,
        "loss_chunk_tokens": 512,
    }
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [ours]}))
    case = case_of(read_records(path)[0])
    assert case.plan.recompute == Recompute(blocks=8)
    assert case.plan.loss == ChunkedLoss(chunk_tokens=512)
    assert allocated_terms(case) == predict_memory(case.plan).phases


def test_a_results_file_without_these_keys_is_counted_and_not_refused() -> None:
    results = Path(__file__).parents[2] / "results" / "vs_trl_cpu.json"
    summary = check_rows(read_records(results))
    assert (summary.rows, summary.represented) == (3, 0)  # full, lora, qlora
    assert all("not stated" in skipped.why for skipped in summary.skipped)
