"""lm-evaluation-harness's model interface over an engine: its tasks ask, and an engine of fitune answers.

Prompts become token ids exactly as in lm-eval's own ``hf`` model, and are cut from the left where they are too long, as
there: on the same model both give the same figures. This module is imported where lm_eval is installed.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fitune.errors import ScoringFailed
from fitune.score.asking import Call, Restarted
from fitune.score.engines.engine import (
    Continuation,
    Engine,
    Request,
    Sampling,
    tokens_beside,
)
from fitune.values.answering import EngineName

logger = logging.getLogger("lm_eval")
"""Whose warnings are told."""

_NEW_TOKENS = 256
"""Most tokens of an answer where the task does not say: lm-eval's default."""

_HONOURED = {"until", "max_gen_toks", "do_sample", "temperature", "top_p"}
_IDLE_WHEN_GREEDY = {"top_k", "min_p", "typical_p"}
_CHANGES_NOTHING = {"num_beams": 1, "repetition_penalty": 1.0, "top_k": 0}

Encoded = tuple[Instance, list[int], list[int]]
"""A request, the ids of its context, and those of the text behind it whose log-likelihood is asked."""


class EngineLM(TemplateLM):
    """A model of lm-eval whose answers and likelihoods an engine gives. The engine is opened by the first request."""

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        tokenizer: Any,
        *,
        engine: EngineName,
        context: int,
        template: str = "",
        seed: int = 0,
        on_rows: Callable[[int, int], None] = lambda done, total: None,
        on_tokens: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """``context``: tokens the model has positions for. ``template``: Jinja text for tasks that are asked as chats.
        ``on_rows`` is told the rows that are done and all of them, anew for each kind of request."""
        super().__init__()
        self.tokenizer = tokenizer
        self._engine = Restarted(open_engine)
        self._context = context
        self._longest_text = context - tokens_beside(engine)
        self._template = template
        self._seed = seed
        self._on_rows, self._on_tokens = on_rows, on_tokens

    @property
    def eot_token_id(self) -> int:
        """The id of EOS."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS where there is one, else EOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's cache of requests, without slashes."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text; one that begins with the tokenizer's BOS gets no second one."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        settings = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **settings)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat; lm-eval asks for it where ``template`` is set.

        A template that refuses it is asked again without its system messages, as by lm-eval's own model.
        """

        def text_of(messages: list[dict[str, str]]) -> str:
            """The messages by the template. Raises TemplateError."""
            text: str = self.tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False,
                add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt,
            )  # fmt: skip
            return text

        try:
            return text_of(chat_history)
        except TemplateError as error:
            without = [message for message in chat_history if message["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            logger.warning(
                f"the chat template refuses a system message ({error}): the tasks' descriptions are left out"
            )
            return text_of(without)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Nats of each text behind its context, and True where each of its tokens is the likeliest."""
        return self._loglikelihood_tokens([(one, *self._pair(one)) for one in requests])

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        """Nats of whole texts, window after window; each token counts once."""
        windows: list[Encoded] = []
        owners: list[int] = []
        for place, one in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(one.args[0]), prefix_token=self.prefix_token_id,
                max_seq_len=self._longest_text - 1, context_len=1,
            )  # fmt: skip
            windows += [(one, *make_disjoint_window(window)) for window in found]
            owners += [place] * (len(windows) - len(owners))
        nats = [0.0] * len(requests)
        for place, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            nats[place] += logprob
        return nats

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        """An answer to each prompt, cut in front of the first text at which its task stops."""
        eos = self.tokenizer.decode([self.eot_token_id])
        stops: list[list[str]] = []
        asked: dict[str, Request] = {}
        for place, one in enumerate(requests):
            prompt, settings = one.args[0], _settings(one)
            draws = bool(settings.get("do_sample"))
            sampling = Sampling(
                temperature=float(settings.get("temperature") or 0.0) if draws else 0.0,
                top_p=float(settings.get("top_p") or 1.0) if draws else 1.0,
                max_new_tokens=settings["max_gen_toks"], seed=self._seed,
            )  # fmt: skip
            until = [settings["until"]] if isinstance(settings["until"], str) else list(settings["until"])
            stops.append([stop for stop in dict.fromkeys([*until, eos]) if stop])
            asked[str(place)] = Request(
                id=str(place), prompt_ids=self._prompt(one, prompt, sampling.max_new_tokens), sampling=sampling,
                stop=tuple(stops[-1]),
            )  # fmt: skip
        found = self._each(asked, requests, lambda engine, some: engine.answer(some))
        answers = []
        for completion, stop in zip(found, stops, strict=True):
            text = completion.text
            if text is None:
                text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            answers.append(postprocess_generated_text(text, stop=stop, think_end_token=None))
        return answers

    def close(self) -> None:
        """Frees the engine."""
        self._engine.close()

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **_: Any) -> list[tuple[float, bool]]:
        asked = {}
        for place, (one, before, ids) in enumerate(requests):
            room = self._longest_text - len(ids)
            if room < 1:
                raise ScoringFailed(
                    f"{_name(one)}: the text to be scored has {len(ids)} tokens, the model has room for "
                    f"{self._longest_text - 1}"
                )
            asked[str(place)] = Continuation(
                id=str(place), prompt_ids=tuple(before[-room:]), token_ids=tuple(ids)
            )
        found = self._each(
            asked, [one for one, _, _ in requests], lambda engine, some: engine.loglikelihoods(some)
        )
        return [(sum(each.logprobs), each.is_greedy) for each in found]

    def _each(self, asked: Mapping[str, Any], owners: Sequence[Instance], call: Call) -> list[Any]:
        """The engine's result for each of ``asked``, in their order. Raises ScoringFailed for the first error."""
        left = Counter((one.task_name, one.doc_id) for one in owners)
        total = len(left)
        found: dict[str, Any] = {}
        self._on_rows(0, total)
        for each in self._engine.each(list(asked.values()), call):
            owner = owners[int(each.id)]
            if each.error:
                raise ScoringFailed(f"{_name(owner)}: {each.error}")
            found[each.id] = each
            self._on_tokens(len(each.logprobs))
            row = (owner.task_name, owner.doc_id)
            left[row] -= 1
            if not left[row]:
                del left[row]
                self._on_rows(total - len(left), total)
        return [found[id_] for id_ in asked]

    def _pair(self, one: Instance) -> tuple[list[int], list[int]]:
        """Ids of the context and of the text behind it; without a context the text stands behind BOS."""
        context, text = one.args
        if context:
            before, ids = self._encode_pair(context, text)
        else:
            ids = self.tok_encode(text, add_special_tokens=False)
            before = [self.prefix_token_id]
            if ids[:1] == before:
                ids = ids[1:]
        if not ids:
            raise ScoringFailed(f"{_name(one)}: the text to be scored has no tokens: {text!r:.60}")
        return before, ids

    def _prompt(self, one: Instance, prompt: str, new: int) -> tuple[int, ...]:
        room = self._context - new
        if room < 1 or new < 1:
            raise ScoringFailed(
                f"{_name(one)}: max_gen_toks {new} leaves no room for a prompt, the model has room for "
                f"{self._context} tokens",
                hint="a smaller max_gen_toks under generation_kwargs of the task",
            )
        return tuple(self.tok_encode(prompt)[-room:]) or (self.prefix_token_id,)


def _name(one: Instance) -> str:
    return f"task {one.task_name}, row {one.doc_id}"


def _settings(one: Instance) -> dict[str, Any]:
    """The generation settings of a request. Raises ScoringFailed for one that no engine honours."""
    settings: dict[str, Any] = dict(normalize_gen_kwargs(one.args[1], _NEW_TOKENS))
    idle = set() if settings.get("do_sample") else _IDLE_WHEN_GREEDY
    for name, value in settings.items():
        if name in _HONOURED | idle or value is None or _CHANGES_NOTHING.get(name) == value:
            continue
        raise ScoringFailed(
            f"{_name(one)}: generation_kwargs has {name} = {value!r}, which is not supported",
            hint=f"supported: {', '.join(sorted(_HONOURED))}",
        )
    return settings
