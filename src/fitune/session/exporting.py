"""Export what a run trained, without training again, and commands that are true for an export."""

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch

from fitune.data.making import PreparedData
from fitune.data.preparing import prepare_data
from fitune.errors import RecipeError, RunDirectoryError, work_under_way
from fitune.files import cache_folder, remove, write_atomically
from fitune.models.adapter_file import read_adapter_config
from fitune.models.tokens import planned_tokenizer
from fitune.models.weight_files import stored_dtype
from fitune.planner.defaults import staging_of
from fitune.report.run_files import RunFiles, read_run
from fitune.report.run_page import write_report
from fitune.score.engines.engine_vllm import rounded_rank
from fitune.score.engines.opening import why_merged_first
from fitune.session.events import Emit, Exported, Note, emit_notes, emit_weights, ignore_event
from fitune.session.train.pushing import push, push_again, ready_repository
from fitune.stores.opening import is_url
from fitune.stores.writing import opened_store
from fitune.train.again import (
    EXPORT_FOLDERS,
    TITLES,
    Kind,
    find_source,
    is_of_last_step,
    load_trained,
    require_trained,
)
from fitune.train.export import handover_of, stored_weights
from fitune.train.uploading import CONFIGS, fetch_run, send_export
from fitune.values.plan import Lora, Plan
from fitune.values.reports import RunReport
from fitune.values.run_lock import lock_directory
from fitune.values.serial import to_json


def export_anywhere(
    run: str, out: str, kind: Kind | None, *, push_to_hub: str = "", hub_public: bool = False, emit: Emit
) -> Exported:
    """``export_run`` of a run, and into a folder, that may each be behind a URL; then it goes to the Hub, where asked.

    A run in a store is fetched into the folder where its training would write it, and without ``out`` its export goes
    back to the store. Raises FituneError.
    """
    ready = partial(ready_repository, push_to_hub, public=hub_public) if push_to_hub else None
    directory, local = Path(run), Path(out) if out else None
    with ExitStack() as stack:
        source = stack.enter_context(opened_store(run)) if is_url(run) else None
        target = stack.enter_context(opened_store(out)) if is_url(out) else None
        if target is not None:
            target.require_writable()
            if any(name in CONFIGS for name in target.infos()):
                raise RunDirectoryError(f"{target.url} holds a model already", hint="choose another URL")
            local = cache_folder() / "exports" / staging_of(out)
            remove(local)
        if source is not None:
            directory = Path(staging_of(run))
            fetch_run(source, directory, emit_notes(emit))
        exported = export_run(directory, local, kind, ready=ready, emit=emit)
        with work_under_way():
            if target is not None:
                send_export(target, exported.path, "", keeps_others=True)
                emit(Note(f"sent: {target.url}", {"sent": target.url}))
            elif source is not None and not out:
                send_export(source, exported.path, exported.path.name)
                url = source.below(exported.path.name)
                emit(Note(f"sent: {url}", {"sent": url}))
    if not is_url(out) and (commands := commands_for(exported.path, Path(run).name)):
        emit(next_note(commands))
    if push_to_hub:
        again = push_again(run, push_to_hub, public=hub_public) + (f" --as {kind}" if kind else "")
        if out and not is_url(out):  # a second export would not be written there
            again = f"hf upload {push_to_hub} {shlex.quote(out)}{'' if hub_public else ' --private'}"
        push(exported.path, push_to_hub, public=hub_public, again=again, emit=emit)
    return exported


def export_run(
    run: Path, out: Path | None, kind: Kind | None, *, ready: Callable[[], object] | None = None,
    emit: Emit = ignore_event,
) -> Exported:  # fmt: skip
    """Export what a run trained, without training again.

    By default what the run was to export, if that failed; else the adapter merged into its base. An export that
    failed and is made up for makes the run complete. ``ready``, for an export that goes on from here: by default what
    the run was to export, one that is there already is taken as it is, and before another is written ``ready`` is
    called.
    """
    files = read_run(run)
    require_trained(run, files.steps)
    if files.run is None:
        raise RunDirectoryError(f"{run}: no report.json there", hint="fitune train … --resume")
    missing = files.run.status != "complete"
    wanted = kind or (files.plan.run.export if missing or ready else "merged")
    folder = run / EXPORT_FOLDERS[wanted]
    is_its_own = wanted == files.plan.run.export and folder.is_dir()
    if ready and out is None and not missing and (is_its_own or is_of_last_step(folder, run)):
        emit(there := Exported(title=TITLES[wanted], path=folder, merged_loss=None))
        return there
    _refuse(run, files.plan, wanted, is_there=not missing and out is None)
    if ready:
        ready()
    with lock_directory(run) if out is None else nullcontext():
        exported, report = _exported(files, files.run, wanted, out, emit=emit)
        emit(exported)
        if out is None and missing and wanted == files.plan.run.export:
            write_atomically(run / "report.json", to_json(report))
            emit(Note(f"report: {write_report(run)}"))
    return exported


