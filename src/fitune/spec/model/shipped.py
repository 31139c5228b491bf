"""Traced shapes and profiles that come with fitune, for the names of models.json that have no formula.

traced_profiles.zip has one JSON object for each config, by ``config_digest``: its shapes, and a profile for each digest
of a way of training. It is opened when the first such name is planned, and one object of it is read.
`bench/ship_profiles.py` writes it.
"""

import io
import json
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fitune.files import read_bytes
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.model.traced_profile import TracedStep
from fitune.spec.serial import from_data

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
