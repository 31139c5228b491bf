"""A model answers a dataset, and the answers are graded.

Peak bytes of the first batch are measured, and predicted for the same passes. An adapter that vLLM cannot take is
folded into its base first.
"""

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from fitune.checkpoint.export import export_merged
from fitune.checkpoint.layout import ExportFolder
from fitune.data.conversations.templates import load_template
from fitune.errors import RecipeError, ScoringFailed
from fitune.estimate.answering import memory_of_answering
from fitune.files import cache_folder, write_atomically, written_whole
from fitune.launch.ray_cluster import RayPlace
from fitune.measure.memory import memory_meter
from fitune.models.adapter_file import read_adapter_config
from fitune.models.adapters import load_adapter, train_tables
from fitune.models.readers import model_folder
from fitune.models.tokens import load_tokenizer
from fitune.models.weight_files import identity, stored_dtype
from fitune.models.weights import load_model
from fitune.recipe.score_recipe import ScoreRecipe
from fitune.report.score_pages import comparison_verdict, write_score_comparison, write_score_page
from fitune.report.score_rows import first_failed, first_grader_error, read_changed, read_score
from fitune.score.answers import CHANGED
from fitune.score.engines.continuous import BatchPass
from fitune.score.engines.opening import answering_of, open_engine, why_merged_first
from fitune.score.grades.intervals import Changed, grades_of, paired_scores
from fitune.score.plan import ScorePlan
from fitune.score.run import score
from fitune.session.events import Emit, Note, RowsAnswered, emit_notes, emit_weights
from fitune.session.named_models import NamedModel
from fitune.session.score.score_plan import plan_of, with_fastest_engine
from fitune.units import counted, format_bytes
from fitune.values.answering import Questions
from fitune.values.reports import ScoreReport
from fitune.values.serial import to_json


def score_dataset(
    recipe: ScoreRecipe, *, emit: Emit, place: RayPlace | None = None, against: str = ""
) -> ScoreReport:
    """Answer every row, grade, and write answers.jsonl, grades.jsonl and report.json into the folder ``out``.

    ``place``: on a Ray cluster. ``against``: the folder of a score to be
    compared with, which must have grades before the first row is asked. Raises what ``plan_of`` and ``score`` raise.
    """
    if against:
        if Path(against).resolve() == recipe.out.resolve():
            raise RecipeError(f"--against {against} is --out itself", hint="name the --out of another score")
        next(grades_of(Path(against)), None)
    plan = plan_of(recipe)
    out = Path(plan.output_dir)
    if place is None and plan.engine != "server":
        plan = with_fastest_engine(plan, recipe.engine, emit=emit)
    # workers of a cluster do not see this machine's cache
    if plan.engine == "vllm" and plan.adapter and place is None:
        from fitune.score.engines.engine_vllm import python_of_vllm

        python_of_vllm()  # refuses before anything is merged
        plan = replace(plan, merged=merged_where_needed(plan.model, plan.adapter, emit=emit))
    with ExitStack() as stack:
        freeze = stack.enter_context(_fewer_collections())
        elsewhere = None
        if place is not None:
            from fitune.session.clusters.score_on_ray import scoring_on_ray

            plan, elsewhere = stack.enter_context(scoring_on_ray(plan, place, emit=emit))
        pace, memory = Pace(emit), ScoreMemory(plan)

        def answered(tokens: int) -> None:
            """Counts the tokens of a shard; the model is there by then, and leaves garbage collection."""
            freeze()
            pace.add(tokens)

        report = score(
            plan,
            say=emit_notes(emit),
            progress=pace.rows,
            on_tokens=answered,
            opens=partial(
                open_engine,
                watch=memory.watch,
                on_bytes=emit_weights(emit),
            ),
            elsewhere=elsewhere,
        )
        report = memory.added_to(report, out)
        emit(Note(f"page: {write_score_page(out)}"))
    return report


@contextmanager
def _fewer_collections() -> Iterator[Callable[[], None]]:
    """Keeps Python from looking for garbage among what libraries and the model made, 0.3 s each time, until the end.

    Yields what is called when the model is there, too; a second call does nothing.
    """
    if gc.get_freeze_count():  # somebody else froze objects, and they are not thawed here
        yield lambda: None
        return
    gc.freeze()
    try:
        yield cache(gc.freeze)
    finally:
        gc.unfreeze()


