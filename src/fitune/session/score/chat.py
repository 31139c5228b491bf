"""A conversation with one model, or with two that are asked the same.

Each model's prompt is its own conversation in its own template, encoded as training encodes it. A base and an adapter
on it are loaded once, and the adapter is switched off while the base answers.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Protocol

from fitune.data.conversations.messages import Conversation, Message
from fitune.data.conversations.templates import load_template
from fitune.data.reading.rows import BadRow
from fitune.errors import DataError, RecipeError
from fitune.models.adapter_file import check_adapter, read_adapter_config
from fitune.models.adapters import saved_rows
from fitune.models.tokens import load_tokenizer
from fitune.recipe.score_recipe import ScoreRecipe, checked_recipe
from fitune.score.engines.choosing import AnswerRow
from fitune.score.engines.engine import Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.opening import changes_the_base, load_adapted
from fitune.session.events import Emit, emit_weights, ignore_event
from fitune.session.named_models import find_model

_COMMAND = re.compile(r"/[a-z]+")
_HALF = "\N{REPLACEMENT CHARACTER}"
"""The text that a tokenizer decodes the first bytes of a character to."""
_GAP = 3
"""Columns between two answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One model's answer. ``error`` is empty, or why it was not asked."""

    model: str
    text: str = ""
    ended: Literal["stop", "length", "interrupted", "error"] = "stop"
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""

    @property
    def words(self) -> str:
        """``24 tokens, 51 tokens/s``, and why it ended if not by itself."""
        if self.error:
            return self.error
        why = {"length": ", cut off at its most tokens", "interrupted": ", stopped"}.get(self.ended, "")
        return f"{self.tokens} tokens, {self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s{why}"


class Screen(Protocol):
    """Shows a conversation. Models are told by their place."""

    def note(self, text: str) -> None:
        """A remark that belongs to no answer."""
        ...

    def piece(self, place: int, text: str) -> None:
        """More text of the answer that is being written."""
        ...

    def answered(self, place: int, reply: Reply) -> None:
        """The model at ``place`` has ended its answer, whole or not."""
        ...

    def turn(self, question: str, replies: Sequence[Reply]) -> None:
        """All models have answered, or the turn was stopped."""
        ...


