"""Options of commands: the keys of a recipe, listed by ``--help`` and completed by the shell; and those that would do
nothing beside others, or without them, which are refused."""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Annotated, Any, get_origin

import typer
from typer.core import TyperCommand

from fitune.errors import RecipeError

_PREDICTING = ("fleet", "plan")
BESIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": {
        "why": ("fleet", "largest"), "largest": ("fleet",), "details": ("fleet", "why", "largest"),
        "html": ("fleet", "why", "largest", "details", "json"),
    },
    "launch": {
        "configuration": ("fleet", "on"), "show": ("fleet", "on", "configuration"),
        "rendezvous": ("fleet", "on", "configuration"),
    },
    "train": dict.fromkeys(("node_rank", "rendezvous"), ("on",)),  # Ray places the workers
    "score": {
        **dict.fromkeys(("gpu", "gpus"), ("fleet",)), **dict.fromkeys(("url", "served_model"), _PREDICTING),
        **dict.fromkeys(_PREDICTING, ("lm_eval",)),
        **dict.fromkeys(("against", "on", "ray_address", "workers"), (*_PREDICTING, "lm_eval")),
    },
}  # fmt: skip
"""Command -> option -> options beside each of which it has no effect."""
WITHOUT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": dict.fromkeys(("deadline", "budget", "rows", "live", "picture"), ("fleet",)),
    "launch": {"job": ("on", "fleet"), **dict.fromkeys(("deadline", "budget", "rows", "live"), ("fleet",))},
    "train": {
        **dict.fromkeys(("ray_address", "workers", "ray_restarts"), ("on",)),
        "rendezvous_timeout": ("node_rank", "rendezvous"),
    },
    "export": {"hub_public": ("push_to_hub",)},
    "score": {
        **dict.fromkeys(("gpu", "gpus"), ("plan",)),
        **dict.fromkeys(("objective", "deadline", "budget", "live"), ("fleet",)), "served_model": ("url",),
        **dict.fromkeys(("ray_address", "workers"), ("on",)),
    },
}  # fmt: skip
"""Command -> option -> options of which it needs one to have an effect."""


def typed_options(context: Any) -> set[str]:
    """Names of the parameters that stand on the command line, ``--on here`` left out; ``context`` is typer's."""
    typed = {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}
    return typed - {"on"} if context.params.get("on") == "here" else typed


def refuse_idle_options(context: Any) -> None:
    """Raises RecipeError for the first option that was typed and would do nothing."""
    typed, command = typed_options(context), context.command
    shown = {param.name: max(param.opts, key=len) for param in command.get_params(context)}
    if context.params.get("on") in ("here", "ray"):
        shown["on"] = "--on ray"
    for option, others in BESIDE.get(command.name, {}).items():
        if option in typed and (present := [other for other in others if other in typed]):
            raise RecipeError(
                f"{shown[option]} has no effect with {shown[present[0]]}", hint=f"leave {shown[option]} out"
            )
    for option, needed in WITHOUT.get(command.name, {}).items():
        if option in typed and not typed & {*needed}:
            first = shown[needed[0]]
            raise RecipeError(
                f"{shown[option]} has no effect without {first}",
                hint=f"add {first}, or leave {shown[option]} out",
            )


class CheckedCommand(TyperCommand):
    """A command that refuses options which would do nothing."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Raises RecipeError for typed options without effect."""
        refuse_idle_options(ctx)
        return super().invoke(ctx)


class ScoreCommand(CheckedCommand):
    """A command whose first options are the keys of a ScoreRecipe; those that are typed are the context's ``obj``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of a ScoreRecipe's keys, then the command's own."""
        return [*_score_options(), *super().get_params(ctx)]

    def invoke(self, ctx: Any) -> Any:
        """Runs the command with ``ctx.obj``: key -> typed value. Raises RecipeError for options without effect."""
        refuse_idle_options(ctx)
        typed = typed_options(ctx)
        asked = {option.name: ctx.params.pop(option.name) for option in _score_options()}
        ctx.obj = {name: value for name, value in asked.items() if name in typed}
        return TyperCommand.invoke(self, ctx)


@cache
def _score_options() -> list[Any]:
    """Made when they are asked for: reading a ScoreRecipe takes 0.1 s, which no other command should wait for."""
    from fitune.recipe.score_recipe import ScoreRecipe, facts_of, options_of

    def keys() -> None:
        """A function whose signature lists the options for typer; nobody calls it."""
        ...

    made = []
    for name, field in ScoreRecipe.model_fields.items():
        option = typer.Option(
            *options_of(name), help=field.description, metavar=facts_of(name).get("metavar")
        )
        kind: Any = field.annotation
        default = Parameter.empty if field.is_required() else field.default
        if get_origin(kind) in (tuple, dict):
            kind, default = list[str] | None, None
        made.append(
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])
        )
    # typer reads the options from here; mypy takes a function's attribute for unknown
    keys.__signature__ = Signature(made)  # type: ignore[attr-defined]
    keys.__annotations__ = {each.name: each.annotation for each in made}
    app = typer.Typer(add_completion=False)
    app.command()(keys)
    return [*typer.main.get_command(app).params]


class RecipeCommand(CheckedCommand):
    """A command that takes every key of a recipe as an option."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes typer's help, then every key of a recipe."""
        super().format_help(ctx, formatter)
        _print_keys()

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Names of options, and behind them those of the keys."""
        from fitune.recipe.keys import all_keys

        # typer brings its own click since 0.26 and does not export this
        item: Any = import_module(f"{_click}.shell_completion").CompletionItem
        keys = [item(key.option, help=key.about) for key in all_keys() if key.option.startswith(incomplete)]
        return [*super().shell_complete(ctx, incomplete), *(keys if incomplete.startswith("-") else [])]


_click = TyperCommand.__mro__[1].__module__.rpartition(".")[0]


def complete_value(ctx: typer.Context, incomplete: str) -> list[str]:
    """Values of the key before the cursor: known models, cards, or the few that a key takes; else none."""
    from fitune.recipe.keys import values_of

    words = ctx.params.get("words") or [""]
    return [value for value in values_of(words[-1]) if value.startswith(incomplete)]


def _print_keys() -> None:
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from fitune.recipe.keys import SWITCH, keys_by_group

    console = Console(highlight=False, markup=False)
    console.print(" Keys of a recipe: --seq-len 4096, or seq_len: 4096 in RECIPE.yaml; [its default].\n")
    for group, keys in keys_by_group().items():
        table = Table.grid(padding=(0, 1))
        for key in keys:
            values = "|".join(key.values) if key.values != SWITCH else ""
            shown = (key.about, values, f"[{key.default}]" if key.default else "")
            table.add_row(Text(key.option, style="cyan"), "  ".join(part for part in shown if part))
        console.print(Panel(table, title=group, title_align="left", border_style="dim"))
