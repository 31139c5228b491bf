"""The fields of a config.json, read by name and checked for their kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from fitune.errors import ModelError

MOST_COUNT = 1_000_000_000
"""Largest count in a config: positions reach ten millions, and arithmetic with what lies beyond never ends."""
MOST_MADE = 10_000
"""Largest number of layers, or of names of classes."""
_SHOWN = 200
"""Characters of a value in an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """The values of one config.json and the words that say where they come from.

    ``null`` counts as absent: Hugging Face writes it for "the class decides".
    """

    values: Mapping[str, Any]
    where: str

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least ``least`` under the first of ``names`` that is set."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if type(value) is not int or value < least:
                self.refuse(name, f"must be a whole number of at least {least}")
            most = MOST_MADE if "layer" in name or name == "num_labels" else MOST_COUNT
            if value > most:
                self.refuse(name, f"is more than any model has ({most:,})")
            return value
        if default is None:
            raise ModelError(
                f"{self.where}: {names[0]} is missing", hint="a config.json of transformers has it"
            )
        return default

    def share(self, name: str, *, default: float = 0.0) -> float:
        """A part of 1, less than all; the ``default`` when the field is absent. Raises ModelError for other values."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 <= value < 1:
            self.refuse(name, "must be a number at least 0 and less than 1")
        return float(value)

    def is_capped(self, name: str, *, default: bool) -> bool:
        """True if a soft cap is set: ``null`` switches it off, an absent one is the ``default`` of the class."""
        return self.values[name] is not None if name in self.values else default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """A boolean field; ``default`` where it is absent. Raises ModelError for any other value."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(name, "must be true or false")
        return value

    def word(self, name: str, *, default: str) -> str:
        """A name, which check_config has checked; the ``default`` when the field is absent."""
        value = self.values.get(name)
        return default if value is None else str(value)

    def words(self, name: str) -> tuple[str, ...]:
        """A list of strings, empty when the field is absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(name, "must be a list of names")
        return tuple(value)

    def refuse(self, name: str, why: str, *, hint: str | None = None) -> NoReturn:
        """Raises ModelError: where it stands, the field and its value (cut when long), then ``why``."""
        shown = repr(self.values.get(name))
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
        raise ModelError(f"{self.where}: {name} = {shown} {why}", hint=hint)