@dataclass(slots=True, kw_only=True)
class Side:
    """One model and its own conversation; ``switch`` is held while it answers."""

    title: str
    engine: TransformersEngine
    switch: Callable[[], AbstractContextManager[object]] = nullcontext
    history: list[Message] = field(default_factory=list)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids that training gives everything before the next answer."""
        return tuple(self.engine.template.encode_prompt(Conversation(tuple(messages), "the conversation")))


@dataclass(slots=True, kw_only=True)
class Chat:
    """One or two models, what they are told first, and how they choose their tokens."""

    sides: list[Side]
    system: str
    sampling: Sampling
    notes: tuple[str, ...] = ()
    _turn: int = 0

    @property
    def titles(self) -> list[str]:
        """The models' names on the screen, in their order."""
        return [side.title for side in self.sides]

    def reset(self) -> None:
        """Forget all turns; the same questions get the same answers again."""
        self._turn = 0
        for side in self.sides:
            side.history.clear()

    def ask(self, text: str, screen: Screen) -> list[Reply]:
        """The answer of each model. Ctrl-C ends the turn: what was written stays, a model that was not asked yet is not
        asked."""
        self._turn += 1
        replies: list[Reply] = []
        for place, side in enumerate(self.sides):
            reply = self._answer(side, Message("user", text), place, screen)
            replies.append(reply)
            screen.answered(place, reply)
            if reply.ended == "interrupted":
                break
        screen.turn(text, replies)
        return replies

    def _answer(self, side: Side, question: Message, place: int, screen: Screen) -> Reply:
        began, tokenizer, stop_ids = time.perf_counter(), side.engine.tokenizer, side.engine.stop_ids
        text, shown, tokens = "", 0, 0

        def show(row: AnswerRow) -> None:
            """Decodes the tokens so far; shows the new text once its last character is whole."""
            nonlocal text, tokens, shown
            ids, tokens = row.token_ids, len(row.token_ids)
            written = ids[:-1] if ids[-1] in stop_ids else ids
            text = tokenizer.decode(written, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            begin = shown
            if not text.endswith(_HALF):
                shown = len(text)
            screen.piece(place, text[begin:shown])

        reply = Reply(model=side.title)
        try:
            request = self._request(side, question, screen)
            if isinstance(request, str):
                return replace(reply, ended="error", error=request)
            with side.switch():
                (done,) = replace(side.engine, on_token=show).answer([request])
            if done.error:
                return replace(reply, ended="error", error=done.error)
            ended: Any = done.finish_reason
        except KeyboardInterrupt:
            ended = "interrupted"
        screen.piece(place, text[shown:])
        if text:
            side.history += [question, Message("assistant", text)]
        seconds = time.perf_counter() - began
        return replace(reply, text=text, ended=ended, tokens=tokens, seconds=seconds)

    def _request(self, side: Side, question: Message, screen: Screen) -> Request | str:
        """The prompt that fits, or why none does. The oldest turns are dropped for it; the answer may get less room."""
        system = [Message("system", self.system)] if self.system else []
        context, new = side.engine.context_tokens, self.sampling.max_new_tokens
        try:
            alone = len(side.prompt_ids([*system, question]))
            if context and alone >= context:
                return f"the question has {alone:,} tokens, the model has room for {context:,}: not asked"
            ids, dropped = side.prompt_ids([*system, *side.history, question]), 0
            while context and len(ids) + new > context and side.history:
                del side.history[:2]
                dropped += 1
                ids = side.prompt_ids([*system, *side.history, question])
        except BadRow as bad:
            return bad.message
        if dropped:
            screen.note(
                f"{side.title}: the context of {context:,} tokens is full: its oldest turns are dropped, {dropped} now "
                f"(prompt {len(ids):,} + {new:,} new = {len(ids) + new:,} tokens)"
            )
        room = min(new, context - len(ids)) if context else new
        if room < new:
            screen.note(f"{side.title}: the question leaves room for {room:,} tokens of an answer")
        sampling = replace(self.sampling, max_new_tokens=room)
        return Request(id=f"turn {self._turn}", prompt_ids=ids, sampling=sampling)


def open_chat(
    names: Sequence[str],
    *,
    system: str,
    sampling: dict[str, Any],
    chat_template: str,
    emit: Emit = ignore_event,
) -> Chat:
    """Load the models that are named. Raises what ``find_model`` does, and DataError where a template refuses
    ``system``."""
    if not 1 <= len(names) <= 2:
        raise RecipeError(f"{len(names)} models are named", hint="fitune chat MODEL_OR_RUN [SECOND]")
    checked_recipe(ScoreRecipe, **sampling)
    found = [find_model(name) for name in names]
    notes = [named.warning for named in found if named.warning]
    for named in found:
        if named.adapter:
            notes += check_adapter(Path(named.adapter), base=named.model)
    # An adapter is loaded once for itself and for its base, where it is switched off, unless each model needs its own
    # weights: tables that trained with an adapter replace those of the base.
    adapters = [named.adapter for named in found if named.adapter]
    shared = adapters[0] if len(found) == 2 and len(adapters) == 1 and found[0].base == found[1].base else ""
    if shared and (saved_rows(Path(shared)) or changes_the_base(read_adapter_config(Path(shared)))):
        shared = ""
    titles = [named.title for named in found]
    if len(set(titles)) < len(titles):  # as they were typed, with numbers where those are the same, too
        titles = list(names)
    if len(set(titles)) < len(titles):
        titles = [f"{title} ({place})" for place, title in enumerate(titles, 1)]

    @cache
    def load(base: str, adapter: str) -> Any:
        """The base with the adapter, or alone where that is empty; each pair is loaded once."""
        return load_adapted(base, adapter, on_bytes=emit_weights(emit))

    sides = []
    for named, title in zip(found, titles, strict=True):
        tokenizer = load_tokenizer(named.texts)
        template = load_template(tokenizer, chat_template)
        if not (tokenizer.chat_template or chat_template):
            notes.append(
                f"{title}: the tokenizer has no chat template, so {template.name} is used, as training would: a model "
                "that was never trained with it may go on with the text instead of answering"
            )
        model = load(named.base, named.adapter or shared)
        engine = TransformersEngine(
            model=model, tokenizer=tokenizer, template=template, tokenizer_folder=named.texts, batch_size=1
        )
        side = Side(title=title, engine=engine)
        if shared and not named.adapter:
            side.switch = model.disable_adapter
        try:  # the template may have no place for a system prompt
            side.prompt_ids([*([Message("system", system)] if system else []), Message("user", "ping")])
        except BadRow as bad:
            raise DataError(
                f"{title}: {bad.message}", hint="leave --system out" if system else bad.hint
            ) from None
        what = f"adapter {named.adapter} on {named.model}" if named.adapter else named.model
        context = f", context of {engine.context_tokens:,} tokens" if engine.context_tokens else ""
        notes.append(f"{title}: {what}{context}")
        sides.append(side)
    return Chat(sides=sides, system=system, sampling=Sampling(**sampling), notes=tuple(notes))


def converse(chat: Chat, *, read: Callable[[], str | None], screen: Screen) -> int:
    """Answer each line of ``read`` until it returns None; returns how many questions have no answer of some model.

    A line that ends with a backslash goes on in the next one. Ctrl-C between two answers gives up what was typed.
    """
    unanswered, begun = 0, ""
    while True:
        try:
            line = read()
            if line is None:
                return unanswered
            text = begun + line.strip("\r\n").encode("utf-8", "replace").decode()
            begun = text[:-1] + "\n" if text.endswith("\\") else ""
            if begun:
                continue
            match text.strip():
                case "":
                    continue
                case "/exit":
                    return unanswered
                case "/reset":
                    chat.reset()
                    screen.note("the conversation begins anew")
                case word if _COMMAND.fullmatch(word):
                    screen.note(f"{word} is unknown; /reset begins anew, /exit ends")
                case _:
                    unanswered += any(reply.error for reply in chat.ask(text, screen))
        except KeyboardInterrupt:
            begun = ""
            screen.note("\n(/exit or Ctrl-D ends)")


def side_by_side(
    titles: Sequence[str], texts: Sequence[str], notes: Sequence[str], *, width: int, most_lines: int
) -> str:
    """Each text below its title and above its note, in columns that are ``width`` together; of long texts the last
    ``most_lines`` lines, 0: all."""
    from rich.cells import set_cell_size
    from rich.console import Console
    from rich.text import Text

    each, console = (width + _GAP) // len(titles) - _GAP, Console()
    wrapped = [Text(text).wrap(console, each, overflow="fold", tab_size=4) for text in texts]
    bodies = [[line.plain for line in lines][-most_lines:] for lines in wrapped]
    rows = [[f"── {title}" for title in titles], *zip_longest(*bodies, fillvalue="")]
    if notes:
        rows.append(list(notes))
    return "\n".join((" " * _GAP).join(set_cell_size(cell, each) for cell in row).rstrip() for row in rows)
