"""JSON files that carry a hash of their own content: a change of any byte is seen."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, TypeVar

from fitune.files import read_bytes
from fitune.spec.serial import from_data, parse_object, to_json

T = TypeVar("T")


def sealed(value: Any) -> Any:
    """``value``, a dataclass with a field ``digest``, with the sha256 of all else in that field."""
    text = to_json(dataclasses.replace(value, digest=""))
    return dataclasses.replace(value, digest=hashlib.sha256(text.encode()).hexdigest())


def read_sealed(cls: type[T], path: Path) -> T:
    """Raises OSError, and ValueError when the file is not, byte for byte, what was written."""
    content = read_bytes(path, follow_links=False)
    data = parse_object(content)
    if "digest" not in data:
        raise ValueError("it is of an older format, without a digest of itself")
    value = from_data(cls, data)
    if to_json(sealed(value)).encode() != content:
        raise ValueError("its content does not match its digest")
    return value
