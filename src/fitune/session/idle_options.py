"""Options of a command that would do nothing beside others, or without them, are refused. This is the one table."""

from collections.abc import Mapping
from typing import Any

from fitune.errors import RecipeError

_ELSEWHERE = ("fleet", "plan")
BESIDE: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": {
        "why": ("fleet", "largest"), "largest": ("fleet",), "html": ("fleet", "why", "largest", "details", "json"),
    },
    "launch": {
        "configuration": ("fleet", "on"), "show": ("fleet", "on", "configuration"),
        "rendezvous": ("fleet", "on", "configuration"),
    },
    "score": {
        **dict.fromkeys(("url", "served_model"), _ELSEWHERE), **dict.fromkeys(_ELSEWHERE, ("lm_eval",)),
        **dict.fromkeys(("against", "on", "ray_address", "workers"), (*_ELSEWHERE, "lm_eval")),
    },
}  # fmt: skip
"""Command -> option -> options beside each of which it has no effect."""
WITHOUT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "plan": dict.fromkeys(("deadline", "budget", "rows", "live", "picture"), ("fleet",)),
    "launch": {"job": ("on", "fleet"), **dict.fromkeys(("deadline", "budget", "rows", "live"), ("fleet",))},
    "train": {"ray_restarts": ("on",), "rendezvous_timeout": ("node_rank", "rendezvous")},
    "export": {"hub_public": ("push_to_hub",)},
    "score": {
        "gpu": ("plan", "fleet"), "gpus": ("plan",),
        **dict.fromkeys(("objective", "deadline", "budget", "live"), ("fleet",)), "served_model": ("url",),
    },
}  # fmt: skip
"""Command -> option -> options of which it needs one to have an effect."""


def typed_options(context: Any) -> set[str]:
    """Names of the parameters that stand on the command line; ``context`` is typer's."""
    return {name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"}


def refuse_idle_options(context: Any) -> None:
    """Raises RecipeError for the first option that was typed and would do nothing."""
    typed, command = typed_options(context), context.command
    shown = {param.name: max(param.opts, key=len) for param in command.get_params(context)}
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
