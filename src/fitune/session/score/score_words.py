"""The options of ``fitune score`` as they are typed. No torch here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from fitune.errors import RecipeError
from fitune.score.engines.engine import LIMITS
from fitune.spec.plan import DataSource
from fitune.spec.recipe.values import as_columns

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One or several of files, folders, URLs and Hub datasets."""

_ADAPTER = "adapter_config.json"
_ROLES = ("system", "prompt", "completion", "choices")


@dataclass(frozen=True, slots=True)
class ScoreWords:
    """The options of ``fitune score`` on which bytes and seconds depend."""

    model: str
    sources: tuple[DataSource, ...]
    adapter: str = ""
    max_new_tokens: int = 256
    batch_size: int = 0
    """0: as many rows at once as fit, at most ``ROWS_AT_ONCE``."""
    engine: str = ""
    """Empty: the fastest that fits."""
    id_column: str = ""


def sources_of(
    data: Paths,
    columns: Mapping[str, str],
    *,
    allow_https: bool,
    allow_private_addresses: bool,
) -> tuple[DataSource, ...]:
    """A source for each path, in their order. Raises RecipeError for one that is named twice, and where none is."""
    paths = [str(path) for path in ([data] if isinstance(data, str | os.PathLike) else data)]
    if not all(paths) or not paths:
        raise RecipeError("fitune score: --data is missing", hint="--data FILE, or --lm-eval TASKS")
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        raise RecipeError(
            f"--data {twice} is given twice", hint="each row is answered once: keep one of them"
        )
    return tuple(
        DataSource(
            path=path, columns=tuple(columns.items()), allow_https=allow_https,
            allow_private_addresses=allow_private_addresses,
        )
        for path in paths
    )  # fmt: skip


def columns_of(words: Sequence[str]) -> dict[str, str]:
    """``prompt=question`` -> {"prompt": "question"}. Raises RecipeError for anything else."""
    try:
        columns: dict[str, str] = as_columns(list(words))
    except ValueError as error:
        raise RecipeError(f"--columns {error}", hint="--columns prompt=question") from None
    return columns


def require_within_limits(numbers: Mapping[str, float], columns: Mapping[str, str]) -> None:
    for name, value in numbers.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise RecipeError(f"{name} = {value!r}: must be from {least:,} to {most:,}")
    for role, column in columns.items():
        if role not in _ROLES or not column:
            fault = f"{role!r} is not a role" if role not in _ROLES else f"{role} names no column"
            raise RecipeError(f"columns: {fault}", hint=f"roles are {', '.join(_ROLES)}")


def said_rows(batch_size: int | None) -> dict[str, int]:
    """The number of rows at once among those that have limits, if it is said."""
    return {} if batch_size is None else {"batch_size": batch_size}


def _require_written(graders: Sequence[str]) -> None:
    if not graders:
        return
    from fitune.score.grades.graders import open_graders  # its libraries are not for every plan

    weighing = [grader.name for grader in open_graders(graders) if grader.row.weigh]
    if weighing:
        raise RecipeError(
            f"--plan and --fleet predict written answers, and --grader {weighing[0]} weighs references",
            hint="leave --plan and --fleet out",
        )


def weights_and_adapter(model: str, adapter: str) -> tuple[str, str]:
    """Weights and the adapter on them, where ``model`` names a run or an adapter, or ``adapter`` names a run; else both
    as they are. Raises RecipeError for two adapters, and for a run that trained none."""
    folder = Path(model)
    is_base = not _is_run(folder) and (
        (folder / "config.json").is_file() or not (folder / _ADAPTER).is_file()
    )
    if is_base and not _is_run(Path(adapter)):
        return model, adapter
    from fitune.session.named_models import find_model  # imports torch

    if is_base:
        found = find_model(adapter)
        if not found.adapter:
            raise RecipeError(f"--adapter {adapter}: the run has no adapter", hint=f"--model {found.model}")
        return model, found.adapter
    found = find_model(model)
    if adapter and found.adapter:
        raise RecipeError(
            f"--model {model} has the adapter {found.adapter}, and --adapter names {adapter}",
            hint=f"keep one of them; its base is {found.model}",
        )
    return found.model, found.adapter or adapter


def _is_run(folder: Path) -> bool:
    return folder != Path() and (folder / "plan.json").is_file()


def score_words(
    model: str, data: Paths, adapter: str, columns: Sequence[str] | None, max_new_tokens: int,
    batch_size: int | None,
    engine: str, id_column: str, *, graders: Sequence[str], allow_https: bool,
    allow_private_addresses: bool,
) -> ScoreWords:  # fmt: skip
    """The words, checked. Raises RecipeError for a number out of its limits, a role that is none, and graders for which
    nothing is written."""
    roles = columns_of(columns or [])
    model, adapter = weights_and_adapter(model, adapter)
    _require_written(graders)
    require_within_limits({**said_rows(batch_size), "max_new_tokens": max_new_tokens}, roles)
    sources = sources_of(
        data, roles, allow_https=allow_https, allow_private_addresses=allow_private_addresses
    )
    return ScoreWords(model, sources, adapter, max_new_tokens, batch_size or 0, engine, id_column)
