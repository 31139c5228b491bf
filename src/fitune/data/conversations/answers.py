"""Positions of the answers in a rendered conversation.

A template that marks with ``{% generation %}`` what the model writes is believed. Most templates on the Hub mark
nothing; there the conversation is rendered once more with stand-ins for the answers, and what is between the
stand-ins is the frame into which the real answers fit. Either way what was found must show the answer, in
every row, or the row is refused. An answer that is not ended by a token of its own is learned together with the
end token behind it, or with EOS when nothing follows: a model must learn to stop.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from fitune.data.conversations.messages import Message
from fitune.data.conversations.rendering import Piece, Rendered, Renderer
from fitune.data.reading.rows import BadRow

_END_OF_THOUGHT = "</think>"
"""Templates of reasoning models treat what stands before this apart."""

Messages = Sequence[Message]
Span = tuple[int, int]


def conversation_pieces(renderer: Renderer, messages: Messages, *, where: str) -> list[Piece]:
    """The conversation to the end of its last answer, as pieces; they begin with those of its prompt.

    Raises BadRow when the template refuses it, leaves a message out, or asks for an answer in words that it does
    not write in front of a given one.
    """
    prompt, pieces = _prompt(renderer, messages[:-1], where)
    whole = renderer.render(messages, ask=False, where=where)
    begin = len(prompt.text)
    if not whole.text.startswith(prompt.text):
        raise _other_prompt(prompt.text, whole.text, where)
    first, end = _answer_spans(renderer, messages, whole, ask=False, where=where)[-1]
    if renderer.has_marks and first == _opening(renderer, prompt) < begin:
        pieces[-1] = replace(pieces[-1], supervised=True)
    learned = max(first, begin) if renderer.has_marks else begin
    pieces += renderer.pieces(whole, begin, learned, supervised=False)
    pieces += renderer.pieces(whole, learned, end, supervised=True)
    return pieces if renderer.is_ended(whole, learned, end) else [*pieces, renderer.eos_piece]


def prompt_pieces(renderer: Renderer, messages: Messages, *, where: str) -> list[Piece]:
    """Messages without their last answer, and the words that ask for it. Raises BadRow."""
    return _prompt(renderer, messages, where)[1]


def _prompt(renderer: Renderer, messages: Messages, where: str) -> tuple[Rendered, list[Piece]]:
    prompt = renderer.render(messages, ask=True, where=where)
    _require_shown(messages, prompt.text, where)
    pieces: list[Piece] = []
    at = 0
    for begin, end in _earlier_answers(renderer, messages, prompt, where):
        pieces += renderer.pieces(prompt, at, begin, supervised=False)
        pieces += renderer.pieces(prompt, begin, end, supervised=True)
        at = end
    opening = _opening(renderer, prompt)
    pieces += renderer.pieces(prompt, at, opening, supervised=False)
    return prompt, pieces + renderer.pieces(prompt, opening, len(prompt.text), supervised=False)


def _opening(renderer: Renderer, prompt: Rendered) -> int:
    """Position of the words that end the prompt and that a generation block writes too; else the prompt's end."""
    written = renderer.opening if prompt.text.endswith(renderer.opening) else ""
    return len(prompt.text) - len(written)


def _earlier_answers(renderer: Renderer, messages: Messages, prompt: Rendered, where: str) -> list[Span]:
    """Spans of the answers inside a prompt, from where the model would have begun to write."""
    spans = _answer_spans(renderer, messages, prompt, ask=True, where=where)
    if renderer.has_marks or _has_calls(messages):
        return spans
    turns = [number for number, message in enumerate(messages) if message.role == "assistant"]
    begun = []
    for (begin, end), turn in zip(spans, turns, strict=True):
        asked = renderer.render(messages[:turn], ask=True, where=where).text
        fits = prompt.text.startswith(asked) and len(asked) <= begin
        begun.append((len(asked) if fits else begin, end))
    return begun


def _answer_spans(
    renderer: Renderer, messages: Messages, rendered: Rendered, *, ask: bool, where: str
) -> list[Span]:
    """The span of every assistant message: its text and the special token that ends it, if one follows."""
    turns = [message for message in messages if message.role == "assistant"]
    answers = [message.content for message in turns]
    if not answers:
        return []
    if renderer.has_marks:
        spans = list(rendered.generated)
    elif _has_calls(messages):
        spans = _spans_of_calls(renderer, messages, rendered, where)
    else:
        spans = _framed(_frame(renderer, messages, ask=ask, where=where), answers, rendered.text, where)
    if len(spans) != len(answers):
        raise _not_found(f"{len(answers)} answers are marked as {len(spans)}", where)
    for (begin, end), turn in zip(spans, turns, strict=True):
        shown = rendered.text[begin:end]
        missing = [part for part in (_visible(turn.content).strip(), *_names(turn)) if part not in shown]
        if missing and not (turn.calls and missing[0] == _visible(turn.content).strip()):
            raise _not_found(f"{missing[0]!r:.60} is not what it writes as the answer", where)
        if missing:
            raise _text_beside_calls(missing[0], where)
    return [
        (
            begin,
            end
            if renderer.is_ended(rendered, begin, end)
            else renderer.through_end_token(rendered.text, end),
        )
        for begin, end in spans
    ]


