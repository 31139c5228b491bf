"""``fitune train``: plan, run, compare."""

import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from fitune.checkpoint.differences import compare_plans, difference_table, with_unsaid_fields
from fitune.checkpoint.resume import last_saved
from fitune.cli.exporting import export_run
from fitune.cli.fresh_process import StartAgain, hand_over, replace_process
from fitune.cli.loading import loading_bar
from fitune.cli.planning import plan_for
from fitune.cli.reading import reading_bar
from fitune.cli.reporting import comparison
from fitune.cli.retrying import Attempt, next_attempt
from fitune.cli.room_on_disk import require_room_on_disk
from fitune.cli.signals import StopRequest, stop_requests
from fitune.data.formats import Conversation
from fitune.data.ledger import describe_ledger
from fitune.data.loader import Loader
from fitune.data.preparing import PreparedData
from fitune.data.templates import load_template
from fitune.engine.schedule import total_steps
from fitune.errors import (
    CheckpointError,
    FituneError,
    OutOfMemory,
    RecipeError,
    RunDirectoryError,
    work_under_way,
)
from fitune.estimate.predict import predict
from fitune.models.language_model import LanguageModel
from fitune.models.vocabulary import planned_tokenizer
from fitune.planner.explain import explain_plan
from fitune.report.attempts import describe_retry
from fitune.report.compare import comparison_table
from fitune.report.html import write_report
from fitune.report.run_files import Prediction, RunnerUp, read_run
from fitune.score.generate_hf import Sampling, answer_all
from fitune.score.tasks import to_task
from fitune.spec.disk import read_text, write_atomically
from fitune.spec.plan import Plan
from fitune.spec.recipe import Recipe, dump_recipe
from fitune.spec.reports import PlanReport, RunReport
from fitune.spec.serial import from_data, to_json
from fitune.spec.strict_json import parse_json
from fitune.spec.words import describe_plan
from fitune.track.progress import Progress
from fitune.track.sinks import Sink, open_sinks
from fitune.train.current import Callbacks
from fitune.train.directory import require_own_directory
from fitune.train.export import FOLDERS, TITLES
from fitune.train.oom import release
from fitune.train.run import run
from fitune.units import format_bytes

T = TypeVar("T")

_SAMPLE_TOKENS = 128


def train_recipe(
    recipe: Recipe, *, overwrite: bool, quiet_plan: bool = False, start_again: StartAgain = replace_process
) -> int:
    """The whole of ``fitune train``; returns the exit code. ``start_again``: how an attempt after one that ran out of
    memory gets a process of its own."""
    if not recipe.data:
        raise RecipeError("no data is named", hint="data: train.jsonl, or --data on the command line")
    report = plan_for(recipe, purposes=("plan", "train"))
    plan = report.chosen.plan
    print(describe_plan(plan) if quiet_plan else explain_plan(report))
    directory = Path(plan.run.output_dir)
    require_own_directory(plan)
    if not overwrite and is_finished(directory, plan, resume=recipe.resume):
        make_up_for_missing(directory)
        print(f"{directory}: already complete; --overwrite starts anew")
        return 0
    require_room_on_disk(plan)
    first = Attempt(report=report, resume=recipe.resume, overwrite=overwrite)
    return train_attempt(first, recipe, start_again=start_again)


def train_attempt(attempt: Attempt, recipe: Recipe, *, start_again: StartAgain = replace_process) -> int:
    """Run the attempt, and one that takes less when memory runs out in a step; returns the exit code."""
    directory = Path(attempt.plan.run.output_dir)
    with stop_requests() as request:
        ended = _run_or_report(attempt, recipe, request)
    if isinstance(ended, Attempt):
        return start_again(hand_over(ended, recipe))
    with work_under_way():
        print(comparison_table(comparison(directory)))
        print(f"report: {write_report(directory)}")
    if ended.exported:
        print(f"{TITLES[attempt.plan.run.export]}: {ended.exported} (verified by reloading)")
    if ended.merged_loss is not None:
        print("\n".join(ended.merged_loss.lines()))
    if ended.status == "interrupted":
        print("interrupted: the step was finished and saved; add --resume to go on")
        return request.exit_code
    return 0


def make_up_for_missing(directory: Path) -> None:
    """Write the export or the page of a complete run that is not there: a run may be killed after its report.json."""
    kind = read_run(directory).plan.run.export
    if not (directory / FOLDERS[kind]).is_dir():
        try:
            export_run(directory, None, kind)
        except CheckpointError as error:
            print(f"note: {error.message}")
    if not (directory / "report.html").is_file():
        print(f"report: {write_report(directory)}")


def _run_or_report(attempt: Attempt, recipe: Recipe, request: StopRequest) -> RunReport | Attempt:
    """How the attempt ended, or the one to try after it; a run that fails has its page, too."""
    had = last_saved(Path(attempt.plan.run.output_dir))
    try:
        try:
            return run_attempt(attempt, recipe, stop_asked=request.asked, sinks=[request])
        except OutOfMemory as error:
            release(error)
            if request.asked():
                raise
            following = next_attempt(attempt, recipe, error, had=had)
            print(describe_retry(following.retries[-1]))
            return following
    except FituneError as error:
        if error.exit_code != FituneError.exit_code:
            with suppress(FituneError, OSError):  # the cause is worth more than the page
                print(f"report: {write_report(Path(attempt.plan.run.output_dir))}")
        raise


