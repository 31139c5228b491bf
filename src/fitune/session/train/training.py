"""A recipe is trained, attempt after attempt."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitune.checkpoint.commit import last_saved
from fitune.data.conversations.messages import Conversation
from fitune.data.conversations.templates import load_template
from fitune.data.loader import Loader
from fitune.data.making import PreparedData
from fitune.data.reading.files import HubDataset, locate
from fitune.data.reading.sources import content_key
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import CheckpointError, FituneError, OutOfMemory, StoreError, work_under_way
from fitune.estimate.division import num_ranks
from fitune.estimate.memory import memory_of
from fitune.estimate.predict import predict
from fitune.estimate.step import before_states, describe_step
from fitune.files import write_atomically
from fitune.models.language_model import LanguageModel
from fitune.models.tokens import planned_tokenizer
from fitune.planner.whole_run import whole_run
from fitune.recipe.recipe import Recipe, dump_recipe
from fitune.report.compare import row_texts
from fitune.report.run_files import Prediction, RunnerUp, read_run
from fitune.report.run_page import commands_of_run, write_report
from fitune.score.engines.engine import Sampling
from fitune.score.engines.engine_transformers import answer_all
from fitune.score.tasks import to_task
from fitune.session.events import (
    Compared,
    DataRead,
    Emit,
    Exported,
    Note,
    Predicted,
    StepEvents,
    emit_notes,
    emit_weights,
)
from fitune.session.exporting import commands_for, export_run, next_note
from fitune.session.reported import NO_EXPORT, outcome_data, report_run
from fitune.session.train.attempts import Attempt, leave_shortage, next_attempt
from fitune.session.train.beginning import first_attempt
from fitune.session.train.pushing import push, push_again
from fitune.track.feed import Trackers
from fitune.track.metrics import Sink
from fitune.track.trackers import End, wanted_trackers
from fitune.train.again import EXPORT_FOLDERS, TITLES
from fitune.train.current import Callbacks
from fitune.train.failure import release
from fitune.train.run import put_metrics_back, run
from fitune.train.uploading import send_run
from fitune.values.plan import Plan, Single
from fitune.values.predictions import PlanReport
from fitune.values.reports import RunReport
from fitune.values.schedule import total_steps
from fitune.values.serial import to_json
from fitune.values.words import describe_plan

_SAMPLE_TOKENS = 128


def train_recipe(recipe: Recipe, *, overwrite: bool, emit: Emit, stop_asked: Callable[[], bool]) -> RunReport:
    """Plan and train in this process, attempt after attempt: on one GPU, where the recipe says no number of them.
    ``stop_asked`` is that of the run's Callbacks."""
    if recipe.gpu is None and recipe.gpus is None:
        recipe = recipe.model_copy(update={"gpus": 1})
    return run_to_end(first_attempt(recipe, overwrite=overwrite, emit=emit), emit=emit, stop_asked=stop_asked)


def run_to_end(attempt: Attempt | RunReport, **how: Any) -> RunReport:
    """The report of the attempt, or of one after it that took less memory, in this process; ``how`` is that of
    ``run_attempt``."""
    while isinstance(attempt, Attempt):
        attempt = run_attempt(attempt, **how)
    return attempt


def run_attempt(
    attempt: Attempt, *, emit: Emit, stop_asked: Callable[[], bool], sinks: Sequence[Sink] = (), ranks: Ranks = ALONE
) -> RunReport | Attempt:  # fmt: skip
    """Run the attempt and compare it with its prediction. Returns the next attempt when memory ran out in a step; a run
    that fails has its page, too."""
    plan, had = attempt.plan, last_saved(attempt.directory)
    with tracked(plan, emit=emit, ranks=ranks) as trackers:
        try:
            try:
                ended = run_once(
                    attempt, emit=emit, stop_asked=stop_asked, sinks=[*sinks, *trackers], ranks=ranks
                )
            except OutOfMemory as error:
                release(error)
                if not ranks.is_alone:
                    leave_shortage(plan, error, ranks)
                if stop_asked() or not ranks.is_alone:
                    raise
                return next_attempt(attempt, error, had=had, emit=emit)
        except FituneError as error:
            if error.exit_code != FituneError.exit_code and ranks.is_first:
                with suppress(FituneError, OSError):  # the cause is worth more than the page
                    emit(Note(f"report: {write_report(attempt.directory)}"))
                    send_end(plan, emit=emit, has_other_end=True)
            raise
        if not ranks.is_first:
            return ended
        with work_under_way():
            emit(Compared(reported=report_run(attempt.directory)))
    for event in export_events(attempt.directory, plan, ended):
        emit(event)
    send_end(plan, emit=emit, has_other_end=ended.status == "interrupted")
    if ended.exported:
        push_export(attempt.directory, plan, emit=emit)
    return ended


