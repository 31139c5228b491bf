"""The linears and blocks that a recipe adapts, by name or by expression."""

import re
from collections.abc import Sequence
from typing import Literal

from fitune.errors import RecipeError, did_you_mean
from fitune.units import as_ranges
from fitune.values.model.model_spec import Linear, ModelSpec

Table = Literal["embed_tokens", "lm_head"]

_ALL = ("all-linear", "all")
EXPERTS = "experts"
"""A recipe's word for the stacked matrices of experts."""
_NAME = re.compile(r"[\w.\-]+|\s*")
"""Without the signs that make a regular expression."""
_TABLES: dict[str, Table] = {
    "embed_tokens": "embed_tokens", "wte": "embed_tokens", "word_embeddings": "embed_tokens",
    "embed": "embed_tokens", "embeddings": "embed_tokens", "lm_head": "lm_head", "head": "lm_head",
}  # fmt: skip
"""Names that models and people give the two tables -> Llama's names."""


def resolve_adapted(
    model: ModelSpec, *, targets: Sequence[str], layers: Sequence[int] = ()
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The linears and the blocks that are adapted, as ``targets`` and ``layers`` of a Lora; no ``layers``: all.

    ``all-linear`` (or ``all``) is every linear that LoRA can wrap, ``experts`` the stacked matrices of a mixture's
    experts, which can be named too (``experts.down_proj``). A name, and a regular expression as a whole, is the
    last part, the name in its block, or the full one (``model.layers.7.mlp.up_proj``), which chooses blocks too.
    Raises RecipeError for what the model does not have, what matches nothing, and for different linears in different
    blocks: a plan adapts the same ones in each.
    """
    if not targets:
        raise RecipeError(
            "lora_target_modules is empty", hint=f"all-linear, or some of {', '.join(model.adaptable_names)}"
        )
    blocks: dict[str, set[int]] = {}
    for wanted in targets:
        for name, numbers in _matches(model, wanted):
            blocks.setdefault(name, set()).update(numbers)
    common = _common_blocks(blocks)
    both = common & set(resolve_layers(model, layers))
    if not both:
        raise RecipeError(
            f"lora_layers and lora_target_modules have no block in common: {_listed(layers)} and "
            f"{_listed(sorted(common))}",
            hint="leave lora_layers out",
        )
    chosen = tuple(sorted(both)) if len(both) < model.num_layers else ()
    return _shortest(model, blocks), chosen


def resolve_targets(model: ModelSpec, wanted: Sequence[str]) -> tuple[str, ...]:
    """The names alone, in block order."""
    return resolve_adapted(model, targets=wanted)[0]


def resolve_layers(model: ModelSpec, wanted: Sequence[int]) -> tuple[int, ...]:
    """Ascending; all of them when none is named. Raises RecipeError for a block that the model does not have."""
    twice = [number for number in wanted if list(wanted).count(number) > 1]
    if twice:
        raise RecipeError(f"lora_layers names block {twice[0]} twice", hint="name every block once")
    beyond = [number for number in wanted if number >= model.num_layers]
    if beyond:
        raise RecipeError(
            f"lora_layers: there is no block {beyond[0]}; {model.name} has {model.num_layers}, "
            f"numbered 0 to {model.num_layers - 1}",
            hint=f"lora_layers: 0-{model.num_layers - 1}",
        )
    return tuple(sorted(wanted)) or tuple(range(model.num_layers))


def resolve_modules_to_save(model: ModelSpec, wanted: Sequence[str]) -> tuple[Table, ...]:
    """Embedding and head in that order, both where they are one tensor.

    Raises RecipeError for a name twice and for any other module.
    """
    found: list[Table] = []
    for name in wanted:
        table = _TABLES.get(name.rsplit(".", 1)[-1])
        if table is None:
            raise RecipeError(
                f"lora_modules_to_save: {name!r} is neither the embedding nor the head; these two can be trained whole "
                "beside adapters",
                hint="lora_modules_to_save: [embed_tokens, lm_head]; linears of blocks belong in lora_target_modules",
            )
        if table in found:
            raise RecipeError(f"lora_modules_to_save names {table} twice", hint="name it once")
        found.append(table)
    if found and model.tied_embeddings:
        return ("embed_tokens", "lm_head")
    return tuple(sorted(found))


def _matches(model: ModelSpec, wanted: str) -> Sequence[tuple[str, Sequence[int]]]:
    """Names in a block with the numbers of the blocks."""
    everywhere = range(model.num_layers)
    stacks = [m for m in model.linears if m.stacked]
    of_experts = [m.name for m in stacks if wanted == EXPERTS or ("." in wanted and _ends(m, wanted))]
    if of_experts:
        return [(name, everywhere) for name in of_experts]
    linears = [m for m in model.linears if m.adaptable]
    if wanted in _ALL:
        return [(m.name, everywhere) for m in linears]
    named = [m.name for m in linears if _ends(m, wanted) or _is(wanted, m.short_name) or _is(wanted, m.name)]
    if named:
        return [(name, everywhere) for name in named]
    roots = _ROOTS if model.blocks_name == _ROOTS[0] else (model.blocks_name,)
    by_block = [
        (m.name, [n for n in everywhere if any(_is(wanted, f"{root}.{n}.{m.name}") for root in roots)])
        for m in linears
    ]
    found = [(name, numbers) for name, numbers in by_block if numbers]
    if not found:
        raise _unknown(model, wanted) if _NAME.fullmatch(wanted) else _unmatched(model, wanted)
    return found


def _ends(linear: Linear, wanted: str) -> bool:
    return linear.name == wanted or linear.name.endswith(f".{wanted}")


def _is(wanted: str, name: str) -> bool:
    """True if a name, or a regular expression as a whole, is ``name``."""
    if _NAME.fullmatch(wanted):
        return wanted == name
    try:
        return re.fullmatch(wanted, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise RecipeError(
            f"lora_target_modules: {wanted!r:.60} is no regular expression: {error}",
            hint="all-linear, or names",
        ) from None


_ROOTS = ("model.layers", "model.language_model.layers", "language_model.model.layers")
"""Before the number of a block: a language model's own, and where it is a part of one that also sees."""


def _common_blocks(blocks: dict[str, set[int]]) -> set[int]:
    first, *others = blocks
    for other in others:
        if blocks[other] != blocks[first]:
            raise RecipeError(
                f"lora_target_modules adapts {first} in {_listed(sorted(blocks[first]))} and {other} in "
                f"{_listed(sorted(blocks[other]))}; every adapted block has the same linears adapted",
                hint="name the linears in lora_target_modules and the blocks in lora_layers",
            )
    return blocks[first]


def _shortest(model: ModelSpec, chosen: dict[str, set[int]]) -> tuple[str, ...]:
    """The last parts of the names, whole names where a last part would name more than was chosen."""
    linears = [m for m in model.linears if m.adaptable or m.stacked]
    ambiguous = {m.short_name for m in linears if m.adaptable and m.name not in chosen}
    names = (
        m.name if m.stacked or m.short_name in ambiguous else m.short_name
        for m in linears
        if m.name in chosen
    )
    return tuple(dict.fromkeys(names))


def _unknown(model: ModelSpec, name: str) -> RecipeError:
    known = f"{model.name} has {', '.join(model.adaptable_names)}"
    if not name.strip():
        return RecipeError(f"lora_target_modules: a name is empty; {known}", hint="all-linear")
    if name.rsplit(".", 1)[-1] in _TABLES:
        why, hint = (
            "is no linear of a block, and only those get adapters",
            f"lora_modules_to_save: [{name}] trains it whole",
        )
    elif name in {linear.short_name for linear in model.linears}:
        stacked = any(m.stacked for m in model.linears if m.short_name == name)
        why = "is a fused parameter in transformers, no linear"
        hint = f"{EXPERTS} adapts those of all experts" if stacked else "all-linear"
    else:
        close = did_you_mean(name.rsplit(".", 1)[-1], model.adaptable_names)
        why, hint = "is no linear of this model", close or "all-linear"
    return RecipeError(f"lora_target_modules: {name!r} {why}; {known}", hint=hint)


def _unmatched(model: ModelSpec, pattern: str) -> RecipeError:
    names = ", ".join(m.name for m in model.linears if m.adaptable)
    table = next((table for name, table in _TABLES.items() if name in pattern), None)
    return RecipeError(
        f"lora_target_modules: the pattern {pattern!r} matches no linear of {model.name}, whose blocks have {names}",
        hint=f"lora_modules_to_save: [{table}] trains it whole"
        if table
        else "a pattern has to match a whole name: .*q_proj",
    )


def _listed(numbers: Sequence[int]) -> str:
    """``blocks 0–3, 7``."""
    return f"block{'s' if len(numbers) > 1 else ''} {as_ranges(numbers)}" if numbers else "all blocks"
