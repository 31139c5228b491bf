"""Keys that say who tracks a run, of transformers' Trainer, axolotl and LLaMA-Factory."""

from typing import Any

from fitune.foreign.reading import Reading, is_on

_HERE = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet": "comet",
    "comet_ml": "comet",
    "tensorboard": "tensorboard",
    "all": "all",
}
"""Their name -> ours."""
_SWITCHES = {
    "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow", "use_comet": "comet",
    "use_tensorboard": "tensorboard",
}  # fmt: skip
"""axolotl's keys that call for a tracker."""
_SETTINGS = {
    "wandb": {
        "wandb_project": "track_project", "wandb_entity": "track_team", "wandb_name": "run_name",
        "wandb_run_id": "track_id",
    },
    "mlflow": {
        "mlflow_experiment_name": "track_project", "mlflow_tracking_uri": "track_server",
        "mlflow_run_name": "run_name",
    },
    "comet": {
        "comet_project_name": "track_project", "comet_workspace": "track_team", "comet_experiment_key": "track_id",
    },
    "tensorboard": {},
    "all": {},
}  # fmt: skip
_MODES = ("wandb_mode", "comet_mode")
_KEPT = "what was trained stays on this disk"


def read_trackers(r: Reading) -> None:
    """``report_to``, and the settings of the trackers that it names or that axolotl's own keys call for."""
    named = _named(r)
    ours = list(dict.fromkeys(_HERE[name] for name in named if name in _HERE))
    called = [name for key, name in _SWITCHES.items() if is_on(r.take(key)) and not _is_off(r, name)]
    trackers = list(dict.fromkeys([*ours, *called]))
    if trackers:
        r.put("report_to", trackers, key="report_to" if ours else _key_of(r, trackers[0]))
    others = [name for name in named if name not in _HERE and name not in ("none", "")]
    r.passed(
        "report_to", f"fitune has no {', '.join(others)}; metrics.jsonl has every step" if others else ""
    )
    for tracker in trackers:
        _settings(r, _SETTINGS[tracker])
    if trackers and (name := r.take("run_name")) is not None and "run_name" not in r.settings:
        r.put("run_name", name, key="run_name")
    for mode in _MODES:
        if str(r.take(mode)).lower() == "offline" and mode.partition("_")[0] in trackers:
            r.put("track_offline", True, key=mode)
    for key in ("use_wandb", "use_mlflow", "use_comet", "use_tensorboard"):
        r.passed(key, "report_to says it" if trackers else "")
    if is_on(r.take("wandb_log_model")):
        r.passed("wandb_log_model", _KEPT)
    if r.take("comet_api_key"):
        r.passed("comet_api_key", "a key is read from the environment alone: COMET_API_KEY")


_LOGGERS = {
    "WandBLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CometLogger": "comet",
    "TensorBoardLogger": "tensorboard",
}
_LOGGER_SETTINGS = {
    "project": "track_project", "experiment_name": "track_project", "entity": "track_team",
    "workspace": "track_team", "tracking_uri": "track_server", "experiment_key": "track_id", "run_name": "run_name",
}  # fmt: skip


def read_metric_logger(r: Reading) -> None:
    """torchtune's ``metric_logger``, a class and its arguments."""
    logger = r.take("metric_logger") or {}
    tracker = _LOGGERS.get(str(logger.get("_component_", "")).rpartition(".")[2])
    if tracker is None:
        r.passed("metric_logger")
        return
    r.put("report_to", [tracker], key="metric_logger")
    for key, name in _LOGGER_SETTINGS.items():
        if logger.get(key) is not None:
            r.put(name, str(logger[key]), key=f"metric_logger[{key}]")


def _named(r: Reading) -> list[str]:
    value = r.take("report_to")
    names = value if isinstance(value, list) else str(value or "").split(",")
    return [str(name).strip().lower() for name in names]


def _is_off(r: Reading, tracker: str) -> bool:
    return str(r.take(f"{tracker}_mode")).lower() == "disabled"


def _key_of(r: Reading, tracker: str) -> str:
    return next(key for key, name in _SWITCHES.items() if name == tracker and is_on(r.take(key)))


def _settings(r: Reading, names: dict[str, str]) -> None:
    """Each of their settings, the first of two that mean the same here."""
    for key, name in names.items():
        value: Any = r.take(key)
        if value is None:
            continue
        if r.settings.get(name, str(value)) != str(value):
            r.passed(key, f"{name} is {r.settings[name]} already: it is one for all trackers")
        else:
            r.put(name, str(value), key=key)
