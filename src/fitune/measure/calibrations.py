"""Calibrations on disk, one JSON file for each device. Without torch: every plan reads them."""

import hashlib
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from fitune.errors import HardwareError
from fitune.files import cache_folder, read_text, write_atomically
from fitune.spec.machines.hardware import Calibration, Gpu
from fitune.spec.machines.proof import Proof
from fitune.spec.serial import from_json, to_json


def calibrations_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where calibrations are kept, in the user's cache; need not exist yet."""
    return cache_folder(environment) / "calibration"


def device_key(
    gpu: Gpu, *, cores: int, processes: int = 1, environment: Mapping[str, str] = os.environ
) -> str:
    """The name that a calibration is stored under: a processor is another device with another number of threads, and
    for several ``processes`` that share it."""
    if not gpu.is_cpu:
        return gpu.name
    beside = f"-{processes}-processes" if processes > 1 else ""
    return f"cpu-{processor_threads(cores, environment)}-threads{beside}"


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


def processor_threads(cores: int, environment: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS as torch reads it, else one for each core."""
    wanted = environment.get("OMP_NUM_THREADS", "").split(",")[0]
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores)


def stored_calibration(device: str) -> Calibration | None:
    """The calibration of a device, or None when it was never measured here.

    Raises HardwareError for a file that cannot be read: silence would quietly change every plan.
    """
    path = _file_of(device)
    try:
        text = read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from None
    try:
        calibration = from_json(Calibration, text)
        _require_sense(calibration)
    except ValueError as error:
        raise _damaged(path, error) from None
    return calibration


def store_calibration(calibration: Calibration) -> Path:
    """Replace what was stored for the device: the file is the old one or the new one, never a part."""
    hint = "free some space, or name another folder with FITUNE_CACHE"
    return keep(calibration, _file_of(calibration.device), what="the calibration", hint=hint)


def keep(value: Calibration | Proof, path: Path, *, what: str, hint: str) -> Path:
    """Write ``value`` whole to ``path``, and return that. Raises HardwareError, with ``what`` in words and ``hint``."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json(value))
    except OSError as error:
        raise HardwareError(
            f"{what} cannot be written to {path}: {error.strerror or error}", hint=hint
        ) from None
    return path


def stem_of(device: str) -> str:
    """The device's key as a part of a file's name."""
    return re.sub(r"[^a-zA-Z0-9._-]+", "-", device)


def _file_of(device: str) -> Path:
    return calibrations_folder() / f"{stem_of(device)}.json"


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
    for numbers in {each.numbers for each in calibration.traffic}:
        sizes = [each.tensor_bytes for each in calibration.traffic if each.numbers == numbers]
        if sizes != sorted(set(sizes)):
            raise ValueError("traffic must go from small tensors to large ones")
    for kind in {(each.numbers, each.head_size) for each in calibration.heads}:
        lengths = [each.tokens for each in calibration.heads if (each.numbers, each.head_size) == kind]
        if lengths != sorted(set(lengths)):
            raise ValueError("heads must go from short rows to long ones")


def _damaged(path: Path, error: Exception) -> HardwareError:
    return HardwareError(
        f"the calibration in {path} cannot be read: {error}",
        hint="measure again with fitune doctor --calibrate, or remove the file",
    )
