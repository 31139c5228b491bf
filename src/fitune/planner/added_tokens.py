"""Tokens that the recipe adds: how many rows embedding and head then have."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.errors import RecipeError
from fitune.spec.model import ModelSpec
from fitune.spec.plan import Lora, Plan
from fitune.spec.recipe import Recipe
from fitune.spec.vocabulary import Vocabulary, vocabulary_of


def with_added_rows(recipe: Recipe, model: ModelSpec) -> ModelSpec:
    """The model with a row for each of ``recipe.added_tokens``; tables often have spare rows, which come first.

    Without a tokenizer.json at hand all of them get new rows. Raises RecipeError for tokens that are empty, named
    twice, or in the vocabulary already.
    """
    if not recipe.added_tokens:
        return model
    known = vocabulary_of(model.name)
    _refuse_tokens(recipe.added_tokens, known)
    count = len(recipe.added_tokens)
    rows = model.vocab_size + count if known is None else max(model.vocab_size, known.length + count)
    return replace(model, vocab_size=rows)


def _refuse_tokens(tokens: list[str], known: Vocabulary | None) -> None:
    for token in tokens:
        if not token.strip():
            raise RecipeError(
                f"added_tokens: {token!r} is empty", hint="added_tokens: ['<think>', '</think>']"
            )
        if tokens.count(token) > 1:
            raise RecipeError(f"added_tokens names {token!r} twice", hint="name it once")
        if known is not None and token in known.tokens:
            raise RecipeError(
                f"added_tokens: {token!r} is token {known.tokens[token]} of the tokenizer already",
                hint="leave it out; lora_modules_to_save: [embed_tokens, lm_head] trains its row with adapters",
            )


def added_tokens_decisions(recipe: Recipe, plan: Plan) -> Iterator[str]:
    if not plan.added_tokens:
        return
    count = len(plan.added_tokens)
    yield (
        f"added_tokens: {count} more; embedding and head have {plan.model.vocab_size:,} rows then, new ones begin as "
        "the mean of the others"
    )
    if isinstance(plan.tuning, Lora) and len(recipe.lora_modules_to_save) < 2:
        yield (
            "lora_modules_to_save: embed_tokens and lm_head, because of added_tokens: beside frozen tables the new "
            "rows would stay as they began"
        )
