"""Measurements of devices in the user's cache: the calibration of each, and the proofs of what plans did on a card.
Without torch: every plan reads them."""

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from fitune.errors import HardwareError
from fitune.files import cache_folder, read_text, write_atomically
from fitune.values.machines.hardware import Calibration, Gpu, Measured
from fitune.values.serial import from_json, to_json


def calibrations_folder() -> Path:
    """Where calibrations are kept, in the user's cache; need not exist yet."""
    return cache_folder() / "calibration"


def device_key(gpu: Gpu, *, cores: int, processes: int = 1) -> str:
    """The name that a calibration is stored under: a processor is another device with another number of threads
    (OMP_NUM_THREADS as torch reads it, else one for each core), and for several ``processes`` that share it."""
    if not gpu.is_cpu:
        return gpu.name
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    threads = int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores)
    beside = f"-{processes}-processes" if processes > 1 else ""
    return f"cpu-{threads}-threads{beside}"


def quick_key(device: str, *, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The name of what was measured in a hurry before a training: of this processor alone, other machines may share the
    folder."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = next((line for line in lines if line.lower().startswith(("model name", "cpu part"))), "")
    kind = f"{platform.machine()} {platform.processor()} {named.partition(':')[2].strip()}"
    return f"{device}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}-quick"


def stored_calibration(device: str) -> Calibration | None:
    """The calibration of a device, or None when it was never measured here.

    Raises HardwareError for a file that cannot be read: silence would quietly change every plan.
    """
    path = _file_of(device)
    try:
        calibration = from_json(Calibration, read_text(path))
        _require_sense(calibration)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"the calibration in {path} cannot be read: {error}",
            hint="measure again with fitune doctor --calibrate, or remove the file",
        ) from None
    return calibration


def _require_sense(calibration: Calibration) -> None:
    """Rates that a device can have: an edited or foreign file must not divide by zero later."""
    positive = [
        *(rate.flops for rate in calibration.products),
        *(rate.flops for rate in calibration.attention),
        *(each.bandwidth for each in calibration.traffic),
        calibration.cpu_adam,
        *(value for each in calibration.heads for value in (each.forward_seconds, each.backward_seconds)),
        *(each.head_size for each in calibration.heads),
        *(each.tokens for each in calibration.heads),
        *(each.seconds for each in calibration.logits),
    ]
    if not calibration.products or not calibration.attention or not calibration.traffic:
        raise ValueError("products, attention and traffic may not be empty")
    if any(not value > 0 for value in (*positive, *(each.tensor_bytes for each in calibration.traffic))):
        raise ValueError("rates must be above 0")


def store_calibration(calibration: Calibration) -> Path:
    """Replace what was stored for the device: the file is the old one or the new one, never a part."""
    hint = "free some space, or name another folder with FITUNE_CACHE"
    return _keep(calibration, _file_of(calibration.device), what="the calibration", hint=hint)


def _file_of(device: str) -> Path:
    return calibrations_folder() / f"{_stem_of(device)}.json"


MOST_MEMORY_ERROR = 0.03
"""Share of its prediction by which a measured peak may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCheck:
    """One comparison: its figures, and whether they are within the tolerance."""

    name: str
    passed: bool | None
    """None: it could not run, or its figures are told and not judged."""
    figures: dict[str, float] = field(default_factory=dict)
    why: str = ""
    """The fault, or the reason why it did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvedPlan:
    """One plan's step on the card, beside its prediction; ``fitune records check`` reads it as a row."""

    id: str
    predicted: int
    """Peak bytes of tensors."""
    measured: int
    reserved_predicted: int
    """Bytes of the device in all: tensors, the allocator's slack, libraries."""
    reserved: int
    """Bytes that torch's allocator reserved, with the driver's context; 0 on a processor."""
    predicted_s: float
    """Seconds of a step."""
    measured_s: float
    tokens: int
    """Tokens of a step."""

    @property
    def passed(self) -> bool:
        """True if memory is as predicted; speed is told and not judged."""
        return abs(self.measured / self.predicted - 1) <= MOST_MEMORY_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """All checks of one card on one day."""

    device: str
    """The name that calibrations of its kind have too."""
    card: str
    """A digest of the card's own number: two proofs of one card count once."""
    date: str
    """YYYY-MM-DDThh:mm:ss."""
    gpu: str
    """The name that the driver gives."""
    capability: tuple[int, int]
    memory_bytes: int
    versions: dict[str, str]
    checks: tuple[ProofCheck, ...]
    rows: tuple[ProvedPlan, ...]

    @property
    def failed(self) -> tuple[ProofCheck | ProvedPlan, ...]:
        """Checks and plans that did not come out as they should."""
        everything: tuple[ProofCheck | ProvedPlan, ...] = (*self.checks, *self.rows)
        return tuple(one for one in everything if one.passed is False)


CONTRIBUTED = Path(__file__).parents[3] / "results"
"""The repository's folder of results, where this is a checkout of it."""


def proofs_folder() -> Path:
    """Where proofs are kept, in the user's cache; need not exist yet."""
    return cache_folder() / "proofs"


def measured_on(device: str) -> Measured | None:
    """Returns how far plans on cards of this kind were off, None where none was measured: here, and in the proofs that
    results/ has of others.

    ``device`` is a calibration's key (``device_key``). Raises HardwareError
    for a file that cannot be read: silence would quietly change every plan.
    """
    files = [
        file
        for folder in (proofs_folder(), CONTRIBUTED)
        for file in folder.glob(f"proof-{_stem_of(device)}-*.json")
    ]
    return measured_by([proof for proof in map(_read_proof, files) if proof.device == device])


def _read_proof(path: Path) -> Proof:
    try:
        return from_json(Proof, read_text(path))
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"the proof in {path} cannot be read: {error}",
            hint="remove the file; fitune doctor --prove makes another",
        ) from None


def measured_by(proofs: Sequence[Proof]) -> Measured | None:
    """The errors of memory and speed that the newest proof of each card measured; None where no plan was measured.

    Memory is the largest |measured / predicted − 1| of all plans, speed the median of measured / predicted − 1.
    """
    newest = {proof.card: proof for proof in sorted(proofs, key=lambda proof: proof.date) if proof.rows}
    rows = [row for proof in newest.values() for row in proof.rows]
    if not rows:
        return None
    return Measured(
        cards=len(newest),
        memory_error=max(abs(row.measured / row.predicted - 1) for row in rows),
        speed_error=median(row.predicted_s / row.measured_s for row in rows) - 1,
    )


def store_proof(proof: Proof, path: Path | None = None) -> Path:
    """Write the proof whole to ``path``, else to the folder that plans read; earlier ones of the device stay there."""
    if path is None:
        path = proofs_folder() / f"proof-{_stem_of(proof.device)}-{re.sub('[^0-9T]', '', proof.date)}.json"
    hint = "name another file with --out, or another folder for all that is kept with FITUNE_CACHE"
    return _keep(proof, path, what="the proof", hint=hint)


def _keep(value: Calibration | Proof, path: Path, *, what: str, hint: str) -> Path:
    """Write ``value`` whole to ``path``, and return that. Raises HardwareError, with ``what`` in words and ``hint``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json(value))
    except OSError as error:
        raise HardwareError(
            f"{what} cannot be written to {path}: {error.strerror or error}", hint=hint
        ) from None
    return path


def _stem_of(device: str) -> str:
    """The device's key as a part of a file's name."""
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", device)
