"""The keys of a recipe as options of a command: listed by ``--help``, and completed by the shell."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand

from fitune.session.idle_options import refuse_idle_options


class CheckedCommand(TyperCommand):
    """A command that refuses options which would do nothing."""

    def invoke(self, ctx: Any) -> Any:
        refuse_idle_options(ctx)
        return super().invoke(ctx)


class RecipeCommand(CheckedCommand):
    """A command that takes every key of a recipe as an option."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        _print_keys()

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Names of options, and behind them those of the keys."""
        from fitune.spec.recipe.keys import all_keys

        # typer brings its own click since 0.26 and does not export this
        item: Any = import_module(f"{_click}.shell_completion").CompletionItem
        keys = [item(key.option, help=key.about) for key in all_keys() if key.option.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *(keys if incomplete.startswith("-") else [])]


_click = TyperCommand.__mro__[1].__module__.rpartition(".")[0]


def complete_value(ctx: typer.Context, incomplete: str) -> list[str]:
    """Values of the key before the cursor: known models, cards, or the few that a key takes; else none."""
    from fitune.spec.recipe.keys import values_of

    words = ctx.params.get("words") or [""]
    return [value for value in values_of(words[-1]) if value.startswith(incomplete)]


def _print_keys() -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from fitune.spec.recipe.keys import GROUPS, SWITCH, keys_of

    console = Console(highlight=False, markup=False)
    console.print(" Keys of a recipe: --seq-len 4096, or seq_len: 4096 in RECIPE.yaml; [its default].\n")
    for group in GROUPS:
        table = Table.grid(padding=(0, 1))
        for key in keys_of(group):
            values = "|".join(key.values) if key.values != SWITCH else ""
            shown = (key.about, values, f"[{key.default}]" if key.default else "")
            table.add_row(Text(key.option, style="cyan"), "  ".join(part for part in shown if part))
        console.print(Panel(table, title=group, title_align="left", border_style="dim"))
