"""Datasets of an axolotl recipe: where their rows are, and how a row becomes a prompt and an answer."""

import json
import re
from collections.abc import Mapping
from string import Formatter
from typing import Any

from fitune.recipe.foreign.reading import Reading, paths_of, words
from fitune.recipe.foreign.trainer_keys import RENDERED, WITHOUT_HEADINGS
from fitune.values.named_templates import NAMED_TEMPLATES

_PASSED_OF_DATA = {
    "ds_type preprocess_shards trust_remote_code input_format": "",
    "chat_template conversation": RENDERED,
    "field_thinking template_thinking_key": "reasoning is read from reasoning_content, reasoning or thinking",
}
_REFUSED_OF_DATA = {
    "shards shards_idx": "a part of the rows; sample: N says how many",
    "revision": "a revision of the dataset; download that revision and name its folder as path",
    "drop_system_message message_field_training message_field_training_detail step_separator input_transform":
        "rows changed while they are read",
}  # fmt: skip
_ONLY = {"train_on_eos": "turn", "train_on_eot": "turn", "field_tools": "tools"}
"""Key of a dataset -> the one value that is what fitune does."""
_ROLES = {
    "user": words("user human"), "assistant": words("assistant gpt"), "system": words("system"),
    "input": words("system user human"), "output": words("assistant gpt"),
    "tool": words("tool observation function ipython tool_response"),
}  # fmt: skip
"""Names of roles in rows, as fitune knows them."""

_LAYOUTS = {"messages": "messages", "conversations": "sharegpt"}
"""Column of messages -> the format with it."""
_HEADED: dict[str, dict[str, str]] = {
    "alpaca_w_system.load_open_orca": {
        "system": "system_prompt", "prompt": "question", "completion": "response",
    },
    "alpaca_chat.load_qa": {"prompt": "question", "completion": "answer"},
    "alpaca_chat.load_camel_ai": {"prompt": "message_1", "completion": "message_2"},
    "jeopardy": {"prompt": "question", "completion": "answer"},
    "oasst": {"prompt": "INSTRUCTION", "completion": "RESPONSE"},
}  # fmt: skip
"""Types whose rows stand below headings there -> columns of their prompt and answer."""
_ALPACA = words(
    "alpaca alpaca_instruct alpaca_chat alpaca_chat.load_concise alpaca_w_system alpaca_w_system.load_instruct "
    "alpaca_w_system.load_chat"
)
"""Types whose rows have Alpaca's columns."""

_JEOPARDY = f"{WITHOUT_HEADINGS}; of jeopardy without the category and the words what is"
_OWN_SAID = (
    "the prompt that axolotl makes of each row; an empty system prompt counts as none, and beside an input no column "
    "of them is read"
)


def read_datasets(r: Reading) -> None:
    """Puts the datasets, the evaluation sets, the held-out rows and the template of an axolotl config."""
    r.inside("passed", _PASSED_OF_DATA)
    r.inside("refused", _REFUSED_OF_DATA)
    templates: dict[str, None] = {}
    """The templates of datasets whose rows are no texts; an empty one is the tokenizer's."""
    has_texts = False
    for key, name in (("datasets", "data"), ("test_datasets", "eval_data")):
        sources = r.take(key)
        if not isinstance(sources, list):
            continue
        read, said = [], ""
        for number, source in enumerate(sources):
            found, template = _sources(r, source, f"{key}[{number}]")
            read += found
            is_text = any(each.get("format") == "text" or "text" in each.get("columns", ()) for each in found)
            has_texts |= is_text
            templates |= {template: None} if found and not is_text else {}
            if isinstance(source, Mapping) and _name(source) in _ALPACA | _HEADED.keys():
                said = _JEOPARDY if _name(source) == "jeopardy" else said or WITHOUT_HEADINGS
        r.put(name, read, key=key, said=said)
    if len(templates) > 1:
        r.refuse("datasets", "prompts of several formats; one chat_template renders all of them here")
    elif own := "".join(templates):
        r.put("chat_template", own, key="datasets", said=_OWN_SAID)
    if r.take("val_set_size") and "eval_data" not in r.settings:
        r.same({"val_set_size": "val_fraction"})
    _template(r, renders="" in templates or not (templates or has_texts))
    longer = str(r.take("excess_length_strategy") or "drop")
    on_long = {"drop": "drop", "truncate": "truncate", "raise": "error"}.get(longer, "drop")
    if has_texts and not templates:
        r.put("on_long_row", "split", said="axolotl goes on with a long text in the next row")
        r.passed("excess_length_strategy", "long texts are split")
    elif "excess_length_strategy" in r.raw:
        r.put("on_long_row", on_long, key="excess_length_strategy")
    else:
        r.assume("axolotl leaves out rows longer than sequence_len", on_long_row=on_long)


