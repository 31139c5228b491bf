"""Answers by transformers' own ``generate``: batches padded on the left, stopped at every end-of-turn token.

An answer depends on its prompt, the weights and the sampling, never on what else is in the batch: padding is
masked, positions count from the first real token, and random draws come from a generator of the row's own.
Up to rounding, that is: where the two best tokens are closer than the rounding of a matrix product, a batch of
another shape may choose the other one. In fp32 on a CPU that is not seen in practice.
With longrope (Phi-3.5, Phi-4-mini) transformers turns all rows of a call by the factors of the longest, so rows on
both sides of its boundary never share a batch, and an answer that could cross the boundary is written alone.

Shapes: B prompts of a batch, T tokens of its longest prompt, V vocabulary.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from fitune.data.templates import ChatTemplate
from fitune.models.attention import longrope_boundary, use_cached_attention
from fitune.score.tasks import Task

_NARROW = 512
"""Hidden size up to which a second thread brings nothing when tokens are written one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the most likely token; then ``top_p`` and ``seed`` are idle."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A model's answer to one task. ``error`` is empty, or why there is no answer."""

    task: Task
    text: str
    finish_reason: Literal["stop", "length", "error"]
    completion_tokens: int
    error: str = ""


def answer_all(
    model: Any,
    tokenizer: Any,
    template: ChatTemplate,
    tasks: Sequence[Task],
    sampling: Sampling,
    *,
    batch_size: int = 16,
    on_answers: Callable[[int], None] = lambda count: None,
) -> list[Answer]:
    """Answer every task, in the order given; batches are made of prompts of similar length.

    ``model`` is a PreTrainedModel or PeftModel on its device; its mode, attention and generation settings are as
    before when this returns. ``on_answers`` is called after each batch with the number of answers it brought.
    A prompt that leaves no room for ``max_new_tokens`` gets an Answer with an error.
    """
    context = context_tokens(model)
    answers: dict[int, Answer] = {}
    fitting = []
    for place, task in enumerate(tasks):
        problem = too_long(task, context=context, sampling=sampling)
        if problem:
            answers[place] = Answer(
                task=task, text="", finish_reason="error", completion_tokens=0, error=problem
            )
        else:
            fitting.append(place)
    if answers:
        on_answers(len(answers))
    fitting.sort(key=lambda place: len(tasks[place].prompt_ids))
    with _ready_to_generate(model, tokenizer, template) as stop_ids, _threads_for(model):
        for places in _batches(fitting, tasks, sampling, batch_size, longrope_boundary(model.config)):
            batch = [tasks[place] for place in places]
            answers.update(
                zip(places, _answer_batch(model, tokenizer, batch, sampling, stop_ids), strict=True)
            )
            on_answers(len(places))
    return [answers[place] for place in range(len(tasks))]


def _batches(
    places: Sequence[int], tasks: Sequence[Task], sampling: Sampling, batch_size: int, boundary: int
) -> Iterator[list[int]]:
    """Places, sorted by length, in batches whose rows stay on one side of ``boundary``; 0: there is none."""

    def side(place: int) -> str:
        prompt = len(tasks[place].prompt_ids)
        last_read = prompt + sampling.max_new_tokens - 1  # the last token that is written is not read again
        return (
            "short" if not boundary or last_read <= boundary else "long" if prompt > boundary else "crosses"
        )

    for where, group in itertools.groupby(places, side):
        alike, size = list(group), 1 if where == "crosses" else batch_size
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def context_tokens(model: Any) -> int:
    """Tokens the model has positions for; 0 when its config names no limit."""
    return int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 0)


def too_long(task: Task, *, context: int, sampling: Sampling) -> str:
    """Why the prompt cannot be answered, with the arithmetic; empty when it fits."""
    prompt, new = len(task.prompt_ids), sampling.max_new_tokens
    if not context or prompt + new <= context:
        return ""
    return f"prompt {prompt} + max_new_tokens {new} = {prompt + new} tokens, the model has room for {context}"


