"""Shapes and profiles of architectures without formulas: from the cache, or traced once by whoever may import torch.

A plan needs neither torch nor transformers once they are there. Files are named by what they depend on: the config,
the way of training and the versions of the libraries.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fitune.errors import ModelError
from fitune.files import cache_folder, write_atomically
from fitune.spec.block_profile import BatchShape
from fitune.spec.model import ModelSpec
from fitune.spec.plan import (
    AdamW,
    Batch,
    Lora,
    Offload,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    Single,
    updates_in_backward,
)
from fitune.spec.serial import from_json, to_data, to_json
from fitune.spec.traced_profile import TracedStep
from fitune.spec.tracer import current_tracer

FORMAT = 3
"""Goes up when what is stored, or how it is counted, changes."""

_NOT_OF_SHAPES = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "torch_dtype", "transformers_version", "use_cache", "initializer_range", "name_or_path",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What the bytes of blocks depend on beside tokens: how they are trained, and by which kernels."""

    plan: Plan
    """With everything else set to one value."""
    rows: int
    """1 or 2: what is written for each row and then joined is like two from the second on."""
    first: int
    """The shortest of three lengths of rows to trace, on the same side of a sliding window as the plan's."""

    @property
    def digest(self) -> str:
        plan = self.plan
        facts = [
            FORMAT, plan.model.config_digest, to_data(plan.tuning), plan.precision.value, plan.attention,
            plan.hardware.gpu.is_cpu, plan.hardware.gpu.capability >= (8, 0), self.rows, self.first,
            to_data(plan.optimizer) if updates_in_backward(plan.tuning) else None,
        ]  # fmt: skip
        return _digest(facts)


def config_digest(config: Mapping[str, Any]) -> str:
    """Names what a config's shapes and profiles depend on."""
    from importlib.metadata import version  # takes a while, and most plans need none of this

    facts = {key: value for key, value in config.items() if key not in _NOT_OF_SHAPES}
    return _digest([FORMAT, facts, version("transformers"), version("torch")])


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def shapes_for(config: Mapping[str, Any], *, name: str, where: str, dtype: str) -> ModelSpec:
    """The shapes of an architecture without a formula. Raises ModelError when they cannot be found out here."""
    digest = config_digest(config)
    file = _folder() / f"{digest}.shapes.json"
    found = _stored(ModelSpec, file)
    if found is None:
        tracer = current_tracer()
        if tracer is None:
            raise ModelError(
                f"{where}: model_type = {config.get('model_type')!r}: its shapes are not known here yet",
                hint="`fitune plan` finds them out once and keeps them",
            )
        try:
            found = tracer.shapes(config, name=name, digest=digest, dtype=dtype)
        except ModelError as error:
            raise ModelError(f"{where}: {error.message}", hint=error.hint) from None
        _store(found, file)
    return replace(found, name=name, dtype=dtype)


def profile_for(plan: Plan, shape: BatchShape) -> TracedStep:
    """The traced profile of ``plan``'s way of training."""
    way = way_of(plan, shape)
    file = _folder() / f"{plan.model.config_digest}.{way.digest}.json"
    found = _known.get(file) or _stored(TracedStep, file)
    if found is None:
        tracer = current_tracer()
        if tracer is None:
            raise ModelError(f"{way.plan.model.name} has not been traced for this way of training yet")
        found = tracer.profile(way)
        _store(found, file)
    _known[file] = found
    return found


_known: dict[Path, TracedStep] = {}


def way_of(plan: Plan, shape: BatchShape) -> Way:
    """The way of training that ``plan`` is one of, for micro-batches like ``shape``."""
    rows = min(2, shape.rows)
    window = plan.model.sliding_window
    if not window:
        first = 1024
    elif shape.row_tokens <= window:
        first = max(16, window // 4)
    else:
        first = 2 * window
    return Way(plan=_plain(plan), rows=rows, first=first)


def _plain(plan: Plan) -> Plan:
    """``plan`` with all that blocks do not depend on set to one value."""
    in_backward = updates_in_backward(plan.tuning)
    tuning = plan.tuning
    if isinstance(tuning, Lora):
        tuning = replace(tuning, alpha=tuning.rank, rslora=False, dropout=0.1 if tuning.dropout else 0.0)
    precision = plan.precision
    if not in_backward and precision is not Precision.FP32:
        precision = Precision.BF16
    return replace(
        plan,
        tuning=tuning,
        precision=precision,
        optimizer=plan.optimizer if in_backward else AdamW(),
        hardware=replace(plan.hardware, gpus_per_node=1, nodes=1),
        sharding=Single(),
        offload=Offload(),
        loss=PlainLoss(),
        recompute=Recompute(blocks=0),
        compile_blocks=False,
        batch=Batch(micro_batch_size=1, accumulation=1 if in_backward else 2, seq_len=1024, packing=False),
    )


def _folder() -> Path:
    return cache_folder() / "traced"


T = TypeVar("T")


def _stored(kind: type[T], file: Path) -> T | None:
    """None where there is no file, or an unreadable one: it is made again."""
    try:
        return from_json(kind, file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _store(value: Any, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, to_json(value))
    except OSError:
        return  # a cache that cannot be written costs the next plan the same seconds
