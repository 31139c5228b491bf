"""JSON files that others wrote, read within bounds: bytes, nesting, UTF-8, and no key twice.

``json.loads`` alone takes the last of two equal keys without a word, ends in a RecursionError for what is nested
deeply, and reads whatever size there is. Every ValueError here is a cause in words; the caller adds the file.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from fitune.spec.disk import read_bytes
from fitune.units import MIB

CONFIG_BYTES = 8 * MIB
"""Largest config, plan, state or report: those in use have about one MiB at most (names of 20,000 classes)."""
TABLE_BYTES = 64 * MIB
"""Largest tokenizer or index of weights: Gemma-3's 262,144 tokens take 33 MiB, 280,000 tensors about 28 MiB."""

MOST_NESTING = 64
"""Levels of lists and objects: what copies, compares or prints a value goes one call deeper for each of them."""
_MOST_CONTAINERS = 4_000_000
"""Lists and objects of one file: an empty one takes 60 bytes for the three that it has in the file."""


def read_object(
    file: Path, *, largest_bytes: int = CONFIG_BYTES, follow_links: bool = True
) -> dict[str, Any]:
    """The object in ``file``. Raises OSError, and ValueError saying what is wrong with the content."""
    return parse_object(read_bytes(file, limit=largest_bytes, follow_links=follow_links))


def read_json(file: Path, *, largest_bytes: int = CONFIG_BYTES, follow_links: bool = True) -> Any:
    """Read the value in ``file``. Raises OSError, and ValueError saying what is wrong with the content."""
    return parse_json(read_bytes(file, limit=largest_bytes, follow_links=follow_links))


def parse_object(data: bytes | str) -> dict[str, Any]:
    """Like ``parse_json`` for what must be an object."""
    value = parse_json(data)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, found {type(value).__name__}")
    return value


def parse_json(data: bytes | str) -> Any:
    """The value that ``data`` spells. Raises ValueError with the line, the key or the place that is wrong."""
    text = data if isinstance(data, str) else _decoded(data)
    if text.count("[") + text.count("{") > _MOST_CONTAINERS:
        raise ValueError(f"more than {_MOST_CONTAINERS:,} lists and objects")
    try:
        value = json.loads(text, object_pairs_hook=_without_doubles)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise _too_deep() from None
    require_shallow(value)
    _require_whole_characters(text, value)
    return value


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def require_shallow(value: Any) -> None:
    """Raises ValueError when lists and objects are nested more than MOST_NESTING deep."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        if depth > MOST_NESTING:
            raise _too_deep()
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]


def _too_deep() -> ValueError:
    return ValueError(f"lists and objects nested more than {MOST_NESTING} deep")


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _require_whole_characters(text: str, value: Any) -> None:
    r"""``"\ud83d"`` alone is a string that cannot be written or printed."""
    if not _SURROGATE.search(text):
        return
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = ord(error.object[error.start])
        raise ValueError(f"contains an unpaired surrogate (U+{code:04X})") from None
