"""The start of a run: from its first step, or from a checkpoint as if it had never stopped."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fitune.checkpoint.commit import COMMIT, FOLDER, OnNote, read_commit, step_folders
from fitune.checkpoint.differences import Difference, difference_table, require_resumable, with_unsaid_fields
from fitune.checkpoint.remote import (
    adopt_line,
    complete_checkpoints,
    fetch_checkpoint,
    is_run,
    newest_in_store,
    remote_checkpoint,
)
from fitune.checkpoint.resume import Found, load_checkpoint, newest_checkpoint
from fitune.checkpoint.slices import SavedTensors
from fitune.checkpoint.state import TrainState
from fitune.data.loader import LoaderState
from fitune.engine.protocol import EngineState, shape_of
from fitune.engine.ranks import Ranks
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.models.weight_files import weights_identity
from fitune.spec.plan import Lora, Plan
from fitune.spec.serial import from_data, to_data
from fitune.stores.opening import is_url
from fitune.stores.writing import Store
from fitune.train.prepare import Prepared
from fitune.train.uploading import store_of


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
        return _compatible(Path(resume), plan, Found(path=None))
    if resume:
        line = None if store is None else adopt_line(store, directory, on_note)
        found = newest_checkpoint(directory)
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
    store = Store(url)
    try:
        if store.read(COMMIT) is None and (there := complete_checkpoints(store)):
            raise CheckpointError(
                f"{url} is the directory of a run, not a checkpoint", hint=f"resume: {there[0].url}"
            )
        return fetch_checkpoint(remote_checkpoint(store), directory, on_note)
    finally:
        store.close()


def _compatible(path: Path, plan: Plan, found: Found) -> Start:
    """The state in ``path``, which was verified when it is the one that was ``found``."""
    state = load_checkpoint(path, verified=path == found.path)
    facts = _facts_of(state, plan)
    differences = require_resumable(facts.plan, plan)
    return Start(
        state=state,
        facts=facts,
        path=path,
        damaged=found.damaged,
        warnings=(*found.warnings, f"resuming from {path}"),
        differences=tuple(differences),
    )


def _facts_of(state: TrainState, plan: Plan) -> Facts:
    """Raises CheckpointError when the checkpoint is no training state of ours."""
    try:
        for group in ("model", "optimizer", "rng"):
            if group not in state.tensors:
                raise ValueError(f"{group}.safetensors is missing")
        saved = with_unsaid_fields(state.facts.get("plan"), plan)
        return from_data(Facts, {**state.facts, "plan": saved} if saved is not None else state.facts)
    except ValueError as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step} cannot be used: {error}",
            hint="name an older one, or --overwrite to start anew",
        ) from None


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
        store = store_of(plan.run)
        try:
            found.append(where_to_start(directory, plan, resume=resume, store=store, on_note=on_note))
        finally:
            if store is not None:
                store.close()
        return found[0].path

    path = ranks.from_first(first)
    if found:
        return found[0]
    return Start(state=None) if path is None else _compatible(path, plan, Found(path=path))


def capture(prepared: Prepared, facts: Facts, *, ranks: Ranks, step: int, log: bytes) -> TrainState:
    """Everything the next step depends on; ``facts`` but for those of the engine, and metrics.jsonl so far.

    What is divided over ranks stays so: each of them writes its part.
    """
    engine = prepared.engine.state()
    device = prepared.model.device
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    generators = ranks.gathered(rng)
    return TrainState(
        step=step,
        tensors={
            "model": prepared.engine.trained(),
            "optimizer": engine.tensors,
            "rng": {
                _of_rank(kind, rank): state
                for rank, own in enumerate(generators)
                for kind, state in own.items()
            },
        },
        facts=to_data(replace(facts, engine=dict(engine.facts))),
        log=log,
    )


def _of_rank(kind: str, rank: int) -> str:
    """Name of a generator's state: ``cpu`` of the first rank, ``cpu/1`` of the next."""
    return f"{kind}/{rank}" if rank else kind


def restore(
    prepared: Prepared, state: TrainState, facts: Facts, *, ranks: Ranks
) -> tuple[LoaderState, float]:
    """Put ``state`` back; returns the position in the data and the best evaluation loss so far.

    A rank that the checkpoint does not know draws numbers of its own.
    """
    model = state.tensors.get("model", {})
    saved = {name: shape_of(model, name) for name in model}
    trained = {name: tensor.shape for name, tensor in prepared.engine.trained().items()}
    if saved != trained:
        odd = sorted({name for name, _ in saved.items() ^ trained.items()})
        raise CheckpointError(f"the checkpoint trains other parameters than the plan, e.g. {odd[:3]}")
    prepared.engine.put_back(model)
    generators = state.tensors["rng"]
    try:
        prepared.engine.restore(EngineState(tensors=state.tensors["optimizer"], facts=facts.engine))
        if not ranks.rank or _of_rank("cpu", ranks.rank) in generators:
            torch.set_rng_state(generators[_of_rank("cpu", ranks.rank)])
        if prepared.model.device.type == "cuda" and _of_rank("cuda", ranks.rank) in generators:
            torch.cuda.set_rng_state(generators[_of_rank("cuda", ranks.rank)], prepared.model.device)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint of step {state.step} lacks {error}") from error
    for tensors in state.tensors.values():
        if isinstance(tensors, SavedTensors):
            tensors.close()
    best = facts.best_eval_loss
    return LoaderState(epoch=facts.epoch, position=facts.position), math.inf if best is None else best
