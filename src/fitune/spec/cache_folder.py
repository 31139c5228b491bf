"""Where fitune keeps what it can make again."""

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """$FITUNE_CACHE, else fitune's folder of $XDG_CACHE_HOME, else of ~/.cache."""
    root = environment.get("FITUNE_CACHE") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "fitune"
    return Path(root).expanduser()
