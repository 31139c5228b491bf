"""The embedded engine: a transformers model in this process.

An answer depends on its prompt, the weights and the sampling, never on what else is in the batch. Up to rounding, that
is: where the two best tokens are closer than the rounding of a matrix product, a batch of another shape may choose the
other one. In fp32 on a CPU that is not seen in practice.

A model whose rows cannot enter a batch one by one (score/engines/continuous.py) answers by transformers'
``generate``, in batches padded on the left that start and end together. With longrope (Phi-3.5, Phi-4-mini)
transformers turns all rows of a call by the factors of the longest, so rows on both sides of its boundary never share
a batch, and an answer that could cross the boundary is written alone.

Shapes: B prompts of a batch, T tokens of its longest prompt, V vocabulary.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fitune.data.conversations.templates import ChatTemplate
from fitune.models.attention import longrope_boundary, use_cached_attention
from fitune.models.language_model import language_model, without_adapters
from fitune.models.tokens import require_rows
from fitune.score.engines.choosing import AnswerRow, OnToken, choose, nobody, stopping
from fitune.score.engines.continuous import Watch, answer_continuously, can_join, unwatched
from fitune.score.engines.engine import (
    Asked,
    Completion,
    Continuation,
    Likelihood,
    Request,
    Sampling,
    sorted_out,
)
from fitune.score.engines.given_texts import (
    HEAD_TOKENS,
    batches_by_prompt,
    loglikelihoods_alone,
    loglikelihoods_behind,
)
from fitune.score.engines.opening import Room, unlimited
from fitune.score.tasks import Answer, Task, to_answer
from fitune.values.answering import NARROW, ROWS_AT_ONCE, Questions
from fitune.values.plan import ChunkedLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersEngine:
    """``model`` is a PreTrainedModel or PeftModel on its device.

    Its mode, attention and generation settings are as before when an iteration over answers has ended.
    """

    model: Any
    tokenizer: Any
    template: ChatTemplate
    tokenizer_folder: str = "the tokenizer"
    batch_size: int = ROWS_AT_ONCE
    room: Room = unlimited
    """Rows answered together are at most ``batch_size``, and at most so many."""
    on_token: OnToken = nobody
    watch: Watch = unwatched

    @property
    def context_tokens(self) -> int:
        """The config's max_position_embeddings."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 0)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of the template, and the EOS ids that the model's makers listed."""
        listed = without_adapters(self.model).generation_config.eos_token_id
        listed = [] if listed is None else listed
        return self.template.stop_ids | frozenset(listed if isinstance(listed, list) else [listed])

    def answer(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> Iterator[Completion]:
        """Rows enter a running batch where the model allows it (can_join); else a batch starts and ends together.

        ``ahead`` is not begun: a shard asked again after a kill is read in batches of the same shapes, to the last
        digit.
        """
        fitting, refused = self._sorted_out(requests)
        yield from refused
        on_token = stopping(self.on_token, lambda ids: str(self.tokenizer.decode(ids)))
        size = self._rows_at_once(
            [len(request.prompt_ids) for request in fitting],
            new_tokens=max((request.sampling.max_new_tokens for request in fitting), default=1),
        )
        with _ready_to_answer(self) as stop_ids:
            if can_join(self.model):
                yield from answer_continuously(
                    self.model, fitting, stop_ids=stop_ids, batch_size=size, on_token=on_token,
                    watch=self.watch,
                )  # fmt: skip
            else:
                yield from answer_together(
                    self.model, fitting, stop_ids=stop_ids, pad_id=_pad_id(self.tokenizer),
                    batch_size=size, on_token=on_token,
                )  # fmt: skip

    def loglikelihoods(self, continuations: Sequence[Continuation]) -> Iterator[Likelihood]:
        """A prompt is read once for all its continuations where the model can join rows; else each is read alone."""
        fitting, refused = self._sorted_out(continuations)
        yield from refused
        read = [len(one.ids) - 1 for one in fitting]  # the last is only compared
        size = self._rows_at_once(read, new_tokens=1)
        with _ready_to_answer(self):
            parts = language_model(self.model, ChunkedLoss(chunk_tokens=HEAD_TOKENS))
            if can_join(self.model):
                for batch in batches_by_prompt(fitting, size):
                    yield from loglikelihoods_behind(parts, batch)
            else:
                for one in fitting:
                    yield from loglikelihoods_alone(parts, one)

    def close(self) -> None:
        """Does nothing: the model belongs to the caller."""

    def _sorted_out(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[Any]]:
        """Returns what the model can read, and the failed results of the rest.

        Raises ModelError for ids of another model's tokenizer."""
        fitting, refused, largest = sorted_out(asked, context=self.context_tokens, engine="transformers")
        rows = self.model.get_input_embeddings().weight.shape[0]
        require_rows(self.tokenizer_folder, largest_id=largest, rows=rows)
        return fitting, refused

    def _rows_at_once(self, tokens: Sequence[int], *, new_tokens: int) -> int:
        """``tokens``: that are read of each row."""
        questions = Questions(
            rows=len(tokens), prompt_tokens=sum(tokens), longest_prompt=max(tokens, default=1), new_tokens=new_tokens
        )  # fmt: skip
        return min(self.batch_size, self.room(questions))


