"""``fitune train``: plan, run, compare."""

import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fitune.checkpoint.paths import lock_run_directory
from fitune.cli.planning import plan_for
from fitune.cli.reporting import comparison
from fitune.data.dataset import PreparedData
from fitune.data.formats import Conversation
from fitune.data.ledger import describe_ledger
from fitune.data.templates import load_template
from fitune.errors import RecipeError, RunDirectoryError
from fitune.models.language_model import LanguageModel
from fitune.models.weights import load_tokenizer
from fitune.planner.explain import describe_plan, explain_plan
from fitune.report.compare import comparison_table
from fitune.report.html import write_report
from fitune.score.generate_hf import Sampling, answer_all
from fitune.score.tasks import to_task
from fitune.spec.plan import Plan
from fitune.spec.recipe import Recipe, dump_recipe
from fitune.spec.reports import PlanReport, RunReport
from fitune.spec.serial import from_json, to_data
from fitune.track.progress import Progress
from fitune.track.sinks import open_sinks
from fitune.train.run import Callbacks, run

_SAMPLE_TOKENS = 128
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


def train_recipe(recipe: Recipe, *, overwrite: bool, quiet_plan: bool = False) -> int:
    """The whole of ``fitune train``; returns the exit code."""
    if not recipe.data:
        raise RecipeError("no data is named", hint="data: train.jsonl, or --data on the command line")
    report = plan_for(recipe)
    plan = report.chosen.plan
    print(describe_plan(plan) if quiet_plan else explain_plan(report))
    directory = Path(plan.run.output_dir)
    if overwrite:
        remove_run(directory)
    elif recipe.resume is False and is_complete(directory):
        print(f"{directory}: already complete; --overwrite starts anew")
        return 0
    with stop_signals() as received:
        finished = run_plan(report, recipe, stop_asked=lambda: bool(received))
    print(comparison_table(comparison(directory)))
    print(f"report: {write_report(directory)}")
    if finished.status == "interrupted":
        print("interrupted: the step was finished and saved; add --resume to go on")
        return _EXIT_CODES[received[0]]
    return 0


def run_plan(report: PlanReport, recipe: Recipe, *, stop_asked: Callable[[], bool]) -> RunReport:
    """Execute the chosen plan with its estimate written beside it, for the report to compare."""
    plan = report.chosen.plan
    directory = Path(plan.run.output_dir)
    sinks = [Progress(log_every=plan.run.log_every), *open_sinks(plan.run.report_to, directory)]
    return run(
        plan,
        callbacks=Callbacks(
            on_data=print_data, on_note=print, stop_asked=stop_asked, answer=answers_with(plan)
        ),
        sinks=sinks,
        resume=recipe.resume,
        files={"recipe.yaml": dump_recipe(recipe), "estimate.json": prediction_text(report)},
    )


def prediction_text(report: PlanReport) -> str:
    """estimate.json: what was predicted, and what else was considered."""
    import json

    runners_up = [
        {
            "summary": describe_plan(priced.plan),
            "peak_bytes": priced.estimate.peak_bytes,
            "step_seconds": priced.estimate.step_seconds,
            "fits": priced.estimate.fits,
        }
        for priced in report.runners_up
    ]
    content = {
        "estimate": to_data(report.chosen.estimate),
        "runners_up": runners_up,
        "rejected": [{"what": r.what, "why": r.why} for r in report.rejected],
        "decisions": list(report.decisions),
    }
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def print_data(data: PreparedData) -> None:
    print(f"train: {describe_ledger(data.train_ledger)}")
    if data.eval_ledger is not None:
        print(f"held out: {describe_ledger(data.eval_ledger)}")


def is_complete(directory: Path) -> bool:
    """Whether ``directory`` holds a run that reached its end."""
    file = directory / "report.json"
    if not file.is_file():
        return False
    try:
        return from_json(RunReport, file.read_text(encoding="utf-8")).status == "complete"
    except ValueError as error:
        raise RunDirectoryError(
            f"{file} cannot be read: {error}", hint="--overwrite, or another output_dir"
        ) from None


def remove_run(directory: Path) -> None:
    """Remove an earlier run, and nothing that is not one."""
    if not directory.exists():
        return
    if not (directory / "plan.json").is_file() and any(directory.iterdir()):
        raise RunDirectoryError(
            f"output_dir {directory} has files and no plan.json, so it is no run and is not removed",
            hint="choose another output_dir",
        )
    with lock_run_directory(directory):
        for entry in directory.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != "run.lock":
                entry.unlink()


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM so that the step can be finished; the second one stops at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        print("\nstopping after this step; once more stops at once")

    before = {number: signal.signal(number, note) for number in _EXIT_CODES}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def answers_with(plan: Plan) -> Callable[[LanguageModel, Sequence[Conversation]], list[str]]:
    """Greedy answers to held-out prompts, in the plan's own template."""
    tokenizer = load_tokenizer(plan.model_path)
    template = load_template(tokenizer, plan.data.chat_template)
    sampling = Sampling(max_new_tokens=_SAMPLE_TOKENS)

    def answer(model: LanguageModel, conversations: Sequence[Conversation]) -> list[str]:
        tasks = [to_task(c, id=str(place), template=template) for place, c in enumerate(conversations)]
        answers = answer_all(model.whole, tokenizer, template, tasks, sampling)
        return [a.text or a.error for a in answers]

    return answer
