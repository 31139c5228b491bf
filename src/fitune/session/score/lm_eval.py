"""Tasks of lm-evaluation-harness on a model: they are loaded, an engine answers, and lm-eval's results are written."""

import json
import re
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from fitune.errors import RunDirectoryError, require_library
from fitune.files import write_atomically
from fitune.models.door import read_config
from fitune.models.weight_files import identity
from fitune.score.answers import claim
from fitune.score.engines.opening import (
    check_all,
    choose_device,
    choose_dtype,
    open_engine,
    open_texts,
)
from fitune.score.shards import FOLDER
from fitune.session.events import Note, Tell, telling_weights
from fitune.session.score.lm_eval_words import TaskScores, scores_of
from fitune.session.score.score_words import plan_of
from fitune.session.score.scoring import Pace
from fitune.spec.recipe.score_recipe import ScoreRecipe
from fitune.spec.run_lock import lock_directory

RESULTS = "lm_eval.json"
"""lm-eval's results as it gives them; the samples of each task are in files beside it."""
OWN_TEMPLATE = "own"
"""--chat-template own: the tokenizer's."""


def score_tasks(recipe: ScoreRecipe, *, tell: Tell) -> TaskScores:
    """Run tasks of lm-evaluation-harness on a model; its results and the samples of each task are written into ``out``.

    ``chat_template``: empty: prompts are plain texts; "own": chats, by the tokenizer's template; else a Jinja file.
    """
    require_library("lm_eval", needed_by="--lm-eval", extra="lm-eval")
    plan, out, limit, seed = plan_of(recipe), recipe.out, recipe.limit, recipe.seed
    if plan.chat_template == OWN_TEMPLATE:
        plan = replace(plan, chat_template="")

    def say(line: str) -> None:
        """Tells the line as a note."""
        tell(Note(line))

    check_all(plan, say=say)  # faults of engine, model or adapter before the tasks are loaded
    from lm_eval.models.utils import resolve_max_length

    from fitune.score.lm_eval import EngineLM
    from fitune.score.lm_eval_tasks import load_tasks, run_tasks

    names, folder = [*recipe.lm_eval], recipe.lm_eval_tasks
    loaded = load_tasks(names, folder=folder, shots=recipe.shots, say=say)
    started = time.perf_counter()
    tokenizer, template = open_texts(plan)
    said: dict[str, Any] = {
        "tasks": names, "tasks_folder": str(folder or ""), "shots": recipe.shots, "limit": limit,
        "engine": f"{plan.engine} {plan.url}".strip(), "model": identity(plan.model), "adapter": identity(plan.adapter),
        "chat_template": template.source if recipe.chat_template else "", "seed": seed,
        "dtype": str(choose_dtype(choose_device())),
    }  # fmt: skip
    with lock_directory(out):
        if (out / FOLDER).exists():
            raise RunDirectoryError(f"{out} holds the answers of a dataset", hint="name a new folder: --out")
        # samples alone are of a run that ended between them and the results
        is_begun = (out / RESULTS).exists() or any(out.glob("samples_*.jsonl"))
        claim(out, said, has_shards=is_begun)
        pace = Pace(tell)
        engine_lm = EngineLM(
            lambda: open_engine(
                plan, tokenizer, template,
                on_bytes=telling_weights(tell),
            ),
            tokenizer, engine=plan.engine, template=said["chat_template"], seed=seed, on_rows=pace.rows,
            on_tokens=pace.add,
            context=resolve_max_length(read_config(plan.model), tokenizer),  # 2048 for a model without positions
        )  # fmt: skip
        with closing(engine_lm) as asked:
            results = run_tasks(asked, loaded, limit=limit, chat=bool(recipe.chat_template), say=say)
        _write(out, results, said)
    return TaskScores(
        model=plan.model, adapter=plan.adapter, results=str(out / RESULTS), seconds=time.perf_counter() - started,
        scores=tuple(scores_of(results)),
    )  # fmt: skip


def _write(out: Path, results: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """The samples first: where the results are, all is."""
    from lm_eval.utils import handle_non_serializable

    for task, samples in results.get("samples", {}).items():
        lines = [json.dumps(each, default=handle_non_serializable, ensure_ascii=False) for each in samples]
        name = re.sub(r"[^\w.-]", "_", task)
        write_atomically(out / f"samples_{name}.jsonl", "".join(f"{line}\n" for line in lines))
    shown = {
        **{name: value for name, value in results.items() if name != "samples"},
        "fitune": dict(settings),
    }
    text = json.dumps(shown, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomically(out / RESULTS, text + "\n")
