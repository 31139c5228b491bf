"""Rows of a LLaMA-Factory recipe: datasets, which a dataset_info.json names, and how they are rendered and packed."""

from collections.abc import Mapping
from typing import Any

from fitune.errors import RecipeError
from fitune.recipe.foreign.reading import Reading, is_on, words
from fitune.recipe.foreign.sharding_files import find_file
from fitune.recipe.foreign.trainer_keys import RENDERED
from fitune.recipe.strict_yaml import load_json, load_yaml
from fitune.values.named_templates import NAMED_TEMPLATES

TEXTS = "pt"
"""The stage that learns texts without questions."""


def read_rows(r: Reading) -> None:
    """Puts the data, the evaluation data, the held-out rows, the template and how rows are packed."""
    registry = _registry(r)
    for key, name in (("dataset", "data"), ("eval_dataset", "eval_data")):
        named = r.take(key)
        listed = named if isinstance(named, list) else str(named or "").split(",")
        names = [str(part).strip() for part in listed if str(part).strip()]
        sources = [_source(r, each, registry, key) for each in names]
        found = [source for source in sources if source is not None]
        if not found:
            continue
        # ``owner/name`` is on the Hub; a file lies beside the recipe or above it
        missing = [
            each for each in names if each not in registry and "/" not in each and not find_file(r, each)
        ]
        if missing:
            said = (
                f"{', '.join(missing)}: names in a dataset_info.json that is not here; name files as {name}"
            )
            r.passed(key, said)
            r.passed("max_samples", f"so many rows of a file are {name}: FILE#{r.take('max_samples')}")
            continue
        rows = r.take("max_samples")
        limit = {} if rows is None else {"sample": rows}
        # only alpaca's rows of a registry have that format
        extra = any(
            source
            and source.get("format") == "alpaca"
            and not (registry[each].get("columns") or {}).keys() >= _EXTRA
            for each, source in zip(names, sources, strict=True)
        )
        r.put(name, [source | limit for source in found], key=key, said=_EXTRA_READ if extra else "")
    r.passed("max_samples", "rows drawn from all of a source; LLaMA-Factory takes its first rows")
    if r.take("val_size"):
        r.same({"val_size": "val_fraction"})
    if r.take("template") in NAMED_TEMPLATES and r.raw.get("stage") != TEXTS:
        r.same({"template": "chat_template"})
    r.passed("template", RENDERED)
    thinks = is_on(r.raw.get("enable_thinking", True))
    if thinks and str(r.take("template")) in _REASONING:
        r.assume(
            "LLaMA-Factory learns the empty thought of an answer without one", train_on_empty_thinking=True
        )
    r.passed(
        "enable_thinking", "" if thinks else "reasoning in the rows is learned here; there it is left out"
    )
    if r.raw.get("stage") == TEXTS and is_on(r.raw.get("packing", True)):
        apart = "texts in a pack do not see each other, and a long one goes on in the next; there all are one text"
        r.put("packing", True, key="packing", said=apart)
        r.put("on_long_row", "split", said=apart)
    elif is_on(r.take("neat_packing")):
        r.put("packing", True, key="neat_packing")
        r.passed("packing", "neat_packing says more")
    elif r.take("packing") is not None:
        apart = "rows in a pack do not see each other; there they do without neat_packing"
        packed = is_on(r.raw["packing"])
        r.put("packing", packed, key="packing", said=apart if packed else "")
    r.passed(("streaming", "buffer_size", "eval_on_each_dataset", "ignore_pad_token_for_loss"))
    if r.take("mix_strategy") not in (None, "concat"):
        r.refuse("mix_strategy", "datasets taken in turn; weight: says each one's share of the rows")
    r.passed("mix_strategy")
    r.same({"add_tokens": "added_tokens"})
    r.passed("resize_vocab", "added_tokens get rows of their own")


_REASONING = words(
    "aeva deepseekr1 ernie_vl gemma4 gemma4n glm4_5v glm4_7 glm4_moe glm4v glmz1 gpt_oss hy3 keye_vl kimi_vl mimo "
    "mimo_v2 mimo_vl minimax2 qwen3 qwen3_5 qwen3_6 qwen3_omni qwen3_vl seed_oss youtu"
)
"""Templates that put an empty thought in front of an answer that has none."""


def _registry(r: Reading) -> dict[str, Any]:
    """LLaMA-Factory's dataset_info.json, where it is beside the recipe or above it; its files are beside it."""
    named = r.take("dataset_dir")
    folders = ("data", ".") if named is None else (str(named),)
    found = (find_file(r, f"{folder}/dataset_info.json") for folder in folders if ":" not in folder)
    file = next(filter(None, found), None)
    if file is None:
        return {}
    try:
        entries = load_json(file, key="dataset")
    except RecipeError as error:
        r.refuse("dataset", error.message.removeprefix("dataset: "))
        return {}
    return {
        name: {**each, "file_name": str(file.parent / str(each.get("file_name", name)))}
        for name, each in entries.items()
        if isinstance(each, dict)
    }


