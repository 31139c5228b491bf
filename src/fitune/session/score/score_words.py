"""The settings of a scoring, from options and from Python. No torch here."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import Any, TypeAlias

from fitune.errors import RecipeError
from fitune.score.engines.engine import Sampling, engine_named, number_fault
from fitune.score.plan import ScorePlan
from fitune.spec.plan import DataSource
from fitune.spec.recipe.values import as_columns

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One or several of files, folders, URLs and Hub datasets."""

_ADAPTER = "adapter_config.json"
_ROLES = ("system", "prompt", "completion", "choices")


def plan_of(
    *, model: str | os.PathLike[str], data: Paths | None = None, out: str | os.PathLike[str] = "",
    adapter: str | os.PathLike[str] = "", columns: Mapping[str, str] | Sequence[str] | None = None,
    graders: Sequence[str] | None = None, max_new_tokens: int = 256, temperature: float = 0.0, top_p: float = 1.0,
    seed: int = 0, batch_size: int | None = None, chat_template: str | os.PathLike[str] = "", id_column: str = "",
    engine: str = "", url: str = "", served_model: str = "", allow_https: bool = False,
    allow_private_addresses: bool = False,
) -> ScorePlan:  # fmt: skip
    """The settings of a scoring, checked; ``data`` None where the rows are not read here.

    ``columns`` maps system, prompt and completion to columns, or has words as prompt=question; ``batch_size``: rows
    answered together, None: as many as fit.
    Raises RecipeError for a number out of its limits, a role that is none, and data that is missing or named twice.
    """
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed)
    require_within_limits(asdict(sampling) | ({} if batch_size is None else {"batch_size": batch_size}))
    roles = _columns_of(columns or {})
    model, adapter = weights_and_adapter(str(model), str(adapter))
    access: dict[str, Any] = {"allow_https": allow_https, "allow_private_addresses": allow_private_addresses}
    return ScorePlan(
        model=model, adapter=adapter, sources=() if data is None else _sources_of(data, roles, access),
        output_dir=str(out), graders=tuple(graders or ()), sampling=sampling, batch_size=batch_size or 0,
        engine=engine_named(engine or "transformers"), chat_template=str(chat_template), id_column=id_column, url=url,
        served_model=served_model,
    )  # fmt: skip


KEYS = tuple(signature(plan_of).parameters)
"""Settings of a scoring, as options and keywords name them."""


def _sources_of(data: Paths, columns: Mapping[str, str], access: Mapping[str, Any]) -> tuple[DataSource, ...]:
    """A source for each path, in their order. Raises RecipeError for one that is named twice, and where none is."""
    paths = [str(path) for path in ([data] if isinstance(data, str | os.PathLike) else data)]
    if not all(paths) or not paths:
        raise RecipeError("fitune score: --data is missing", hint="--data FILE, or --lm-eval TASKS")
    if twice := next((path for path in paths if paths.count(path) > 1), ""):
        raise RecipeError(
            f"--data {twice} is given twice", hint="each row is answered once: keep one of them"
        )
    return tuple(DataSource(path=path, columns=tuple(columns.items()), **access) for path in paths)


def _columns_of(words: Mapping[str, str] | Sequence[str]) -> dict[str, str]:
    """``prompt=question`` -> {"prompt": "question"}. Raises RecipeError for anything else, and a role that is none."""
    try:
        columns: dict[str, str] = as_columns(words if isinstance(words, Mapping) else list(words))
    except ValueError as error:
        raise RecipeError(f"--columns {error}", hint="--columns prompt=question") from None
    for role, column in columns.items():
        if role not in _ROLES or not column:
            fault = f"{role!r} is not a role" if role not in _ROLES else f"{role} names no column"
            raise RecipeError(f"columns: {fault}", hint=f"roles are {', '.join(_ROLES)}")
    return columns


def require_within_limits(numbers: Mapping[str, float]) -> None:
    """Raises RecipeError for a number out of its limits."""
    for fault in filter(None, (number_fault(name, value) for name, value in numbers.items())):
        raise RecipeError(fault)


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
