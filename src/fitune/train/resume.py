"""Where a run begins, and how it goes on as if it had never stopped."""

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from fitune.checkpoint.commit import FOLDER
from fitune.checkpoint.differences import Difference, difference_table, require_resumable
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.checkpoint.state import TrainState
from fitune.data.loader import LoaderState
from fitune.engine.protocol import EngineState
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.models.identity import weights_identity
from fitune.spec.plan import Lora, Plan
from fitune.spec.serial import from_data, to_data
from fitune.train.prepare import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """``state`` None: from the beginning."""

    state: TrainState | None
    warnings: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    """Settings that were others when ``state`` was saved, all allowed."""

    @property
    def step(self) -> int:
        return 0 if self.state is None else self.state.step

    @property
    def steps_of_other_plan(self) -> int:
        """Steps done under settings that memory and speed depend on and that changed: their figures are of another
        plan."""
        without_effect = ("run.", "data.", "schedule.")
        changed = any(not d.setting.startswith(without_effect) for d in self.differences)
        if changed or self.state is None:
            return self.step
        return int(self.state.facts.get("steps_of_other_plan", 0))

    @property
    def notes(self) -> tuple[str, ...]:
        """What people are told before the run goes on."""
        if not self.differences:
            return self.warnings
        return (*self.warnings, f"going on under other settings\n{difference_table(list(self.differences))}")


def where_to_start(directory: Path, plan: Plan, *, resume: bool | str) -> Start:
    """The checkpoint to go on from, checked and compatible with ``plan``.

    Raises CheckpointError when it is damaged or the plan changed too much, and RunDirectoryError when there
    are steps of an earlier run that nobody asked to continue.
    """
    if isinstance(resume, str):
        return _compatible(load_checkpoint(Path(resume)), plan)
    if resume:
        found = newest_checkpoint(directory)
        if found.path is None and found.warnings:
            raise CheckpointError(
                f"no checkpoint of {directory} can be used:\n  " + "\n  ".join(found.warnings),
                hint="put the files back, or --overwrite to start anew",
            )
        if found.path is None:
            note = f"nothing to resume: no checkpoint in {directory}; starting from the beginning"
            return Start(state=None, warnings=(note,))
        note = f"resuming from {found.path}"
        state = load_checkpoint(found.path, verified=True)
        return _compatible(state, plan, warnings=(*found.warnings, note))
    if any((directory / FOLDER).glob("step-*")) or _has_steps(directory / "metrics.jsonl"):
        raise RunDirectoryError(
            f"output_dir {directory} holds an earlier run",
            hint="resume: true to continue it, --overwrite to start anew, or another output_dir",
        )
    return Start(state=None)


def _has_steps(metrics: Path) -> bool:
    """A run that ended before its first step left nothing to protect."""
    return metrics.is_file() and metrics.stat().st_size > 0


def _compatible(state: TrainState, plan: Plan, *, warnings: tuple[str, ...] = ()) -> Start:
    differences = require_resumable(_planned(state), plan)
    return Start(state=state, warnings=warnings, differences=tuple(differences))


_FACTS = {"plan": dict, "engine": dict, "epoch": int, "position": int, "best_eval_loss": int | float | None}


def _planned(state: TrainState) -> Plan:
    """The plan that was saved. Raises CheckpointError when the checkpoint is no training state of ours."""
    for name, kind in _FACTS.items():
        if not isinstance(state.facts.get(name), kind):
            raise _foreign(state, f"{name} is missing or of another type")
    for group in ("model", "optimizer", "rng"):
        if group not in state.tensors:
            raise _foreign(state, f"{group}.safetensors is missing")
    try:
        return from_data(Plan, state.facts["plan"])
    except ValueError as error:
        raise _foreign(state, str(error)) from None


def _foreign(state: TrainState, cause: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {state.step} cannot be used: {cause}",
        hint="name an older one, or --overwrite to start anew",
    )


def require_same_rows(state: TrainState, fingerprint: str) -> None:
    """Raises CheckpointError when the training rows are not those of the checkpoint: same path, other content."""
    if state.facts.get("rows", fingerprint) != fingerprint:
        raise CheckpointError(
            f"the training rows changed since step {state.step} was saved: the files, the template or the tokenizer",
            hint="put the data back as it was, or start a new run in another output_dir",
        )


def base_identity(plan: Plan) -> str:
    """A hash of the frozen weights under an adapter; empty where all weights are trained, and so in the checkpoint."""
    return weights_identity(plan.model_path) if isinstance(plan.tuning, Lora) else ""


def require_same_base(state: TrainState, plan: Plan, *, base: str) -> None:
    """Raises CheckpointError when an adapter's frozen base is no longer what it was: same path, other weights."""
    if isinstance(plan.tuning, Lora) and state.facts["base"] != base:
        raise CheckpointError(
            f"the weights in {plan.model_path} changed since step {state.step} was saved",
            hint="put them back as they were, or start a new run in another output_dir",
        )


def capture(
    plan: Plan,
    prepared: Prepared,
    *,
    step: int,
    position: LoaderState,
    best_eval_loss: float,
    rows: str,
    base: str,
    steps_of_other_plan: int = 0,
) -> TrainState:
    """Everything the next step depends on. ``rows`` is the fingerprint of the training rows, ``base`` that of the
    frozen weights when they were loaded."""
    engine = prepared.engine.state()
    rng = {"cpu": torch.get_rng_state()}
    if prepared.model.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(prepared.model.device)
    return TrainState(
        step=step,
        tensors={
            "model": {name: p.detach() for name, p in prepared.model.trained.items()},
            "optimizer": engine.tensors,
            "rng": rng,
        },
        facts={
            "plan": to_data(plan),
            "rows": rows,
            "base": base,
            "engine": dict(engine.facts),
            "epoch": position.epoch,
            "position": position.position,
            "steps_of_other_plan": steps_of_other_plan,
            "best_eval_loss": None if math.isinf(best_eval_loss) else best_eval_loss,
        },
    )


def restore(prepared: Prepared, state: TrainState) -> tuple[LoaderState, float]:
    """Put ``state`` back; returns the position in the data and the best evaluation loss so far."""
    saved, trained = state.tensors["model"], prepared.model.trained
    if saved.keys() != trained.keys():
        odd = sorted(saved.keys() ^ trained.keys())
        raise CheckpointError(f"the checkpoint trains other parameters than the plan, e.g. {odd[:3]}")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])
    prepared.engine.restore(EngineState(tensors=state.tensors["optimizer"], facts=state.facts["engine"]))
    torch.set_rng_state(state.tensors["rng"]["cpu"])
    if prepared.model.device.type == "cuda" and "cuda" in state.tensors["rng"]:
        torch.cuda.set_rng_state(state.tensors["rng"]["cuda"], prepared.model.device)
    best = state.facts["best_eval_loss"]
    position = LoaderState(epoch=state.facts["epoch"], position=state.facts["position"])
    return position, math.inf if best is None else best
