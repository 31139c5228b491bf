"""One file calls the libraries' readers of strangers' files, and has nobody to ask."""

import ast
from functools import cache
from pathlib import Path

import pytest

from fitune.errors import ModelError
from fitune.models import readers
from sources import ROOT, trees

FILE = Path(readers.__file__)

READERS = {
    "from_pretrained", "from_config", "for_model", "snapshot_download", "load_custom_generate", "pipeline",
    "get_class_from_dynamic_module",
}  # fmt: skip


@cache
def modules():
    """The nodes of every module whose text has a word that any of these tests looks for."""
    words = "|".join((*READERS, "Auto", "push_to_hub", "trust_remote_code"))
    return {path: list(ast.walk(tree)) for path, tree in trees(words).items()}


def named(nodes):
    """Every name and attribute of a module that reads what others wrote, or runs it."""
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    found |= {node.id for node in nodes if isinstance(node, ast.Name)}
    found |= {a.name for n in nodes if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names}
    return {name for name in found if name in READERS or name.startswith("Auto")}


def calls(nodes, *names):
    return [
        node
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
    ]


def test_no_other_file_calls_them():
    found = {
        str(path.relative_to(ROOT)): names
        for path, nodes in modules().items()
        if path != FILE and (names := named(nodes))
    }
    assert found == {}


def test_no_library_pushes_by_itself():
    for path, nodes in modules().items():
        assert not calls(nodes, "push_to_hub"), path


def test_code_is_trusted_nowhere():
    """Every call that could trust it says that it does not; GenerationConfig and PEFT have nothing to say it to."""
    for path, nodes in modules().items():
        for node in nodes:
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path
    for call in calls(modules()[FILE], "from_pretrained", "from_config"):
        owner = ast.unparse(call.func)
        if not owner.startswith(("GenerationConfig.", "PeftModel.")):
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert said.get("trust_remote_code") == "False", owner  # None asks on standard input


def test_torch_and_pickle_read_nothing():
    """But what data/tokenising.py sends through a pipe to a process that it has just started itself."""
    for path in modules().keys() - {ROOT / "data" / "tokenising.py"}:
        nodes = modules()[path]
        assert not {"pickle", "joblib", "dill", "cloudpickle"} & {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }, path
        assert not [call for call in calls(nodes, "load") if ast.unparse(call.func) == "torch.load"], path
        allowed = [n for n in nodes if isinstance(n, ast.keyword) and n.arg == "allow_pickle"]
        assert all(ast.unparse(keyword.value) == "False" for keyword in allowed), path


def test_an_architecture_of_ones_own_has_a_next_step():
    with pytest.raises(ModelError, match="model_type = 'of-my-own'") as refused:
        readers.text_config({"model_type": "of-my-own"})
    assert "no model's own code" in refused.value.hint
    assert "model_type into config.json" in refused.value.hint
