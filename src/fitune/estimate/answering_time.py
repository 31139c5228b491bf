"""Seconds of answering, by the rates of training: prompts are read at the speed of products, tokens written at the
speed at which weights, keys and values are read.

Every answer is taken to be as long as it may be: an upper bound.
"""

from dataclasses import dataclass, replace

from fitune.estimate.answering import (
    AnsweringMemory,
    adapter_bytes,
    kv_bytes,
    pooled_bytes,
    rows_at_once,
    weights_bytes,
)
from fitune.estimate.blocks.eager import elementwise_passes
from fitune.estimate.rates import Rates, rates_of
from fitune.estimate.time import roofline
from fitune.estimate.transfers import COLLECTIVE_SECONDS, HOP_SECONDS, LINK_EFFICIENCY
from fitune.estimate.work import Work, count_in_large
from fitune.values.answering import CACHE_ROOM, NARROW, Answering, Questions

VLLM_START_SECONDS = 60.0
"""From its start to the first row beside reading weights: compiling and capturing graphs. Not measured by us."""
VLLM_STEP_SECONDS = 2e-3
"""Scheduling and sampling of a step. Not measured by us."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringTime:
    """Seconds of the whole job by part, and what limits each."""

    rows_at_once: int
    reading_seconds: float
    writing_seconds: float
    start_seconds: float
    reading_limit: str
    writing_limit: str
    reading_rate: float
    """Tokens of prompts read in a second."""
    writing_rate: float
    """Tokens of answers written in a second."""

    @property
    def seconds(self) -> float:
        """From the start of the engine to the last answer."""
        return self.start_seconds + self.reading_seconds + self.writing_seconds


def time_of_answering(answering: Answering, questions: Questions, memory: AnsweringMemory) -> AnsweringTime:
    """Seconds of the rows of ``questions``: prompts by batches, then one step for each token of a batch."""
    rows = rows_at_once(answering, questions, memory)
    rates = _rates(answering)
    prompt = max(1, round(questions.mean_prompt))
    batches = max(1.0, questions.rows / rows)
    reading = _pass(answering, rates, rows=rows, tokens=prompt, width=prompt)
    read_once, reading_limit = _seconds(answering, rates, reading, rows * prompt)
    width = prompt + questions.new_tokens // 2
    writing = _pass(answering, rates, rows=rows, tokens=1, width=width)
    step, writing_limit = _seconds(answering, rates, writing, rows)
    steps = max(0, questions.new_tokens - 1)  # reading a prompt writes the first token
    return AnsweringTime(
        rows_at_once=rows,
        reading_seconds=batches * read_once,
        writing_seconds=batches * steps * step,
        start_seconds=VLLM_START_SECONDS if answering.engine == "vllm" else 0.0,
        reading_limit=reading_limit,
        writing_limit=writing_limit,
        reading_rate=rows * prompt / read_once,
        writing_rate=rows / step,
    )


def _rates(answering: Answering) -> Rates:
    """Rates of one device; a narrow model on a CPU is answered by one thread of the transformers engine."""
    hardware = answering.hardware
    rates = rates_of(hardware, answering.precision)
    calibration = hardware.calibration
    threads = max(1, hardware.cpu_cores if calibration is None else calibration.threads)
    narrow = (
        hardware.gpu.is_cpu and answering.model.hidden_size <= NARROW and answering.engine == "transformers"
    )
    if not narrow or threads == 1:
        return rates
    return replace(rates, flops=rates.flops / threads, attention_flops=rates.attention_flops / threads)


def _pass(answering: Answering, rates: Rates, *, rows: int, tokens: int, width: int) -> Work:
    """One forward over ``tokens`` of each row behind which ``width`` columns are seen, on one of ``devices``."""
    model, e, parts = answering.model, answering.precision.compute_bytes, answering.devices
    t = rows * tokens
    between, _ = elementwise_passes(model, element_bytes=e, fused=answering.engine == "vllm")
    flops = sum(
        2.0 * m.in_features * m.out_features * m.active_copies * n for m, n in model.counted_linears()
    )
    products = sum(n for _, n in model.counted_linears())
    head = 2.0 * rows * model.hidden_size * model.vocab_size
    grows = answering.engine == "transformers"
    kv = (
        kv_bytes(answering, rows=rows, width=width) / parts
        if grows
        else rows * pooled_bytes(answering, width)
    )
    square = (
        1.0 if answering.engine == "transformers" else 0.5
    )  # a mask is computed whole, a causal kernel by half
    pairs = square * rows * tokens * (width + rates.attention_row_tokens) if tokens > 1 else 0.0
    width = sum(model.attention_of(block).width for block in range(model.num_layers))
    attention = 4.0 * width * pairs / parts / rates.attention_flops
    copied = 0.0 if not grows else 1.0 if tokens > 1 else 1 / CACHE_ROOM  # share of the cache
    kept = kv / (2 * model.num_layers)
    return Work(
        product_flops=(t * flops + head) / parts,
        products=products + 1,
        attention_seconds=attention,
        bytes=model.num_layers * t * between.bytes / parts + 2 * kv * copied,
        tensor_bytes=max(t * e * model.hidden_size, kept if grows else 0.0),
        bytes_in_place=_weights_read(answering, rows=t) + kv,
        logits=rows * model.vocab_size,
        new_bytes=2 * model.num_layers * count_in_large(kept) * copied,
        forward_operations=model.num_layers * (between.operations + _CACHE_OPERATIONS) + products
        if grows
        else 0.0,
        python_seconds=rates.forward_start_seconds if grows else 0.0,
    )


_CACHE_OPERATIONS = 4
"""Operations of one block: keys and values joined, and the checks of their cache."""


def _weights_read(answering: Answering, *, rows: int) -> float:
    """Bytes of weights that one pass reads on one device: of experts those that ``rows`` tokens visit.

    Routed evenly, (1 − chosen / all)^rows of them are left out.
    """
    e = answering.precision.compute_bytes
    unread = sum(
        n * m.weights * (1 - m.active_copies / m.copies) ** rows
        for m, n in answering.model.counted_linears()
        if m.copies > 1
    )
    table = 0 if answering.model.tied_embeddings else answering.model.vocab_size * answering.model.hidden_size
    return weights_bytes(answering) + adapter_bytes(answering) - (unread + table) * e / answering.devices


def _seconds(answering: Answering, rates: Rates, work: Work, tokens: int) -> tuple[float, str]:
    own, limit = roofline(rates, work)
    sent = _all_reduce_seconds(answering, tokens=tokens)
    planned = VLLM_STEP_SECONDS if answering.engine == "vllm" else 0.0
    return own + sent + planned, "communication" if sent > own else limit


def _all_reduce_seconds(answering: Answering, *, tokens: int) -> float:
    """Two in each block: 2·(N − 1)/N · tokens · h · e over the link to a neighbour, as a ring sends."""
    ranks, gpu = answering.devices, answering.hardware.gpu
    if ranks == 1:
        return 0.0
    size = 2 * (ranks - 1) / ranks * tokens * answering.model.hidden_size * answering.precision.compute_bytes
    once = COLLECTIVE_SECONDS + HOP_SECONDS * (ranks - 1) + size / (gpu.link_bandwidth * LINK_EFFICIENCY)
    return 2 * answering.model.num_layers * once