def end_complete(plan: Plan, report: RunReport, *, is_fetched: bool, emit: Emit, ranks: Ranks) -> RunReport:
    """Tell of a run that is complete already, make up for what it lacks and send it again; its report."""
    directory = Path(plan.run.output_dir)
    if ranks.is_first and not is_fetched:
        make_up_for_missing(directory, plan, report, emit=emit)
    data = outcome_data(report, directory) | NO_EXPORT
    for event in export_events(directory, plan, report):
        data |= event.data
    changed = ", ".join(changed_data(plan, report)) if ranks.is_first else ""
    since = f", but {changed} changed since" if changed else ""
    emit(Note(f"{directory}: already complete{since}; --overwrite starts anew", data))
    if ranks.is_first and not is_fetched:
        send_end(plan, emit=emit)
        push_export(directory, plan, emit=emit)
    elif ranks.is_first and (name := plan.run.push_to_hub):
        command = push_again(plan.run.upload_to, name, public=plan.run.hub_public)
        emit(Note(f"the export is in {plan.run.upload_to}; to the Hub: {command}"))
    return report


def changed_data(plan: Plan, report: RunReport) -> Iterator[str]:
    """Yields the paths of sources whose content is not what the run read, but of none that can no longer be read, or
    that might be downloaded from the Hub for it."""
    sources = (*plan.data.sources, *plan.data.eval_sources)
    for source, was_read in zip(sources, report.contents, strict=False):
        with suppress(FituneError):
            if not isinstance(locate(source), HubDataset) and content_key(source) != was_read:
                yield source.path


def export_events(directory: Path, plan: Plan, ended: RunReport) -> Iterator[Exported | Note]:
    """Yields what the run in ``directory`` has exported, if it is there, and commands that use it."""
    if ended.exported and Path(ended.exported).is_dir():
        title, path = TITLES[plan.run.export], Path(ended.exported)
        yield Exported(title=title, path=path, merged_loss=ended.merged_loss)
        commands = commands_of_run(str(directory), plan)
        yield next_note(
            [*commands, *commands_for(directory / EXPORT_FOLDERS[plan.run.export], plan.run.name)]
        )


def make_up_for_missing(directory: Path, plan: Plan, report: RunReport, *, emit: Emit) -> None:
    """Write the export or the page of a complete run that is not there: a run may be killed after its report.json."""
    kind = plan.run.export
    owes_export = not (directory / EXPORT_FOLDERS[kind]).is_dir()
    owes_page = not (directory / "report.html").is_file()
    if owes_export or owes_page:
        try:
            put_metrics_back(directory, plan, steps=report.steps, on_note=emit_notes(emit))
        except CheckpointError as error:
            emit(Note(f"note: {error.message}"))
    if owes_export:
        try:
            export_run(directory, None, kind, emit=emit)
        except CheckpointError as error:
            emit(Note(f"note: {error.message}"))
    if owes_page:
        emit(Note(f"report: {write_report(directory)}"))


def send_end(plan: Plan, *, emit: Emit, has_other_end: bool = False) -> None:
    """Send what the store of the run lacks, if it has one. Raises StoreError, or where the run ends by something else
    tells it."""
    try:
        with work_under_way():
            send_run(plan.run, lambda line: emit(Note(line, {"sent": plan.run.upload_to})))
    except StoreError as error:
        if not has_other_end:
            raise
        emit(Note(f"warning: {error.message}"))


def push_export(directory: Path, plan: Plan, *, emit: Emit) -> None:
    """Send what the run has exported to the Hub, if its plan says so. Raises StoreError."""
    folder = directory / EXPORT_FOLDERS[plan.run.export]
    if (name := plan.run.push_to_hub) and folder.is_dir():
        public = plan.run.hub_public
        push(folder, name, public=public, again=push_again(directory, name, public=public), emit=emit)


def run_once(
    attempt: Attempt, *, emit: Emit, stop_asked: Callable[[], bool], sinks: Sequence[Sink] = (), ranks: Ranks = ALONE
) -> RunReport:  # fmt: skip
    """Execute the attempt's plan with the estimate written beside it, for the report to compare."""
    plan = attempt.plan

    def on_data(data: PreparedData, loader: Loader, steps_of_other_plan: int) -> None:
        """Tells what the data has; the first rank also predicts the run and writes estimate.json."""
        also = tuple(data.also_trained)
        emit(DataRead(train=data.train_ledger, held_out=data.eval_ledger, also_trained=also))
        if not ranks.is_first:
            return
        prediction = predict_run(attempt.report, loader, after=steps_of_other_plan)
        emit(Predicted(prediction=prediction, plan=plan))
        write_atomically(attempt.directory / "estimate.json", to_json(prediction))

    return run(
        plan,
        callbacks=Callbacks(
            on_data=on_data,
            on_note=emit_notes(emit),
            stop_asked=stop_asked,
            answer=answers_with(plan),
            on_bytes=emit_weights(emit),
            on_reading=emit,
        ),
        sinks=[*([StepEvents(emit)] if ranks.is_first else []), *sinks],
        resume=attempt.resume,
        overwrite=attempt.overwrite,
        files={"recipe.yaml": dump_recipe(attempt.wanted, anywhere=True)},
        retries=attempt.retries,
        restarts=attempt.restarts,
        ranks=ranks,
    )


