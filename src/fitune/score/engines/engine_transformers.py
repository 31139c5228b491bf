"""The embedded engine: a transformers model in this process.

An answer depends on its prompt, the weights and the sampling, never on what else is in the batch. Up to rounding, that
is: where the two best tokens are closer than the rounding of a matrix product, a batch of another shape may choose the
other one. In fp32 on a CPU that is not seen in practice.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import ChatTemplate
from fitune.models.adapters import saved_rows
from fitune.models.attention import use_cached_attention
from fitune.models.language_model import language_model
from fitune.models.tokens import require_rows
from fitune.score.engines.choosing import OnToken, nobody, stopping
from fitune.score.engines.continuous import Watch, answer_continuously, can_join, unwatched
from fitune.score.engines.engine import (
    Completion,
    Continuation,
    Likelihood,
    Request,
    Sampling,
    failed,
    no_effect,
    refusal,
)
from fitune.score.engines.room import Room, unlimited
from fitune.score.engines.shared_prompts import batches_of, prompts_shared, weigh_behind
from fitune.score.engines.together import answer_together
from fitune.score.tasks import Answer, Task, to_answer
from fitune.spec.answering import NARROW, ROWS_AT_ONCE, Questions
from fitune.spec.plan import ChunkedLoss

_PROBE = Conversation((Message("user", "What changes?"), Message("assistant", "-")), "the canary")
_PROBE_TOKENS = 64

_HEAD_TOKENS = 256
"""Tokens that go through the head together: 256 · V logits in fp32 are 150 MiB for a vocabulary of 150,000."""


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
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 0) or 0)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: those of the template, and those that the model's makers listed."""
        return self.template.stop_ids | _listed_stop_ids(self.model)

    def answer(self, requests: Sequence[Request]) -> Iterator[Completion]:
        fitting = []
        for request in requests:
            if refused := refusal(request, context=self.context_tokens):
                yield refused
            else:
                fitting.append(request)
        largest = max((max(request.prompt_ids) for request in fitting), default=0)
        rows = self.model.get_input_embeddings().weight.shape[0]
        require_rows(self.tokenizer_folder, largest_id=largest, rows=rows)
        on_token = stopping(self.on_token, lambda ids: str(self.tokenizer.decode(ids)))
        size = self._rows_at_once(
            [len(request.prompt_ids) for request in fitting],
            new_tokens=max((request.sampling.max_new_tokens for request in fitting), default=1),
        )
        with _ready_to_answer(self) as stop_ids, _threads_for(self.model):
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

    def prepare(self, requests: Sequence[Request]) -> None:
        """Does nothing: a shard asked again after a kill is read in batches of the same shapes, to the last digit."""

    def weigh(self, continuations: Sequence[Continuation]) -> Iterator[Likelihood]:
        shared: list[list[Continuation]] = []
        alone = list(continuations)
        context = self.context_tokens
        if can_join(self.model):
            shared, alone = prompts_shared([one for one in continuations if _has_room(one, context)])
            alone += [one for one in continuations if not _has_room(one, context)]
        by_length = sorted(alone, key=lambda c: len(c.prompt_ids) + len(c.token_ids), reverse=True)
        size = self._rows_at_once([_tokens_read(one) for one in continuations], new_tokens=1)
        with _ready_to_answer(self), _threads_for(self.model):
            for batch in batches_of(shared, size):
                yield from self._weigh_sharing(batch)
            size = size if can_join(self.model) else 1
            for start in range(0, len(by_length), size):
                yield from self._weigh_batch(by_length[start : start + size])

    def close(self) -> None:
        """Does nothing: the model belongs to the caller."""

    def _rows_at_once(self, tokens: Sequence[int], *, new_tokens: int) -> int:
        """``tokens``: that are read of each row."""
        questions = Questions(
            rows=len(tokens), prompt_tokens=sum(tokens), longest_prompt=max(tokens, default=1), new_tokens=new_tokens
        )  # fmt: skip
        return min(self.batch_size, self.room(questions))

    def _weigh_sharing(self, batch: Sequence[Sequence[Continuation]]) -> list[Likelihood]:
        parts = language_model(self.model, ChunkedLoss(chunk_tokens=_HEAD_TOKENS))
        return weigh_behind(
            parts.body, batch, lambda hidden, texts: _weights_of(hidden, texts, parts), parts.device
        )

    @torch.inference_mode()
    def _weigh_batch(self, batch: Sequence[Continuation]) -> list[Likelihood]:
        """One pass of the body, padded on the right; only the hidden states before the continuations reach the head."""
        context = self.context_tokens
        rows = [(*c.prompt_ids, *c.token_ids)[: _tokens_read(c)] for c in batch]
        good = [place for place, one in enumerate(batch) if _has_room(one, context)]
        found: list[Likelihood] = [failed(c, "prompt_too_long", _no_room(c, context)) for c in batch]
        if not good:
            return found
        width = max(len(rows[place]) for place in good)
        ids = torch.tensor([list(rows[place]) + [0] * (width - len(rows[place])) for place in good])
        mask = torch.tensor([[1] * len(rows[place]) + [0] * (width - len(rows[place])) for place in good])
        parts = language_model(self.model, ChunkedLoss(chunk_tokens=_HEAD_TOKENS))
        hidden_BTD = parts.body(
            input_ids=ids.to(parts.device),
            attention_mask=mask.to(parts.device),
            use_cache=False,
            return_dict=True,
        ).last_hidden_state
        before = []
        for row, place in enumerate(good):
            start = len(batch[place].prompt_ids) - 1
            before.append(hidden_BTD[row, start : start + len(batch[place].token_ids)])
        weights = _weights_of(before, [batch[place].token_ids for place in good], parts)
        for place, (logprobs, greedy) in zip(good, weights, strict=True):
            found[place] = Likelihood(id=batch[place].id, logprobs=logprobs, is_greedy=greedy)
        return found


