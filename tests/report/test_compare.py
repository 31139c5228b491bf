"""Predicted next to measured: the same words, the same numbers, errors with the right sign."""

import dataclasses

import pytest

from fitune.report.compare import Figure, compare, comparison_table
from fitune.values.predictions import MemoryBreakdown, Phase
from fitune.values.reports import MeasuredMemory

MIB = 1024**2


def by_name(*facts):
    return {row.what: row for row in compare(*facts)}


def test_each_phase_is_the_sum_of_its_terms(prediction, run_report):
    rows = by_name(prediction.estimate, run_report)
    assert rows["Backward"].predicted == (43 + 3 + 6 + 231 + 8 + 118 + 3) * MIB
    assert rows["Backward"].measured == 405 * MIB
    assert rows["Peak of tensors"].predicted == 412 * MIB
    assert rows["Peak of tensors"].error == pytest.approx(412 / 405 - 1)


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [(110, 100, 0.1), (90, 100, -0.1), (None, 100, None), (1, None, None), (1, 0, None)],
)
def test_an_error_is_positive_when_too_much_was_predicted(predicted, measured, error):
    found = Figure(what="x", predicted=predicted, measured=measured, unit="bytes").error
    assert found == (error and pytest.approx(error))


def test_the_process_is_predicted_only_when_what_lies_outside_the_tensors_is(prediction, run_report):
    """torch's count of reserved bytes is held against its own: without the driver's context."""
    assert by_name(prediction.estimate, run_report)["Process (resident set)"].predicted is None
    memory = MemoryBreakdown(
        phases=prediction.estimate.memory.phases,
        outside={"CUDA context": 500 * MIB, "cuBLAS workspace": 8 * MIB},
        reclaimable=30 * MIB,
    )
    for usable, reserved, segments in (
        (2000, 412 + 8 + 30, None),
        (920 + 10, 412 + 8 + 10, None),
        (100, 420, False),
    ):
        on_cuda = MeasuredMemory(
            kind="cuda allocated",
            phases={Phase.IDLE: 1},
            process_bytes=900 * MIB,
            expandable_segments=segments,
        )
        estimate = dataclasses.replace(prediction.estimate, memory=memory, usable_bytes=usable * MIB)
        rows = by_name(estimate, dataclasses.replace(run_report, memory=on_cuda))
        what = "reserved on the device" + ", without expandable segments" * (segments is False)
        assert rows[f"Process ({what})"].predicted == reserved * MIB
        assert rows["Peak of tensors"].predicted == (412 + 8) * MIB


def test_cudas_count_of_tensors_has_cublas_workspace_among_them(prediction, run_report):
    """Seen on the null GPU: allocated peaks are the tensors and 32 MiB on compute capability 9, 8.1 MiB before."""
    memory = dataclasses.replace(prediction.estimate.memory, outside={"cuBLAS workspace": 8 * MIB})
    estimate = dataclasses.replace(prediction.estimate, memory=memory)
    on_cuda = MeasuredMemory(kind="cuda allocated", phases={Phase.BACKWARD: 420 * MIB}, process_bytes=0)
    for counted, beside in ((run_report.memory, 0), (on_cuda, 8)):
        rows = by_name(estimate, dataclasses.replace(run_report, memory=counted))
        assert rows["Peak of tensors"].predicted == (412 + beside) * MIB
        assert rows["Backward"].predicted == (412 + beside) * MIB
    assert rows["Peak of tensors"].error == 0


def test_a_run_without_a_report_is_measured_by_its_steps(prediction, steps):
    rows = by_name(prediction.estimate, None, steps)
    settled = [step for step in steps[1:] if not step.memory_bytes]  # counting bytes slows a step
    seconds = sum(step.step_seconds for step in settled)
    assert len(settled) < len(steps) - 1
    assert rows["Backward"].measured == 405 * MIB
    assert rows["Time of a step"].measured == pytest.approx(seconds / len(settled))
    assert rows["Throughput"].measured == pytest.approx(sum(step.tokens for step in settled) / seconds)


def test_without_a_prediction_the_measurement_is_still_shown(run_report):
    rows = by_name(None, run_report)
    assert rows["Backward"].measured == 405 * MIB
    assert all(row.predicted is None and row.error is None for row in rows.values())
    assert all(row.measured is None for row in compare(None, None))


def test_the_table_lines_up_to_the_right(prediction, run_report, steps):
    table = comparison_table(compare(prediction.estimate, run_report, steps))
    lines = table.splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["predicted", "measured", "error"]
    assert "Peak of tensors" in lines[6]
    assert lines[6].split()[-6:] == ["412.0", "MiB", "405.0", "MiB", "+1.7", "%"]
    assert "2,133 tokens/s  2,156 tokens/s" in table
