"""fitune's own modules as syntax trees, read once for all tests that look at them."""

import ast
from functools import cache
from pathlib import Path

import fitune

ROOT = Path(fitune.__file__).parent


@cache
def trees():
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("*.py"))}
