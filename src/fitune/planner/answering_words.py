"""The plan of answering a dataset as text for people and as data for programs."""

from collections.abc import Iterator
from typing import Any

from fitune.planner.answering import AnsweringReport, PricedAnswering, bytes_sum, name_of
from fitune.planner.reasons.explain import unit_for
from fitune.spec.answering import Questions
from fitune.spec.counts import count_parameters
from fitune.spec.words import devices_with_memory
from fitune.units import format_bytes, format_count, format_dollars, format_rate, format_seconds, wrapped


def explain_answering(report: AnsweringReport) -> str:
    """The way that is taken with its bytes and rates, the time on the data, the other ways, what does not fit."""
    title, *taken = _taken(report)
    sections = [
        "\n".join([wrapped(title, indent=0, hanging=2), *(wrapped(line, hanging=2) for line in taken)]),
        "\n".join(["On your data", *(wrapped(line, hanging=2) for line in _on_data(report))]),
    ]
    others = [f"{name_of(each.answering)}: {_speed(each)}" for each in report.others]
    rejected = [f"{name}: {why}" for name, why in report.rejected]
    for title, lines in (("Also fits", others), ("Does not fit", rejected)):
        if lines:
            sections.append("\n".join([title, *(wrapped(line, hanging=2) for line in lines)]))
    return "\n\n".join(sections)


def _taken(report: AnsweringReport) -> Iterator[str]:
    chosen, answering = report.chosen, report.chosen.answering
    model, hardware, memory = answering.model, answering.hardware, report.chosen.memory
    parameters = format_count(count_parameters(model).total)
    yield f"{model.name} · {parameters} parameters · on {devices_with_memory(hardware)}"
    size = answering.adapter.elements
    adapter = f", adapter of {format_count(size)} parameters" if size else ""
    yield f"{name_of(answering)}, {answering.precision.value}{adapter}, {chosen.time.rows_at_once:,} rows at once"
    if memory.reading != memory.writing:
        yield f"reading prompts: {_sum(memory.reading)}"
        yield f"writing answers: {_sum(memory.writing)}"
    yield f"peak: {bytes_sum(memory)}"
    if report.largest_batch:
        yield f"at most {report.largest_batch:,} rows at once fit (--batch-size, {answering.batch_size} now)"
    yield (
        f"reads {format_rate(chosen.time.reading_rate)} ({chosen.time.reading_limit}), writes "
        f"{format_rate(chosen.time.writing_rate)} ({chosen.time.writing_limit}) · {hardware.rates}"
    )


def _sum(terms: dict[str, int]) -> str:
    total = sum(terms.values())
    unit, name = unit_for(total)
    shown = [f"{term} {size / unit:,.2f}" for term, size in terms.items() if size >= unit / 200]
    return f"{' + '.join(shown)} = {total / unit:,.2f} {name}"


def _on_data(report: AnsweringReport) -> Iterator[str]:
    questions, time = report.questions, report.chosen.time
    yield rows_line(questions)
    parts = {"start": time.start_seconds, "reading": time.reading_seconds, "writing": time.writing_seconds}
    shown = [f"{name} {format_seconds(seconds)}" for name, seconds in parts.items() if seconds]
    cost = f" for {format_dollars(report.cost)}" if report.cost else ""
    yield (
        f"{' + '.join(shown)} = {format_seconds(time.seconds)}{cost} without loading the model: an upper bound, as if "
        f"every answer had {questions.new_tokens:,} tokens (--max-new-tokens)"
    )
    if report.cost:
        yield f"{format_dollars(report.price_per_gpu_hour)} per GPU-hour (assumed)"


def rows_line(questions: Questions) -> str:
    guess = f"; guessed {questions.guess}" if questions.guess else ""
    return (
        f"{questions.rows:,} rows: prompts of {questions.mean_prompt:,.0f} tokens on average, the longest "
        f"{questions.longest_prompt:,}, {format_count(questions.prompt_tokens)} in all; answers of at most "
        f"{questions.new_tokens:,}, {format_count(questions.most_new_tokens)} in all{guess}"
    )


def _speed(each: PricedAnswering) -> str:
    return (
        f"{format_seconds(each.time.seconds)}, {each.time.rows_at_once:,} rows at once, writes "
        f"{format_rate(each.time.writing_rate)}, {format_bytes(each.memory.peak_bytes)} on each device"
    )


def answering_data(report: AnsweringReport) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    questions = report.questions

    def data(each: PricedAnswering) -> dict[str, Any]:
        return {
            "engine": each.answering.engine, "devices": each.answering.devices,
            "precision": each.answering.precision.value, "rows_at_once": each.time.rows_at_once,
            "peak_bytes": each.memory.peak_bytes, "usable_bytes": each.memory.usable_bytes,
            "reading": each.memory.reading, "writing": each.memory.writing, "outside": each.memory.outside,
            "entering_bytes": each.memory.entering, "seconds": each.time.seconds,
            "reading_tokens_per_second": each.time.reading_rate, "writing_tokens_per_second": each.time.writing_rate,
        }  # fmt: skip

    return {
        "model": report.chosen.answering.model.name,
        "rows": questions.rows,
        "prompt_tokens": questions.prompt_tokens,
        "longest_prompt": questions.longest_prompt,
        "most_new_tokens": questions.new_tokens,
        "guess": questions.guess,
        "chosen": data(report.chosen),
        "largest_batch": report.largest_batch,
        "cost": report.cost or None,
        "others": [data(each) for each in report.others],
        "does_not_fit": dict(report.rejected),
    }
