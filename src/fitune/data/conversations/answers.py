"""Positions of the answers in a rendered conversation.

A template that marks with ``{% generation %}`` what the model writes is believed. Most templates on the Hub mark
nothing: there an answer starts after the generation prompt and ends at the last end token before the next message.
Rendering the conversation with stand-ins for the questions shows where that message starts. Either way what was found
must show the answer, in every row, or the row is refused. An answer that is not ended by a token of its own is learned
together with the end token behind it, or with EOS when nothing follows: a model must learn to stop.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from fitune.data.conversations.messages import Message
from fitune.data.conversations.rendering import Piece, Renderer
from fitune.data.conversations.sandbox import Rendered, joined
from fitune.data.reading.rows import BadRow

_THOUGHTS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""Tags around the reasoning, in which templates of reasoning models treat it apart."""
_OPEN, _CLOSE = ("|".join(map(re.escape, tags)) for tags in (_THOUGHTS, _THOUGHTS.values()))
_OPENED = re.compile(rf"({_OPEN})(\s*)$")
_TAGS_AT_END = re.compile(rf"(?:(?:{_OPEN}|{_CLOSE})\s*)+$")
_EMPTY_THOUGHT = re.compile(rf"\s*(?:(?:{_OPEN})\s*)?(?:{_CLOSE})\n*")
_THOUGHT = re.compile(rf"\s*(?:{_OPEN})?(.*)(?:{_CLOSE})\n*", re.DOTALL)
_WRITTEN_THOUGHT = re.compile(rf"(?:\s*(?:{_OPEN})(?s:.*?)(?:{_CLOSE}))?\n*")

Messages = Sequence[Message]
Span = tuple[int, int]


def conversation_pieces(renderer: Renderer, messages: Messages) -> list[Piece]:
    """The conversation to the end of its last answer, as pieces; they begin with those of its prompt.

    Raises BadRow when the template refuses it, leaves a message out, or asks for an answer in words that it does
    not write in front of a given one.
    """
    *before, answer = messages
    prompt, pieces = _prompt(renderer, before)
    begin = len(prompt.text)
    whole = _continued(renderer, messages, prompt)
    if renderer.has_marks:
        first, end = _marked_spans(renderer, messages, whole)[-1]
        if first == _opening(renderer, prompt) < begin:
            pieces[-1] = replace(pieces[-1], supervised=True)
        learned = max(first, begin)
        pieces += renderer.pieces(whole, begin, learned, supervised=False)
        is_ended = renderer.is_ended(whole, learned, end)
    else:
        learned = begin
        end, is_ended = _end_of_answer(renderer, whole, begin, len(whole.text))
    _require_answer(answer, whole.text[learned:end])
    if answer.thought.strip() not in whole.text[begin:end]:
        raise BadRow(
            f"this template leaves out the reasoning {answer.thought!r:.60}",
            reason="reasoning left out by the template",
            hint="leave the field out of the rows, or give a chat_template that shows reasoning_content or thinking",
        )
    pieces += _answer_pieces(renderer, whole, (learned, end), answer)
    return pieces if is_ended else [*pieces, renderer.closing(answer)]


def prompt_pieces(renderer: Renderer, messages: Messages) -> list[Piece]:
    """Messages without their last answer, and the words that ask for it. Raises BadRow."""
    return _prompt(renderer, messages)[1]


def thought_of(message: Message) -> str:
    """The reasoning before an answer, from its own field or between tags in the content; "" for none."""
    found = _THOUGHT.match(message.content)
    return (message.thought or (found[1] if found else "")).strip()


def _prompt(renderer: Renderer, messages: Messages) -> tuple[Rendered, list[Piece]]:
    prompt = renderer.render(messages, ask=True)
    _require_shown(messages, prompt.text)
    pieces: list[Piece] = []
    at = 0
    answers = [message for message in messages if message.role == "assistant"]
    if answers:
        spans_of = _marked_spans if renderer.has_marks else _earlier_spans
        for answer, (begin, end) in zip(answers, spans_of(renderer, messages, prompt), strict=True):
            _require_answer(answer, prompt.text[begin:end])
            pieces += renderer.pieces(prompt, at, begin, supervised=False)
            pieces += _answer_pieces(renderer, prompt, (begin, end), answer)
            at = end
    opening = _opening(renderer, prompt)
    pieces += renderer.pieces(prompt, at, opening, supervised=False)
    return prompt, pieces + renderer.pieces(prompt, opening, len(prompt.text), supervised=False)


