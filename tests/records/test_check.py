"""Errors, percentiles and verdicts by hand, what the command prints, and that the score is the estimate's own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fitune.estimate.memory as memory
import fitune.records.score as score
from fitune.cli.app import app
from fitune.estimate.predict import predict_memory, predict_step_time
from fitune.records.plans import plan_of
from fitune.records.row import Row, read_records
from fitune.records.score import Errors, compare_row, compare_rows, errors_of, group_score, scores_of
from fitune.values.plan import ChunkedLoss, Recompute

RUNS = Path(__file__).with_name("runs.jsonl")
RESULTS = Path(__file__).parents[2] / "results"
TRUSTED = ("high", "medium")


def test_median_percentile_and_bias_by_hand():
    errors = errors_of([-0.10, 0.02, 0.04, -0.01, 0.20])
    assert (errors.count, errors.median_abs_error) == (5, 0.04)
    assert errors.p90_abs_error == pytest.approx(0.10 + 0.6 * 0.10)  # rank 3.6 of 0.01 0.02 0.04 0.10 0.20
    assert errors.bias == pytest.approx(0.03)
    assert errors_of([]) == Errors(count=0, median_abs_error=None, p90_abs_error=None, bias=None)


def test_sources_count_alike_however_many_rows_they_have():
    scores = scores_of(compare_rows(read_records(RUNS))[0], confidence=TRUSTED)
    others = [score for score in scores if score.group == "others" and score.memory.count]
    medians = sorted(score.memory.median_abs_error for score in others)
    assert group_score(scores, "others").memory.median_abs_error in (*medians, sum(medians) / 2)


def test_only_trusted_rows_are_evidence():
    compared, _ = compare_rows(read_records(RUNS))
    trusted, all_rows = (
        sum(score.memory.count for score in scores_of(compared, confidence=levels))
        for levels in (TRUSTED, (*TRUSTED, "low", ""))
    )
    assert all_rows == trusted + 1


def test_an_oom_row_has_a_verdict_and_no_error():
    compared, _ = compare_rows(read_records(RUNS))
    oom = next(one for one in compared if one.row.oom)
    assert oom.memory_error is None
    assert oom.fits is False
    total = group_score(scores_of(compared, confidence=TRUSTED), "others")
    assert (total.oom, total.oom_not_fit) == (1, 1)


@pytest.mark.parametrize(
    "name", ["full-one-device", "lora-logits-decide", "full-fsdp-two", "qlora-fsdp-frozen"]
)
def test_runs_with_all_facts_stated_are_within_a_twentieth(name):
    told = compare_row(next(row for row in read_records(RUNS) if row.id == name), left_out=False)
    assert told.memory_error == pytest.approx(0, abs=0.05)


def test_the_score_is_that_of_the_estimate_and_of_nothing_else(monkeypatch):
    """memory_of 10 % larger: every predicted byte is. Where it raises, nothing is predicted."""
    rows = read_records(RUNS)
    before, _ = compare_rows(rows)
    real = memory.memory_of

    def tenth_more(terms):
        return {name: size * 11 // 10 for name, size in terms.items()}

    def larger(step):
        found = real(step)
        phases = {phase: tenth_more(terms) for phase, terms in found.phases.items()}
        return replace(found, phases=phases, outside=tenth_more(found.outside))

    monkeypatch.setattr(score, "memory_of", larger)
    for one, other in zip(before, compare_rows(rows)[0], strict=True):
        assert other.predicted_bytes == pytest.approx(1.1 * one.predicted_bytes, rel=0.01)
    monkeypatch.setattr(score, "memory_of", real)
    monkeypatch.setattr(memory, "loss_moments", lambda step, gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        compare_rows(rows)


def test_rows_that_cannot_be_represented_are_listed_and_the_others_are_compared():
    """No plan has the one's optimizer; the other's cannot be made: by an error of more than one line."""
    rows = read_records(RUNS)
    muon = replace(rows[0], id="muon", facts=_without_shapes(model="Qwen/Qwen3-0.6B", optimizer="Muon"))
    fitted = replace(rows[0], id="fitted", facts=_without_shapes(model="Qwen/Qwen3-Next-80B-A3B-Instruct"))
    before, skipped = compare_rows(rows)
    compared, listed = compare_rows([muon, fitted, *rows])
    assert compared == before
    assert [row for row, _ in listed] == [muon, fitted, *(row for row, _ in skipped)]
    for words, (_, reason) in zip(("optimizer 'muon'", "Liger's kernels are fitted"), listed, strict=False):
        assert words in reason
        assert "\n" not in reason


def test_a_traced_model_of_a_row_keeps_the_hyphens_of_its_name():
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    # a trainer without dropout: a profile of that is shipped
    own = {"source": "huggingface trainer", "must_assume": "", "notes": ""}
    facts = _without_shapes(model=name, lora_targets="all-linear", **own)
    row = Row(id="next", line=1, source="", facts=facts)
    assert plan_of(row).model_path == name
    assert compare_row(row, left_out=False).predicted_bytes


def _without_shapes(**different):
    """A row of QLoRA whose model is known by its name alone."""
    facts = next(row.facts for row in read_records(RUNS) if row.id == "qlora-fsdp-frozen")
    shapes = ("params_b", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    return {**facts, **dict.fromkeys(shapes), **different}


def check(*words, fails=False):
    result = CliRunner().invoke(app, ["records", "check", str(RUNS), *words])
    assert bool(result.exit_code) == fails
    return result


def test_the_command_says_what_was_compared_and_what_was_not():
    """Which keys its JSON has: tests/cli/test_json_page.py."""
    data = json.loads(check("--json").stdout)
    assert (data["rows"], data["represented"]) == (13, 11)
    assert data["fitune"]["all"]["memory"]["bias"] is None
    assert {one["id"] for one in data["skipped"]} == {"tensor-parallel", "length-not-stated"}
    text = check("--rows", "--leave-one-out").stdout
    for words in ("without what was learnt", "tensor-parallel: tp = 8", "full-one-device"):
        assert words in text


def test_a_confidence_that_is_none_is_refused():
    assert "did you mean 'high'" in str(check("--confidence", "hihg", fails=True).exception)


def test_leave_one_out_takes_speeds_from_other_sources():
    """Three rows alike by two sources: the second's measured speed is half of the first's, and so is the correction."""
    facts = next(row.facts for row in read_records(RUNS) if row.id == "full-one-device")
    rows = [
        Row(id=source, line=1, source=source, facts={**facts, "must_assume": None, "tok_s_per_gpu": measured})
        for source, measured in (("someone", 1000.0), ("another", 500.0))
    ]
    compared, _ = compare_rows(rows, leave_one_out=True)
    assert [one.predicted_speed for one in compared] == pytest.approx([500.0, 1000.0])
    alone, _ = compare_rows(rows[:1], leave_one_out=True)
    assert alone[0].predicted_speed is None


def test_a_run_of_ours_is_priced_by_the_estimate_as_it_is():
    """No switch of another trainer, recompute and chunk as planned."""
    facts = next(row.facts for row in read_records(RUNS) if row.id == "lora-logits-decide")
    source = "fitune results"
    ours = {"source": source, "must_assume": None, "recompute_blocks": 8, "loss_chunk_tokens": 512}
    row = Row(id="ours", line=1, source=source, facts=facts | ours)
    plan, told = plan_of(row), compare_row(row, left_out=False)
    assert plan.recompute == Recompute(blocks=8)
    assert plan.loss == ChunkedLoss(chunk_tokens=512)
    expected = predict_memory(plan)
    assert told.group == "fitune"
    assert told.predicted_bytes == expected.tensor_peak_bytes + expected.outside["cuBLAS workspace"]
    assert told.predicted_speed == pytest.approx(16384 / predict_step_time(plan).step_seconds)


def test_results_of_ours_are_compared_as_they_were_recorded():
    compared, skipped = compare_rows(
        [row for name in ("cpu_methods.json", "step_time_cpu.json") for row in read_records(RESULTS / name)]
    )
    assert skipped == []
    assert {one.group for one in compared} == {"fitune"}
    memory_score, time_score = scores_of(compared, confidence=TRUSTED)
    assert memory_score.memory.median_abs_error < 0.01
    assert time_score.speed.count == len(compared) - 95


def test_a_results_file_without_predictions_is_counted_and_not_refused():
    compared, skipped = compare_rows(read_records(RESULTS / "vs_trl_cpu.json"))
    assert (len(compared), len(skipped)) == (0, 3)
    assert all("not stated" in why or "not known" in why for _, why in skipped)
