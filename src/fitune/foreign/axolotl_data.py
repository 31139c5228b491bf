"""Datasets of axolotl's recipes: paths, prompt types, fields, and rows that are too long."""

from collections.abc import Mapping
from typing import Any

from fitune.foreign.reading import Reading


def read_datasets(r: Reading) -> None:
    """Puts the datasets, the evaluation sets and the held-out share of an Axolotl config."""
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
        said = "the tokenizer's own, or fitune's plain headings where it has none; a file is named as chat_template"
        r.passed("chat_template", said)
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
    return [{"path": path, **wanted} for path in _paths(source)]


def _paths(source: Mapping[str, Any]) -> list[str]:
    """``data_files`` are files by themselves beside a layout (``path: json``), and inside the path else."""
    path, files = str(source["path"]), source.get("data_files")
    if source.get("name"):
        return [f"{path}:{source['name']}"]
    if not files:
        return [path]
    names = [str(file) for file in files] if isinstance(files, list) else [str(files)]
    return names if path in ("json", "csv", "parquet", "text") else [f"{path}/{name}" for name in names]


_MAPPED = {"field_system": "system", "field_instruction": "prompt", "field_output": "completion"}


def _format(source: Mapping[str, Any]) -> tuple[str, dict[str, str], str]:
    """(format, columns, why it is refused) of a dataset's type and fields."""
    kind = source.get("type")
    for key in (
        "drop_system_message",
        "message_field_training",
        "message_field_training_detail",
        "step_separator",
    ):
        if source.get(key):
            return "", {}, f"{key}: rows changed while they are read"
    if source.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["gpt", "assistant"]):
        return "", {}, f"roles_to_train: {source['roles_to_train']}; fitune learns the assistant's turns"
    if isinstance(kind, Mapping):
        columns = {ours: str(kind[key]) for key, ours in _MAPPED.items() if kind.get(key)}
        if kind.get("field_input") or {"prompt", "completion"} - set(columns):
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
