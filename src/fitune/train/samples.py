"""Held-out prompts answered before and after training: what a reader of the report looks at first."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fitune.data.formats import Conversation
from fitune.files import write_atomically
from fitune.models.language_model import LanguageModel
from fitune.spec.reports import Sample
from fitune.spec.serial import read_json

Answer = Callable[[LanguageModel, Sequence[Conversation]], list[str]]
"""Answers to the last user message of each conversation, by the model as it is now."""

_BEFORE = "samples_before.json"


def answer_before(
    directory: Path, model: LanguageModel, conversations: Sequence[Conversation], answer: Answer
) -> None:
    """Answer with the untrained model and keep the answers on disk: a resumed run cannot ask again."""
    answers = answer(model, conversations)
    write_atomically(directory / _BEFORE, json.dumps(answers, ensure_ascii=False))


def compare_samples(
    directory: Path, model: LanguageModel, conversations: Sequence[Conversation], answer: Answer
) -> tuple[Sample, ...]:
    """Answer the same prompts with the trained model and lay both answers side by side."""
    before = _answers_before(directory, len(conversations))
    after = answer(model, conversations)
    return tuple(
        Sample(prompt=_prompt(c), expected=c.messages[-1].content, before=was, after=now)
        for c, was, now in zip(conversations, before, after, strict=True)
    )


def _answers_before(directory: Path, wanted: int) -> list[str]:
    """What the untrained model said. A run resumed elsewhere, or with more samples, was never asked all of them.

    The file stays: a finished run may be made longer.
    """
    try:
        found = read_json(directory / _BEFORE, follow_links=False)
    except (OSError, ValueError):  # a table that a damaged file leaves empty is not worth a finished run
        found = []
    said = [answer for answer in found if isinstance(answer, str)] if isinstance(found, list) else []
    return [*said, *[_NOT_ASKED] * wanted][:wanted]


_NOT_ASKED = "(not asked: the run was resumed from elsewhere)"


def _prompt(conversation: Conversation) -> str:
    """What was said before the answer; the role is named where it is not the user's."""
    lines = [m.content if m.role == "user" else f"[{m.role}] {m.content}" for m in conversation.messages[:-1]]
    return "\n".join(lines)
