"""Calls of tools in an answer and its reference, both as the chat template writes them.

Most templates write a call as JSON with the tool's name and its arguments, between tokens of their own: these calls are
compared in any order, whatever else is said. Where a template writes them in another way (a name in front of the
arguments, tags) the words are compared, and the JSON among them by value.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fitune.data.conversations.tool_calls import calls_in_text
from fitune.data.reading.rows import BadRow, Row
from fitune.spec.serial import require_shallow

_DECODER = json.JSONDecoder()


def compared_calls(answer: str, expected: str, wanted: Sequence[str]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of ``answer`` and of ``expected``, each as canonical JSON. ``wanted``: those of ``expected``
    as the data has them."""
    calls = Counter(_canonical(json.loads(call)) for call in wanted)
    said, meant = _parts(answer), _parts(expected)
    if _calls(meant) == calls:
        return _calls(said), calls
    return Counter([_canonical(said)]), Counter([_canonical(meant)])


def _parts(text: str) -> list[Any]:
    """Words, and JSON's objects and lists, in their order."""
    parts: list[Any] = []
    at = begin = 0
    while at < len(text):
        if text[at] in "{[":
            try:
                value, end = _DECODER.raw_decode(text, at)
                require_shallow(value)
            except RecursionError:
                break  # brackets without end
            except ValueError:
                pass
            else:
                parts += [*text[begin:at].split(), value]
                at = begin = end
                continue
        at += 1
    return parts + text[begin:].split()


def _calls(parts: Sequence[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for part in parts:
        if not isinstance(part, str):
            try:
                calls = calls_in_text(Row("", {}), "", part)
            except BadRow:
                continue
            found.update(
                _canonical({"name": call.name, "arguments": json.loads(call.arguments)}) for call in calls
            )
    return found


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
