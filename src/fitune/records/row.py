"""Measured runs as a file says them: one JSON object a line, or a document whose ``rows`` are such objects."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fitune.errors import DataError
from fitune.files import read_text
from fitune.units import MIB
from fitune.values.serial import parse_json

_MOST_BYTES = 64 * MIB
_MOST, _MOST_ROWS = 1e12, 1e6
"""The largest number in a record, and the most rows in a micro-batch: the estimate goes through them one by one."""
_COUNTS = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "n_gpus", "lora_rank",
    "seq_len", "micro_batch", "grad_accum", "tp", "pp", "cp", "recompute_blocks", "loss_chunk_tokens",
)  # fmt: skip
_AMOUNTS = ("params_b", "peak_mem_gib", "tok_s_per_gpu")
_CHOICES = {
    "outcome": ("ok", "oom"),
    "confidence_mem": ("high", "medium", "low"),
    "confidence_speed": ("high", "medium", "low"),
}
_WORDS = (
    "id", "source", "model", "gpu", "method", "lora_targets", "quant", "optimizer", "optimizer_dtype",
    "precision_mode", "sharding", "attention", "mem_kind", "mlp_type", "must_assume", "notes", "setting",
)  # fmt: skip

_FORM = 'one JSON object a line, each a measured run: {"id": "a", "model": …}; or a file of results/'


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run. Sizes are checked and positive; what was not said is None."""

    id: str
    line: int
    source: str
    facts: Mapping[str, Any]

    def size(self, key: str) -> int | None:
        """A whole number, or None where it was not said."""
        value = self.facts.get(key)
        return None if value is None else int(value)

    def amount(self, key: str) -> float | None:
        """A number with a fraction, or None where it was not said."""
        value = self.facts.get(key)
        return None if value is None else float(value)

    def flag(self, key: str) -> bool | None:
        """A word that describes how ("selective", the name of a kernel) means yes."""
        value = self.facts.get(key)
        return None if value is None else bool(value)

    def words(self, *keys: str) -> str:
        """The field in lower case, with blanks for hyphens and underscores; "" where it is empty."""
        said = (self.facts.get(key) for key in keys)
        text = " ".join(str(each) for each in said if each is not None and not isinstance(each, bool))
        return text.lower().replace("_", " ").replace("-", " ")

    def says(self, key: str, *needles: str) -> bool:
        """True if any of ``needles`` occurs in what the author wrote under ``key``."""
        return any(needle in self.words(key) for needle in needles)

    @property
    def oom(self) -> bool:
        """True if the run ended out of memory."""
        return self.facts.get("outcome") == "oom"

    @property
    def remarks(self) -> str:
        """Remarks of the row on this one run beside its facts."""
        return self.words("must_assume", "notes")


def read_records(path: Path) -> list[Row]:
    """Every row of ``path``, checked.

    Raises DataError with file and line for what cannot be read, is no object, has an impossible size or repeats an id.
    """
    rows = [_row(facts, path, line) for line, facts in _objects(path)]
    if not rows:
        raise DataError(f"{path}: has no rows", hint=_FORM)
    seen: dict[str, int] = {}
    for row in rows:
        if seen.setdefault(row.id, row.line) != row.line:
            raise DataError(f"{path} line {row.line}: id {row.id!r} is that of line {seen[row.id]} too")
    return rows


def _objects(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        text = read_text(path, limit=_MOST_BYTES, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        whole = parse_json(text)
    except ValueError:
        whole = None
    rows = whole.get("rows") if isinstance(whole, dict) else whole
    if isinstance(rows, list):
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise DataError(f"{path} line {number}: {error}", hint=_FORM) from None


def _row(facts: Any, path: Path, line: int) -> Row:
    if not isinstance(facts, dict):
        raise DataError(f"{path} line {line}: expected an object, found {type(facts).__name__}")
    for key, value in facts.items():
        why = "" if value is None else _refusal(key, value)
        if why:
            raise DataError(f"{path} line {line}: {key} = {repr(value)[:60]} {why}")
    name = str(facts.get("id") or f"line-{line}").encode("utf-8", "replace").decode()
    source = str(facts.get("source") or path.name).encode("utf-8", "replace").decode()
    return Row(id=name, line=line, source=source, facts=facts)


def _refusal(key: str, value: Any) -> str:
    """Reason why ``value`` cannot be that of ``key``; "" where it can."""
    if key in _COUNTS or key in _AMOUNTS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return "is not a number"
        most = _MOST_ROWS if key == "micro_batch" else _MOST
        if not 0 < value < most and not (key == "recompute_blocks" and value == 0):
            return "must be more than zero and no more than a machine can hold"
        return "is not a whole number" if key in _COUNTS and value != int(value) else ""
    if key in _CHOICES:
        return "" if value in (*_CHOICES[key], "") else f"must be {', '.join(_CHOICES[key])} or null"
    return "" if key not in _WORDS or isinstance(value, str | int | float) else "is not a word"
