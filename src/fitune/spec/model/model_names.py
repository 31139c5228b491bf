"""The known model that an unknown name may mean: of its family and its size, or none."""

import re
from collections.abc import Iterable
from difflib import SequenceMatcher

_SIZE = re.compile(r"(?<![a-z0-9.])(?:\d+x)?\d+(?:\.\d+)?[bm](?![a-z0-9])")
_FAMILY = re.compile(r"[a-z]+")


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name`` in its family: of its size where the family has that."""
    wanted = _plain(name)
    alike = [each for each in known if _family(_plain(each)) == _family(wanted)]
    size = _SIZE.search(wanted)
    if size is not None:
        alike = [each for each in alike if size[0] in _SIZE.findall(_plain(each))] or alike
    return max(
        alike,
        key=lambda each: (_likeness(wanted, _plain(each)), _likeness(name.lower(), each.lower())),
        default=None,
    )


def _plain(name: str) -> str:
    """``meta-llama/Meta-Llama-3-8B`` -> ``llama-3-8b``."""
    return name.rsplit("/", 1)[-1].lower().removeprefix("meta-").replace("_", "-")


def _family(plain: str) -> str:
    found = _FAMILY.match(plain)
    return found[0] if found else ""


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
