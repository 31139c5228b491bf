"""The command line: parse, call, print. It imports rooms only when a command needs them, and nothing imports it.

``main`` runs a command and says what went wrong, to people or as JSON, also of words that typer refuses; exit codes
are those of errors.py.
"""

import json
import os
import re
import sys
from typing import Any

import typer

from fitune.cli.app import app
from fitune.errors import (
    FituneError,
    RecipeError,
    did_you_mean,
    exit_code_of,
    system_failures,
    training_libraries,
)
from fitune.session.signals import exits_on_signals
from fitune.units import wrapped


def main() -> None:
    """Run a command; a FituneError is printed for people (or as JSON), never as a traceback."""
    # Read when torch is loaded. Threads that spin while they wait make a step on cores that others use, too, 20 to 100
    # times as slow (bench/busy_neighbour.py).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # pydantic would look through all installed packages for plugins, which takes a tenth of a plan.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    try:
        with exits_on_signals(), system_failures(), training_libraries():
            _run_command()
    except FituneError as error:
        _print_error(error)
        sys.exit(exit_code_of(error))
    except BrokenPipeError:  # `fitune plan … | head` closed the pipe: what was asked for was shown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)


def _run_command() -> None:
    """Words that typer does not take are refused like all others."""
    # typer brings its own click since 0.26 and does not export this
    usage_error: Any = typer.BadParameter.__base__
    try:
        sys.exit(app(prog_name="fitune", standalone_mode=False))
    except usage_error as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()
            sys.exit(error.exit_code)
        raise refusal_of(error) from None


def _print_error(error: FituneError) -> None:
    if "--json" in sys.argv:
        facts = getattr(error, "facts", {})
        content = {"kind": error.kind, "message": error.message, "hint": error.hint, **facts}
        print(json.dumps({"error": content}, indent=2, ensure_ascii=False))
    else:
        lines = f"error: {error}".splitlines()
        if sys.stderr.isatty():  # a log keeps its lines whole, so that they can be searched
            lines = [
                wrapped(line.strip(), indent=len(line) - len(line.lstrip()), hanging=2) for line in lines
            ]
        print("\n".join(lines), file=sys.stderr)


_SENTENCES = (
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Input should be greater than or equal to (.*)", r"must be at least \1"),
    (r"Input should be less than or equal to (.*)", r"must be at most \1"),
    (r"Input should be (.*)", r"must be \1"),
)
"""pydantic's sentences, which typer shows since 0.26, and ours."""


_OF_OTHER_TOOLS = {"--merge": "--as merged", "--merged": "--as merged"}
"""Options of other tools, and what says the same here."""


def refusal_of(error: Any) -> RecipeError:
    """The error to show for ``error``, a UsageError of the click that typer brings along and does not export."""
    command = "fitune" if error.ctx is None else str(error.ctx.command_path)
    message = str(error.message or error.format_message()).removeprefix("Value error, ").rstrip(".")
    param = getattr(error, "param", None)
    if option := getattr(error, "option_name", ""):
        if "No such" not in message:
            return RecipeError(f"{option} has no value", hint=f"{command} --help")
        near = _OF_OTHER_TOOLS.get(option) or did_you_mean(option, error.possibilities or [])
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
        return RecipeError(f"{name} = {value!r}: must be {allowed}", hint=did_you_mean(value, words))
    for pattern, ours in _SENTENCES:
        if re.fullmatch(pattern, message):
            refused = getattr(error.__cause__, "errors", None)  # pydantic's, which keep what was typed
            value = None if refused is None else refused()[0].get("input")
            shown = "" if value is None else f" = {value!r}"
            said = re.sub(pattern, ours, message)
            return RecipeError(f"{name}{shown}: {said}", hint=f"{error.ctx.command_path} --help")
    return None
