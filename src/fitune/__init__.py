"""fitune: fine-tune large language models within the memory you have.

    import fitune

    report = fitune.plan(model="meta-llama/Llama-3.1-8B", gpu="rtx-4090", tuning="qlora")
    print(fitune.explain(report))

Every function takes a recipe as keyword arguments, as a YAML file or a mapping, or both: the keywords win. They print
nothing outside a notebook, return frozen values, tell ``progress`` what happens, and raise FituneError for what cannot
be done.
"""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING
from warnings import filterwarnings

from fitune.errors import FituneError, system_failures
from fitune.values.hub import keep_out_hub_kernels
from fitune.values.machines.environment import set_cuda_environment

if TYPE_CHECKING:
    from typing import Unpack

    from fitune.session.alternatives import Rehearsed
    from fitune.session.events import Event, Exported
    from fitune.session.recipes.keywords import PathLike, RecipeKeys, RecipeLike, ScoreKeys
    from fitune.session.reported import Reported
    from fitune.session.results import Result
    from fitune.session.score.lm_eval import TaskScores
    from fitune.train.again import Kind
    from fitune.values.predictions import PlanReport, ShownInNotebooks
    from fitune.values.reports import RunReport, ScoreReport

__version__ = "0.1.0"
__all__ = ["FituneError", "explain", "export", "plan", "rehearse", "report", "score", "score_tasks", "train"]

set_cuda_environment()  # before torch first uses a GPU: in commands, ranks, workers of Ray and in Python alike
keep_out_hub_kernels()  # before any room imports a library that would fetch them
# PEFT asks transformers for a property by its old name; that warning is not for our users.
filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")

# Four functions have the name of a room. Python binds a room to the package when it is first imported and never again,
# so they are imported before the functions take their names.
for _room in ("rehearse", "report", "score", "train"):
    import_module(f"fitune.{_room}")


@system_failures()
def plan(recipe: "RecipeLike | None" = None, /, **settings: "Unpack[RecipeKeys]") -> "PlanReport":
    """The fastest plan that fits, the next best, and why the others do not. Imports no torch.

    Raises NothingFits with the arithmetic, RecipeError, ModelError or HardwareError.
    """
    from fitune.session.planning import plan_on_data
    from fitune.session.recipes.reading import recipe_of

    return plan_on_data(recipe_of(recipe, settings))


@system_failures()
def rehearse(
    recipe: "RecipeLike | None" = None, /, *, exact: bool = False, **settings: "Unpack[RecipeKeys]"
) -> "Rehearsed":
    """Plan, then run the plan's own step on fake tensors: every allocation, no GPU, no weights.

    ``exact`` traces every block instead of a few that stand for all.
    """
    from fitune.session.alternatives import rehearse_recipe
    from fitune.session.recipes.reading import recipe_of

    return rehearse_recipe(recipe_of(recipe, settings), exact=exact)


@system_failures()
def train(
    recipe: "RecipeLike | None" = None,
    /,
    *,
    overwrite: bool = False,
    progress: "Callable[[Event], object] | None" = None,
    should_stop: Callable[[], bool] = lambda: False,
    **settings: "Unpack[RecipeKeys]",
) -> "RunReport":
    """Plan, train exactly that, compare, and return what was measured.

    A run that is complete already is not trained again: its report is returned. ``should_stop`` is asked after every
    step and before each batch of an evaluation; True saves a checkpoint and ends the run as interrupted. When memory
    runs out in a step, the run goes on in smaller micro-batches, in this process. Without ``gpus`` one GPU is used.
    Raises FituneError; what was done until then is in output_dir.
    """
    from fitune.session.planning import see_planned_gpus

    see_planned_gpus()
    from fitune.session.recipes.reading import recipe_of
    from fitune.session.train.training import train_recipe

    return train_recipe(
        recipe_of(recipe, settings), overwrite=overwrite, emit=_told(progress), stop_asked=should_stop
    )


