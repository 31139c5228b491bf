"""The trained model of a run whose last step is done, loaded from what the run left on disk."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file

from fitune.checkpoint.commit import OnNote
from fitune.checkpoint.layout import unverified
from fitune.checkpoint.resume import load_checkpoint, newest_checkpoint
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.models.adapter_file import WEIGHTS, check_adapter
from fitune.models.attention import use_attention
from fitune.models.headers import own_name
from fitune.models.language_model import LanguageModel, language_model
from fitune.models.tokens import add_rows
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import compute_dtype, load_model
from fitune.train.prepare import training_device, tuned
from fitune.values.plan import Lora, Plan, base_of
from fitune.values.reports import RunReport, StepReport

Kind = Literal["adapter", "merged", "full"]
EXPORT_FOLDERS: dict[Kind, str] = {"adapter": "adapter", "merged": "merged", "full": "model"}
"""Kind of export -> its folder in the run directory."""
TITLES: dict[Kind, str] = {"adapter": "adapter", "merged": "merged model", "full": "model"}
"""Names of the exports for people."""


def trained_kind(plan: Plan) -> Literal["adapter", "full"]:
    """The kind that holds all that was trained and nothing else."""
    return "adapter" if isinstance(plan.tuning, Lora) else "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedSource:
    """A folder that holds all that a run trained."""

    path: Path
    kind: Literal["adapter", "full", "checkpoint"]


def require_trained(directory: Path, steps: Sequence[StepReport]) -> None:
    """Raises RunDirectoryError when the last step of the run is not done."""
    if not steps or steps[-1].step < steps[-1].total_steps:
        done = f"{steps[-1].step} of {steps[-1].total_steps} steps are done" if steps else "no step is done"
        raise RunDirectoryError(
            f"{directory} is not complete, so there is nothing to export yet: {done}",
            hint="fitune train … --resume",
        )


def find_source(
    directory: Path, plan: Plan, report: RunReport | None, *, step: int, on_note: OnNote = lambda _: None
) -> TrainedSource:
    """The place of the weights after ``step``, the last one.

    An export that the report does not speak for counts only when it is younger than the last step: it may be of an
    earlier end of a run that was made longer. Raises CheckpointError when there is none.
    """
    kind = trained_kind(plan)
    folder = directory / EXPORT_FOLDERS[kind]
    told = report is not None and (report.status == "complete" or report.exported)
    for path, counts in ((folder, told), (unverified(folder), False)):
        if path.is_dir() and (counts or is_of_last_step(path, directory)):
            return TrainedSource(path=path, kind=kind)
    saved = newest_checkpoint(directory, on_note)
    if saved.path is not None and saved.path.name == f"step-{step}":
        return TrainedSource(path=saved.path, kind="checkpoint")
    found = (
        f"the newest checkpoint is {saved.path.name}" if saved.path is not None else "there is no checkpoint"
    )
    raise CheckpointError(
        f"{directory}: neither {folder.name} nor a checkpoint holds the weights after step {step}: {found}",
        hint="fitune train … --resume" if saved.path is not None else "fitune train … --overwrite",
    )


def is_of_last_step(folder: Path, directory: Path) -> bool:
    """True if the weights in ``folder`` are younger than the last step of the run in ``directory``."""
    written = [file.stat().st_mtime_ns for file in folder.glob("*.safetensors")]
    return bool(written) and min(written) >= (directory / "metrics.jsonl").stat().st_mtime_ns


def load_trained(plan: Plan, source: TrainedSource, *, on_bytes: OnBytes) -> LanguageModel:
    """The model as it was when training ended, on the plan's device, or on the host where there is none."""
    dtype = compute_dtype(plan.precision)
    device = training_device(plan) if torch.cuda.is_available() else torch.device("cpu")
    if source.kind != "full":
        return with_weights(
            plan, trained_weights(plan, source), dtype=dtype, device=device, on_bytes=on_bytes
        )
    whole: Any = load_model(str(source.path), dtype=dtype, device=device, on_bytes=on_bytes)
    use_attention(whole, plan.attention)
    return language_model(whole, plan.loss)


def trained_weights(plan: Plan, source: TrainedSource) -> Mapping[str, torch.Tensor]:
    """Trained tensors by their names in the model, read from a checkpoint or an adapter's folder.

    Raises CheckpointError where the adapter is damaged or does not fit.
    """
    if source.kind == "checkpoint":
        return load_checkpoint(source.path, verified=True).tensors["model"]
    check_adapter(source.path, base=plan.model_path)
    # PEFT's files leave out the name of the adapter, and DoRA's that of a parameter
    part = re.compile(r"\.(lora_[AB])\.weight$|\.(lora_magnitude_vector)$")
    file = load_file(source.path / WEIGHTS)
    return {part.sub(r".\1\2.default.weight", own_name(name)): tensor for name, tensor in file.items()}


def with_weights(
    plan: Plan,
    trained: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: OnBytes = nobody,
) -> LanguageModel:
    """The model of ``plan`` on one device, its trained weights being ``trained``."""
    model = load_model(plan.model_path, base=base_of(plan), dtype=dtype, device=device, on_bytes=on_bytes)
    use_attention(model, plan.attention)
    add_rows(model, plan)
    whole = tuned(model, plan)
    own = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    # a file may hold a tied table under both of its names
    with_tied = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    if odd := sorted(own.keys() - trained.keys()) or sorted(trained.keys() - with_tied):
        raise CheckpointError(
            f"the saved weights are of other parameters than the plan trains, e.g. {odd[:3]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(trained[name])
    return language_model(whole, plan.loss)
