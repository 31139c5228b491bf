"""Before the first step of a run: its directory is locked and cleared, its data read, its log put back."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fitune.checkpoint.commit import FOLDER as CHECKPOINTS
from fitune.checkpoint.commit import Descent
from fitune.checkpoint.resume import begin_line
from fitune.data.loader import Loader
from fitune.data.making import PreparedData
from fitune.data.preparing import Contents, prepare_data
from fitune.engine.ranks import Ranks
from fitune.files import remove_stale_siblings, write_atomically
from fitune.models.tokens import planned_tokenizer, require_rows
from fitune.spec.places import placed
from fitune.spec.plan import Plan
from fitune.spec.rank_status import forget_statuses
from fitune.spec.reports import Restart, Retry
from fitune.spec.run_directory import LOGS
from fitune.spec.run_lock import Ownership, lock_directory
from fitune.spec.serial import to_json
from fitune.track.metrics import MetricsLog, read_metrics
from fitune.train.current import Callbacks
from fitune.train.failure import TRACEBACK
from fitune.train.resume import Start, require_same_rows, where_to_start


def own_directory(directory: Path, owned: ExitStack) -> Ownership:
    """Lock the directory and remove what killed runs left: half-written files, and what their ranks said last."""
    owner = owned.enter_context(lock_directory(directory))
    remove_stale_siblings(directory)
    forget_statuses(directory / LOGS)
    return owner


def read_data(
    plan: Plan, start: Start, callbacks: Callbacks, ranks: Ranks, contents: Contents
) -> tuple[PreTrainedTokenizerBase, PreparedData, Loader]:
    """Tokenise before the model is loaded: bad data should not cost the wait for the weights."""
    tokenizer = planned_tokenizer(plan)
    data = prepare_data(
        plan.data,
        tokenizer=tokenizer,
        tokenizer_path=plan.model_path,
        seq_len=plan.batch.seq_len,
        seed=plan.run.seed,
        contents=contents,
        watch=callbacks.on_reading,
        on_note=callbacks.on_note,
        sends=ranks.is_first,
    )
    largest = max(part.largest_id for part in (data.train, data.eval) if part is not None)
    require_rows(plan.model_path, largest_id=largest, rows=plan.model.vocab_size)
    require_same_rows(start, data.train.fingerprint)
    loader = Loader(data.train, plan.batch, seed=plan.run.seed, rank=ranks.rank, world_size=ranks.world)
    return (
        tokenizer,
        replace(data, train_ledger=replace(data.train_ledger, packs=loader.num_packs)),
        loader,
    )


def begin_attempt(
    plan: Plan, start: Start, files: Mapping[str, str], *, attempt: str, on_note: Callable[[str], None]
) -> Descent:
    """Makes the directory this attempt's; what an earlier one said about its end holds no longer."""
    directory = Path(plan.run.output_dir)
    for name in ("report.json", "report.html", TRACEBACK):
        (directory / name).unlink(missing_ok=True)
    for name, text in {"plan.json": to_json(placed(plan)), **files}.items():
        write_atomically(directory / name, text)
    if plan.run.upload_to:
        (directory / CHECKPOINTS).mkdir(exist_ok=True)  # the line is written there, also before a save
    return begin_line(directory, attempt=attempt, base=start.path, damaged=start.damaged, on_note=on_note)


def put_metrics_back(directory: Path, plan: Plan, *, steps: int, on_note: Callable[[str], None]) -> None:
    """Make metrics.jsonl of a complete run of ``steps`` what its last checkpoint says, if that can be used."""
    start = where_to_start(directory, plan, resume=True)
    if start.step == steps:
        with MetricsLog(directory / "metrics.jsonl") as log:
            restart_log(log, start, on_note)


def restart_log(log: MetricsLog, start: Start, on_note: Callable[[str], None]) -> None:
    saved = b"" if start.state is None else start.state.log
    difference = log.restart(saved, step=start.step)
    if difference:
        on_note(
            f"{log.path}: {difference}; the lines up to step {start.step} are put back from its checkpoint"
        )


def untold(
    retries: Sequence[Retry], restarts: Sequence[Restart], log: MetricsLog
) -> tuple[tuple[Retry, ...], tuple[Restart, ...]]:
    """The retries and restarts that no step of the log tells of yet."""
    steps = list(read_metrics(log.path))
    told = {retry for step in steps for retry in step.retries}
    known = {replace(restart, again_at=0.0) for step in steps for restart in step.restarts}
    return tuple(one for one in retries if one not in told), tuple(
        one for one in restarts if replace(one, again_at=0.0) not in known
    )
