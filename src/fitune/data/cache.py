"""Tokenised data kept by what it was made of, so that it is made once."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fitune.errors import DataError
from fitune.spec.disk import sync_tree

_CODE_VERSION = 2
"""Raised whenever the same input would be tokenised differently."""


def folder_of(cache_dir: str) -> Path:
    """``cache_dir``, else $FITUNE_CACHE, else ~/.cache/fitune; tokenised data is in ``tokens`` inside."""
    root = cache_dir or os.environ.get("FITUNE_CACHE") or "~/.cache/fitune"
    return Path(root).expanduser() / "tokens"


def key_of(settings: dict[str, Any], *, tokenizer: Any, template: str) -> str:
    """A hash of everything the tokens depend on: content, settings, tokenizer, template and this code."""
    parts = [_CODE_VERSION, settings, template, _tokenizer_text(tokenizer), tokenizer.special_tokens_map]
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _tokenizer_text(tokenizer: Any) -> Any:
    """What the tokenizer does, not where it was read from: a renamed folder changes nothing."""
    if tokenizer.is_fast:
        return tokenizer.backend_tokenizer.to_str()
    return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]


def store(entry: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder that appears under its name only when all of it is on disk.

    What stood there is replaced: it was damaged, or another process has just made the same.
    Raises DataError when the cache cannot be written.
    """
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{entry.name}.making-", dir=entry.parent))
    except OSError as error:
        raise _unwritable(entry.parent, error) from None
    try:
        write(made)
        sync_tree(made)
        shutil.rmtree(entry, ignore_errors=True)
        made.rename(entry)
    except OSError as error:
        if not (entry / "manifest.json").exists():
            raise _unwritable(entry.parent, error) from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache for tokenised data cannot be written: {folder}: {error.strerror or error}",
        hint="free some space, or name another folder: cache_dir in the recipe, or FITUNE_CACHE",
    )
