"""Row 27 of the fault table: no password and no token in what is printed or saved, by name and by value."""

import json

import pytest

from fitune.credentials import credential_in, without_credentials
from fitune.data.reading.sources import read_rows
from fitune.errors import DataError, FituneError, RecipeError
from fitune.recipe.recipe import parse_recipe
from fitune.session.recipes.reading import read_any_recipe
from fitune.train.failure import traceback_text
from fitune.values.plan import DataSource

SECRET = "Xy7" * 12
WITH_SECRET = [
    f"https://user:{SECRET}@host/data.jsonl",
    f"https://{SECRET}@host/data.jsonl",
    f"s3://key:{SECRET}@bucket/data.jsonl",
    f"hdfs://user:{SECRET}@name:9000/data.jsonl",
    f"https://host/data.jsonl?token={SECRET}",
    f"https://host/data.jsonl?a=b&X-Amz-Signature={SECRET}&c=d",
    f"https://host/data.jsonl?sv=1&sig={SECRET}#500",
    f"s3://bucket/data.jsonl?api_key={SECRET}",
    f"hf_{SECRET}/data",
    f"data/ghp_{SECRET}.jsonl",
    f"https://host/data.jsonl?AWSAccessKeyId={SECRET}",
    f"https://host/data.jsonl?client_secret={SECRET}",
    f"data/github_pat_{SECRET}",
    f"data/glpat-{SECRET}",
    f"data/AIza{SECRET[:35]}",
    f"AccountKey={SECRET}==",
]
WITHOUT = [
    "data.jsonl", "owner/name:config", "s3://bucket/key/token.jsonl", "abfs://container@account.dfs.core.windows.net/a",
    "hdfs://user@name:9000/a", "gs://bucket/a?b=c", "hf_model/data", "a@b:c", "runs/author=me", "data.jsonl#500",
    "https://host/data.jsonl?author=me", "https://host/data.jsonl?design=3", "https://host/a?max_tokens=5&monkey=b",
]  # fmt: skip


@pytest.mark.parametrize("path", WITHOUT)
def test_what_is_no_credential_is_left_alone(path):
    assert credential_in(path) is None
    assert without_credentials(path, environment={}) == path


@pytest.mark.parametrize(
    ("setting", "path"),
    [
        *(("data", path) for path in WITH_SECRET),
        *((setting, WITH_SECRET[0]) for setting in ("eval_data", "model", "chat_template", "output_dir", "resume")),
    ],
)  # fmt: skip
def test_a_recipe_with_a_credential_is_refused_by_name_without_it(setting, path):
    for refuse in (
        lambda: parse_recipe({"model": "m", setting: path}),
        lambda: read_any_recipe(None, settings=["model=m", f"{setting}={path}"]),
    ):
        with pytest.raises(
            RecipeError, match=rf"{setting}.*contains .* keep them in the environment"
        ) as caught:
            refuse()
        assert SECRET not in str(caught.value)


def test_data_of_a_plan_made_in_python_is_refused_too():
    with pytest.raises(DataError, match="contains") as caught:
        list(read_rows(DataSource(path=WITH_SECRET[0])))
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("words", [("train", "--gpu", "cpu"), ("train", "--json"), ("score",)])
def test_a_command_neither_prints_nor_saves_it(call, tmp_path, model_folder, words):
    out = tmp_path / "out"
    ended = call(*words, "--data", WITH_SECRET[0], "--model", model_folder, "--output-dir", out)
    assert ended.code == 2
    assert SECRET not in ended.out + ended.err
    assert not out.exists()


def test_the_path_of_a_token_is_no_secret():
    environment = {"HF_TOKEN_PATH": "/home/me/tokens/hf", "HF_TOKEN": "abcdefghijklmnop"}
    text = "cannot read /home/me/tokens/hf with abcdefghijklmnop"
    assert (
        without_credentials(text, environment=environment) == "cannot read /home/me/tokens/hf with [hidden]"
    )


def test_errors_and_tracebacks_hide_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    error = FituneError(f"the server said: {SECRET} is not known", hint=f"try {SECRET}")
    assert SECRET not in str(error)
    assert SECRET not in json.dumps([error.message, error.hint])
    assert SECRET not in traceback_text(OSError(f"401 for {SECRET}"))