def _opening(renderer: Renderer, prompt: Rendered) -> int:
    """Position of the words that end the prompt and that a generation block writes too; else the prompt's end."""
    written = renderer.opening if prompt.text.endswith(renderer.opening) else ""
    return len(prompt.text) - len(written)


def _answer_pieces(renderer: Renderer, rendered: Rendered, span: Span, answer: Message) -> list[Piece]:
    """The answer is learned, but not an empty thinking block that the template put in front of it."""
    begin, end = span
    is_own = renderer.has_marks or (_THOUGHT.match(answer.content) and not thought_of(answer))
    found = None if is_own else _EMPTY_THOUGHT.match(rendered.text, begin, end)
    learned = found.end() if found else begin
    empty = renderer.pieces(rendered, begin, learned, supervised=False)
    pieces = renderer.pieces(rendered, learned, end, supervised=True)
    return [*(replace(piece, empty_thought=True) for piece in empty), *pieces]


def _continued(renderer: Renderer, messages: Messages, prompt: Rendered) -> Rendered:
    """The conversation, which begins with its prompt.

    Some templates change earlier turns once an answer follows (gpt-oss drops the reasoning of calls): then the answer
    is put behind the prompt that the model sees. Some prompts end with an open <think> (DeepSeek-R1's): then the
    thought, which may be empty, and its closing tag are put behind it, as the model has to write them.
    """
    whole = renderer.render(messages, ask=False)
    if whole.text.startswith(prompt.text):
        return whole
    last = len(messages) - 1
    try:
        begin, _ = _between_questions(renderer, messages, whole, ask=False)[last]
        asking = _asking(renderer, messages, last)
    except (BadRow, KeyError):
        raise _other_prompt(prompt.text, whole.text) from None
    if whole.text.startswith(asking, begin):
        return joined(prompt, Rendered("", (), frozenset()), whole, begin + len(asking))
    opened, words = _OPENED.search(asking), _TAGS_AT_END.sub("", asking)
    if opened is None or not whole.text.startswith(words, begin):
        raise _other_prompt(prompt.text, whole.text)
    tag, space = opened.groups()
    left_out = _WRITTEN_THOUGHT.match(whole.text, begin + len(words))
    assert left_out is not None, "it matches nothing, too"
    thought = renderer.as_content(thought_of(messages[-1]), ending=f"{space}{_THOUGHTS[tag]}{space * 2}")
    return joined(prompt, thought, whole, left_out.end())


def _asking(renderer: Renderer, messages: Messages, number: int) -> str:
    """The text between the message before that of ``number`` and what the model writes."""
    return renderer.frame(messages[:number], {number - 1}, ask=True)[-1]


def _marked_spans(renderer: Renderer, messages: Messages, rendered: Rendered) -> list[Span]:
    """The spans of all answers as the template marks them, with the end tokens behind them."""
    answers = sum(message.role == "assistant" for message in messages)
    if len(rendered.generated) != answers:
        raise _not_found(f"{answers} answers are marked as {len(rendered.generated)}")
    return [
        (
            begin,
            end if renderer.is_ended(rendered, begin, end) else renderer.through_end_tokens(rendered, end),
        )
        for begin, end in rendered.generated
    ]


def _earlier_spans(renderer: Renderer, messages: Messages, prompt: Rendered) -> list[Span]:
    """The spans of the answers inside a prompt: each from behind the words that ask for it to its end tokens."""
    stretches = _between_questions(renderer, messages, prompt, ask=True)
    spans = []
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if number not in stretches:
            raise _not_found(f"message {number + 1} does not follow a question")
        begin, stop = stretches[number]
        asking = _asking(renderer, messages, number)
        words = next(
            (w for w in (asking, _TAGS_AT_END.sub("", asking)) if prompt.text.startswith(w, begin)), None
        )
        if words is None:
            raise _other_prompt(asking, prompt.text[begin:stop])
        begin += len(words)
        spans.append((begin, _end_of_answer(renderer, prompt, begin, stop)[0]))
    return spans


