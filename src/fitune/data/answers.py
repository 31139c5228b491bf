"""Where in a rendered conversation the answers stand.

A template that marks with ``{% generation %}`` what the model writes is believed. Most templates on the Hub mark
nothing; there the conversation is rendered once more with stand-ins for the answers, and what is between the
stand-ins is the frame into which the real answers fit. Either way what was found must show the answer, in
every row, or the row is refused. An answer that is not ended by a token of its own is learned together with the
end token behind it, or with EOS when nothing follows: a model must learn to stop.
"""

from collections.abc import Sequence
from dataclasses import replace

from fitune.data.formats import Message
from fitune.data.rendering import Piece, Rendered, Renderer
from fitune.data.rows import BadRow

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
    """Where the words begin that the prompt ends with and a generation block writes too; else the prompt's end."""
    written = renderer.opening if prompt.text.endswith(renderer.opening) else ""
    return len(prompt.text) - len(written)


def _earlier_answers(renderer: Renderer, messages: Messages, prompt: Rendered, where: str) -> list[Span]:
    """Spans of the answers inside a prompt, from where the model would have begun to write."""
    spans = _answer_spans(renderer, messages, prompt, ask=True, where=where)
    if renderer.has_marks:
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
    """Of every assistant message: its text and the special token that ends it, if one follows."""
    answers = [message.content for message in messages if message.role == "assistant"]
    if not answers:
        return []
    if renderer.has_marks:
        spans = list(rendered.generated)
    else:
        spans = _framed(_frame(renderer, messages, ask=ask, where=where), answers, rendered.text, where)
    if len(spans) != len(answers):
        raise _not_found(f"{len(answers)} answers are marked as {len(spans)}", where)
    for (begin, end), answer in zip(spans, answers, strict=True):
        if _visible(answer).strip() not in rendered.text[begin:end]:
            raise _not_found(f"{answer!r:.60} is not what it writes as the answer", where)
    return [
        (
            begin,
            end
            if renderer.is_ended(rendered, begin, end)
            else renderer.through_end_token(rendered.text, end),
        )
        for begin, end in spans
    ]


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
    """Where the answer that begins at ``at`` ends: templates write it whole or without the space around it."""
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
        if message.role != "assistant" and message.content.strip() not in text:
            raise BadRow(
                f"{where}: this template leaves out the {message.role} message {message.content!r:.60}",
                reason=f"{message.role} message left out by the template",
                hint="leave that message out, or give a chat_template that has a place for it",
            )


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
