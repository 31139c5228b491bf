"""The fastest way to answer a dataset: the engine, its devices within a node, and the largest batch that fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.errors import NothingFits
from fitune.estimate.answering import AnsweringMemory, memory_of_answering, rows_that_fit
from fitune.estimate.answering_time import AnsweringTime, time_of_answering
from fitune.planner.reasons.explain import verdict
from fitune.spec.answering import (
    ROWS_AT_ONCE,
    Adapter,
    Answering,
    PlannedEngine,
    Questions,
    answering_precision,
)
from fitune.spec.machines.hardware import Hardware
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.words import devices_with_memory
from fitune.units import GIB, MIB

_MOST_ROWS = 65_536
"""The largest --batch-size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedAnswering:
    """A way to answer, with its bytes and seconds."""

    answering: Answering
    memory: AnsweringMemory
    time: AnsweringTime


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
        return self.chosen.time.seconds / 3600 * self.price_per_gpu_hour * self.chosen.answering.devices


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
    if not fitting:
        raise NothingFits(
            "\n  ".join(
                [
                    f"nothing fits on {devices_with_memory(hardware)}:",
                    *(f"{name_of(each.answering)}: {bytes_sum(each.memory)}" for each in rejected),
                ]
            ),
            hint=_smaller(asked, questions, rejected),
        )
    chosen = fitting[0]
    return AnsweringReport(
        questions=questions,
        chosen=chosen,
        largest_batch=_largest_batch(chosen.answering, questions),
        others=tuple(fitting[1:]),
        rejected=tuple((name_of(each.answering), bytes_sum(each.memory)) for each in rejected),
        price_per_gpu_hour=price,
    )


def priced(answering: Answering, questions: Questions) -> PricedAnswering:
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
    if not asked.hardware.gpu.is_cpu and any(each.answering.engine == "vllm" for each in rejected):
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
    unit, name = (GIB, "GiB") if memory.peak_bytes >= GIB else (MIB, "MiB")
    shown = [f"{term} {size / unit:,.2f}" for term, size in terms.items() if size >= unit / 200]
    return (
        f"{' + '.join(shown)} = {memory.peak_bytes / unit:,.2f} {name} "
        f"{'writing' if writes else 'reading'}, {verdict(memory.peak_bytes, memory.usable_bytes, unit, digits=2)}"
    )
