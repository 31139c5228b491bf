"""May a run go on under another plan? Every setting that differs, and why it may or may not."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fitune.errors import CheckpointError
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.places import moved, placed
from fitune.spec.plan import ClipByNorm, ClipByValue, Epochs, Full, Plan, Steps, clip_in_backward
from fitune.spec.serial import to_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One setting, as the checkpoint has it and as it is wanted now."""

    setting: str
    saved: str
    wanted: str
    allowed: bool
    reason: str


def compare_plans(saved: Plan, wanted: Plan) -> list[Difference]:
    """Every setting that differs, in the order of the Plan; the same file is the same by any path to it, also where the
    run was moved together with it."""
    wanted = placed(wanted)
    saved = placed(replace(moved(saved, Path(wanted.run.output_dir)), run=saved.run))
    if saved.model_path == wanted.model_path:  # the name may be a relative path to it
        saved = replace(saved, model=replace(saved.model, name=wanted.model.name))
    before, after = _flat(to_data(saved), ""), _flat(to_data(wanted), "")
    differences = []
    for setting in dict.fromkeys([*before, *after]):
        old, new = before.get(setting, _ABSENT), after.get(setting, _ABSENT)
        if old != new and not any(_below(setting, moment) for moment in _OF_THE_MOMENT):
            allowed, reason = _verdict(setting, saved, wanted)
            differences.append(
                Difference(
                    setting=setting, saved=_text(old), wanted=_text(new), allowed=allowed, reason=reason
                )
            )
    return differences


def with_unsaid_fields(saved: Any, wanted: Plan) -> Any:
    """The data of a saved plan, with the fields of its model that plans did not have yet as ``wanted`` has them.

    They say more about the same config.json; that it describes the same weights is judged by the others.
    """
    if not isinstance(saved, Mapping) or not isinstance(saved.get("model"), Mapping):
        return saved
    now = to_data(wanted.model)
    later = {f.name: now[f.name] for f in fields(ModelSpec) if f.default is not MISSING}
    return {**saved, "model": {**later, **saved["model"]}}


def require_resumable(saved: Plan, wanted: Plan) -> list[Difference]:
    """The differences, all allowed, for the caller to print. Raises CheckpointError with a table when one is not."""
    differences = compare_plans(saved, wanted)
    refused = [difference for difference in differences if not difference.allowed]
    if refused:
        raise CheckpointError(
            f"settings that forbid going on from this checkpoint: {len(refused)}\n{difference_table(differences)}",
            hint="set them back, or start a new run in another output_dir",
        )
    return differences


def difference_table(differences: list[Difference]) -> str:
    """setting | checkpoint | now | verdict, one line each."""
    rows = [("setting", "checkpoint", "now", "")]
    rows += [(d.setting, d.saved, d.wanted, f"{_WORD[d.allowed]}: {d.reason}") for d in differences]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = (
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )
    return "\n".join(f"  {line.rstrip()}" for line in lines)


_WORD = {True: "allowed", False: "refused"}
_ABSENT = object()

_OF_THE_MOMENT = (
    "hardware.nvme_bytes", "hardware.host_memory_bytes", "hardware.calibration", "hardware.measured",
    "hardware.taken_bytes", "hardware.left_out",
)  # fmt: skip
"""Measured when the plan is made and different every time: no setting of anybody's."""

_FREE = {
    "run.output_dir": "only a place",
    "run.upload_to": "only a place",
    "run.log_every": "changes what is written, not what is learned",
    "run.evals_per_epoch": "changes what is written, not what is learned",
    "run.saves_per_epoch": "changes what is written, not what is learned",
    "run.eval_every": "changes what is written, not what is learned",
    "run.save_every": "changes what is written, not what is learned",
    "run.keep_checkpoints": "changes what is written, not what is learned",
    "run.async_save": "changes what is written, not what is learned",
    "run.export": "changes what is written, not what is learned",
    "run.report_to": "changes what is written, not what is learned",
    "run.tracking": "changes what is written, not what is learned",
    "run.samples": "changes what is written, not what is learned",
    "data.cache_dir": "only a place",
    "offload.activations": "only a place",
    "offload.nvme_path": "only a place",
    "recompute": "same arithmetic, done twice",
    "sharding": "same arithmetic, divided otherwise",
    "attention": "same function, rounded differently",
    "kernels": "same function, rounded differently",
    "compile_blocks": "same function, rounded differently",
    "loss": "same function, rounded differently",
}
"""Setting, or everything below it, -> why it may change."""

_SHARES_OF_THE_BATCH = ("batch.micro_batch_size", "batch.accumulation", "hardware")


def _verdict(setting: str, saved: Plan, wanted: Plan) -> tuple[bool, str]:
    for free, reason in _FREE.items():
        if _below(setting, free):
            return True, reason
    if any(_below(setting, share) for share in _SHARES_OF_THE_BATCH):
        return _same_global_batch(saved, wanted)
    if _below(setting, "schedule.duration"):
        return _longer(saved.schedule.duration, wanted.schedule.duration)
    if _below(setting, "tuning.update"):
        return _same_steps(saved, wanted)
    if setting == "model_path" and isinstance(wanted.tuning, Full):
        return True, "all weights come from the checkpoint"
    return False, "another run would come out"


def _below(setting: str, prefix: str) -> bool:
    return setting == prefix or setting.startswith((f"{prefix}.", f"{prefix}["))


def _same_global_batch(saved: Plan, wanted: Plan) -> tuple[bool, str]:
    before, after = _global_batch(saved), _global_batch(wanted)
    verb = "stays" if before[0] == after[0] else "changes"
    return before[0] == after[0], f"the global batch {verb}: {before[1]}, then {after[1]}"


def _global_batch(plan: Plan) -> tuple[int, str]:
    """Rows per optimizer step over all devices, and how they come about."""
    batch, devices = plan.batch, plan.hardware.num_gpus
    rows = batch.global_batch_size * devices
    return rows, f"{batch.micro_batch_size} × {batch.accumulation} × {devices} = {rows}"


def _same_steps(saved: Plan, wanted: Plan) -> tuple[bool, str]:
    """In backward or after it: the optimizer's states are the same, and so are its steps if gradients are clipped
    alike."""
    if not isinstance(saved.tuning, Full) or not isinstance(wanted.tuning, Full):
        return False, "another run would come out"
    if _clip(saved) != _clip(wanted):
        return False, "gradients would be clipped otherwise"
    return True, "the same steps, clipped alike"


def _clip(plan: Plan) -> ClipByValue | ClipByNorm:
    return clip_in_backward(plan.tuning) or ClipByNorm(max_norm=plan.schedule.max_grad_norm)


def _longer(saved: Epochs | Steps, wanted: Epochs | Steps) -> tuple[bool, str]:
    if type(saved) is not type(wanted):
        return False, "epochs and steps cannot be compared before the data is read"
    if wanted.count >= saved.count:
        return True, "the run is made longer and its learning-rate schedule stretched"
    return False, "a run may be made longer, not shorter"


def _flat(data: Any, path: str) -> dict[str, Any]:
    """Nested data as ``a.b[0].c`` -> value. The matrices of a model are one value: their list is long."""
    if isinstance(data, Mapping) and data:
        pairs = [(f"{path}.{key}" if path else str(key), item) for key, item in data.items()]
    elif isinstance(data, list) and data and path != "model.linears":
        pairs = [(f"{path}[{index}]", item) for index, item in enumerate(data)]
    else:
        return {path: data}
    return {name: value for key, item in pairs for name, value in _flat(item, key).items()}


def _text(value: Any) -> str:
    if value is _ABSENT:
        return "–"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return str(value)
