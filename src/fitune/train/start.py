"""Where a run starts: it is complete already, begins at its first step, or goes on from a checkpoint.

The process that only starts ranks asks if the run is complete, so this file imports neither transformers nor PEFT.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from fitune.checkpoint.commit import COMMIT, FOLDER, OnNote, last_saved, read_commit, step_folders
from fitune.checkpoint.remote import (
    adopt_line,
    complete_checkpoints,
    fetch_checkpoint,
    is_run,
    newest_in_store,
    remote_checkpoint,
)
from fitune.checkpoint.resume import (
    Difference,
    Found,
    compare_plans,
    difference_table,
    load_checkpoint,
    newest_checkpoint,
    require_resumable,
    with_unsaid_fields,
)
from fitune.checkpoint.state import TrainState
from fitune.engine.ranks import Ranks
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.files import read_text
from fitune.models.weight_files import weights_identity
from fitune.stores.opening import is_url
from fitune.stores.writing import Store, opened_store
from fitune.train.uploading import examined_store
from fitune.values.plan import Lora, Plan
from fitune.values.reports import RunReport
from fitune.values.serial import from_data, parse_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a checkpoint beside its tensors."""

    plan: Plan
    rows: str
    """Fingerprint of the training rows."""
    base: str
    """Identity of the frozen weights when they were loaded; empty where all are trained."""
    engine: dict[str, float]
    epoch: int
    position: int
    steps_of_other_plan: int
    best_eval_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """``state``, ``facts`` and ``path`` None: from the beginning."""

    state: TrainState | None
    facts: Facts | None = None
    path: Path | None = None
    """Path of the checkpoint."""
    damaged: tuple[Path, ...] = ()
    """Newer checkpoints that cannot be used."""
    warnings: tuple[str, ...] = ()
    differences: tuple[Difference, ...] = ()
    """Settings that were others when ``state`` was saved, all allowed."""

    @property
    def step(self) -> int:
        """Steps that are done already; 0 from the beginning."""
        return 0 if self.state is None else self.state.step

    @property
    def steps_of_other_plan(self) -> int:
        """Steps done under settings that memory and speed depend on and that changed: their figures are of another
        plan."""
        without_effect = ("run.", "data.", "schedule.")
        changed = any(not d.setting.startswith(without_effect) for d in self.differences)
        return self.step if changed or self.facts is None else self.facts.steps_of_other_plan

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people before the run goes on."""
        if not self.differences:
            return self.warnings
        return (*self.warnings, f"going on under other settings\n{difference_table(list(self.differences))}")


def complete_run(
    plan: Plan, *, resume: bool | str, overwrite: bool, ranks: Ranks
) -> tuple[RunReport | None, bool]:
    """The report of this very run where it is complete already, else None; and True if it is complete in its store and
    not here, of which what it says of itself was fetched. A longer run is left to ``resume``.

    Raises RunDirectoryError for a complete run of other settings that nobody asked to continue, or one that is trained
    and lacks its export only, StoreError for a store that cannot be written to.
    """
    directory = Path(plan.run.output_dir)
    is_fetched = ranks.from_first(lambda: examined_store(plan.run, overwrite=overwrite))
    if overwrite:
        return None, is_fetched
    file = directory / "report.json"
    ended = _read_or_refuse(RunReport, file) if file.is_file() else None
    if isinstance(resume, str) or ended is None or not (ended.status == "complete" or ended.lacks_export):
        return None, is_fetched
    has_checkpoint = is_fetched or last_saved(directory) is not None
    if ended.lacks_export and not (has_checkpoint or any(directory.glob("*/*.safetensors"))):
        return None, is_fetched  # stopped before it wrote any weights: it has to train again
    saved = _read_or_refuse(Plan, directory / "plan.json", lambda data: with_unsaid_fields(data, plan))
    differences = [
        d for d in compare_plans(saved, plan) if not d.allowed or d.setting.startswith("schedule.duration")
    ]
    if not differences and ended.status == "complete":
        return ended, is_fetched
    if resume and has_checkpoint:
        return None, is_fetched
    if ended.lacks_export:
        raise RunDirectoryError(
            f"{directory} is trained; only its export failed: {ended.reason}",
            hint=f"fitune export {quote(str(directory))}, or --overwrite to start anew",
        )
    if resume:
        raise RunDirectoryError(
            f"{directory} holds a complete run and no checkpoint (save_steps was 0): there is nothing to go on from\n"
            f"{difference_table(differences)}",
            hint="--overwrite to start anew, or another output_dir; with save_steps a run can be made longer",
        )
    longer = " --resume to make it longer," if has_checkpoint and all(d.allowed for d in differences) else ""
    raise RunDirectoryError(
        f"{directory} holds a complete run with other settings\n{difference_table(differences)}",
        hint=f"{longer} --overwrite to start anew, or another output_dir".strip(),
    )


def _read_or_refuse(cls: type[T], file: Path, completed: Callable[[Any], Any] = lambda data: data) -> T:
    try:
        return from_data(cls, completed(parse_json(read_text(file, follow_links=False))))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}", hint="another output_dir, or --overwrite to start anew"
        ) from None


def where_to_start(
    directory: Path,
    plan: Plan,
    *,
    resume: bool | str,
    store: Store | None = None,
    on_note: OnNote = lambda _: None,
) -> Start:
    """The checkpoint to go on from, checked and compatible with ``plan``: of ``directory``, or of the run's ``store``
    where that has a later one, which is then fetched.

    Raises CheckpointError when it is damaged or the plan changed too much, and RunDirectoryError when there
    are steps of an earlier run that nobody asked to continue.
    """
    if isinstance(resume, str) and is_url(resume):
        path = _fetched(resume, directory, on_note)
        return _compatible(path, plan, Found(path=path))
    if isinstance(resume, str):
        return _compatible(Path(resume), plan, Found(path=None), on_note)
    if resume:
        line = None if store is None else adopt_line(store, directory, on_note)
        found = newest_checkpoint(directory, on_note)
        if store is not None and line is not None:
            # a later one of the store's, which is hashed while it is fetched
            after = 0 if found.path is None else read_commit(found.path).step
            fetched = newest_in_store(store, directory, line, after=after, on_note=on_note)
            if fetched is not None:
                damaged = tuple(path for path in found.damaged if path != fetched)
                found = replace(found, path=fetched, damaged=damaged)
        if found.path is None and found.warnings:
            raise CheckpointError(
                f"no checkpoint of {directory} can be used:\n  " + "\n  ".join(found.warnings),
                hint="put the files back, name another checkpoint (--resume PATH), or --overwrite to start anew",
            )
        if found.path is None:
            places = f"{directory}" if store is None else f"{directory} and {store.url}"
            note = f"nothing to resume: no checkpoint in {places}; starting from the beginning"
            return Start(state=None, warnings=(note,))
        return _compatible(found.path, plan, found)
    metrics = directory / "metrics.jsonl"  # a run that ended before its first step left nothing to protect
    has_steps = metrics.is_file() and metrics.stat().st_size > 0
    if step_folders(directory / FOLDER) or has_steps:
        raise RunDirectoryError(
            f"output_dir {directory} holds an earlier run",
            hint="--resume to continue it, --overwrite to start anew, or another output_dir",
        )
    if store is not None and is_run(store):
        raise RunDirectoryError(
            f"{store.url} holds an earlier run",
            hint="--resume to continue it, --overwrite to start anew, or another URL",
        )
    return Start(state=None)


def _fetched(url: str, directory: Path, on_note: OnNote) -> Path:
    """The checkpoint behind ``url``, brought into ``directory``. Raises CheckpointError when there is none."""
    with opened_store(url) as store:
        if store.read(COMMIT) is None and (found := complete_checkpoints(store)):
            raise CheckpointError(
                f"{url} is the directory of a run, not a checkpoint", hint=f"resume: {found[0].url}"
            )
        return fetch_checkpoint(remote_checkpoint(store), directory, on_note)


def _compatible(path: Path, plan: Plan, found: Found, on_note: OnNote = lambda _: None) -> Start:
    """The state in ``path``, which was verified when it is the one that was ``found``.

    Raises CheckpointError when it is no training state of ours.
    """
    state = load_checkpoint(path, verified=path == found.path, on_note=on_note)
    try:
        for group in ("model", "optimizer", "rng"):
            if group not in state.tensors:
                raise ValueError(f"{group}.safetensors is missing")
        saved = with_unsaid_fields(state.facts.get("plan"), plan)
        facts = from_data(Facts, {**state.facts, "plan": saved} if saved is not None else state.facts)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step} cannot be used: {error}",
            hint="go on with the version of fitune that saved it, name an older one, or --overwrite to start anew",
        ) from None
    differences = require_resumable(facts.plan, plan)
    return Start(
        state=state,
        facts=facts,
        path=path,
        damaged=found.damaged,
        warnings=(*found.warnings, f"resuming from {path}"),
        differences=tuple(differences),
    )


def require_same_rows(start: Start, fingerprint: str) -> None:
    """Raises CheckpointError when the training rows are not those of the checkpoint: same path, other content."""
    if start.facts is not None and start.facts.rows != fingerprint:
        raise CheckpointError(
            f"the training rows changed since step {start.step} was saved: the files, the template or the tokenizer",
            hint="put the data back as it was, or start a new run in another output_dir",
        )


def base_identity(plan: Plan, ranks: Ranks) -> str:
    """A hash of the frozen weights under an adapter; empty where all weights are trained, and so in the checkpoint.

    The first rank of each machine reads them. Called by every rank.
    """
    if not isinstance(plan.tuning, Lora):
        return ""
    return ranks.once_a_node(lambda: weights_identity(plan.model_path))


def require_same_base(start: Start, plan: Plan, *, base: str) -> None:
    """Raises CheckpointError when an adapter's frozen base is no longer what it was: same path, other weights."""
    if start.facts is not None and start.facts.base != base:
        raise CheckpointError(
            f"the weights in {plan.model_path} changed since step {start.step} was saved",
            hint="put them back as they were, or start a new run in another output_dir",
        )


def where_all_start(
    directory: Path, plan: Plan, *, ranks: Ranks, resume: bool | str, on_note: OnNote
) -> Start:
    """``where_to_start``, as the first rank finds it; the others read the checkpoint that it names."""
    found: list[Start] = []

    def first() -> Path | None:
        """Path of the first rank's checkpoint, None for a new start; ``found`` keeps the Start."""
        url = plan.run.upload_to
        with opened_store(url) if url else nullcontext() as store:
            found.append(where_to_start(directory, plan, resume=resume, store=store, on_note=on_note))
        return found[0].path

    path = ranks.from_first(first)
    if found:
        return found[0]
    return Start(state=None) if path is None else _compatible(path, plan, Found(path=path))
