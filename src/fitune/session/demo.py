"""The whole loop on a base model and a task made on the spot."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.demo.files import HELD_OUT_ROWS, MAX_NEW_TOKENS, DemoFiles, write_demo
from fitune.errors import RunDirectoryError, TrainingFailed
from fitune.recipe.recipe import dump_recipe
from fitune.recipe.score_recipe import score_recipe
from fitune.score.shards import remove_scores
from fitune.session.events import Emit, Note, Planned, ignore_event
from fitune.session.planning import plan_on_data
from fitune.session.program import train_program
from fitune.session.recipes.reading import read_any_recipe
from fitune.session.reported import Reported, report_run
from fitune.session.score.scoring import score_dataset
from fitune.session.train.attempts import Attempt
from fitune.session.train.training import run_once
from fitune.track.metrics import read_metrics
from fitune.units import format_bytes, format_percent, format_rate, format_seconds, text_table
from fitune.values.reports import RunReport
from fitune.values.run_directory import LOGS

_SEED = 0
_GRADER = "exact_match"
_SETTINGS = ("log_steps=25",)
_HEADINGS = ("", "right answers", "loss", "peak predicted", "measured", "error", "speed", "time")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the demo's table. The base was not trained here: it has no run."""

    name: str
    accuracy: float
    run: RunReport | None
    predicted_bytes: float | None
    report: Path | None


def run_demo(directory: Path, *, gpus: int, emit: Emit) -> tuple[Outcome, ...]:
    """Write, pretrain, plan, train twice, score three times, compare.

    ``gpus`` 2: train the second once more by two processes, GPUs where there are two.
    """
    started = time.perf_counter()
    _make_room(directory)

    def say(*lines: str, **data: Any) -> None:
        """Tells the lines as one note; ``data`` goes with it for programs."""
        emit(Note("\n".join(lines), data))

    say(
        "1. A shop's orders as text, a task about them, and a small Llama with random weights, in "
        f"{directory}/\n"
    )
    files = write_demo(directory, seed=_SEED)
    say("2. The base model: pretrained for a moment on the text, by fitune itself\n")
    _train(files.pretrain_recipe, emit, explain=False)
    base = Outcome(
        name="base", accuracy=_accuracy(files, files.base.parent), run=None, predicted_bytes=None, report=None
    )
    say("\n3. The task by LoRA: the plan first\n")
    lora = _tuned(files, files.lora_recipe, "LoRA", emit)
    say("\n4. The same by training every parameter\n")
    outcomes = [base, lora, _tuned(files, files.full_recipe, "full", emit)]
    if gpus > 1:
        say(f"\n   And once more by {gpus} processes that each hold a share of every tensor (ZeRO-3)\n")
        divided = files.divided_recipe.with_suffix("")
        recipe = read_any_recipe(files.divided_recipe, settings=_SETTINGS)
        if code := train_program(recipe, overwrite=True, emit=emit):
            raise TrainingFailed(
                f"the processes ended with exit code {code}", hint=f"what they said is in {divided / LOGS}"
            )
        outcomes.append(_outcome(files, "full, ZeRO-3 on 2", report_run(divided)))
        one, two = (
            [step.loss for step in read_metrics(folder / "metrics.jsonl")]
            for folder in (files.full_recipe.with_suffix(""), divided)
        )
        largest = max(abs(ours - theirs) for ours, theirs in zip(one, two, strict=True))
        say(f"\n   losses of one process and of two differ by at most {largest:.1g} over {len(one)} steps")
    say(f"\n5. {HELD_OUT_ROWS} held-out orders, about goods and cities that no training row names\n")
    seconds = time.perf_counter() - started
    say(
        # right answers before and after, and what training took: predicted | measured
        text_table([_HEADINGS, *(_cells(outcome) for outcome in outcomes)], indent=2),
        f"\nThe whole demo took {format_seconds(seconds)}. Open in a browser:",
        *(f"  {outcome.report}" for outcome in outcomes if outcome.report is not None),
        folder=directory,
        seconds=seconds,
        models=outcomes,
    )
    return tuple(outcomes)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    run, right = outcome.run, format_percent(outcome.accuracy)
    if run is None or run.memory is None or outcome.predicted_bytes is None:
        return (outcome.name, right, "", "", "", "", "", "")
    predicted, measured = outcome.predicted_bytes, run.memory.peak_bytes
    return (
        outcome.name,
        right,
        f"{run.first_loss:.2f} → {run.final_loss:.2f}",
        format_bytes(predicted),
        format_bytes(measured),
        format_percent(predicted / measured - 1, signed=True),
        format_rate(run.tokens_per_second),
        format_seconds(run.seconds),
    )


def _tuned(files: DemoFiles, recipe: Path, name: str, emit: Emit) -> Outcome:
    """Train by ``recipe``, score the result, write its report."""
    _train(recipe, emit, explain=True)
    return _outcome(files, name, report_run(recipe.with_suffix("")))


def _outcome(files: DemoFiles, name: str, reported: Reported) -> Outcome:
    assert reported.run is not None, "a run that did not end well has raised"
    peak = next(row for row in reported.rows if row.what == "Peak of tensors")
    return Outcome(
        name=name,
        accuracy=_accuracy(files, reported.directory),
        run=reported.run,
        predicted_bytes=peak.predicted,
        report=reported.page,
    )


def _train(path: Path, emit: Emit, *, explain: bool) -> None:
    recipe = read_any_recipe(path, settings=(*_SETTINGS, "gpus=1"))
    report = plan_on_data(recipe)
    if explain:
        emit(Planned(report=report))
    attempt = Attempt(recipe=dump_recipe(recipe), report=report, resume=False, overwrite=True)
    run_once(attempt, emit=emit, stop_asked=lambda: False)


def _accuracy(files: DemoFiles, run: Path) -> float:
    """Share of held-out rows that the export of ``run`` answers exactly."""
    recipe = score_recipe(
        model=run, data=files.test, out=run / "scores", graders=_GRADER,
        max_new_tokens=MAX_NEW_TOKENS, batch_size=25,
    )  # fmt: skip
    return score_dataset(recipe, emit=ignore_event).grades[_GRADER]


def _make_room(directory: Path) -> None:
    """Remove the scores of an earlier demo; all else it wrote is written again, and nothing of others is touched."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    if not (directory / "pretrain.yaml").is_file():
        raise RunDirectoryError(
            f"{directory} has files and is no earlier demo, so nothing was removed",
            hint="--out with a new folder",
        )
    for scores in directory.glob("*/scores"):
        remove_scores(scores)
