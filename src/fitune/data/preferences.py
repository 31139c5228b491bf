"""Preference data is refused by name: fitune learns every answer it reads, so it would learn the bad ones too.

| kind               | told by                                                                                    |
|--------------------|--------------------------------------------------------------------------------------------|
| pairs (DPO, ORPO)  | chosen and rejected                                                                        |
| KTO                | label true or false beside an answer (0 or 1 beside prompt and completion), or kto_tag     |
| stepwise (PRM)     | labels, a list of true and false, or completions and labels                                |

A ``label`` that is a class of plain text, or any other value, says nothing about an answer and is left alone.
"""

from collections.abc import Mapping
from typing import Any

from fitune.data.rows import Row
from fitune.errors import DataError

_PAIRS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
_WORDS = ("true", "false")
_NUMBERS = (0, 1, "0", "1")


def refuse_good_and_bad(row: Row) -> None:
    """Raises DataError for a row that holds good and bad answers, or good and bad steps, side by side."""
    for chosen, rejected in _PAIRS:
        if chosen in row.fields and rejected in row.fields:
            raise _refusal(
                row, f"{chosen} and {rejected}", "pairs, as for DPO", _hint_for_pairs(row.fields, chosen)
            )
    if "completions" in row.fields and "labels" in row.fields:
        raise _stepwise(row)


def refuse_judged(row: Row) -> None:
    """Raises DataError for a row that says whether its answer is good. Not for plain text."""
    fields = row.fields
    for name in ("label", "kto_tag"):
        if name in fields and _is_judgement(fields[name], fields):
            raise _refusal(
                row,
                f"{name}: {str(fields[name]).lower()} beside an answer",
                "as for KTO",
                f"keep the rows whose {name} is true and leave the column out; if {name} says nothing about "
                "the answer, name the columns to be read: columns: {prompt: …, completion: …}",
            )
    if _is_list_of_judgements(fields.get("labels")):
        raise _stepwise(row)


def _is_judgement(value: Any, fields: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or (isinstance(value, str) and value.strip().lower() in _WORDS):
        return True
    return isinstance(value, int | str) and value in _NUMBERS and {"prompt", "completion"} <= fields.keys()


def _is_list_of_judgements(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, bool) for item in value)


def _hint_for_pairs(fields: Mapping[str, Any], chosen: str) -> str:
    asked = next((name for name in ("prompt", "question", "instruction", "input") if name in fields), "…")
    if isinstance(fields[chosen], list) and not isinstance(fields.get(asked), list):
        return f"to learn the chosen answers, write {chosen} as messages, without the other column"
    return f"to learn the chosen answers: columns: {{prompt: {asked}, completion: {chosen}}}"


def _stepwise(row: Row) -> DataError:
    return _refusal(
        row,
        "labels of single steps",
        "as for process reward models",
        "write the rows whose steps are all right as {prompt, completion}",
    )


def _refusal(row: Row, found: str, kind: str, hint: str) -> DataError:
    return DataError(
        f"{row.where}: the row has {found}: preference data ({kind}). fitune has no preference methods; it would "
        "learn every answer, the bad ones too",
        hint=hint,
    )
