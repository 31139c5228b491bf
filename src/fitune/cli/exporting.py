"""``fitune export``."""

from pathlib import Path

from fitune.checkpoint.export import export_merged
from fitune.cli.loading import loading_bar
from fitune.data.templates import load_template
from fitune.errors import RecipeError, RunDirectoryError
from fitune.models.adapter_check import check_adapter
from fitune.models.adapters import load_adapter
from fitune.models.vocabulary import planned_tokenizer
from fitune.models.weights import compute_dtype, load_model
from fitune.report.run_files import RunFiles, read_run
from fitune.spec.plan import Lora
from fitune.spec.reports import RunReport
from fitune.train.card import model_card
from fitune.train.export import FOLDERS
from fitune.train.prepare import training_device


def export_merged_model(run: Path, out: Path | None) -> None:
    """Merge the adapter of a finished run into its 16-bit or fp32 base and verify it by reloading."""
    files = read_run(run)
    report = _require_adapter(run, files)
    plan = files.plan
    for warning in check_adapter(run / FOLDERS["adapter"], base=plan.model):
        print(f"warning: {warning}")
    with loading_bar() as on_bytes:
        base = load_model(
            plan.model_path,
            dtype=compute_dtype(plan.precision),
            device=training_device(plan),
            on_bytes=on_bytes,
        )
    tokenizer = planned_tokenizer(plan)
    exported = export_merged(
        load_adapter(base, run / FOLDERS["adapter"]),
        tokenizer,
        out or run / FOLDERS["merged"],
        chat_template=load_template(tokenizer, plan.data.chat_template).source,
        card=model_card(plan, report, kind="merged"),
        replace=out is None,  # a folder of the run's own; any other may hold what somebody needs
    )
    print(f"merged model: {exported.path}")
    print(f"largest difference of its logits from the adapter's: {exported.max_logit_difference:.2g}")
    for warning in exported.warnings:
        print(f"warning: {warning}")


def _require_adapter(run: Path, files: RunFiles) -> RunReport:
    """How the run that made the adapter went. Raises RecipeError or RunDirectoryError when it has none."""
    plan = files.plan
    if not isinstance(plan.tuning, Lora):
        raise RecipeError(
            f"{run} trained every parameter: there is no adapter to merge",
            hint=f"use {run / FOLDERS['full']}",
        )
    if files.run is None or files.run.status != "complete":
        raise RunDirectoryError(
            f"{run} is not complete, so it has no adapter yet", hint="fitune train … --resume"
        )
    if plan.run.export == "merged" and not (run / FOLDERS["adapter"]).exists():
        raise RecipeError(
            f"{run} merged its adapter already, when it ended (export: merged): {run / FOLDERS['merged']}",
            hint=f"use {run / FOLDERS['merged']}, or train with export: adapter to keep both",
        )
    return files.run
