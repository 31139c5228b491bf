"""The protocol of scoring engines: token ids in, tokens with log-probabilities and a finish reason out.

An answer depends on its prompt, the weights, its sampling, its seed and its id, never on what else is in a batch.
No torch here: engines are imported when they are opened.

| engine       | runs                                                             | file                   |
|--------------|------------------------------------------------------------------|------------------------|
| transformers | in this process; rows enter and leave the batch one by one       | engine_transformers.py |
| server       | behind a URL that speaks OpenAI's API                            | engine_server.py       |
| vllm         | vLLM's offline engine, in a process and environment of its own   | engine_vllm.py         |
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from fitune.values.answering import EngineName
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.config_schema import stop_ids
from fitune.values.serial import read_object

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the most likely token; then ``top_p`` and ``seed`` are idle."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 256
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be answered; ``id`` is unique, and the row's random draws are seeded by it.

    ``stop``: texts at which the answer ends. The embedded engine ends there, the others write on; the caller cuts.
    """

    id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop: tuple[str, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """All that is read."""
        return self.prompt_ids

    @property
    def seed(self) -> int:
        """The row's own seed, 56 bits: the same in any batch and after any restart."""
        digest = hashlib.blake2b(f"{self.sampling.seed} {self.id}".encode(), digest_size=7)
        return int.from_bytes(digest.digest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The tokens that an engine wrote for one request, the one that ended it included.

    ``logprobs`` are natural logarithms under the model's own softmax: temperature and top_p are not in them. ``text``
    is None where the caller decodes the tokens; a server that returns no token ids sets it. ``error`` is empty, or
    ``code: why``.
    """

    id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: FinishReason = "stop"
    text: str | None = None
    tokens: int = 0
    """Tokens written, also where their ids are not known."""
    code: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """A text whose likelihood after a prompt is asked for."""

    id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt and the text behind it."""
        return self.prompt_ids + self.token_ids


Asked = TypeVar("Asked", Request, Continuation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """Log-probabilities (nats) of a continuation's tokens; ``is_greedy``: each is the most likely one."""

    id: str
    logprobs: tuple[float, ...] = ()
    is_greedy: bool = False
    code: str = ""
    error: str = ""


class Engine(Protocol):
    """A model that answers. Both methods yield in any order, each id once; a row that fails is one with an error."""

    def answer(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> Iterator[Completion]:
        """Write an answer for each request. ``ahead``: rows that the next call is asked for; an engine may begin with
        them while it is at the last ones."""
        ...

    def loglikelihoods(self, continuations: Sequence[Continuation]) -> Iterator[Likelihood]:
        """Log-probabilities of given tokens after given prompts."""
        ...

    def close(self) -> None:
        """Free what the engine holds: processes, connections."""
        ...


class EngineDied(Exception):
    """The engine cannot answer anything more; the rows that it did not yield may be asked of a new one.

    ``hint``: what to change first, where a new one would end in the same way.
    """

    def __init__(self, why: str, *, hint: str = "") -> None:
        super().__init__(why)
        self.hint = hint


def failed(asked: Request | Continuation, code: str, error: str) -> Any:
    """The Completion of a request, or the Likelihood of a continuation, that has an error."""
    if isinstance(asked, Request):
        return Completion(id=asked.id, finish_reason="error", code=code, error=error)
    return Likelihood(id=asked.id, code=code, error=error)


def tokens_beside(engine: EngineName) -> int:
    """Tokens more than prompt and continuation that an engine needs room for to tell log-likelihoods: the embedded one
    does not read the last token; servers and vLLM read it and write one behind it."""
    return -1 if engine == "transformers" else 1


def sorted_out(
    asked: Sequence[Asked], *, context: int, engine: EngineName
) -> tuple[list[Asked], list[Any], int]:
    """Returns what fits into ``context`` positions (0: no limit is known), the failed results of what does not, with
    the arithmetic, and the largest token id of what fits."""
    fitting, refused = [], []
    for one in asked:
        prompt = f"prompt {len(one.prompt_ids)}"
        if isinstance(one, Request):
            new = one.sampling.max_new_tokens
            tokens = len(one.ids) + new
            why = f"{prompt} + max_new_tokens {new} = {tokens} tokens"
        else:
            tokens = len(one.ids) + (beside := tokens_beside(engine))
            more, read = ("- 1", " to be read") if beside < 0 else ("+ 1 written", "")
            why = f"{prompt} + continuation {len(one.token_ids)} {more} = {tokens} tokens{read}"
        if not one.prompt_ids:
            refused.append(failed(one, "empty_prompt", "the prompt has no tokens"))
        elif 0 < context < tokens:
            refused.append(failed(one, "prompt_too_long", f"{why}, the model has room for {context}"))
        else:
            fitting.append(one)
    return fitting, refused, max((max(one.ids) for one in fitting), default=0)


def listed_stop_ids(folder: str) -> frozenset[int]:
    """EOS ids that the model's makers listed in generation_config.json, else in config.json; empty for a Hub id.

    Raises ModelError for a list that is none.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(folder) / name
        if file.is_file():
            fields = ConfigFields(values=read_object(file), where=str(file))
            if fields.values.get("eos_token_id") is not None:
                return stop_ids(fields)
    return frozenset()
