"""``fitune matrix``."""

import json as json_text
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fitune.cli.matrix_pictures import write_picture
from fitune.cli.options import split_words
from fitune.cli.planning import wanted_hardware
from fitune.errors import RecipeError
from fitune.planner.matrix import Matrix, matrix
from fitune.planner.matrix_findings import Finding, explain_findings, findings
from fitune.planner.matrix_words import explain_matrix, matrix_data
from fitune.spec.model_config import load_model_spec
from fitune.spec.recipe import Recipe, canonical_keys, read_recipe

_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bm]", re.IGNORECASE)


def print_matrix(
    words: list[str], settings: list[str], *, models: str, context: str, picture: Path | None, json: bool
) -> None:
    """Raises RecipeError for words that name no models or lengths, and for pins that contradict each other."""
    names = tuple(full_names(models))
    lengths = row_lengths(context)
    recipe = matrix_recipe(words, settings, model=names[0])
    found = matrix(
        recipe,
        models=[load_model_spec(name) for name in names],
        seq_lens=lengths,
        hardware=wanted_hardware(recipe),
    )
    beside = findings(recipe, found)
    if picture is not None:
        write_picture(found, picture)
    if json:
        print(json_text.dumps(as_data(found, beside), indent=2, ensure_ascii=False))
        return
    print(explain_matrix(found))
    if beside:
        print("\nBeside the study (arXiv 2406.02290: 8 V100 of 32 GB, Falcon-180B on 16)")
        print(explain_findings(beside))
    if picture is not None:
        print(f"\npicture: {picture}")


def as_data(found: Matrix, beside: tuple[Finding, ...]) -> dict[str, Any]:
    return {**matrix_data(found), "findings": [asdict(finding) for finding in beside]}


def matrix_recipe(words: list[str], settings: list[str], *, model: str) -> Recipe:
    """The pins of all cells; what varies from cell to cell may not be pinned."""
    path, options = split_words(words)
    for name, instead in (("model", "--models"), ("seq_len", "--context")):
        if name in canonical_keys(options, where="the options"):
            raise RecipeError(f"{name} is what varies in a matrix", hint=f"{instead} alone")
    return read_recipe(path, settings=settings, options={**options, "model": model})


def full_names(models: str) -> Iterator[str]:
    """``llama-2-7b,13b``: a size alone stands for the model before it in that size.

    Raises RecipeError for no names, and for a size that follows no name with a size in it.
    """
    before = ""
    words = [word.strip() for word in models.split(",") if word.strip()]
    if not words:
        raise RecipeError("--models names no model", hint="--models llama-2-7b,13b,70b")
    for word in dict.fromkeys(words):
        if _SIZE.fullmatch(word):
            sizes = list(_SIZE.finditer(before))
            if not sizes:
                raise RecipeError(
                    f"--models: {word} is a size, and no model with a size is named before it",
                    hint="--models llama-2-7b,13b,70b",
                )
            word = before[: sizes[-1].start()] + word + before[sizes[-1].end() :]
        yield word
        before = word


def row_lengths(context: str) -> tuple[int, ...]:
    """Whole numbers of tokens. Raises RecipeError for anything else."""
    words = [word.strip() for word in context.split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise RecipeError(
            f"--context {context!r} is no list of numbers of tokens", hint="--context 512,1024,2048"
        )
    return tuple(int(word) for word in words)
