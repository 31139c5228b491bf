"""Options whose values have parts."""

from collections.abc import Sequence

from fitune.errors import RecipeError


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """``prompt=question`` -> {"prompt": "question"}. Raises RecipeError for anything else."""
    columns: dict[str, str] = {}
    for word in words:
        role, equals, column = word.partition("=")
        if not (role and equals and column) or role in columns:
            raise RecipeError(f"--columns {word!r} is not role=column", hint="--columns prompt=question")
        columns[role] = column
    return columns
