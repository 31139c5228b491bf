"""Shapes and profiles of architectures without formulas: shipped, cached, or traced by whoever may import torch.

A plan needs neither torch nor transformers once they are there. Files are named by what they depend on: the config,
the way of training and the versions of the libraries. Those of other versions than the installed ones serve a plan,
which says so, and neither training nor a rehearsal.

Profiles of public names are shipped: traced_profiles.zip has one JSON object for each config, by ``config_digest``,
with its shapes and a profile for each digest of a way of training. It is opened when the first such name is planned,
and one object of it is read. bench/ship_profiles.py writes it.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from fitune.errors import ModelError
from fitune.files import cache_folder, read_bytes, write_atomically
from fitune.values.counts import untouched_blocks
from fitune.values.model.block_profile import BatchShape, TracedStep
from fitune.values.model.model_spec import ModelSpec
from fitune.values.model.tracer import current_tracer, installed_alone
from fitune.values.plan import (
    AdamW,
    Batch,
    Full,
    Lora,
    Offload,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    Single,
    updates_in_backward,
)
from fitune.values.serial import from_data, from_json, to_data, to_json

SHIPPED = Path(__file__).with_name("traced_profiles.zip")
LIBRARIES = "libraries"
SHAPES = "shapes"
"""Names inside the file: of the versions that traced, and of the shapes in each object."""
NOT_SHIPPED: dict[str, str] = {}
"""First name of a config of models.json without a profile -> why. Its first plan would have to trace it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Versions of the libraries that a trace depends on."""

    torch: str
    transformers: str

    @property
    def public(self) -> "Libraries":
        """Without the build: ``2.13.0`` for ``2.13.0+cu128``, whose operations on fake tensors are the same."""
        return Libraries(torch=self.torch.partition("+")[0], transformers=self.transformers.partition("+")[0])

    @property
    def words(self) -> str:
        """The versions as a sentence names them."""
        return f"torch {self.torch} and transformers {self.transformers}"


def is_shipped(config_digest: str) -> bool:
    """True if the file has that config."""
    return config_digest in _archive().namelist()


def shipped_shapes(config_digest: str) -> ModelSpec | None:
    """The shapes of that config; its name and dtype are those of the first name that has it."""
    found = _shipped(config_digest).get(SHAPES)
    return None if found is None else from_data(ModelSpec, found)


@cache
def shipped_profile(config_digest: str, way_digest: str) -> TracedStep | None:
    """The profile of that config for that way of training, or None."""
    found = _shipped(config_digest).get(way_digest)
    return None if found is None else from_data(TracedStep, found)


@cache
def shipped_libraries() -> Libraries:
    """The versions that traced all of it."""
    return from_data(Libraries, json.loads(_archive().read(LIBRARIES)))


@cache
def _shipped(config_digest: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_archive().read(config_digest))
    except KeyError:
        return {}
    return found


@cache
def _archive() -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(read_bytes(SHIPPED)))


FORMAT = 3
"""Goes up when what is stored, or how it is counted, changes."""
_SHAPES_FORMAT = 6
"""Format of cached shapes; apart from FORMAT, so that shipped profiles stay valid when only shapes change."""
_CACHED = 4
"""Goes up when some models' traces come out otherwise: caches are made again, shipped profiles have been."""

LENGTHS = (1, 2, 4)
"""Lengths of rows that are traced, as multiples of the first."""

_FIRST_BY_TOKEN = 16
"""Shortest row that is traced where a mixer's loop takes dozens of operations for each token."""

_NOT_OF_SHAPES = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "torch_dtype", "transformers_version", "use_cache", "initializer_range", "name_or_path",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Facts that the bytes of blocks depend on beside tokens: how they are trained, and by which kernels."""

    plan: Plan
    """With everything else set to one value."""
    rows: int
    """1 or 2: what is written for each row and then joined is like two from the second on."""
    first: int
    """The shortest of three lengths of rows to trace, on the same side of a sliding window as the plan's.

    Shorter where blocks take no longer streams."""

    @property
    def digest(self) -> str:
        """Hash that the trace is stored under: equal for plans whose blocks hold the same bytes."""
        plan = self.plan
        facts = [
            FORMAT, plan.model.config_digest, to_data(plan.tuning), plan.precision.value, plan.attention,
            plan.hardware.gpu.is_cpu, plan.hardware.gpu.capability >= (8, 0), self.rows, self.first,
            None,  # shipped digests have it
        ]  # fmt: skip
        facts += [plan.model.chunk] if plan.model.chunk else []
        untouched = untouched_blocks(plan.model, plan.tuning)
        return _digest([*facts, "untouched", untouched] if untouched else facts)


def config_digest(config: Mapping[str, Any]) -> str:
    """Names what a config's shapes and profiles depend on beside the versions of the libraries."""
    return _digest([FORMAT, {key: value for key, value in config.items() if key not in _NOT_OF_SHAPES}])


@cache
def installed_libraries() -> Libraries | None:
    """The versions of the libraries that trace here; None where one is missing: a plan needs none of them."""
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )  # takes a while, and most plans need none of this

    try:
        return Libraries(torch=version("torch"), transformers=version("transformers"))
    except PackageNotFoundError:
        return None


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:24]


