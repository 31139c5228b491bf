"""Files and tests that README and docs/ name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = sorted(path.name for path in (ROOT / "src" / "fitune").iterdir() if (path / "__init__.py").is_file())
NAMED = re.compile(
    rf"(?<![\w/.])((?:src/fitune|tests|bench|results|recipes|docs|examples|{'|'.join(ROOMS)})"
    r"/[\w/\-]+\.(?:py|md|json|yaml|svg|ipynb))(?:::(\w+))?"
)
MADE = {"demo/train.json", "demo/test.json"}
"""By `fitune demo`."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    missing = []
    for name, test in NAMED.findall(page.read_text(encoding="utf-8")):
        found = [place for place in (ROOT / name, ROOT / "src" / "fitune" / name) if place.is_file()]
        if not found and name not in MADE:
            missing.append(name)
        elif test and f"def {test}(" not in found[0].read_text(encoding="utf-8"):
            missing.append(f"{name}::{test}")
    assert not missing