def answer_all(
    model: Any, tokenizer: Any, template: ChatTemplate, tasks: Sequence[Task], sampling: Sampling, *,
    batch_size: int = ROWS_AT_ONCE,
) -> list[Answer]:  # fmt: skip
    """Answers to all tasks, in the order given.

    A prompt that leaves no room for ``max_new_tokens`` gets an Answer with an error.
    """
    engine = TransformersEngine(model=model, tokenizer=tokenizer, template=template, batch_size=batch_size)
    requests = [
        Request(id=task.id, prompt_ids=task.prompt_ids, sampling=task.sampling or sampling) for task in tasks
    ]
    found = {completion.id: completion for completion in engine.answer(requests)}
    return [to_answer(task, found[task.id], template.decode, engine.stop_ids) for task in tasks]


@contextmanager
def _ready_to_answer(engine: TransformersEngine) -> Iterator[frozenset[int]]:
    """Evaluation mode, attention with a cache, no generation settings but ours, and one thread for a narrow model on a
    CPU; undone afterwards. Yields the ids that end an answer.

    ``generate`` fills what a call leaves open from the model's own generation_config (Llama's has a temperature,
    others a repetition penalty), so that is set aside too. One token at a time, a narrow model's products take
    microseconds and the threads mostly wait for one another: 100 answers of the demo's model took 2.4 s with two
    threads on two idle cores, 146 s on busy ones, and 4 s there with one.
    """
    model, tokenizer = engine.model, engine.tokenizer
    base: Any = without_adapters(model)
    training, attention, settings = model.training, base.config._attn_implementation, base.generation_config
    stop_ids, threads = engine.stop_ids, torch.get_num_threads()
    try:
        model.eval()
        use_cached_attention(base)
        base.generation_config = GenerationConfig(
            do_sample=False,
            use_cache=True,
            eos_token_id=sorted(stop_ids),
            pad_token_id=_pad_id(tokenizer),
            bos_token_id=tokenizer.bos_token_id,
        )
        if model.device.type == "cpu" and model.config.get_text_config().hidden_size <= NARROW:
            torch.set_num_threads(1)
        yield stop_ids
    finally:
        torch.set_num_threads(threads)
        model.train(training)
        if base.config._attn_implementation != attention:
            base.set_attn_implementation(attention)
        base.generation_config = settings


def _pad_id(tokenizer: Any) -> int:
    """Padding is masked, so any id does where the tokenizer has none of its own."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def answer_together(
    model: Any,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int],
    pad_id: int,
    batch_size: int,
    on_token: OnToken = nobody,
) -> Iterator[Completion]:
    """Completions, batch after batch. ``requests`` fit into the model's context."""
    by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
    for batch in _batches(by_length, batch_size, longrope_boundary(model.config)):
        rows = [AnswerRow(request, on_token) for request in batch]
        longest = max(row.length for row in rows)
        gaps = [longest - row.length for row in rows]
        ids = [[pad_id] * gap + list(one.prompt_ids) for gap, one in zip(gaps, batch, strict=True)]
        mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]  # generate takes the positions from it
        with torch.inference_mode():
            model.generate(
                input_ids=torch.tensor(ids, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=max(one.sampling.max_new_tokens for one in batch),
                logits_processor=LogitsProcessorList([_Chosen(rows, stop_ids)]),
            )
        for row in rows:
            yield row.completion(row.finish_reason(stop_ids) or "length")


def _batches(requests: Sequence[Request], batch_size: int, boundary: int) -> Iterator[list[Request]]:
    """Requests, sorted by length, in batches whose rows stay on one side of ``boundary``; 0: there is none."""

    def side(request: Request) -> str:
        """``short``, ``long``, or ``crosses`` for an answer that may pass the boundary."""
        prompt = len(request.prompt_ids)
        last_read = prompt + request.sampling.max_new_tokens - 1  # the last one written is not read again
        if not boundary or last_read <= boundary:
            return "short"
        return "long" if prompt > boundary else "crosses"

    for where, group in itertools.groupby(requests, side):
        alike, size = list(group), 1 if where == "crosses" else batch_size
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


class _Chosen(LogitsProcessor):
    """Scores whose largest is the token that ``choose`` takes: ``generate`` itself only follows. A row that has ended
    is fed ends until the last row of the batch is done."""

    def __init__(self, rows: Sequence[AnswerRow], stop_ids: frozenset[int]) -> None:
        self._rows, self._stop_ids = rows, stop_ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        going = [place for place, row in enumerate(self._rows) if not row.finish_reason(self._stop_ids)]
        chosen_B = torch.full_like(input_ids[:, 0], min(self._stop_ids, default=0))
        rows = [self._rows[place] for place in going]
        chosen_B[going] = choose(scores[going], rows)
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B[:, None], 0.0)