def shapes_for(config: Mapping[str, Any], *, name: str, where: str, dtype: str) -> ModelSpec:
    """The shapes of an architecture without a formula. Raises ModelError when they cannot be found out here."""
    digest = config_digest(config)
    found = shipped_shapes(digest) if _takes_shipped() else None
    file = _file(f"{digest}.shapes.{_SHAPES_FORMAT}")
    found = found or _stored(ModelSpec, file)
    if found is None:
        open_tracer = current_tracer()
        if open_tracer is None:
            raise ModelError(
                f"{where}: model_type = {config.get('model_type')!r}: its shapes are not known here yet",
                hint="`fitune plan` finds them out once and keeps them",
            )
        try:
            found = open_tracer().shapes(config, name=name, digest=digest, dtype=dtype)
        except ModelError as error:
            raise ModelError(f"{where}: {error.message}", hint=error.hint) from None
        _store(found, file)
    return replace(found, name=name, dtype=dtype)


def profile_for(plan: Plan, shape: BatchShape) -> TracedStep:
    """The traced profile of ``plan``'s way of training."""
    way = way_of(plan, shape)
    digest = plan.model.config_digest
    file = _file(f"{digest}.{way.digest}")
    found = _known.get(file) or _stored(TracedStep, file)
    if found is None and _takes_shipped():
        found = shipped_profile(digest, way.digest)
        if found is not None and not _is_shipped_version():
            _of_other_versions.add(digest)
            return found
    if found is None:
        open_tracer = current_tracer()
        if open_tracer is None:
            raise ModelError(f"{way.plan.model.name} has not been traced for this way of training yet")
        found = open_tracer().profile(way)
        _store(found, file)
    _known[file] = found
    return found


_known: dict[Path, TracedStep] = {}
_of_other_versions: set[str] = set()
"""Configs for which this process took shipped profiles of other versions than the installed ones."""


def _is_shipped_version() -> bool:
    installed = installed_libraries()
    return installed is None or installed.public == shipped_libraries()


def _takes_shipped() -> bool:
    return not installed_alone() or _is_shipped_version()


def versions_note(model: ModelSpec) -> str | None:
    """Says by which versions the blocks of ``model`` were traced where those are not the installed ones, or None."""
    installed = installed_libraries() if model.config_digest in _of_other_versions else None
    if installed is None:
        return None
    return (
        f"blocks: a shipped profile, traced with {shipped_libraries().words}; installed are "
        f"{installed.words}, by which training and `fitune rehearse` trace afresh"
    )


def way_of(plan: Plan, shape: BatchShape) -> Way:
    """The way of training that ``plan`` is one of, for micro-batches like ``shape``."""
    rows = min(2, shape.rows) if plan.model.separates_rows else 1  # others are trained a row at a time
    window = plan.model.sliding_window
    if not window or plan.attention == "flash":  # whose kernels hold no scores, whatever a row sees
        first = 1024
    elif shape.row_tokens <= window:
        first = max(16, window // 4)
    else:
        first = 2 * window
    if plan.model.chunk == 1:
        first = _FIRST_BY_TOKEN
    elif plan.model.chunk:  # with one chunk alone some copies are not made
        first = _first_by_chunk(plan.model, is_one=plan.batch.seq_len <= plan.model.chunk)
    longest = plan.model.longest_stream
    if longest:
        first = max(1, min(first, longest // (rows * LENGTHS[-1])))
    return Way(plan=_plain(plan), rows=rows, first=first)


def _first_by_chunk(model: ModelSpec, *, is_one: bool) -> int:
    """Whole chunks, and more of them for a delta rule, whose loop over them is to outweigh what comes once.

    Of rows that are one chunk: such as a delta rule pads and copies.
    """
    if is_one:
        return max(1, (model.chunk - model.has_delta_rule) // LENGTHS[-1])
    return (8 if model.has_delta_rule else 2) * model.chunk


def _plain(plan: Plan) -> Plan:
    """``plan`` with all that blocks do not depend on set to one value.

    Weights that are updated in backward have the gradients of full fine-tuning; estimate/model_profile.py adds
    their step.
    """
    tuning = Full() if updates_in_backward(plan.tuning) else plan.tuning
    if isinstance(tuning, Lora):
        tuning = replace(tuning, alpha=tuning.rank, rslora=False, dropout=0.1 if tuning.dropout else 0.0)
    precision = plan.precision if plan.precision is Precision.FP32 else Precision.BF16
    return replace(
        plan,
        tuning=tuning,
        precision=precision,
        optimizer=AdamW(),
        hardware=replace(plan.hardware, gpus_per_node=1, nodes=1),
        sharding=Single(),
        offload=Offload(),
        loss=PlainLoss(),
        recompute=Recompute(blocks=0),
        compile_blocks=False,
        batch=Batch(
            micro_batch_size=1,
            accumulation=2,
            seq_len=min(1024, plan.model.longest_stream or 1024),
            packing=False,
        ),
    )


def _file(stem: str) -> Path:
    return cache_folder() / "traced" / f"{stem}.{_installed_digest()}.json"


@cache
def _installed_digest() -> str:
    return _digest([_CACHED, to_data(installed_libraries())])[:8]


T = TypeVar("T")


def _stored(kind: type[T], file: Path) -> T | None:
    """The stored value; None where there is no file, or an unreadable one: it is made again."""
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
