"""Row 24: code that a model folder brings or names never runs, whoever answers "y" at standard input."""

import io
import json
import shutil
import sys

import pytest

UNKNOWN_TOKENIZER = {
    "tokenizer_class": "Evil",
    "auto_map": {"AutoTokenizer": ["payload.Evil", "payload.Evil"]},
}
OWN_MODEL = {"AutoConfig": "payload.Evil", "AutoModelForCausalLM": "payload.Evil"}
PAYLOAD = """
open({mark!r}, "w").close()
class Evil: ...
def generate(*_, **__): ...
"""


@pytest.fixture
def attacked(model_folder, tmp_path, monkeypatch):
    """The tiny model with changed JSON and a payload beside it, where "y" waits at standard input."""

    def change(**files):
        folder = tmp_path / "attacked"
        if not folder.exists():
            shutil.copytree(model_folder, folder)
        for name in ("payload.py", "custom_generate/generate.py"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(PAYLOAD.format(mark=str(tmp_path / "ran")))
        for name, values in files.items():
            file = folder / f"{name}.json"
            before = json.loads(file.read_text()) if file.exists() else {}
            file.write_text(json.dumps({**before, **values}))
        return folder

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.syspath_prepend(str(tmp_path / "attacked"))
    return change


@pytest.fixture
def score(call, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 2 plus 2?", "answer": "4"}\n')
    return lambda model: call(
        "score", "--model", model, "--data", rows, "--out", tmp_path / "scored", "--max-new-tokens", 2
    )


REFUSED = {
    "tokenizer": ({"tokenizer_config": UNKNOWN_TOKENIZER}, "tokenizer_config.json: auto_map"),
    "old tokenizer": (
        {"tokenizer_config": {"tokenizer_class": "Evil", "auto_map": ["payload.Evil", None]}},
        "tokenizer_config.json: auto_map",
    ),
    "tokenizer that loads others": (
        {"tokenizer_config": {"tokenizer_class": "RagTokenizer"}}, "tokenizer_class = 'RagTokenizer' is no tokenizer",
    ),
    "tokenizer that is itself": (
        {"tokenizer_config": {"tokenizer_class": "AutoTokenizer"}}, "tokenizer_class = 'AutoTokenizer' is no tokenizer",
    ),
    "trust": ({"tokenizer_config": {"trust_remote_code": True}}, "tokenizer_config.json: trust_remote_code = True"),
    "deep trust": (
        {"generation_config": {"a": [{"trust_remote_code": 1}]}}, "generation_config.json: a[0].trust_remote_code = 1",
    ),
    "generation": ({"generation_config": {"auto_map": OWN_MODEL}}, "generation_config.json: auto_map"),
    "kernel": ({"config": {"attn_implementation": "payload/attention"}}, "config.json: attn_implementation"),
    "experts": (
        {"config": {"text_config": {"_experts_implementation": "sonicmoe"}}},
        "config.json: text_config._experts_implementation",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "words"), REFUSED.values(), ids=REFUSED)
def test_a_folder_that_asks_for_code_is_refused_by_name(
    attacked,
    train,
    score,
    tmp_path,
    files,
    words,
):
    model = attacked(**files)
    for code, out, err in (train(model=model), score(model)):
        assert (code, words in err) == (2, True), err
        assert "[y/N]" not in out + err
    assert not (tmp_path / "ran").exists()
    assert "payload" not in sys.modules


@pytest.mark.parametrize("model_type", ["llama", "evil"])
def test_a_models_own_code_is_never_planned_rehearsed_or_trained(
    attacked, call, train, score, tmp_path, model_type
):
    """transformers has a llama of its own; what the code beside it builds nobody knows, so it is not planned."""
    model = attacked(config={"model_type": model_type, "auto_map": OWN_MODEL})
    words = "model_type = 'evil'" if model_type == "evil" else "auto_map"
    given = ("--model", model, "--gpu", "cpu", "--data", tmp_path / "rows.jsonl")
    for code, _, err in (call("plan", *given), call("rehearse", *given), train(model=model)):
        assert (code, words in err) == (2, True), err
    if model_type == "evil":
        score(model).ends(2, "config.json: ", "asks to run code")
    assert not (tmp_path / "ran").exists()


def test_where_transformers_has_its_own_that_one_is_scored_and_a_note_says_so(attacked, score, tmp_path):
    """Phi-3, Falcon, DeepSeek and others still name the code that transformers adopted."""
    model = attacked(
        config={"auto_map": OWN_MODEL},
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": UNKNOWN_TOKENIZER["auto_map"]},
    )  # fmt: skip
    code, _, err = score(model)
    assert code == 0, err
    assert f"note: {model}/config.json: the code that auto_map names is not run" in err
    assert f"note: {model}/tokenizer_config.json: the code that auto_map names is not run" in err
    assert not (tmp_path / "ran").exists()


def test_an_export_runs_no_code_that_came_into_the_base_later(attacked, call, train, tmp_path):
    assert train(model=attacked())[0] == 0
    attacked(tokenizer_config=UNKNOWN_TOKENIZER)
    call("export", tmp_path / "run").ends(2, "tokenizer_config.json")
    assert not (tmp_path / "ran").exists()