def _template(r: Reading, *, renders: bool) -> None:
    """``chat_template``, where it ``renders`` rows."""
    template, text = r.take("chat_template"), r.take("chat_template_jinja")
    if renders and (text or template in NAMED_TEMPLATES):
        r.put("chat_template", text or template, key="chat_template_jinja" if text else "chat_template")
    said = "another key says the template" if "chat_template" in r.settings else RENDERED
    r.passed("chat_template chat_template_jinja chat_template_kwargs", said)
    r.passed("eot_tokens", "an answer is learnt with the token that ends it in the template")


def _sources(r: Reading, source: Any, where: str) -> tuple[list[dict[str, Any]], str]:
    """One dataset in fitune's words, a source for each of its files, none where it is refused; and the template of a
    prompt format of its own."""
    if isinstance(source, str):
        return [{"path": source}], ""
    if not isinstance(source, Mapping) or not source.get("path"):
        r.refuse(where, "no path is named")
        return [], ""
    columns: dict[str, str] = {}
    format, template, why = "columns", "", _strange_messages(source)
    if isinstance(kind := source.get("type"), Mapping) and not why:
        columns, template, why = _own_prompts(kind)
    elif not why:
        format, columns, why = _format(source, str(kind or ""))
    if why:
        r.refuse(where, why)
        return [], ""
    wanted = {
        "split": str(source.get("split") or source.get("train_on_split") or ""),
        "format": format,
        "columns": columns,
    }
    given = {name: value for name, value in wanted.items() if value}
    return [{"path": path, **given} for path in paths_of(source)], template


def _strange_messages(source: Mapping[str, Any]) -> str:
    """Why the messages of a dataset are not read or learned here as they are there; empty where they are."""
    for key, only in _ONLY.items():
        if source.get(key) not in (None, only):
            return f"{key}: {source[key]}; here it is {only}"
    mapped = source.get("message_property_mappings") or {}
    role = mapped.get("role") or source.get("message_field_role") or "role"
    content = mapped.get("content") or source.get("message_field_content") or "content"
    if (role, content) not in (("role", "content"), ("from", "value")):
        return f"messages of {role} and {content}; fitune reads role and content, or from and value"
    for name, others in (source.get("roles") or {}).items():
        if not _ROLES.get(name, frozenset()).issuperset(others if isinstance(others, list) else [others]):
            known = ", ".join(sorted(_ROLES.get(name, ())))
            return f"roles: {others} for {name}; fitune knows {known}"
    for key, name in (("field_human", "user"), ("field_model", "assistant")):
        if source.get(key) not in (None, *_ROLES[name]):
            return f"{key}: {source[key]}; fitune knows {', '.join(sorted(_ROLES[name]))}"
    if source.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["gpt", "assistant"]):
        return f"roles_to_train: {source['roles_to_train']}; fitune learns the assistant's turns"
    return ""


def _name(source: Mapping[str, Any]) -> str:
    """Name of the type of a dataset: alpaca for ``alpaca:chat`` and ``alpaca.load``."""
    return str(source.get("type") or "chat_template").split(":")[0].removesuffix(".load")