def predict_run(report: PlanReport, loader: Loader, *, after: int) -> Prediction:
    """Prediction for the batches this run will really see, with the alternatives considered.

    The plan was made for the largest batch its settings allow; the heaviest of this data are known before it runs.
    ``after``: steps that were done under another plan.
    """
    plan, epoch = report.chosen.plan, loader.epoch()
    world = num_ranks(plan)
    plan = replace(plan, batch=plan.batch.of_units(-(-epoch.units // world)))
    total = total_steps(plan.schedule, steps_per_epoch=loader.steps_per_epoch)
    alone = isinstance(
        plan.sharding, Single
    )  # else the first micro-batch is taken as one that finds gradients
    fresh = replace(plan, batch=replace(plan.batch, accumulation=1)) if alone else plan
    heaviest = loader.heaviest(range(min(after, total - 1), total), ranks=range(world))
    steps = [describe_step(plan if heavy.adds else fresh, heavy.shape) for heavy in heaviest]
    steps = [
        before_states(step) if heavy.step == 0 else step for step, heavy in zip(steps, heaviest, strict=True)
    ]
    peaks = [memory_of(step).tensor_peak_bytes for step in steps]
    at_peak = heaviest[peaks.index(max(peaks))]
    return Prediction(
        estimate=predict(plan, heaviest=steps, usual=epoch.usual),
        run=whole_run(report.chosen.plan, epoch, price_per_gpu_hour=report.price_per_gpu_hour),
        heaviest_step=at_peak.step + 1,
        heaviest_tokens=at_peak.shape.tokens,
        allowed_bytes=report.chosen.estimate.memory.tensor_peak_bytes,
        runners_up=tuple(
            RunnerUp(
                summary=describe_plan(priced.plan),
                peak_bytes=priced.estimate.peak_bytes,
                step_seconds=priced.estimate.step_seconds,
                fits=priced.estimate.fits,
            )
            for priced in report.runners_up
        ),
        rejected=report.rejected,
        decisions=report.decisions,
    )


def answers_with(plan: Plan) -> Callable[[LanguageModel, Sequence[Conversation]], list[str]]:
    """Greedy answers to held-out prompts, in the plan's own template."""
    tokenizer = planned_tokenizer(plan)
    template = load_template(tokenizer, plan.data.chat_template, date=plan.data.chat_template_date)
    sampling = Sampling(max_new_tokens=_SAMPLE_TOKENS)

    def answer(model: LanguageModel, conversations: Sequence[Conversation]) -> list[str]:
        """The model's answer to the last user message of each conversation, or why it has none."""
        tasks = [to_task(c, id=str(place), template=template) for place, c in enumerate(conversations)]
        answers = answer_all(model.whole, tokenizer, template, tasks, sampling)
        return [a.text or a.error for a in answers]

    return answer


_ATTACHED = ("report.html", "report.json", "plan.json", "recipe.yaml")


@contextmanager
def tracked(plan: Plan, *, emit: Emit, ranks: Ranks) -> Iterator[Sequence[Sink]]:
    """Inside, the sinks that feed the plan's trackers; only the first rank has any. At the end they get the report."""
    rows = wanted_trackers(plan.run.report_to) if ranks.is_first else {}
    if not rows:
        yield ()
        return
    directory = Path(plan.run.output_dir)
    trackers = Trackers(rows, directory, say=emit_notes(emit))
    try:
        yield (trackers,)
    finally:
        if trackers.tracked and trackers.close(end_of(directory)):
            # the page said nothing of a tracker that failed at the very end
            with suppress(FituneError, OSError):
                write_report(directory)


def end_of(directory: Path) -> End:
    """End of the run in ``directory`` for trackers: predicted beside measured, and the files that say more."""
    try:
        files = read_run(directory)
    except FituneError:
        return End(status="failed", figures={})
    rows = files.comparison
    figures: dict[str, float] = {}
    for row in rows:
        name = re.sub(r"\W+", "_", row.what.strip().lower()).strip("_")
        for kind, value in (("predicted", row.predicted), ("measured", row.measured), ("error", row.error)):
            if value is not None:
                figures[f"{kind}/{name}"] = float(value)
    return End(
        status="failed" if files.run is None else files.run.status,
        figures=figures,
        table=(("", "predicted", "measured", "error"), *(row_texts(row) for row in rows)),
        files=tuple(str(directory / name) for name in _ATTACHED if (directory / name).is_file()),
    )
