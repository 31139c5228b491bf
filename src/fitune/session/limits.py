"""The smallest and largest value of every number that scoring takes; light, because the options are made of it."""

from collections.abc import Mapping

from fitune.errors import RecipeError

SCORING: dict[str, tuple[float, float]] = {
    "max_new_tokens": (1, 1_000_000),
    "batch_size": (1, 65_536),
    "temperature": (0.0, 1_000.0),
    "top_p": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
}


def require_within_limits(settings: Mapping[str, float]) -> None:
    """Raises RecipeError for a number that is out of its range."""
    for name, value in settings.items():
        least, most = SCORING[name]
        if not least <= value <= most:
            raise RecipeError(f"{name} = {value!r}: must be from {least:,} to {most:,}")
