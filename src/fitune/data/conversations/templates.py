"""Conversations to token ids, with a mask over what the model learns to write: its answers.

Three things hold, whatever the template:

* Training ids begin with exactly the ids that scoring feeds the model: the prompt is rendered and encoded by
  itself in both, and the answer is encoded behind it.
* Every answer is learned together with the tokens that end it, and nothing else is.
* Content is text: what looks like a special token inside it is encoded as plain text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fitune.data.conversations.answers import conversation_pieces, prompt_pieces
from fitune.data.conversations.messages import Conversation, Example, Message, ToolCall
from fitune.data.conversations.piece_encoder import PieceEncoder, TokenizerFailed
from fitune.data.conversations.rendering import Piece, Renderer
from fitune.data.conversations.sandbox import SafeTemplate
from fitune.data.conversations.tool_calls import PROBE_TOOLS
from fitune.data.reading.rows import BadRow, in_row
from fitune.errors import DataError
from fitune.files import is_template, read_text
from fitune.values.named_templates import NAMED_TEMPLATES, require_marks

PLAIN_TEMPLATE = """\
{{- bos_token if bos_token else '' -}}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {{- '### Assistant\\n' -}}
        {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
        {{- '\\n\\n' -}}
    {%- elif message.role == 'system' -%}
        {{- '### System\\n' ~ message.content ~ '\\n\\n' -}}
    {%- else -%}
        {{- '### User\\n' ~ message.content ~ '\\n\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '### Assistant\\n' -}}{%- endif -%}
"""
"""For tokenizers that bring no template: headings in plain words, answers that end with EOS."""

_PROBE = Conversation((Message("user", "ping"), Message("assistant", "pong")), "a first try of the template")
_CALL_PROBE = Conversation(
    (Message("user", "ping"), Message("assistant", "", (ToolCall("look_up", "{}"),))), "a call", PROBE_TOOLS
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids of one row and, for each, whether the model learns to write it."""

    ids: list[int]
    supervised: list[bool]


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """Many rows end to end: int32 and bool of shape (tokens,); row i is from ``ends[i - 1]``, or 0, to ``ends[i]``."""

    ids: np.ndarray
    supervised: np.ndarray
    ends: np.ndarray


def load_template(tokenizer: Any, path: str = "", *, date: str = "") -> "ChatTemplate":
    """The template that ``path`` names or is, or that of the Jinja file there; else the tokenizer's own, else
    ``PLAIN_TEMPLATE``; ``date`` is the day that it writes, as 2026-01-31, else that of sandbox.py.

    The template is tried on a small conversation at once: raises DataError when it is missing, is no Jinja, fails,
    or does not show the answer; RecipeError for a named one whose marks the tokenizer has no tokens for.
    """
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no EOS token: a model trained with it could never stop")
    if path in NAMED_TEMPLATES:
        require_marks(path, tokenizer.get_vocab())
        source, name = NAMED_TEMPLATES[path], path
    elif is_template(path):
        source, name = path, "the recipe's chat_template"
    elif path:
        source, name = _read_template(path), path
    elif tokenizer.chat_template:
        source, name = _own_template(tokenizer), "the tokenizer's chat template"
    else:
        source, name = PLAIN_TEMPLATE, "fitune's plain template"
    return _tried(ChatTemplate(tokenizer, _dated(source, date, name) if date else source, name=name))


class ChatTemplate:
    """A chat template bound to its tokenizer; ``source`` is its Jinja text, to be saved with the model."""

    def __init__(self, tokenizer: Any, source: str, *, name: str) -> None:
        self.source = source
        self.name = name
        self._tokenizer = tokenizer
        self._encoder = PieceEncoder(tokenizer)
        specials = {
            key: str(value) for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)
        }
        self._renderer = Renderer(
            SafeTemplate(source, name=name), specials, special_texts=self._encoder.special_texts
        )
        self._text_start = _text_start(tokenizer)

    def __reduce__(self) -> Any:  # it goes to the processes that tokenise
        return partial(ChatTemplate, name=self.name), (self._tokenizer, self.source)

    def encode(self, example: Example) -> Encoded:
        """Ids of a conversation up to the end of its last answer: nothing after it can be learned. Or of a plain text
        and EOS, all supervised; special tokens in it are special: the author wrote them.

        Raises BadRow when the template refuses the conversation or leaves a part of it out.
        """
        return _good(next(self.encode_each([example])))

    def encode_prompt(self, conversation: Conversation) -> list[int]:
        """Ids of everything before the last answer and of the words that ask for it: what scoring feeds the model."""
        return _good(next(self.encode_prompts([conversation])))

    def encode_prompts(self, conversations: Sequence[Conversation]) -> Iterator[list[int] | BadRow]:
        """``encode_prompt`` of many rows, as ``encode_each``."""
        questions = [
            replace(c, messages=c.messages[:-1])
            if c.messages[-1:] and c.messages[-1].role == "assistant"
            else c
            for c in conversations
        ]
        for row in self.encode_each(questions, ask=True):
            yield row if isinstance(row, BadRow) else row.ids

    def encode_each(self, examples: Sequence[Example], *, ask: bool = False) -> Iterator[Encoded | BadRow]:
        """``encode`` of many rows, in one call of template and tokenizer, or with ``ask`` of the prompts that they are;
        an error stands in the place of a row that one of the two refuses."""
        laid_out = list(self.lay_out_rows(examples, ask=ask))
        try:
            rows = self.encode_rows([row for row in laid_out if not isinstance(row, BadRow)])
        except TokenizerFailed as failed:
            for each in examples:  # finds the row
                yield from (
                    [failed.of_row(each.where)] if len(examples) == 1 else self.encode_each([each], ask=ask)
                )
            return
        begin, ends = 0, iter(rows.ends.tolist())
        for row in laid_out:
            if isinstance(row, BadRow):
                yield row
            else:
                part = slice(begin, begin := next(ends))
                yield Encoded(rows.ids[part].tolist(), rows.supervised[part].tolist())

    def prompt_text(self, conversation: Conversation) -> str:
        """The prompt that ``conversation``, which has no answer at its end, is. Raises BadRow."""
        return "".join(piece.text for piece in self.lay_out(conversation, ask=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer's ids, without special tokens."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def lay_out(self, example: Example, *, ask: bool = False) -> list[Piece]:
        """The row as pieces of text that are encoded one by one; with ``ask`` the prompt that it is, without an answer.

        Raises BadRow.
        """
        if not isinstance(example, Conversation):
            return [Piece(example.text, supervised=True, plain=False, first=True)]
        pieces_of = prompt_pieces if ask else conversation_pieces
        with in_row(example.where):
            return pieces_of(self._renderer.with_tools(example.tools), example.messages)

    def lay_out_rows(
        self, examples: Sequence[Example], *, ask: bool = False
    ) -> Iterator[list[Piece] | BadRow]:
        """``lay_out`` of one row after another; an error stands in the place of a bad one."""
        for example in examples:
            try:
                row: list[Piece] | BadRow = self.lay_out(example, ask=ask)
            except BadRow as bad:
                row = bad
            yield row

    def encode_rows(self, rows: Sequence[list[Piece]], *, empty_thoughts: bool = False) -> EncodedRows:
        """Many rows in one call of the tokenizer, which is several times faster than one by one. ``empty_thoughts``
        that the template put before an answer are learned, too."""
        pieces = [piece for row in rows for piece in row]
        encoded = self._encoder.encode(pieces)
        learned = [piece.supervised or (empty_thoughts and piece.empty_thought) for piece in pieces]
        past_P = np.cumsum([len(row) for row in rows], dtype=np.int64)
        for past, row in zip(past_P.tolist(), rows, strict=True):
            if len(row) == 1 and row[0].supervised:  # a plain text: before an answer stands a prompt
                encoded[past - 1] = self._as_text(encoded[past - 1])
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ids = np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum()))
        ends = np.concatenate([[0], np.cumsum(lengths)])[past_P]
        return EncodedRows(ids, np.repeat(np.array(learned, np.bool_), lengths), ends)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids at which generation has to stop: EOS, and the tokens that end an answer and a call in this template."""
        ends = {self._tokenizer.eos_token_id}
        for row in self.lay_out_rows([_PROBE, _CALL_PROBE]):
            ids = [] if isinstance(row, BadRow) else self.encode_rows([row]).ids.tolist()
            ends.update([token for token in ids if token in self._encoder.special_ids][-1:])
        return frozenset(ends)

    def _as_text(self, ids: list[int]) -> list[int]:
        """Pieces of a plain text, with BOS and EOS unless its author wrote them."""
        if ids[: len(self._text_start)] != self._text_start:
            ids = self._text_start + ids
        eos = self._tokenizer.eos_token_id
        if not ids or ids[-1] not in self._encoder.special_ids | {eos}:
            ids = [*ids, eos]
        return ids


T = TypeVar("T")


def _good(row: T | BadRow) -> T:
    """``row``. Raises it where it is an error."""
    if isinstance(row, BadRow):
        raise row
    return row


def _text_start(tokenizer: Any) -> list[int]:
    """BOS, where the tokenizer puts one in front of plain text."""
    ids = tokenizer("a")["input_ids"]
    return ids[:1] if tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id] else []


def _read_template(path: str) -> str:
    try:
        return read_text(Path(path).expanduser(), encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(
            f"chat_template {path!r} cannot be read: {cause}",
            hint="give the path of a Jinja file, or leave chat_template out to use the tokenizer's own",
        ) from None


def _own_template(tokenizer: Any) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise DataError(
            f"the tokenizer's chat template cannot be used: {error}",
            hint="chat_template: path/to/template.jinja",
        ) from None


def _dated(source: str, day: str, name: str) -> str:
    """The template, to write that day. It says so in Jinja: exported, it writes the same day everywhere."""
    if "strftime_now" not in source and "date_string" not in source:
        raise DataError(
            f"chat_template_date = {day}: {name} writes no date", hint="leave chat_template_date out"
        )
    that_day = date.fromisoformat(day)
    parts = (f"replace('%{letter}', '{that_day:%{letter}}')" for letter in ("-d", *"dmyYbBaAjHMS"))
    return (
        f"{{%- macro strftime_now(format) -%}}{{{{- format | {' | '.join(parts)} -}}}}{{%- endmacro -%}}"
        f"{{%- set date_string = '{that_day:%d %b %Y}' %}}\n{source}"
    )


def _tried(template: ChatTemplate) -> ChatTemplate:
    """The template, after it was seen to show an answer that decodes to what it should."""
    try:
        encoded = template.encode(_PROBE)
    except BadRow as error:
        cause = error.message.removeprefix(f"{_PROBE.where}: ").replace(f"{template.name}: ", "", 1)
        raise DataError(f"{template.name} cannot be used: {cause}", hint=error.hint) from None
    learned = [token for token, wanted in zip(encoded.ids, encoded.supervised, strict=True) if wanted]
    shown = template._tokenizer.decode(learned)
    if "pong" not in "".join(shown.split()).lower():
        raise DataError(
            f"{template.name} cannot be used: for the answer 'pong' the model would learn {shown!r}"
        )
    return template
