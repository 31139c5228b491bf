"""Names that can stand for a file on every machine and in every message."""

import unicodedata

_LONGEST_NAME_BYTES, _LONGEST_PATH_BYTES = 255, 4095
"""NAME_MAX and PATH_MAX of Linux (man 7 path_resolution)."""


def path_fault(path: str) -> str | None:
    """Why ``path`` cannot be the name of a file or folder, in words; None when it can."""
    for character in path:
        category = unicodedata.category(character)
        if category in ("Cc", "Cs"):
            kind = "a control character" if category == "Cc" else "an unpaired surrogate"
            return f"{ascii(path)[:80]} contains {kind} (U+{ord(character):04X})"
    longest = max(path.split("/"), key=len)
    size = len(longest.encode())
    if size > _LONGEST_NAME_BYTES:
        return f"the name {longest[:40]}… has {size} bytes, at most {_LONGEST_NAME_BYTES} are allowed"
    size = len(path.encode())
    if size > _LONGEST_PATH_BYTES:
        return f"the path {path[:40]}… has {size} bytes, at most {_LONGEST_PATH_BYTES} are allowed"
    return None
