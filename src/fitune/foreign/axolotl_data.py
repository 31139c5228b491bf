"""Datasets of axolotl's recipes: paths, prompt types, fields, and rows that are too long."""

from collections.abc import Mapping
from typing import Any

from fitune.foreign.reading import Reading, paths_of, words

_RENDERED = (
    "the tokenizer's own, or fitune's plain headings where it has none; a file is named as chat_template"
)
_PASSED = {
    "ds_type preprocess_shards trust_remote_code input_format": "",
    "chat_template conversation": _RENDERED,
    "field_thinking template_thinking_key": "reasoning is read from reasoning_content, reasoning or thinking",
}
_REFUSED = {
    "shards shards_idx": "a part of the rows; sample: N says how many",
    "revision": "a revision of the dataset; download that revision and name its folder as path",
    "drop_system_message message_field_training message_field_training_detail step_separator input_transform":
        "rows changed while they are read",
    "system_prompt": "a system message added to every row",
    "system_format": "a prompt format of its own; write prompt and completion into the rows",
}  # fmt: skip
_ONLY = {"train_on_eos": "turn", "train_on_eot": "turn", "field_tools": "tools"}
"""Key of a dataset -> the one value that is what fitune does."""
_ROLES = {
    "user": words("user human"), "assistant": words("assistant gpt"), "system": words("system"),
    "tool": words("tool observation function ipython tool_response"),
}  # fmt: skip
"""Names of roles in rows, as fitune knows them."""


def read_datasets(r: Reading) -> None:
    """Puts the datasets, the evaluation sets and the held-out share of an Axolotl config."""
    r.inside("passed", _PASSED)
    r.inside("refused", _REFUSED)
    for key, name in (("datasets", "data"), ("test_datasets", "eval_data")):
        sources = r.take(key)
        if not isinstance(sources, list):
            continue
        read = [
            each for number, source in enumerate(sources) for each in _sources(r, source, f"{key}[{number}]")
        ]
        prompts = any(
            str(source.get("type")).startswith("alpaca") for source in sources if isinstance(source, dict)
        )
        said = (
            "rendered by the chat template, without Alpaca's headings around question and answer"
            if prompts
            else ""
        )
        r.put(name, read, key=key, said=said)
    share = r.take("val_set_size")
    if share is not None and float(share) >= 1:
        r.refuse("val_set_size", "a number of rows to evaluate on; here it is a share: 0.05")
    elif share and "eval_data" not in r.settings:
        r.put("val_fraction", share, key="val_set_size")
    if (template := r.take("chat_template")) is not None:
        r.passed("chat_template", _RENDERED)
        r.passed("chat_template_kwargs", f"of {template}")
    r.passed("eot_tokens", "an answer is learnt with the token that ends it in the template")
    longer = str(r.take("excess_length_strategy") or "drop")
    on_long = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(longer, "drop")
    if "excess_length_strategy" in r.raw:
        r.put("on_long_row", on_long, key="excess_length_strategy")
    else:
        r.assume("on_long_row", on_long, "axolotl leaves out rows longer than sequence_len")


def _sources(r: Reading, source: Any, where: str) -> list[dict[str, Any]]:
    """One dataset in fitune's words, a source for each of its files; none where it is refused."""
    if isinstance(source, str):
        return [{"path": source}]
    if not isinstance(source, Mapping) or not source.get("path"):
        r.refuse(where, "no path is named")
        return []
    wanted: dict[str, Any] = {}
    if source.get("split"):
        wanted["split"] = str(source["split"])
    format, columns, why = _format(source)
    if why:
        r.refuse(where, why)
        return []
    if format:
        wanted["format"] = format
    if columns:
        wanted["columns"] = columns
    return [{"path": path, **wanted} for path in paths_of(source)]


_MAPPED = {"field_system": "system", "field_instruction": "prompt", "field_output": "completion"}


def _format(source: Mapping[str, Any]) -> tuple[str, dict[str, str], str]:
    """(format, columns, why it is refused) of a dataset's type and fields."""
    kind = source.get("type")
    for key, only in _ONLY.items():
        if source.get(key) not in (None, only):
            return "", {}, f"{key}: {source[key]}; here it is {only}"
    mapped = source.get("message_property_mappings") or {}
    role = mapped.get("role") or source.get("message_field_role") or "role"
    content = mapped.get("content") or source.get("message_field_content") or "content"
    if (role, content) not in (("role", "content"), ("from", "value")):
        return "", {}, f"messages of {role} and {content}; fitune reads role and content, or from and value"
    for name, others in (source.get("roles") or {}).items():
        if not _ROLES.get(name, frozenset()).issuperset(others if isinstance(others, list) else [others]):
            return (
                "",
                {},
                f"roles: {others} for {name}; fitune knows {', '.join(sorted(_ROLES.get(name, ())))}",
            )
    if source.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["gpt", "assistant"]):
        return "", {}, f"roles_to_train: {source['roles_to_train']}; fitune learns the assistant's turns"
    if isinstance(kind, Mapping):
        columns = {ours: str(kind[key]) for key, ours in _MAPPED.items() if kind.get(key)}
        own = any(kind.get(key) not in (None, "{instruction}") for key in ("format", "no_input_format"))
        if own or kind.get("field_input") or {"prompt", "completion"} - set(columns):
            return "", {}, "a prompt format of its own; write prompt and completion into the rows"
        return "columns", columns, ""
    name = str(kind or "chat_template").split(":")[0].split(".")[0]
    field = str(source.get("field_messages") or "messages")
    match name:
        case "chat_template" | "sharegpt":
            known = {"messages": "messages", "conversations": "sharegpt"}
            if source.get("field_messages") and field not in known:
                return "columns", {"messages": field}, ""
            return ("auto" if kind is None else "sharegpt" if name == "sharegpt" else known[field]), {}, ""
        case "alpaca":
            return "alpaca", {}, ""
        case "completion":
            text = str(source.get("field") or "text")
            return ("text", {}, "") if text == "text" else ("columns", {"text": text}, "")
        case "jeopardy":
            return "question_answer", {}, ""
        case _:
            return "", {}, f"type: {kind} is a prompt format of its own"
