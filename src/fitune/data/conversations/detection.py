"""Which format a row has, by the names of its fields; for any other row, how its columns could be named."""

import re
import shlex

from fitune.data.reading.rows import Row, refuse_good_and_bad
from fitune.errors import DataError
from fitune.spec.plan import DataFormat

Columns = tuple[tuple[str, str], ...]

ACCEPTED = (
    "accepted formats: messages [{role, content}], conversations [{from, value}], {instruction, output[, input]}, "
    "{prompt, completion}, {question, answer}, {dialogue, summary}, {text}, or columns: {prompt: …, completion: …}"
)

_RECOGNISED: tuple[tuple[DataFormat, tuple[str, ...]], ...] = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("question_answer", ("question", "answer")),
    ("dialogue_summary", ("dialogue", "summary")),
    ("text", ("text",)),
)
"""The first format all of whose fields are there is taken."""


def detect_format(row: Row, columns: Columns = ()) -> DataFormat:
    """The format whose fields are all there; a column mapping goes before everything.

    Raises DataError that names the row and lists the fields found and the formats accepted; and for rows of
    good and bad answers.
    """
    if columns:
        return "columns"
    refuse_good_and_bad(row)
    names = set(row.fields)
    for name, needed in _RECOGNISED:
        if names.issuperset(needed):
            return name
    found = ", ".join(sorted(map(str, names))) or "no fields"
    raise DataError(
        f"{row.where}: format auto: the row has {found}, which is not a known format",
        hint=f"{_mapped(row)}; {ACCEPTED}",
    )


def _mapped(row: Row) -> str:
    """The columns of this row by role, as a recipe and as an option: those whose names sound like it, else open."""
    talks = [name for name, value in row.fields.items() if isinstance(value, list)]
    if talks:
        roles = {"messages": talks[0]}
    else:
        texts = [str(name) for name, value in row.fields.items() if isinstance(value, str)]
        parts = {name: set(re.split(r"[^a-z]+", name.lower())) for name in texts}
        roles = {
            role: next((name for word in words for name in texts if word in parts[name]), "…")
            for role, words in _SOUNDS.items()
        }
    written = ", ".join(f"{role}: {name}" for role, name in roles.items())
    typed = ",".join(f"{role}={name}" for role, name in roles.items())
    option = typed if "…" in typed else shlex.quote(typed)
    return f"columns: {{{written}}} in the recipe, or --columns {option}"


_SOUNDS = {
    "prompt": ("prompt", "instruction", "question", "query", "input", "user", "source", "problem", "q"),
    "completion": (
        "completion",
        "response",
        "answer",
        "output",
        "reply",
        "assistant",
        "target",
        "solution",
        "a",
    ),
}
"""Words that a column's name may have as a part, the likeliest first."""
