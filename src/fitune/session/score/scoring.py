"""A model answers a dataset, and the answers are graded."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from fitune.errors import ScoringFailed
from fitune.files import written_whole
from fitune.launch.ray_cluster import RayPlace
from fitune.models.adapter_file import CONFIG
from fitune.report.score_comparison import write_score_comparison
from fitune.report.score_page import write_score_page
from fitune.report.score_rows import first_failed, first_grader_error, read_changed
from fitune.score.answers import CHANGED
from fitune.score.engines.opening import open_engine
from fitune.score.grades.paired import Changed, compare, grades_of
from fitune.score.run import score
from fitune.session.events import Note, RowsAnswered, Tell, WeightsRead
from fitune.session.score.score_memory import ScoreMemory
from fitune.session.score.score_words import plan_of
from fitune.spec.recipe.score_recipe import ScoreRecipe
from fitune.spec.reports import ScoreReport
from fitune.units import counted

_LINE_SECONDS = 30.0


def score_dataset(
    recipe: ScoreRecipe, *, tell: Tell, place: RayPlace | None = None, against: str = ""
) -> ScoreReport:
    """Answer every row, grade, and write answers.jsonl, grades.jsonl and report.json into the folder ``out``.

    ``place``: on a Ray cluster. ``against``: the folder of a score to be
    compared with, which must have grades before the first row is asked. Raises what ``plan_of`` and ``score`` raise.
    """
    if against:
        next(grades_of(Path(against)), None)
    plan = plan_of(recipe)
    out = Path(plan.output_dir)
    if place is None and plan.engine != "server":
        from fitune.session.score.score_plan import with_fastest_engine

        plan = with_fastest_engine(plan, recipe.engine, tell=tell)
    # workers of a cluster do not see this machine's cache
    if plan.engine == "vllm" and plan.adapter and place is None:
        from fitune.score.engines.engine_vllm import python_of_vllm
        from fitune.session.score.merging import merged_where_needed

        python_of_vllm()  # refuses before anything is merged
        plan = replace(plan, merged=merged_where_needed(plan.model, plan.adapter, tell=tell))
    with ExitStack() as stack:
        settle = stack.enter_context(_settling())
        elsewhere = None
        if place is not None:
            from fitune.session.clusters.score_on_ray import scoring_on_ray

            plan, elsewhere = stack.enter_context(scoring_on_ray(plan, place, tell=tell))
        pace, memory = Pace(tell), ScoreMemory(plan)

        def answered(tokens: int) -> None:
            """Counts the tokens of a shard; the model is there by then, so garbage collection settles."""
            settle()
            pace.add(tokens)

        report = score(
            plan,
            say=lambda line: tell(Note(line)),
            progress=pace.rows,
            on_tokens=answered,
            opens=partial(
                open_engine,
                watch=memory.watch,
                on_bytes=lambda done, total: tell(WeightsRead(done_bytes=done, total_bytes=total)),
            ),
            elsewhere=elsewhere,
        )
        report = memory.added_to(report, out)
        tell(Note(f"page: {write_score_page(out)}"))
    return report


@contextmanager
def _settling() -> Iterator[Callable[[], None]]:
    """Keeps Python from looking for garbage among what libraries and the model made, 0.3 s each time, until the end.

    Yields what is called once more, when the model is there, too.
    """
    is_free = not gc.get_freeze_count()  # else it is somebody else's, who is not thawed here
    is_loaded = False

    def settle() -> None:
        """Takes the objects that exist now out of garbage collection; at the first call alone."""
        nonlocal is_loaded
        if is_free and not is_loaded:
            gc.freeze()
        is_loaded = True

    if is_free:
        gc.freeze()
    try:
        yield settle
    finally:
        if is_free:
            gc.unfreeze()


class Pace:
    """Tells how far a scoring is, and how fast since it began."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._tokens, self._before = tell, 0, 0
        self._began = self._told = 0.0

    def add(self, tokens: int) -> None:
        """Counts tokens of an answer; they are told with the next rows."""
        self._tokens += tokens

    def rows(self, done: int, total: int) -> None:
        """Tells RowsAnswered, due for a line every 30 s; fewer ``done`` than before begin another count."""
        now = time.monotonic()
        if not self._began or done < self._before:  # another count begins
            self._before, self._began, self._told = done, now, now
        is_due = now - self._told >= _LINE_SECONDS
        self._told = now if is_due else self._told
        self._tell(
            RowsAnswered(
                done=done, total=total, new=done - self._before, tokens=self._tokens, seconds=now - self._began,
                is_due=is_due,
            )
        )  # fmt: skip


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
    with written_whole(directory / CHANGED) as file:

        def write(row: Changed) -> None:
            """Appends the row to changed.jsonl."""
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())

        paired = compare(directory, other, on_changed=write)
    shown = []
    for found in paired:
        lower = ", lower is better" if found.scale == "perplexity" else ""
        chance = "" if found.p_value is None else f", McNemar p = {found.p_value:.3g}"
        shown.append(
            f"{found.grader}: {found.mean:.4f} here, {found.other:.4f} there, difference {found.difference:+.4f} "
            f"(95 %: {found.low:+.4f} to {found.high:+.4f}) over {found.rows} rows{lower}; "
            f"{found.better} better, {found.worse} worse{chance}"
        )
    page = write_score_comparison(directory, other, paired, read_changed(directory))
    return "\n".join([*shown, f"changed rows: {directory / CHANGED}", f"page: {page}"])


def model_and_adapter(exported: Path, *, base: str) -> tuple[str, str]:
    """Model and adapter of an export for ``score_dataset``: a model and "", or ``base`` and an adapter on it."""
    return (base, str(exported)) if (exported / CONFIG).is_file() else (str(exported), "")
