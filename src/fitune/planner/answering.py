"""The fastest way to answer a dataset: the engine, its devices within a node, and the largest batch that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fitune.errors import NothingFits
from fitune.estimate.answering import AnsweringMemory, memory_of_answering, rows_that_fit
from fitune.estimate.answering_time import AnsweringTime, time_of_answering
from fitune.planner.explain import unit_for, verdict
from fitune.units import (
    format_bytes,
    format_count,
    format_dollars,
    format_rate,
    format_seconds,
    wrapped,
)
from fitune.values.answering import (
    ROWS_AT_ONCE,
    Adapter,
    Answering,
    PlannedEngine,
    Questions,
    answering_precision,
)
from fitune.values.counts import count_parameters
from fitune.values.machines.hardware import Hardware
from fitune.values.model.model_spec import ModelSpec
from fitune.values.words import devices_with_memory

_MOST_ROWS = 65_536
"""The largest --batch-size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAnswering:
    """A way to answer, with its bytes and seconds."""

    answering: Answering
    memory: AnsweringMemory
    time: AnsweringTime

    def data(self) -> dict[str, Any]:
        """An engine's bytes and rates, as ``--json`` prints them."""
        answering, memory, time = self.answering, self.memory, self.time
        return {
            "engine": answering.engine, "devices": answering.devices, "precision": answering.precision.value,
            "batch_size": answering.batch_size, "rows_at_once": time.rows_at_once,
            "peak_bytes": memory.peak_bytes, "usable_bytes": memory.usable_bytes,
            "reading": memory.reading, "writing": memory.writing, "outside": memory.outside,
            "entering_bytes": memory.entering, "seconds": time.seconds,
            "reading_tokens_per_second": time.reading_rate, "writing_tokens_per_second": time.writing_rate,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringReport:
    """The way that is taken, the other ways that fit, and why the rest do not."""

    questions: Questions
    chosen: PricedAnswering
    largest_batch: int
    """Rows at once that fit; 0 where the engine decides that itself."""
    others: tuple[PricedAnswering, ...]
    rejected: tuple[tuple[str, str], ...]
    price_per_gpu_hour: float = 0.0
    """US dollars; 0 when it is not known."""

    @property
    def cost(self) -> float:
        """US dollars; 0 where no price is known."""
        return self.chosen.time.seconds / 3600 * self.price_per_gpu_hour * self.chosen.answering.devices

    def text(self) -> str:
        """The way that is taken with its bytes and rates, the time on the data, the other ways, what does not fit."""
        title, *taken = _taken(self)
        text = [wrapped(title, indent=0, hanging=2), *(wrapped(line, hanging=2) for line in taken)]
        others = [
            f"{name_of(each.answering)}: {format_seconds(each.time.seconds)}, {each.time.rows_at_once:,} rows at once, "
            f"writes {format_rate(each.time.writing_rate)}, {format_bytes(each.memory.peak_bytes)} on each device"
            for each in self.others
        ]
        rejected = [f"{name}: {why}" for name, why in self.rejected]
        for heading, lines in (
            ("On your data", list(_on_data(self))),
            ("Also fits", others),
            ("Does not fit", rejected),
        ):
            if lines:
                text += ["", heading, *(wrapped(line, hanging=2) for line in lines)]
        return "\n".join(text)

    def data(self) -> dict[str, Any]:
        """The object that ``--json`` prints."""
        questions = self.questions
        return {
            "model": self.chosen.answering.model.name,
            "rows": questions.rows,
            "prompt_tokens": questions.prompt_tokens,
            "longest_prompt": questions.longest_prompt,
            "most_new_tokens": questions.new_tokens,
            "guess": questions.guess,
            "chosen": self.chosen.data(),
            "largest_batch": self.largest_batch,
            "cost": self.cost or None,
            "others": [each.data() for each in self.others],
            "does_not_fit": dict(self.rejected),
        }


def plan_answering(
    model: ModelSpec,
    questions: Questions,
    hardware: Hardware,
    *,
    engines: Sequence[PlannedEngine],
    batch_size: int,
    adapter: Adapter,
    price: float,
) -> AnsweringReport:
    """The fastest of ``engines`` that fits on one node of ``hardware``. ``batch_size`` 0: as many rows at once as fit,
    at most ``ROWS_AT_ONCE``.

    Raises NothingFits with the arithmetic when none does, ModelError for a model whose state is not known.
    """
    asked = Answering(
        engine="transformers", model=model, hardware=hardware, precision=answering_precision(hardware),
        batch_size=batch_size, adapter=adapter,
    )  # fmt: skip
    if not batch_size:
        rows = rows_that_fit(asked, questions, most=ROWS_AT_ONCE)
        asked = replace(asked, batch_size=rows or 1)
    found = [
        priced(replace(asked, engine=engine, devices=devices), questions)
        for engine in engines
        for devices in _device_counts(engine, asked)
    ]
    fitting = sorted((each for each in found if each.memory.fits), key=lambda each: each.time.seconds)
    rejected = [each for each in found if not each.memory.fits]
    reasons = tuple((name_of(each.answering), bytes_sum(each.memory)) for each in rejected)
    if not fitting:
        lines = [
            f"nothing fits on {devices_with_memory(hardware)}:",
            *(f"{name}: {why}" for name, why in reasons),
        ]
        raise NothingFits("\n  ".join(lines), hint=_smaller(asked, questions, rejected))
    chosen = fitting[0]
    return AnsweringReport(
        questions=questions,
        chosen=chosen,
        largest_batch=_largest_batch(chosen.answering, questions),
        others=tuple(fitting[1:]),
        rejected=reasons,
        price_per_gpu_hour=price,
    )


def priced(answering: Answering, questions: Questions) -> PricedAnswering:
    """Returns the bytes and seconds of a way to answer."""
    memory = memory_of_answering(answering, questions)
    return PricedAnswering(
        answering=answering, memory=memory, time=time_of_answering(answering, questions, memory)
    )


def _device_counts(engine: PlannedEngine, asked: Answering) -> Iterator[int]:
    """1 of transformers; of vLLM every power of two within the node that divides the heads of queries."""
    yield 1
    if engine == "vllm" and not asked.hardware.gpu.is_cpu:
        model, count = asked.model, 2
        while count <= asked.hardware.gpus_per_node:
            keys_divide = not (model.num_kv_heads % count and count % model.num_kv_heads)
            if model.num_heads % count == 0 and keys_divide:
                yield count
            count *= 2


def _largest_batch(answering: Answering, questions: Questions) -> int:
    """Rows at once that fit; 0 where not even one does, or vLLM decides."""
    return 0 if answering.engine == "vllm" else rows_that_fit(answering, questions, most=_MOST_ROWS)


def _smaller(asked: Answering, questions: Questions, rejected: Sequence[PricedAnswering]) -> str:
    """The next thing to try where nothing fits."""
    if any(each.answering.engine == "transformers" for each in rejected):
        if rows := _largest_batch(asked, questions):
            return f"--batch-size {rows}"
        if memory_of_answering(replace(asked, batch_size=1), replace(questions, rows=1, new_tokens=1)).fits:
            return "a smaller --max-new-tokens with --batch-size 1"
    if asked.hardware.gpu.is_cpu:
        return "a machine with more memory; --gpu plans for a card that is elsewhere"
    if any(each.answering.engine == "vllm" for each in rejected):
        return "more devices in the node (--gpus), or a larger --gpu"
    return "--engine vllm divides the weights over the devices of a node; or a larger device"


def name_of(answering: Answering) -> str:
    """``vllm over 4 devices``."""
    return answering.engine + (f" over {answering.devices} devices" if answering.devices > 1 else "")


def bytes_sum(memory: AnsweringMemory) -> str:
    """``weights 14.96 + keys and values 4.10 + … = 25.30 GiB writing, 22.49 usable, 2.81 short``."""
    writes = sum(memory.writing.values()) >= sum(memory.reading.values())
    terms = {**(memory.writing if writes else memory.reading), **memory.outside}
    terms |= {"rows that enter": memory.entering} if memory.entering else {}
    left = verdict(memory.peak_bytes, memory.usable_bytes, unit_for(memory.peak_bytes)[0], digits=2)
    return f"{_sum(terms, memory.peak_bytes)} {'writing' if writes else 'reading'}, {left}"


def _sum(terms: dict[str, int], total: int) -> str:
    unit, name = unit_for(total)
    shown = [f"{term} {size / unit:,.2f}" for term, size in terms.items() if size >= unit / 200]
    return f"{' + '.join(shown)} = {total / unit:,.2f} {name}"


def _taken(report: AnsweringReport) -> Iterator[str]:
    chosen, answering = report.chosen, report.chosen.answering
    model, hardware, memory = answering.model, answering.hardware, report.chosen.memory
    parameters = format_count(count_parameters(model).total)
    yield f"{model.name} · {parameters} parameters · on {devices_with_memory(hardware)}"
    size = answering.adapter.elements
    adapter = f", adapter of {format_count(size)} parameters" if size else ""
    yield f"{name_of(answering)}, {answering.precision.value}{adapter}, {chosen.time.rows_at_once:,} rows at once"
    if memory.reading != memory.writing:
        for what, terms in (("reading prompts", memory.reading), ("writing answers", memory.writing)):
            yield f"{what}: {_sum(terms, sum(terms.values()))}"
    yield f"peak: {bytes_sum(memory)}"
    if report.largest_batch:
        yield f"at most {report.largest_batch:,} rows at once fit (--batch-size, {answering.batch_size} now)"
    yield (
        f"reads {format_rate(chosen.time.reading_rate)} ({chosen.time.reading_limit}), writes "
        f"{format_rate(chosen.time.writing_rate)} ({chosen.time.writing_limit}) · {hardware.rates}"
    )


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
    """Rows, and tokens of prompts and answers."""
    guess = f"; guessed {questions.guess}" if questions.guess else ""
    return (
        f"{questions.rows:,} rows: prompts of {questions.mean_prompt:,.0f} tokens on average, the longest "
        f"{questions.longest_prompt:,}, {format_count(questions.prompt_tokens)} in all; answers of at most "
        f"{questions.new_tokens:,}, {format_count(questions.most_new_tokens)} in all{guess}"
    )