def _refuse(run: Path, plan: Plan, wanted: Kind, *, is_there: bool) -> None:
    """Raises RecipeError for what the run's method does not train, or what lies there already."""
    if not isinstance(plan.tuning, Lora) and wanted != "full":
        raise RecipeError(
            f"{run} trained every parameter: there is no adapter to {'merge' if wanted == 'merged' else 'export'}",
            hint=f"use {run / EXPORT_FOLDERS['full']}",
        )
    if isinstance(plan.tuning, Lora) and wanted == "full":
        raise RecipeError(
            f"{run} trained an adapter, not every parameter", hint="--as merged, or --as adapter"
        )
    folder = run / EXPORT_FOLDERS[wanted]
    if is_there and wanted == plan.run.export and folder.is_dir():
        done = "merged its adapter already" if wanted == "merged" else f"has its {TITLES[wanted]} already"
        raise RecipeError(
            f"{run} {done}, when it ended (export: {wanted}): {folder}",
            hint="use that, or --out for another copy",
        )


def _exported(
    files: RunFiles, report: RunReport, wanted: Kind, out: Path | None, *, emit: Emit
) -> tuple[Exported, RunReport]:
    """Write it; returns where it is, and the report of a run that is complete with it."""
    plan, last = files.plan, files.steps[-1]
    source = find_source(files.directory, plan, report, step=last.step, on_note=emit_notes(emit))
    emit(Note(f"the trained weights are read from {source.path}"))
    weights = stored_weights(plan, source)
    model = load_trained(plan, source, on_bytes=emit_weights(emit)) if weights is None else None
    tokenizer = planned_tokenizer(plan)

    @cache
    def data() -> PreparedData:
        """The run's tokenised data, prepared at the first call."""
        return prepare_data(
            plan.data, tokenizer=tokenizer, tokenizer_path=plan.model_path, seq_len=plan.batch.seq_len,
            seed=plan.run.seed, sends=False,
        )  # fmt: skip

    report = replace(report, status="complete", reason="", failure=None)
    handover = handover_of(
        model, weights, plan=plan, tokenizer=tokenizer, report=report, on_note=emit_notes(emit)
    )
    path, loss = (
        handover.merged(data, out) if wanted == "merged" else (handover.trained(out, secure=False), None)
    )
    exported = Exported(title=TITLES[wanted], path=path, merged_loss=loss)
    return exported, replace(report, exported=str(path), merged_loss=loss)


def commands_for(folder: Path, name: str) -> list[str]:
    """Commands of vLLM, Ollama and llama.cpp that take the export in ``folder`` as it is; ``name``: its name there."""
    where, name = (
        shlex.quote(str(folder)),
        re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model",
    )
    if not (folder / "adapter_config.json").is_file():
        commands = [f"vllm serve {where}{_dtype_words(str(folder))}"]
        if (folder / "Modelfile").is_file():
            commands.append(f"ollama create {name} -f {shlex.quote(str(folder / 'Modelfile'))}")
        return [*commands, f"python convert_hf_to_gguf.py {where}   (llama.cpp)"]
    config = read_adapter_config(folder)
    base = config.base_model_name_or_path or ""
    if why_merged_first(config) or not base:
        return []
    served = ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"{name}={folder}"]
    served += ["--max-lora-rank", str(rounded_rank(config.r))]
    template = ["--chat-template", str(folder / "chat_template.jinja")]
    commands = [shlex.join(served + template) + _dtype_words(base)]
    if not config.use_rslora:  # llama.cpp scales by alpha / r alone
        its_base = ["--base" if Path(base).is_dir() else "--base-model-id", base]
        commands.append(f"python convert_lora_to_gguf.py {where} {shlex.join(its_base)}   (llama.cpp)")
    return commands


def next_note(commands: Sequence[str]) -> Note:
    """Commands that a person may want next, one a line; a program gets them without what is said behind them."""
    lines = (f"{'next:' if not place else '':9}{one}" for place, one in enumerate(commands))
    return Note("\n".join(lines), {"next": [one.partition("   (")[0] for one in commands]})


def _dtype_words(model: str) -> str:
    """vLLM rounds fp32 weights to 16 bits unless it is told not to."""
    is_fp32 = Path(model).is_dir() and stored_dtype(Path(model)) == torch.float32
    return " --dtype float32" if is_fp32 else ""