@system_failures()
def score(
    model: "PathLike",
    data: "PathLike | Sequence[PathLike]",
    out: "PathLike",
    *,
    progress: "Callable[[Event], object] | None" = None,
    **settings: "Unpack[ScoreKeys]",
) -> "ScoreReport":
    """Answer a dataset with a model and grade the answers; answers.jsonl and grades.jsonl are written into ``out``.

    ``data`` may be several files, folders or Hub ids: their rows are answered in their order, as if they were one.
    ``settings`` are options of ``fitune score``. ``engine`` is transformers, server (at ``url``) or vllm; left out, the
    fastest on GPUs with vLLM, else transformers. ``columns`` maps system, prompt and completion to columns.
    ``batch_size``: rows answered together; None: as many as fit, at most 32. Rows without an answer are graded 0 and
    count as failed.
    """
    from fitune.session.planning import see_planned_gpus

    see_planned_gpus()
    from fitune.recipe.score_recipe import score_recipe
    from fitune.session.score.scoring import score_dataset

    return score_dataset(score_recipe(model=model, data=data, out=out, **settings), emit=_told(progress))


@system_failures()
def score_tasks(
    model: "PathLike",
    tasks: str | Sequence[str],
    out: "PathLike",
    *,
    tasks_folder: "PathLike | None" = None,
    progress: "Callable[[Event], object] | None" = None,
    **settings: "Unpack[ScoreKeys]",
) -> "TaskScores":
    """Run tasks of lm-evaluation-harness; its results and the samples of each task are written into ``out``.

    ``settings`` are options of ``fitune score --lm-eval``. ``shots``: solved examples in a prompt, None: as many as the
    task says. ``limit``: the first rows of each task.
    ``chat_template``: empty: prompts are plain texts; "own": chats, by the tokenizer's template; else a Jinja file.
    """
    from fitune.recipe.score_recipe import score_recipe
    from fitune.session.score.lm_eval import score_tasks as run

    recipe = score_recipe(model=model, lm_eval=tasks, out=out, lm_eval_tasks=tasks_folder, **settings)
    return run(recipe, emit=_told(progress))


@system_failures()
def export(
    run: "PathLike",
    out: "PathLike | None" = None,
    *,
    kind: "Kind | None" = None,
    push_to_hub: str = "",
    hub_public: bool = False,
    progress: "Callable[[Event], object] | None" = None,
) -> "Exported":
    """Export what a run trained, without training again: an adapter merged into its base, or an export that failed.

    Each of ``run`` and ``out`` may be a URL. ``push_to_hub``: a repository on the Hub that is sent it, too, private
    unless ``hub_public``; by default what the run exported.
    """
    from fitune.session.exporting import export_anywhere

    return export_anywhere(
        str(run), "" if out is None else str(out), kind, push_to_hub=push_to_hub, hub_public=hub_public,
        emit=_told(progress),
    )  # fmt: skip


@system_failures()
def report(run: "PathLike") -> "Reported":
    """Predicted and measured of a run side by side; writes the run's report.html."""
    from fitune.session.reported import report_anywhere

    return report_anywhere(str(run))


def explain(result: "Result") -> str:
    """The text that the command of a result prints, for people."""
    from fitune.session.results import text_of

    return text_of(result)


def _notebook_html(result: "ShownInNotebooks") -> str:
    """The text of a value as a notebook shows it, as HTML."""
    from html import escape

    from fitune.session.results import notebook_text

    return f"<pre>{escape(notebook_text(result))}</pre>"


def _told(progress: "Callable[[Event], object] | None") -> "Callable[[Event], None]":
    if progress is None and "ipykernel" in sys.modules:
        from fitune.cli.terminal import Terminal

        return Terminal(redrawn=True)

    def emit(event: "Event") -> None:
        """Passes each event to ``progress``; drops it where there is none."""
        if progress is not None:
            progress(event)

    return emit
