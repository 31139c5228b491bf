"""The command line: parse, call, print. It imports rooms only when a command needs them, and nothing imports it.

``main`` runs a command and says what went wrong, to people or as JSON; exit codes are those of errors.py.
"""

import json
import os
import sys
from typing import Any

import typer

from fitune.cli.app import app
from fitune.errors import FituneError, exit_code_of, system_failures, training_libraries
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
        from fitune.cli.usage_errors import refusal_of

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