def _has_calls(messages: Messages) -> bool:
    return any(message.calls for message in messages)


def _names(message: Message) -> list[str]:
    return [call.name for call in message.calls]


def _spans_of_calls(renderer: Renderer, messages: Messages, rendered: Rendered, where: str) -> list[Span]:
    """The spans of all answers in a conversation with calls: each from the end of its prompt to its end token.

    Stand-ins do not find them: templates write calls instead of the content, or other words around it.
    """
    spans: list[Span] = []
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        begin = _after_prompt(
            renderer, messages[:number], rendered, at=spans[-1][1] if spans else 0, where=where
        )
        end = renderer.end_of_call(rendered, begin)
        if begin < 0 or end < 0:
            raise _not_found(f"message {number + 1} does not follow its prompt, or has no end token", where)
        spans.append((begin, end))
    return spans


def _after_prompt(renderer: Renderer, messages: Messages, rendered: Rendered, *, at: int, where: str) -> int:
    """Position at which the prompt of ``messages`` ends; -1 where it does not stand in the text.

    Templates of reasoning models write earlier turns shorter than when they were last: there the words that ask for an
    answer are looked for, or the first line of them, from ``at``.
    """
    asked = renderer.render(messages, ask=True, where=where).text
    if rendered.text.startswith(asked):
        return len(asked)
    said = renderer.render(messages, ask=False, where=where).text
    asking = asked.removeprefix(said) if asked.startswith(said) else ""
    first = asking.splitlines(keepends=True)[0] if asking.strip() else ""
    found = rendered.text.find(first, at) if first else -1
    if found < 0 or found in rendered.shielded:
        return -1
    return found + len(asking if rendered.text.startswith(asking, found) else first)


def _text_beside_calls(text: str, where: str) -> BadRow:
    return BadRow(
        f"{where}: this template leaves out the text {text!r:.60} beside the calls of an answer",
        reason="text beside calls left out by the template",
        hint="leave the text out of answers with calls, or give a chat_template that shows both",
    )


def _frame(renderer: Renderer, messages: Messages, *, ask: bool, where: str) -> list[str]:
    """The text around the answers: one part before each, one after the last."""
    thoughts = {
        number: _thought(message.content)
        for number, message in enumerate(messages)
        if message.role == "assistant"
    }
    return renderer.frame(messages, thoughts, ask=ask, where=where)


def _framed(frame: list[str], answers: list[str], text: str, where: str) -> list[Span]:
    """Fit the answers between the parts of the frame; the last one ends where the last part begins."""
    if len(frame) != len(answers) + 1 or not text.startswith(frame[0]) or not text.endswith(frame[-1]):
        raise _not_found("the answers cannot be told from the rest", where)
    spans = []
    at = len(frame[0])
    for answer, after in zip(answers[:-1], frame[1:-1], strict=True):
        end = _end_of(_visible(answer), after, text, at)
        if end < 0:
            raise _not_found(f"{answer!r:.60} is not where it should be", where)
        spans.append((at, end))
        at = end + len(after)
    return [*spans, (at, len(text) - len(frame[-1]))]


def _end_of(answer: str, after: str, text: str, at: int) -> int:
    """End of the answer that begins at ``at``: templates write it whole or without the space around it."""
    for form in (answer, answer.strip(), answer.lstrip(), answer.rstrip()):
        if text.startswith(form + after, at):
            return at + len(form)
    return text.find(after, at)


def _thought(answer: str) -> str:
    head, mark, _ = answer.rpartition(_END_OF_THOUGHT)
    return head + mark


def _visible(answer: str) -> str:
    return answer.rpartition(_END_OF_THOUGHT)[2]


def _require_shown(messages: Messages, text: str, where: str) -> None:
    for message in messages:
        if message.role != "assistant" and not _is_shown(message, text):
            raise BadRow(
                f"{where}: this template leaves out the {message.role} message {message.content!r:.60}",
                reason=f"{message.role} message left out by the template",
                hint="leave that message out, or give a chat_template that has a place for it",
            )


def _is_shown(message: Message, text: str) -> bool:
    """Templates write a tool's answer as it is, or as JSON text."""
    content = message.content.strip()
    forms = [content]
    if message.role == "tool":
        forms += [json.dumps(content, ensure_ascii=escaped)[1:-1] for escaped in (False, True)]
    return any(form in text for form in forms)


def _other_prompt(prompt: str, whole: str, where: str) -> BadRow:
    same = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(whole))
    return BadRow(
        f"{where}: this template asks for an answer with {prompt[same:]!r:.60} "
        f"but writes {whole[same:]!r:.60} in front of a given one: training would not match use",
        reason="prompt of the template differs from its conversation",
        hint="give a chat_template whose add_generation_prompt writes what stands in front of its answers",
    )


def _not_found(what: str, where: str) -> BadRow:
    return BadRow(
        f"{where}: cannot find the answers in what the template writes: {what}",
        reason="answer not found in the template's text",
        hint="put {% generation %}…{% endgeneration %} around the answer in a chat_template of your own",
    )
