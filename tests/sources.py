"""fitune's own modules as syntax trees, read once for all tests that look at them."""

import ast
import gc
from functools import cache
from pathlib import Path

import fitune

ROOT = Path(fitune.__file__).parent


@cache
def trees():
    found = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
    gc.freeze()  # each search for garbage would go through all of these nodes again
    return found
