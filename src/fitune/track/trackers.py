"""The table of trackers, and what ``report_to`` is refused for before a run begins. Nothing of theirs is imported."""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fitune.credentials import credential_in
from fitune.errors import MissingExtra, RecipeError, did_you_mean

NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One tracker."""

    tracker: str
    """``module:Class``, imported in the tracker's process alone."""
    library: str
    """The module that has to be installed."""
    extra: str
    prefix: str = ""
    """Its environment variables begin so."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """For its process, unless the user has said otherwise: nothing is sent but the run."""


TRACKERS: dict[str, Row] = {
    "wandb": Row(
        tracker="fitune.track.wandb:Wandb", library="wandb", extra="wandb", prefix="WANDB_",
        environment={"WANDB_ERROR_REPORTING": "false"},
    ),
    "mlflow": Row(
        tracker="fitune.track.mlflow:MLflow", library="mlflow", extra="mlflow", prefix="MLFLOW_",
        environment={"MLFLOW_DISABLE_TELEMETRY": "true"},
    ),
    "comet": Row(
        tracker="fitune.track.comet:Comet", library="comet_ml", extra="comet", prefix="COMET_",
        environment={"COMET_ERROR_TRACKING_ENABLE": "false", "COMET_DISABLE_AUTO_LOGGING": "1"},
    ),
    "tensorboard": Row(
        tracker="fitune.track.tensorboard:TensorBoard", library="tensorboard", extra="tensorboard"
    ),
}  # fmt: skip
"""Name in ``report_to`` -> tracker."""

_ALIASES = {"comet_ml": "comet"}
_ALL = "all"


def wanted_trackers(names: Sequence[str]) -> dict[str, Row]:
    """The trackers that ``report_to`` names. ``all`` is every one that is installed, ``none`` is none.

    Raises RecipeError for an unknown name, MissingExtra for a library that is not installed.
    """
    named = list(dict.fromkeys(_ALIASES.get(name.lower(), name.lower()) for name in names))
    if NONE in named:
        if len(named) > 1:
            raise RecipeError(f"report_to: {', '.join(names)}: none goes with no other")
        return {}
    if _ALL in named:
        return {name: row for name, row in TRACKERS.items() if _is_installed(row.library)}
    for name in named:
        if name not in TRACKERS:
            known = (*TRACKERS, NONE)
            raise RecipeError(
                f"report_to: unknown tracker {name!r}; known are {', '.join(known)}",
                hint=did_you_mean(name, known),
            )
        if not _is_installed(TRACKERS[name].library):
            error = MissingExtra(f"report_to: {name}", extra=TRACKERS[name].extra)
            error.hint = f"{error.hint}, or report_to: none; metrics.jsonl has every step in any case"
            raise error
    return {name: TRACKERS[name] for name in named}


def _is_installed(module: str) -> bool:
    """False also for a mere folder of that name: wandb makes one where it runs."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def settings_of_environment(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[str, str]]:
    """The trackers' variables that another machine may be told; keys, and addresses with a password, stay here."""
    prefixes = tuple(row.prefix for row in TRACKERS.values() if row.prefix)
    for name, value in environment.items():
        is_secret = any(part in name for part in ("KEY", "TOKEN", "PASSWORD", "SECRET")) or credential_in(
            value
        )
        if name.startswith(prefixes) and not is_secret:
            yield name, value