def _format(source: Mapping[str, Any], kind: str) -> tuple[str, dict[str, str], str]:
    """(format, columns, why it is refused) of a dataset whose type is a name."""
    name = _name(source)
    if name in _HEADED or name in _ALPACA:
        return ("columns", _HEADED[name], "") if name in _HEADED else ("alpaca", {}, "")
    match name.split(".")[0]:
        case "chat_template" | "sharegpt" as layout:
            field = source.get("field_messages") or ("conversations" if layout == "sharegpt" else "messages")
            if field not in _LAYOUTS:
                return "columns", {"messages": str(field)}, ""
            return _LAYOUTS[field] if kind else "auto", {}, ""
        case "completion":
            text = str(source.get("field") or "text")
            return ("text", {}, "") if text == "text" else ("columns", {"text": text}, "")
        case "input_output":
            return "", {}, f"type: {kind}: segments that each say whether they are learned; here answers are"
        case _:
            why = (
                f"type: {kind} is a prompt format of its own; write it out, as type: "
                "{field_instruction: …, field_output: …, format: …}, or name the rows' columns with --data"
            )
            return "", {}, why


def _own_prompts(kind: Mapping[str, Any]) -> tuple[dict[str, str], str, str]:
    """(columns, template, why it is refused) of a type that says the format of its prompts.

    A conversation has two places for them: the instruction is its question, and the input or else the system prompt is
    its system message.
    """
    with_input = str(kind.get("format") or "{instruction} {input} ")
    without = str(kind.get("no_input_format") or "{instruction} ")
    columns = {
        "prompt": str(kind.get("field_instruction") or "instruction"),
        "completion": str(kind.get("field_output") or "output"),
    }
    system, of_system = str(kind.get("system_prompt") or ""), str(kind.get("system_format") or "{system}")
    try:
        pieces = [
            _expression(text, **places)
            for text, places in (
                (with_input, {"instruction": "message.content", "input": "more"}),
                (without, {"instruction": "message.content"}),
                (of_system, {"system": json.dumps(system, ensure_ascii=False)}),
                (of_system, {"system": "more"}),
            )
        ]
    except ValueError as error:
        return {}, "", f"its format cannot be filled in: {error}"
    with_input_, without_, constant, from_row = pieces
    if "more" in with_input_:
        if kind.get("field_system"):
            return {}, "", "prompts of a system prompt and an input; here is one place beside the instruction"
        columns["system"] = str(kind.get("field_input") or "input")
        prompt, usual = f"{with_input_} if more else {without_}", '""'
        prompt = f"({constant}) ~ ({prompt})" if system else prompt
    elif with_input != without:
        why = f"rows without an input are {without!r} there, whatever format says; name it as no_input_format, too"
        return {}, "", why
    else:
        columns["system"] = str(kind.get("field_system") or "system")
        prompt, usual = f"({from_row} if more else '') ~ {without_}", json.dumps(system, ensure_ascii=False)
    filled = {"USUAL": usual, "PROMPT": prompt}
    return columns, re.sub("USUAL|PROMPT", lambda found: filled[found[0]], _TEMPLATE), ""


_TEMPLATE = """\
{{- bos_token if bos_token else '' -}}
{%- set more = messages[0].content if messages[0].role == 'system' else USUAL -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- PROMPT -}}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
"""


def _expression(format: str, **places: str) -> str:
    """``format`` as a Jinja expression with the expressions of its ``places``. Raises ValueError for another place."""
    parts = []
    for text, place, spec, conversion in Formatter().parse(format):
        parts += [json.dumps(text, ensure_ascii=False)] if text else []
        if place is not None:
            if place not in places or spec or conversion:
                raise ValueError(f"{{{place}}} stands in {format!r}, which has {', '.join(places)}")
            parts.append(places[place])
    return " ~ ".join(parts) or '""'