def _weights_of(
    hidden: Sequence[Tensor], texts: Sequence[Sequence[int]], parts: Any
) -> list[tuple[tuple[float, ...], bool]]:
    """Log-probability of each token of each text, and True if each is the most likely one.

    ``hidden`` are the states before the tokens [tokens, D]. Logits exist for one chunk of tokens at a time.
    """
    hidden_SD = torch.cat(list(hidden))
    ids_S = torch.tensor([token for text in texts for token in text], device=hidden_SD.device)
    logprobs: list[float] = []
    greedy: list[bool] = []
    for start in range(0, len(ids_S), _HEAD_TOKENS):
        part = slice(start, start + _HEAD_TOKENS)
        logits_SV = parts.head(hidden_SD[part]).float() * parts.logit_scale
        if parts.softcap:
            logits_SV = (logits_SV / parts.softcap).tanh() * parts.softcap
        wanted_S = ids_S[part].to(logits_SV.device)
        chosen_S = logits_SV.gather(1, wanted_S[:, None])[:, 0]
        logprobs += (chosen_S - logits_SV.logsumexp(-1)).tolist()
        greedy += (logits_SV.argmax(-1) == wanted_S).tolist()
    ends = list(accumulate(map(len, texts)))
    return [
        (tuple(logprobs[end - len(text) : end]), all(greedy[end - len(text) : end]))
        for text, end in zip(texts, ends, strict=True)
    ]


def _has_room(one: Continuation, context: int) -> bool:
    return bool(one.prompt_ids) and not 0 < context < _tokens_read(one)


def _tokens_read(asked: Continuation) -> int:
    """All but the last one, which is only compared with what the model expects there."""
    return len(asked.prompt_ids) + len(asked.token_ids) - 1


def _no_room(asked: Continuation, context: int) -> str:
    if not asked.prompt_ids:
        return "the prompt has no tokens"
    return (
        f"prompt {len(asked.prompt_ids)} + continuation {len(asked.token_ids)} - 1 = {_tokens_read(asked)} tokens "
        f"to be read, the model has room for {context}"
    )


def require_effect(engine: TransformersEngine, adapter: str) -> None:
    """The canary: raises CheckpointError for an adapter whose B is not zero and that changes no hidden state."""
    model = engine.model
    if saved_rows(Path(adapter)) or not any(
        p.any() for name, p in model.named_parameters() if "lora_B" in name
    ):
        return
    probe = engine.template.encode_prompt(_PROBE)[-_PROBE_TOKENS:]
    with _ready_to_answer(engine), torch.inference_mode():
        body = language_model(model, ChunkedLoss(chunk_tokens=_HEAD_TOKENS)).body
        ids = torch.tensor([probe], device=model.device)
        adapted = body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
        with model.disable_adapter():
            plain = body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    if torch.equal(adapted, plain):
        raise no_effect(adapter)


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
    """Evaluation mode, attention with a cache, no generation settings but ours; undone afterwards.

    ``generate`` fills what a call leaves open from the model's own generation_config (Llama's has a temperature,
    others a repetition penalty), so that is set aside too. Yields the ids that end an answer.
    """
    model, tokenizer = engine.model, engine.tokenizer
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    training, attention, settings = model.training, base.config._attn_implementation, base.generation_config
    stop_ids = engine.stop_ids
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
    narrow = model.device.type == "cpu" and model.config.get_text_config().hidden_size <= NARROW
    torch.set_num_threads(1 if narrow else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _listed_stop_ids(model: Any) -> frozenset[int]:
    """EOS ids that the model's makers listed."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    listed = base.generation_config.eos_token_id
    return frozenset(listed if isinstance(listed, list) else [] if listed is None else [listed])


def _pad_id(tokenizer: Any) -> int:
    """Padding is masked, so any id does where the tokenizer has none of its own."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