class Pace:
    """Tells how far a scoring is, and how fast since it began."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self._tokens, self._before = emit, 0, 0
        self._began = 0.0

    def add(self, tokens: int) -> None:
        """Counts tokens of an answer; they are told with the next rows."""
        self._tokens += tokens

    def rows(self, done: int, total: int) -> None:
        """Tells RowsAnswered; fewer ``done`` than before begin another count."""
        now = time.monotonic()
        if not self._began or done < self._before:  # another count begins
            self._before, self._began = done, now
        self._emit(
            RowsAnswered(
                done=done, total=total, new=done - self._before, tokens=self._tokens, seconds=now - self._began
            )
        )  # fmt: skip


def merged_where_needed(model: str, adapter: str, *, emit: Emit) -> str:
    """The folder of ``adapter`` merged into ``model``; empty where vLLM takes the adapter as it is.

    It is named by the content of both, so it is made once. Raises CheckpointError for an adapter that cannot be merged,
    or whose merged weights are not W + scaling · B A.
    """
    config = read_adapter_config(Path(adapter))
    if not (why := why_merged_first(config)):
        return ""
    both = f"{identity(model)}\n{identity(adapter)}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(both, digest_size=8).hexdigest()
    folder = cache_folder() / "merged" / f"{Path(model).name}-{digest}"
    if not folder.is_dir():
        emit(Note(f"vLLM cannot take {adapter} as it is ({why}): it is merged into its base first"))
        for warning in _merge(model, adapter, folder, emit=emit):
            emit(Note(f"warning: {warning}"))
    size = sum(file.stat().st_size for file in folder.iterdir())
    emit(Note(f"merged, verified: {folder} ({format_bytes(size)}; remove it when you like)"))
    return str(folder)


def _merge(model: str, adapter: str, folder: Path, *, emit: Emit) -> tuple[str, ...]:
    """Write the merged model in its base's type; returns warnings."""
    base = load_model(
        model,
        dtype=stored_dtype(model_folder(model)) or torch.float32,
        device=torch.device("cpu"),
        on_bytes=emit_weights(emit),
    )
    adapted = load_adapter(base, adapter)
    settings: Any = adapted.peft_config[adapted.active_adapter]
    settings.modules_to_save = None  # load_adapter has put the tables in place
    train_tables(base, read_adapter_config(Path(adapter)).modules_to_save or ())
    tokenizer = load_tokenizer(NamedModel(title="", model=model, adapter=adapter).texts)
    card = f"# {Path(model).name} with an adapter merged into it\n\nMade for scoring: {adapter} on {model}.\n"
    into = ExportFolder(
        target=folder,
        tokenizer=tokenizer,
        chat_template=load_template(tokenizer).source,
        card=card,
        replace=True,
    )
    _, warnings = export_merged(adapted, into, base_path=model)
    return warnings


class ScoreMemory:
    """Measures the passes that it is opened for, and predicts each of them by its rows and widths alone."""

    def __init__(self, plan: ScorePlan) -> None:
        self._plan = plan
        self._measured = 0
        self._moments: list[BatchPass] = []

    @contextmanager
    def watch(self, moment: BatchPass, alive: Callable[[], Iterable[torch.Tensor]]) -> Iterator[None]:
        """Measure one pass, if it may need more than those before it: the counter makes it several times as long."""
        if any(
            moment.is_reading == before.is_reading
            and moment.rows <= before.rows
            and moment.prompt_tokens <= before.prompt_tokens
            and moment.width <= before.width
            for before in self._moments
        ):
            yield
            return
        device = next(iter(alive())).device
        meter = memory_meter(device)
        with meter.measuring(alive):
            yield
        self._measured = max(self._measured, *meter.take_peaks().values())
        self._moments.append(moment)

    def added_to(self, report: ScoreReport, out: Path) -> ScoreReport:
        """The report with both figures, written anew; as it is where nothing was watched, or nothing can be
        predicted."""
        if not self._moments:
            return report
        answering = answering_of(self._plan)
        if answering is None:
            return report
        predicted = 0
        for moment in self._moments:  # prompts are read, or the token is written that makes the cache so wide
            asked = Questions(
                rows=moment.rows, prompt_tokens=moment.rows * moment.prompt_tokens,
                longest_prompt=moment.prompt_tokens, new_tokens=moment.width - moment.prompt_tokens + 1,
            )  # fmt: skip
            memory = memory_of_answering(replace(answering, batch_size=moment.rows), asked)
            terms = memory.reading if moment.is_reading else memory.writing
            predicted = max(predicted, sum(terms.values()))
        report = replace(report, measured_bytes=self._measured, predicted_bytes=predicted)
        write_atomically(out / "report.json", to_json(report))
        return report


def why_not_all(report: ScoreReport, out: Path) -> ScoringFailed | None:
    """The error of a score in which rows have no answer, or a grader graded none, with that of the first one; None
    when all is well."""
    if report.failed:
        id_, why = first_failed(out)
        return ScoringFailed(
            f"no answer to {report.failed:,} of {counted(report.rows, 'row')}, graded 0; the first is {id_}: {why}",
            hint=f"see the error of those rows in {out / 'answers.jsonl'}",
        )
    broken = [name for name, count in report.grader_errors.items() if count == report.rows]
    if not broken:
        return None
    id_, why = first_grader_error(out, broken[0])
    return ScoringFailed(
        f"grader {broken[0]} failed for every row, so its mean says nothing; the first is {id_}: {why}",
        hint="mend the grader and run the same command again: the answers are kept",
    )


def compare_scores(directory: Path, other: Path) -> str:
    """Two scorings of the same rows side by side, in words; the rows whose grade changed go to changed.jsonl."""
    scales = read_score(directory).scales
    with written_whole(directory / CHANGED) as file:

        def write(row: Changed) -> None:
            """Appends the row to changed.jsonl."""
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())

        paired = paired_scores(directory, other, scales=scales, on_changed=write)
    shown = [
        f"{comparison_verdict(found)} {found.better:,} better, {found.worse:,} worse, of {counted(found.rows, 'row')}"
        for found in paired
    ]
    page = write_score_comparison(directory, other, paired, read_changed(directory))
    return "\n".join([*shown, f"changed rows: {directory / CHANGED}", f"page: {page}"])