@contextmanager
def _ready_to_generate(model: Any, tokenizer: Any, template: ChatTemplate) -> Iterator[tuple[int, ...]]:
    """Evaluation mode, attention with a cache, no generation settings but ours; all undone afterwards.

    ``generate`` fills what a call leaves open from the model's own generation_config (Llama's has a temperature,
    others a repetition penalty), so that is set aside too. Yields the ids that end an answer.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    training, attention, settings = model.training, base.config._attn_implementation, base.generation_config
    stop_ids = _stop_ids(settings, template)
    try:
        model.eval()
        use_cached_attention(base)
        base.generation_config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=list(stop_ids),
            pad_token_id=_pad_id(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
        )
        yield stop_ids
    finally:
        model.train(training)
        if base.config._attn_implementation != attention:
            base.set_attn_implementation(attention)
        base.generation_config = settings


@contextmanager
def _threads_for(model: Any) -> Iterator[None]:
    """One thread for a narrow model on a CPU, as many as before for any other.

    One token at a time, its products take microseconds and the threads mostly wait for one another: 100 answers of
    the demo's model took 2.4 s with two threads on two idle cores, 146 s on busy ones, and 4 s there with one.
    """
    threads = torch.get_num_threads()
    narrow = model.device.type == "cpu" and model.config.get_text_config().hidden_size <= _NARROW
    torch.set_num_threads(1 if narrow else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _stop_ids(settings: GenerationConfig, template: ChatTemplate) -> tuple[int, ...]:
    """EOS and end-of-turn ids: those of the template and those the model's makers listed."""
    listed = settings.eos_token_id
    listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return tuple(sorted(template.stop_ids | set(listed)))


def _pad_id(tokenizer: Any) -> int:
    """Padding is masked, so any id does where the tokenizer has none of its own."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


@torch.inference_mode()
def _answer_batch(
    model: Any, tokenizer: Any, tasks: Sequence[Task], sampling: Sampling, stop_ids: tuple[int, ...]
) -> list[Answer]:
    prompts_BT, mask_BT = _padded_left(tasks, _pad_id(tokenizer), model.device)
    whole = model.generate(
        input_ids=prompts_BT,
        attention_mask=mask_BT,
        max_new_tokens=sampling.max_new_tokens,
        logits_processor=_choosers(tasks, sampling),
    )
    new = whole[:, prompts_BT.shape[1] :].tolist()
    return [_to_answer(task, ids, tokenizer, stop_ids) for task, ids in zip(tasks, new, strict=True)]


def _padded_left(tasks: Sequence[Task], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids [B, T] and a mask [B, T] of what is real; ``generate`` takes the positions from the mask."""
    longest = max(len(task.prompt_ids) for task in tasks)
    padding = [longest - len(task.prompt_ids) for task in tasks]
    ids = [[pad_id] * gap + list(task.prompt_ids) for gap, task in zip(padding, tasks, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in padding]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _to_answer(task: Task, ids: list[int], tokenizer: Any, stop_ids: tuple[int, ...]) -> Answer:
    end = next((place for place, token in enumerate(ids) if token in stop_ids), None)
    text = tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return Answer(
        task=task,
        text=text,
        finish_reason="length" if end is None else "stop",
        completion_tokens=len(ids) if end is None else end + 1,
    )


def _choosers(tasks: Sequence[Task], sampling: Sampling) -> LogitsProcessorList:
    """Processors of logits into scores whose largest is the token taken."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    choosers: list[LogitsProcessor] = [TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_p < 1:
        choosers.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList([*choosers, RowNoise([task.id for task in tasks], seed=sampling.seed)])


class RowNoise(LogitsProcessor):
    """Gumbel noise on the logits: then the largest is a draw from their softmax (Maddison et al., arXiv 1411.0030).

    The noise is −log of exponential noise. Each row has a generator seeded by the sampling seed and its id, so the
    same row draws the same answer in any batch and after any restart; ``generate``'s own sampling draws for the
    whole batch at once.
    """

    def __init__(self, ids: Sequence[str], *, seed: int) -> None:
        self._generators = [torch.Generator().manual_seed(_row_seed(seed, id_)) for id_ in ids]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        size = scores.shape[1]
        waiting_BV = torch.stack([torch.empty(size).exponential_(generator=g) for g in self._generators])
        return scores - waiting_BV.log().to(scores.device)


def _row_seed(seed: int, id_: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {id_}".encode(), digest_size=7).digest())
