"""The architecture as a test: who may import whom. docs/architecture.md draws it."""

import ast
from collections import Counter
from functools import cache

from sources import ROOT, trees

MAY_IMPORT: dict[str, set[str]] = {
    "values": set(),
    "recipe": {"values"},
    "estimate": {"values"},
    "planner": {"values", "recipe", "estimate"},
    "records": {"values", "recipe", "estimate"},
    "launch": {"values", "recipe"},
    "track": {"values"},
    "report": {"values", "track"},
    "stores": set(),
    # below this line torch is allowed
    "data": {"values", "recipe", "stores"},
    "models": {"values"},
    "measure": {"values"},
    "engine": {"values"},
    "checkpoint": {"values", "models", "stores"},
    "train": {"values", "stores", "data", "models", "engine", "checkpoint", "measure", "track"},
    "rehearse": {"values", "models", "engine", "train", "measure"},  # measure: one counter of live storages
    "score": {"values", "recipe", "estimate", "data", "models", "measure"},  # as many rows at once as fit
    "demo": {"values", "data"},
    # one use of the program, for the command line and for Python
    "session": {
        "values", "recipe", "stores", "estimate", "planner", "records", "launch", "track", "report", "data", "models",
        "measure", "engine", "checkpoint", "train", "rehearse", "score", "demo",
    },
    "cli": {"session", "values", "recipe", "report"},
}  # fmt: skip
MOST_CLI_LINES = 1280
MOST_MODULES = 20  # in one folder, about 15 is the aim
WITHOUT_TORCH = {"values", "recipe", "stores", "estimate", "planner", "records", "launch", "track", "report"}
OPEN_TO_ALL = {"units", "errors", "files", "credentials", "threads", "child"}
HEAVY = {"torch", "transformers", "peft", "datasets", "accelerate", "numpy", "safetensors"}
FORBIDDEN_NAMES = {"utils", "common", "core", "helpers", "base"}


@cache
def imported_names(path, *, only_at_import):
    """Dotted names a module imports; optionally only those that run when it is imported."""
    names = set()
    for node in _statements(trees()[path], in_functions=not only_at_import):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def _statements(tree, *, in_functions):
    """All statements of a module; expressions, which hold most of its nodes, import nothing."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        if isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            yield node
            yield from _statements(node, in_functions=in_functions)


def room_of(path):
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def test_a_room_imports_only_the_rooms_it_may():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in trees()
        if (room := room_of(path)) not in {"__main__", "__init__"}
        for name in imported_names(path, only_at_import=False)
        if name.startswith("fitune.")
        and name.split(".")[1] not in OPEN_TO_ALL | {room} | MAY_IMPORT.get(room, set())
    ]
    assert not wrong


def test_planning_needs_no_torch():
    wrong = [
        f"{path.relative_to(ROOT)} imports {name} when it is imported"
        for path in trees()
        if room_of(path) in WITHOUT_TORCH | OPEN_TO_ALL | {"cli"}
        for name in imported_names(path, only_at_import=True)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_every_room_is_in_the_table():
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert rooms == set(MAY_IMPORT)


def test_a_folder_can_be_read_at_a_glance():
    modules_of = Counter(path.parent for path in trees() if path.name != "__init__.py")
    assert {str(folder) for folder, count in modules_of.items() if count > MOST_MODULES} == set()


def test_folders_of_a_room_need_each_other_one_way():
    needed = set()
    for path in trees():
        room, *parts = path.relative_to(ROOT).parts
        for name in imported_names(path, only_at_import=False) if len(parts) > 1 else ():
            other = name.split(".")[1:3]
            if other[0:1] == [room] and other[1:] != parts[:1] and (ROOT / room / other[-1]).is_dir():
                needed.add((f"{room}/{parts[0]}", "/".join(other)))
    assert needed
    assert {(one, other) for one, other in needed if (other, one) in needed} == set()


def test_no_room_has_a_name_that_says_nothing():
    assert not {p.stem for p in ROOT.rglob("*") if p.suffix in {"", ".py"}} & FORBIDDEN_NAMES


def test_the_command_line_is_thin():
    """It parses, calls a session and prints."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "cli").glob("*.py"))
    assert lines < MOST_CLI_LINES


def test_a_session_prints_nothing():
    for path, tree in trees(r"print\(").items():
        for node in ast.walk(tree) if room_of(path) == "session" else ():
            is_print = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not is_print, f"{path.name}:{node.lineno} prints"
