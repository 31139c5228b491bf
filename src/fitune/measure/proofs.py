"""Proofs on disk (spec/machines/proof.py), a file for each. Without torch: every plan reads them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from fitune.errors import HardwareError
from fitune.files import cache_folder, read_text
from fitune.measure.calibrations import keep, stem_of
from fitune.spec.machines.hardware import Measured
from fitune.spec.machines.proof import Proof, measured_by
from fitune.spec.serial import from_json

CONTRIBUTED = Path(__file__).parents[3] / "results"
"""The repository's folder of results, where this is a checkout of it."""


def proofs_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where proofs are kept, in the user's cache; need not exist yet."""
    return cache_folder(environment) / "proofs"


def measured_on(device: str) -> Measured | None:
    """Returns how far plans on cards of this kind were off, None where none was measured: here, and in the proofs that
    results/ has of others.

    ``device`` is a calibration's key (``device_key``). Raises HardwareError
    for a file that cannot be read: silence would quietly change every plan.
    """
    files = [
        file
        for folder in (proofs_folder(), CONTRIBUTED)
        for file in folder.glob(f"proof-{stem_of(device)}-*.json")
    ]
    return measured_by([proof for proof in map(_read, files) if proof.device == device])


def store_proof(proof: Proof, path: Path | None = None) -> Path:
    """Write the proof whole to ``path``, else to the folder that plans read; earlier ones of the device stay there."""
    if path is None:
        path = proofs_folder() / f"proof-{stem_of(proof.device)}-{re.sub('[^0-9T]', '', proof.date)}.json"
    hint = "name another file with --out, or another folder for all that is kept with FITUNE_CACHE"
    return keep(proof, path, what="the proof", hint=hint)


def _read(path: Path) -> Proof:
    try:
        return from_json(Proof, read_text(path))
    except (OSError, ValueError) as error:
        raise HardwareError(
            f"the proof in {path} cannot be read: {error}",
            hint="remove the file; fitune doctor --prove makes another",
        ) from None