def _end_of_answer(renderer: Renderer, rendered: Rendered, begin: int, stop: int) -> tuple[int, bool]:
    """End of the answer that begins at ``begin``, and True if an end token is there."""
    if (end := renderer.end_token_between(rendered, begin, stop)) >= 0:
        return end, True
    if (behind := renderer.behind_answer(rendered, begin, stop)) is None:
        raise _not_found(f"{rendered.text[begin:stop]!r:.60} has no end token")
    return stop - len(behind), False


def _between_questions(
    renderer: Renderer, messages: Messages, rendered: Rendered, *, ask: bool
) -> dict[int, Span]:
    """For each message that follows a question or a tool's answer, the text from there to the next of them.

    Found from the end: templates may quote questions before the conversation itself.
    """
    numbers = [number for number, message in enumerate(messages) if message.role in ("user", "tool")]
    behind = renderer.frame(messages, numbers, ask=ask)[1:][-len(numbers) :]
    stretches, stop = {}, len(rendered.text)
    for place in reversed(range(len(behind))):
        begin = stop - len(behind[place])
        if begin < 0 or not rendered.text.endswith(behind[place], 0, stop):
            raise _not_found("the answers cannot be told from the rest")
        stretches[numbers[place] + 1] = (begin, stop)
        before = behind[place - 1] if place else ""
        stop = _begin_of(messages[numbers[place]], before, rendered.text, begin)
    return stretches


def _begin_of(question: Message, before: str, text: str, end: int) -> int:
    """Start of the question that ends at ``end``; -1 where ``before`` is not in front of it."""
    for form in _forms(question):
        if text.endswith(before + form, 0, end):
            return end - len(form)
    found = text.rfind(before, 0, end)
    return found + len(before) if found >= 0 else -1


def _forms(message: Message) -> list[str]:
    """Ways in which templates write a content: with or without the space around it, a tool's answer as JSON, too."""
    content = message.content
    forms = [content, content.strip(), content.lstrip(), content.rstrip()]
    if message.role == "tool":
        forms += [
            json.dumps(form, ensure_ascii=escaped)[1:-1] for form in forms[:2] for escaped in (False, True)
        ]
    return forms


def _require_answer(answer: Message, shown: str) -> None:
    text = answer.content[found.end() :] if (found := _THOUGHT.match(answer.content)) else answer.content
    text = text.strip()
    missing = next(
        (part for part in (text, *(call.name for call in answer.calls)) if part not in shown), None
    )
    if missing is None:
        return
    if answer.calls and missing == text:
        raise BadRow(
            f"this template leaves out the text {text!r:.60} beside the calls of an answer",
            reason="text beside calls left out by the template",
            hint="leave the text out of answers with calls, or give a chat_template that shows both",
        )
    raise _not_found(f"{missing!r:.60} is not what it writes as the answer")


def _require_shown(messages: Messages, text: str) -> None:
    for message in messages:
        if message.role != "assistant" and not any(form in text for form in _forms(message)):
            raise BadRow(
                f"this template leaves out the {message.role} message {message.content!r:.60}",
                reason=f"{message.role} message left out by the template",
                hint="leave that message out, or give a chat_template that has a place for it",
            )


def _other_prompt(prompt: str, whole: str) -> BadRow:
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
    return BadRow(
        f"this template asks for an answer with {prompt[same:]!r:.60} "
        f"but writes {whole[same:]!r:.60} in front of a given one: training would not match use",
        reason="prompt of the template differs from its conversation",
        hint="give a chat_template whose add_generation_prompt writes what stands in front of its answers",
    )


def _not_found(what: str) -> BadRow:
    return BadRow(
        f"cannot find the answers in what the template writes: {what}",
        reason="answer not found in the template's text",
        hint="put {% generation %}…{% endgeneration %} around the answer in a chat_template of your own",
    )