def run_attempt(
    attempt: Attempt, recipe: Recipe, *, stop_asked: Callable[[], bool], sinks: Sequence[Sink] = ()
) -> RunReport:
    """Execute its plan with the estimate written beside it, for the report to compare."""
    report, plan = attempt.report, attempt.plan
    directory = Path(plan.run.output_dir)
    sinks = [*sinks, Progress(log_every=plan.run.log_every), *open_sinks(plan.run.report_to, directory)]

    def on_data(data: PreparedData, loader: Loader, steps_of_other_plan: int) -> None:
        print_data(data)
        for path in data.also_trained:
            print(f"note: eval_data {path} is also trained on, so its loss says nothing about new rows")
        prediction = predict_run(report, loader, after=steps_of_other_plan)
        print(describe_prediction(prediction))
        write_atomically(directory / "estimate.json", to_json(prediction))

    with loading_bar() as on_bytes, reading_bar() as on_reading:
        return run(
            plan,
            callbacks=Callbacks(
                on_data=on_data,
                on_note=print,
                stop_asked=stop_asked,
                answer=answers_with(plan),
                on_bytes=on_bytes,
                on_reading=on_reading,
            ),
            sinks=sinks,
            resume=attempt.resume,
            overwrite=attempt.overwrite,
            files={"recipe.yaml": dump_recipe(recipe)},
            retries=attempt.retries,
        )


def predict_run(report: PlanReport, loader: Loader, *, after: int = 0) -> Prediction:
    """What is predicted for the batches this run will really see, and what else was considered.

    The plan was made for the largest batch its settings allow; the heaviest of this data is known before it runs.
    ``after``: steps that were done under another plan.
    """
    plan = report.chosen.plan
    total = total_steps(plan.schedule, steps_per_epoch=loader.steps_per_epoch)
    step, heaviest = loader.heaviest(range(min(after + 1, total - 1), total))
    return Prediction(
        estimate=predict(plan, largest=heaviest, usual=loader.usual()),
        heaviest_step=step + 1,
        heaviest_tokens=heaviest.tokens,
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


def describe_prediction(prediction: Prediction) -> str:
    """One line before the run: where its peak will be."""
    peak, allowed = prediction.estimate.memory.tensor_peak_bytes, prediction.allowed_bytes
    return (
        f"predicted for this data: {format_bytes(peak)} at the peak, in step {prediction.heaviest_step:,} with "
        f"{prediction.heaviest_tokens:,} tokens in a micro-batch (the plan allows {format_bytes(allowed)})"
    )


def print_data(data: PreparedData) -> None:
    """The ledger of each part, under its name."""
    for name, ledger in (("train", data.train_ledger), ("held out", data.eval_ledger)):
        if ledger is not None:
            print(textwrap.indent(describe_ledger(ledger), " " * 10).replace(" " * 10, f"{name + ':':10}", 1))


def is_finished(directory: Path, plan: Plan, *, resume: bool | str) -> bool:
    """True if ``directory`` holds this very run, complete. A longer one is left to ``resume``.

    Raises RunDirectoryError when it holds a complete run of other settings that nobody asked to continue, or one
    that is trained and lacks its export only.
    """
    ended = _ended(directory)
    if isinstance(resume, str) or ended is None or not (ended.status == "complete" or ended.lacks_export):
        return False
    saved = _read_or_refuse(Plan, directory / "plan.json", lambda data: with_unsaid_fields(data, plan))
    differences = [
        d for d in compare_plans(saved, plan) if not d.allowed or d.setting.startswith("schedule.duration")
    ]
    if not differences and ended.status == "complete":
        return True
    has_checkpoint = last_saved(directory) is not None
    if resume and has_checkpoint:
        return False
    if ended.lacks_export:
        raise RunDirectoryError(
            f"{directory} is trained; only its export failed: {ended.reason}",
            hint=f"fitune export {directory}, or --overwrite to start anew",
        )
    if resume:
        raise RunDirectoryError(
            f"{directory} holds a complete run and no checkpoint (save_steps was 0): there is nothing to go on from\n"
            f"{difference_table(differences)}",
            hint="--overwrite to start anew, or another output_dir; with save_steps a run can be made longer",
        )
    longer = " --resume to make it longer," if has_checkpoint and all(d.allowed for d in differences) else ""
    raise RunDirectoryError(
        f"{directory} holds a complete run of other settings\n{difference_table(differences)}",
        hint=f"{longer} --overwrite to start anew, or another output_dir".strip(),
    )


def _ended(directory: Path) -> RunReport | None:
    if not (directory / "report.json").is_file():
        return None
    return _read_or_refuse(RunReport, directory / "report.json")


def _read_or_refuse(cls: type[T], file: Path, completed: Callable[[Any], Any] = lambda data: data) -> T:
    try:
        return from_data(cls, completed(parse_json(read_text(file, follow_links=False))))
    except (OSError, ValueError) as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}", hint="--overwrite, or another output_dir"
        ) from None


def answers_with(plan: Plan) -> Callable[[LanguageModel, Sequence[Conversation]], list[str]]:
    """Greedy answers to held-out prompts, in the plan's own template."""
    tokenizer = planned_tokenizer(plan)
    template = load_template(tokenizer, plan.data.chat_template)
    sampling = Sampling(max_new_tokens=_SAMPLE_TOKENS)

    def answer(model: LanguageModel, conversations: Sequence[Conversation]) -> list[str]:
        tasks = [to_task(c, id=str(place), template=template) for place, c in enumerate(conversations)]
        answers = answer_all(model.whole, tokenizer, template, tasks, sampling)
        return [a.text or a.error for a in answers]

    return answer