_TAGS = {
    "role_tag": words("role from"), "content_tag": words("content value"), "user_tag": words("user human"),
    "assistant_tag": words("assistant gpt"), "system_tag": words("system"),
    "observation_tag": words("observation tool"), "function_tag": words("function_call tool_call"),
}  # fmt: skip
"""Tags of a dataset's messages -> their values that fitune reads."""
_ALPACA = {
    "prompt": "prompt", "query": "query", "response": "completion", "history": "history", "system": "system",
    "tools": "tools",
}  # fmt: skip
_SHAREGPT = {"messages": "messages", "system": "system", "tools": "tools"}
"""Columns of a dataset by LLaMA-Factory's names -> their roles here."""
_USUAL = {
    "prompt": words("instruction"), "query": words("input"), "completion": words("output"), "history": words("history"),
    "messages": words("conversations messages"), "system": words("system"), "tools": words("tools"),
}  # fmt: skip
"""Role -> columns that are read without a mapping."""
_EXTRA = {"system", "history"}
_EXTRA_READ = (
    "system prompts and earlier turns are learned, too, where rows have columns called system and history"
)
_ALPACA_ROWS = "instruction, input, output and history, or a prompt and a response alone"


def _source(r: Reading, name: str, registry: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    texts = r.raw.get("stage") == TEXTS
    if name not in registry:
        return {"path": str(find_file(r, name) or name)} | ({"format": "text"} if texts else {})
    where = f"{key}[{name}]"
    entry = r.watch(where, registry[name])
    columns = entry.get("columns") or {}
    if entry.get("ranking") or columns.get("kto_tag"):
        r.refuse(where, "rows of good and bad answers; fitune learns from answers alone")
        return None
    hub = entry.get("hf_hub_url") or entry.get("ms_hub_url")
    path = str(hub) if hub else entry["file_name"]
    source: dict[str, Any] = {"path": f"{path}:{entry['subset']}" if hub and entry.get("subset") else path}
    source |= {
        ours: entry[key] for key, ours in (("split", "split"), ("num_samples", "sample")) if entry.get(key)
    }
    if texts:
        return source | {"format": "columns", "columns": {"text": columns.get("prompt") or "instruction"}}
    own = [
        f"{tag}: {said}" for tag, said in (entry.get("tags") or {}).items() if said not in _TAGS.get(tag, ())
    ]
    own += [] if columns.get("history") in (None, "history") else [f"history: {columns['history']}"]
    if own:
        known = "role and content of user and assistant, from and value of human and gpt"
        r.refuse(where, f"{own[0]}; fitune reads {known}")
        return None
    is_alpaca = entry.get("formatting", "alpaca") == "alpaca"
    named = {
        ours: columns[theirs]
        for theirs, ours in (_ALPACA if is_alpaca else _SHAREGPT).items()
        if columns.get(theirs)
    }
    if is_alpaca and "columns" in entry and not {"query", "history"} & named.keys():
        # without query no input is read there
        columns = {"prompt": "instruction", "completion": "output"} | named
        return source | {"format": "columns", "columns": columns}
    # beside messages of role and content a column of system prompts is read by its name alone
    by_name = named.get("messages") == "messages" and "system" in named
    if all(column in _USUAL[ours] for ours, column in named.items()) and not by_name:
        return source | {"format": "alpaca"} if is_alpaca else source
    if unread := next((name for name in ("query", "history") if name in named), ""):
        r.refuse(
            where, f"{unread}: {named[unread]}, beside columns of other names; fitune reads {_ALPACA_ROWS}"
        )
        return None
    usual = {"prompt": "instruction", "completion": "output"} if is_alpaca else {"messages": "conversations"}
    return source | {"format": "columns", "columns": usual | named}


def read_rows_of_v1(r: Reading) -> None:
    """Puts data and evaluation data: each is a file, a Hub id, or a YAML that names several."""
    for key, name in (("train_dataset", "data"), ("eval_dataset", "eval_data")):
        value = r.take(key)
        if value is None:
            continue
        if not str(value).endswith((".yaml", ".yml")):
            r.put(name, [_source_of_v1(r, {"path": value})], key=key)
            continue
        file = find_file(r, str(value))
        if file is None:
            r.passed(key, f"{value} is not here; name files as {name}")
            continue
        entries = {each: r.watch(f"{key}[{each}]", entry) for each, entry in load_yaml(file).items()}
        named = [each for each in entries.values() if isinstance(each, Mapping) and "path" in each]
        r.put(name, [_source_of_v1(r, each) for each in named], key=key)


def _source_of_v1(r: Reading, entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "sample": entry.get("size") or None,
        "split": entry.get("split") or None,
        "weight": entry.get("weight"),
    }
    path = str(find_file(r, str(entry["path"])) or entry["path"])
    return {"path": path, **{name: value for name, value in found.items() if value is not None}}
