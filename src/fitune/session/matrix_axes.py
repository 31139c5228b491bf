"""The two axes of a matrix as people write them: names of models, and lengths of rows."""

import re
from collections.abc import Iterator

from fitune.errors import RecipeError

_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]", re.IGNORECASE)


def full_names(models: str) -> Iterator[str]:
    """``llama-2-7b,13b``: a size alone stands for the model before it in that size.

    Raises RecipeError for no names, and for a size that follows no name with a size in it.
    """
    before = ""
    words = [word.strip() for word in models.split(",") if word.strip()]
    if not words:
        raise RecipeError("--models names no model", hint="--models llama-2-7b,13b,70b")
    for word in dict.fromkeys(words):
        if _SIZE.fullmatch(word):
            sizes = list(_SIZE.finditer(before))
            if not sizes:
                raise RecipeError(
                    f"--models: {word} is a size, and no model with a size is named before it",
                    hint="--models llama-2-7b,13b,70b",
                )
            word = before[: sizes[-1].start()] + word + before[sizes[-1].end() :]
        yield word
        before = word


def row_lengths(context: str) -> tuple[int, ...]:
    """Whole numbers of tokens. Raises RecipeError for anything else."""
    words = [word.strip() for word in context.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(
            f"--context {context!r} is not a list of token counts", hint="--context 512,1024,2048"
        )
    return tuple(int(word) for word in words)
