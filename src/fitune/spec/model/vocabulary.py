"""The tokens of a model, read from its tokenizer.json without a tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from fitune.spec.hub import cached_file
from fitune.spec.serial import TABLE_BYTES, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Ids by token, and the length that a table of them needs."""

    length: int
    """One more than the largest id."""
    tokens: dict[str, int]


def vocabulary_of(name: str) -> Vocabulary | None:
    """The vocabulary in a model's folder or the Hugging Face cache; None without a tokenizer.json."""
    file = _tokenizer_file(name)
    if file is None:
        return None
    try:
        data = read_object(file, largest_bytes=TABLE_BYTES)
        tokens = data["model"]["vocab"]
        if not isinstance(tokens, dict):  # Unigram lists pairs of token and score in the order of the ids
            tokens = {token: place for place, (token, _) in enumerate(tokens)}
        tokens |= {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever needs the tokenizer itself says what is wrong with it
    return Vocabulary(length=max(tokens.values(), default=-1) + 1, tokens=tokens)


def _tokenizer_file(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / "tokenizer.json"
        return file if file.is_file() else None
    try:
        return cached_file(name, "tokenizer.json")
    except ModuleNotFoundError:
        return None
