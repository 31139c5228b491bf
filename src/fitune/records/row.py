"""One measured run as its line in a records file says it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fitune.errors import DataError

Confidence = Literal["high", "medium", "low", ""]

_LEVELS: tuple[Confidence, ...] = ("high", "medium", "low")
_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "n_gpus", "lora_rank",
    "seq_len", "micro_batch", "grad_accum", "tp", "pp", "cp", "recompute_blocks", "loss_chunk_tokens",
)  # fmt: skip
_MOST = 1e12
_MAY_BE_NONE = ("recompute_blocks",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Facts of one run. Words are as its author wrote them, sizes are positive; None is what was not said."""

    id: str
    line: int
    source: str
    model: str
    words: Mapping[str, str]
    """Lower case, by key: gpu, method, quant, precision_mode, sharding, …; "" where nothing was said."""
    sizes: Mapping[str, int | None]
    params_b: float | None
    peak_mem_gib: float | None
    """Per device."""
    tok_s_per_gpu: float | None
    switches: Mapping[str, bool | None]
    outcome: Literal["ok", "oom"]
    confidence_mem: Confidence
    confidence_speed: Confidence

    def size(self, key: str) -> int | None:
        return self.sizes[key]

    def says(self, key: str, *needles: str) -> bool:
        """True if any of ``needles`` occurs in what the author wrote under ``key``."""
        return any(needle in self.words[key] for needle in needles)

    @property
    def remarks(self) -> str:
        """Everything that may name the trainer and its habits."""
        return " ".join((self.source.lower(), self.words["must_assume"], self.words["notes"]))


_WORDS = (
    "gpu", "method", "lora_targets", "quant", "optimizer", "optimizer_dtype", "precision_mode", "sharding",
    "attention", "fused_ce", "mem_kind", "act_ckpt", "mlp_type", "must_assume", "notes",
)  # fmt: skip
_SWITCHES = (
    "double_quant", "offload_params", "offload_optimizer", "act_ckpt", "act_offload", "compile",
    "tied_embeddings", "fused_ce",
)  # fmt: skip


def row_from(facts: Mapping[str, Any], *, line: int, where: str, fallback_source: str) -> Row:
    """Check one object. Raises DataError naming file, line, key and value."""
    values = _Values(facts, f"{where} line {line}")
    return Row(
        id=values.text("id") or f"line-{line}",
        line=line,
        source=values.text("source") or fallback_source,
        model=values.text("model"),
        words={key: values.text(key, also_switch=True).lower() for key in _WORDS},
        sizes={key: values.size(key) for key in _SIZES},
        params_b=values.amount("params_b"),
        peak_mem_gib=values.amount("peak_mem_gib"),
        tok_s_per_gpu=values.amount("tok_s_per_gpu"),
        switches={key: values.switch(key) for key in _SWITCHES},
        outcome=values.outcome(),
        confidence_mem=values.confidence("confidence_mem"),
        confidence_speed=values.confidence("confidence_speed"),
    )


@dataclass(frozen=True, slots=True)
class _Values:
    facts: Mapping[str, Any]
    where: str

    def text(self, key: str, *, also_switch: bool = False) -> str:
        value = self.facts.get(key)
        if value is None or (also_switch and isinstance(value, bool)):
            return ""
        if not isinstance(value, str | int | float):
            raise self._refused(key, "is not a word")
        return str(value).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be printed

    def size(self, key: str) -> int | None:
        value = self.amount(key)
        if value is not None and value != int(value):
            raise self._refused(key, "is not a whole number")
        return None if value is None else int(value)

    def amount(self, key: str) -> float | None:
        value = self.facts.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refused(key, "is not a number")
        if value == 0 and key in _MAY_BE_NONE:
            return 0.0
        if not 0 < value < _MOST:
            raise self._refused(key, "must be more than zero and no more than a machine can hold")
        return float(value)

    def switch(self, key: str) -> bool | None:
        """A word that describes how ("selective", the name of a kernel) means yes."""
        value = self.facts.get(key)
        return bool(value) if value is not None else None

    def outcome(self) -> Literal["ok", "oom"]:
        value = self.facts.get("outcome", "ok")
        if value not in ("ok", "oom"):
            raise self._refused("outcome", "must be ok or oom")
        return "oom" if value == "oom" else "ok"

    def confidence(self, key: str) -> Confidence:
        for level in _LEVELS:
            if self.facts.get(key) == level:
                return level
        if self.facts.get(key) in (None, ""):
            return ""
        raise self._refused(key, "must be high, medium, low or null")

    def _refused(self, key: str, why: str) -> DataError:
        return DataError(f"{self.where}: {key} = {repr(self.facts[key])[:60]} {why}")
