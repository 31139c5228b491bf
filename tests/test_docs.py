"""Files, tests, pages and headings that README and docs/ name are there; recipes on a page are taken."""

import ast
import re
from pathlib import Path

import pytest

from fitune.values.run_directory import FILES, FOLDERS, LOGS
from sources import trees

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
def test_what_a_page_names_is_there(page):
    missing = []
    for name, test in NAMED.findall(page.read_text(encoding="utf-8")):
        found = [place for place in (ROOT / name, ROOT / "src" / "fitune" / name) if place.is_file()]
        if not found and name not in MADE:
            missing.append(name)
        elif test and f"def {test}(" not in found[0].read_text(encoding="utf-8"):
            missing.append(f"{name}::{test}")
    assert not missing


def test_no_message_names_a_page_that_an_installed_wheel_lacks():
    named = []
    for path, tree in trees(r"docs|\.md").items():
        for node in ast.walk(tree):
            docstring = isinstance(node, ast.Expr)
            texts = [] if docstring else ast.iter_child_nodes(node)
            named += [
                f"{path.name}: {text.value}"
                for text in texts
                if isinstance(text, ast.Constant) and re.search(r"docs/[\w-]+\.md", str(text.value))
            ]
    assert not named


def test_operations_lists_what_a_run_writes():
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    assert [name for name in (*FILES, *FOLDERS, LOGS) if f"`{name}" not in page] == []


LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")


def anchors(page):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"], ids=lambda page: page.name
)
def test_links_of_a_page_lead_somewhere(page):
    broken = []
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        if "://" not in target and (not there.exists() or (anchor and anchor not in anchors(there))):
            broken.append(f"{target}#{anchor}")
    assert not broken


def test_the_recipes_of_other_trainers_on_a_page_are_converted_and_planned(tmp_path, monkeypatch, call):
    """docs/migrating.md: each as its file is named in its first line, converted, and planned as ours."""
    recipes = re.findall(
        r"```yaml\n# (\w+\.yaml)\n(.*?)```", (ROOT / "docs/migrating.md").read_text(), re.DOTALL
    )
    assert {name for name, _ in recipes} == {
        "axolotl.yaml",
        "llama_factory.yaml",
        "trl.yaml",
        "torchtune.yaml",
    }
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"instruction": "add 1 and 1", "output": "2"}\n' * 40)
    for name, text in recipes:
        Path(name).write_text(text)
        Path("ours.yaml").write_text(call("convert", name).ends(0))
        call("plan", "ours.yaml", "--gpu", "4090").ends(0, "FITS")
