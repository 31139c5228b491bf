"""Words of a command that typer refuses, as an error of fitune's own: the option, the value, what may stand there, and
the nearest of it."""

import re
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from fitune.errors import RecipeError, did_you_mean

_SENTENCES = (
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"Input should be (.*)", r"must be \1"),
)
"""pydantic's sentences, which typer shows since 0.26, and ours."""


_ELSEWHERE = {"--merge": "--as merged", "--merged": "--as merged"}
"""Options of other tools, and what says the same here."""


def refusal_of(error: Any) -> RecipeError:
    """The error to show for ``error``, a UsageError of the click that typer brings along and does not export."""
    command = "fitune" if error.ctx is None else str(error.ctx.command_path)
    message = str(error.message or error.format_message()).removeprefix("Value error, ").rstrip(".")
    param = getattr(error, "param", None)
    if option := getattr(error, "option_name", ""):
        if "No such" not in message:
            return RecipeError(f"{option} has no value", hint=f"{command} --help")
        near = _ELSEWHERE.get(option) or did_you_mean(option, error.possibilities or [])
        return RecipeError(f"{option} is not an option of {command}", hint=near or f"{command} --help")
    if param is None or not error.message:  # no such command, a word too many, an option that is missing
        said, _, hint = error.format_message().partition(". ")
        said, hint = (text[:1].lower() + text[1:] for text in (said.rstrip("."), hint))
        return RecipeError(f"{command}: {said}", hint=hint or f"{command} --help")
    name = max(param.opts, key=len)
    return _bad_value(name, message, error) or RecipeError(f"{name}: {message}", hint=f"{command} --help")


def _bad_value(name: str, message: str, error: Any) -> RecipeError | None:
    """The error of a value that ``name`` does not take; None for a sentence that is not known."""
    if choice := re.fullmatch(r"'(.*?)' is not one of (.*)", message):
        value, words = choice[1], re.findall(r"'([^']*)'", choice[2])
        *first, last = map(repr, words)
        allowed = f"{', '.join(first)} or {last}" if first else last
        elsewhere = next(_taken_by(error, name, value), None)
        return RecipeError(
            f"{name} = {value!r}: must be {allowed}", hint=elsewhere or did_you_mean(value, words)
        )
    for pattern, ours in _SENTENCES:
        if re.fullmatch(pattern, message):
            value = _typed(error)
            shown = "" if value is None else f" = {value!r}"
            said = re.sub(pattern, ours, message)
            return RecipeError(f"{name}{shown}: {said}", hint=f"{error.ctx.command_path} --help")
    return None


def _taken_by(error: Any, name: str, value: str) -> Iterator[str]:
    """Other commands whose option of that name takes the value."""
    parent = error.ctx.parent
    for command in parent.command.commands.values() if parent is not None else ():
        if command.callback is None or all(name not in param.opts for param in command.params):
            continue
        kind = get_type_hints(command.callback).get(name.lstrip("-").replace("-", "_"))
        if any(value in get_args(part) for part in (kind, *get_args(kind))):
            yield f"{parent.command_path} {command.name} … {name} {value}"


def _typed(error: Any) -> Any:
    """The value as it was typed, where pydantic refused it; else None."""
    errors = getattr(error.__cause__, "errors", None)
    return errors()[0].get("input") if errors is not None else None
