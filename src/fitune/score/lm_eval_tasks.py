"""Tasks of lm-evaluation-harness by name: found, checked, loaded with their data, and evaluated.

This module is imported where lm_eval is installed.
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
from lm_eval.api.registry import metric_registry
from lm_eval.evaluator import evaluate
from lm_eval.tasks import TaskManager

from fitune.data.reading.sources import datasets_of_hub
from fitune.errors import DataError, FituneError, RecipeError, ScoringFailed, did_you_mean
from fitune.score.lm_eval import EngineLM

_RESAMPLES = 1_000
"""For the standard error of a metric that has no formula for it."""
_PYTHON_SEED, _OTHER_SEED = 0, 1234
"""lm-eval's own, by which tasks choose their solved examples: the prompts are those of everybody else."""

_FILE_READERS = {"json", "csv", "parquet", "text", "arrow", "xml"}
"""Values of dataset_path with which datasets reads files of this machine and asks nobody."""

Loaded = dict[str, dict[str, Any]]
"""Tasks, groups and the names under each group."""


def load_tasks(
    names: Sequence[str], *, folder: Path | None, shots: int | None, say: Callable[[str], None]
) -> Loaded:
    """The tasks of these names with their data, from ``folder`` and from lm-eval's own.

    Raises RecipeError for an unknown task and for one that runs code or fetches a metric, DataError for a task whose
    data cannot be read.
    """
    manager = _manager(names, folder)
    configs = [config for name in names for config in _configs(name, manager.task_index)]
    for config in configs:
        _refuse_code(config)
    is_local = all(config.get("dataset_path") in _FILE_READERS for config in configs)
    random.seed(_PYTHON_SEED)
    np.random.seed(_OTHER_SEED)
    loaded: Loaded = {"tasks": {}, "groups": {}, "group_map": {}}
    with _told(say), nullcontext("") if is_local else datasets_of_hub() as unreachable:
        for name in names:
            for kind, found in _load(manager, name, unreachable).items():
                loaded[kind].update(found)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (shots is not None and own != 0):
            task.set_config(key="num_fewshot", value=shots or 0)
        task.set_fewshot_seed(seed=_OTHER_SEED)
    return loaded


def run_tasks(
    model: EngineLM, tasks: Loaded, *, limit: int | None, chat: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """lm-eval's results, samples included. Raises ScoringFailed with whatever a task's own code or the engine met."""
    with _told(say):
        try:
            results: dict[str, Any] = evaluate(
                lm=model, task_dict=tasks, limit=limit, bootstrap_iters=_RESAMPLES, apply_chat_template=chat,
                fewshot_as_multiturn=True,
            )  # fmt: skip
        except FituneError:
            raise
        except Exception as error:  # a task has templates and functions of its own, which raise anything
            raise ScoringFailed(
                f"lm-eval cannot evaluate {', '.join(tasks['tasks'])}: {_words(error)}"
            ) from error
        return results


def _manager(names: Sequence[str], folder: Path | None) -> TaskManager:
    """The index of the folder's tasks; of lm-eval's 14,000 files only where a name is not among them."""
    if folder is not None:
        if not folder.is_dir():
            raise RecipeError(f"--lm-eval-tasks {folder}: no such folder", hint="a folder of YAML tasks")
        alone = TaskManager(include_path=str(folder), include_defaults=False)
        if all(name in alone.all_tasks for name in names):
            return alone
    manager = TaskManager(include_path=str(folder) if folder is not None else None)
    for name in names:
        if name not in manager.all_tasks:
            near = did_you_mean(name, manager.all_tasks)
            raise RecipeError(
                f"--lm-eval {name}: lm-eval has no such task", hint=near or "lm-eval ls tasks shows all"
            )
    return manager


def _configs(name: str, index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The settings, as written, of the task ``name`` or of all tasks of that group or tag."""
    entry = index.get(name)
    if entry is None:
        return
    config = entry.cfg or {}
    children: Any = entry.tags if entry.kind.name == "TAG" else ()
    if entry.kind.name == "GROUP":
        children = config.get("task") or ()
    elif entry.kind.name != "TAG":
        yield config
    for child in [children] if isinstance(children, str) else children:
        if isinstance(child, dict):
            yield child
            child = child.get("task") or child.get("group")
        if isinstance(child, str) and child != name:
            yield from _configs(child, index)


def _refuse_code(config: dict[str, Any]) -> None:
    """Raises RecipeError for a task that runs what the model writes, or whose metric is code to be fetched."""
    task = config.get("task")
    metrics = [each for each in config.get("metric_list") or () if isinstance(each, dict)]
    names = [each.get("metric") for each in metrics]
    if config.get("unsafe_code") or "code_eval" in names:
        raise RecipeError(
            f"--lm-eval {task}: the task runs the code that the model writes, which fitune does not do",
            hint="evaluate it with lm-eval itself, in a container: lm-eval run --confirm_run_unsafe_code",
        )
    for name, each in zip(names, metrics, strict=True):
        is_function = not isinstance(name, str) or "/" in name  # `!function` stands in the index as a path
        if config.get("process_results") or is_function:
            continue
        if each.get("hf_evaluate") or name not in metric_registry:
            raise RecipeError(
                f"--lm-eval {task}: its metric {name} is code of the Hub, which fitune does not fetch",
                hint="a metric of lm-eval's own, or a !function in the task's folder",
            )


def _load(manager: TaskManager, name: str, unreachable: str) -> dict[str, Any]:
    try:
        return dict(manager.load([name]))
    except Exception as error:  # of datasets, of the network, of the task's own functions
        cause = f"{_words(error)}; {unreachable}" if unreachable else _words(error)
        raise DataError(
            f"--lm-eval {name}: the task or its data cannot be read: {cause}",
            hint="data that is not in the Hugging Face cache needs the network; a task of your own may name local "
            "files",
        ) from error


def _words(error: Exception) -> str:
    """The error's first line."""
    said = f"{error}".strip().splitlines()
    return f"{type(error).__name__}: {said[0]:.300}" if said else type(error).__name__


class _Told(logging.Handler):
    """Hands warnings to ``say``, each once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say, self._seen = say, set[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """Says the warning on one line of at most 300 characters."""
        text = " ".join(record.getMessage().split())
        if text not in self._seen:
            self._seen.add(text)
            self._say(f"lm-eval: {text:.300}")


@contextmanager
def _told(say: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``say`` gets lm-eval's warnings, its prints go to standard error, and it starts no processes.

    They would be forked beside the threads of torch.
    """
    logger, handler = logging.getLogger("lm_eval"), _Told(say)
    propagate, alone = logger.propagate, os.environ.get("DISABLE_MULTIPROC")
    logger.addHandler(handler)
    logger.propagate = False
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        if alone is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = alone
