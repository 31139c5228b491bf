"""Model folders that are not what they should be: one readable line, never a traceback, never a pickle."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from faults.adapters import Payload
from fitune.errors import ModelError
from fitune.models.low_bit.quantised import count_weights, elements
from fitune.models.tokens import load_tokenizer, require_rows
from fitune.values.plan import Dense, Nf4
from models.tiny_models import load, tiny_model


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_weights_come_in_the_dtype_asked_for(folder):
    model = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(model.lm_head.weight, tiny_model().lm_head.weight.bfloat16())


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights \(\*\.safetensors\)"):
        load(folder)


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_are_refused_and_not_run(folder, tmp_path, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Payload(tmp_path / "exploded")))
    with pytest.raises(ModelError, match="pickled"):
        load(folder)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("base", [Dense(), Nf4()], ids=["dense", "packed"])
def test_a_missing_tensor_is_named(folder, base):
    """No index says that it is there."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing in model\.safetensors: model\.layers\.1\.mlp\.up_proj"):
        load(folder, base=base)


def test_no_tokenizer(folder):
    with pytest.raises(ModelError, match="no tokenizer"):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("content", ["{ not json", '{"added_tokens": [3]}'])
def test_a_damaged_tokenizer(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded"):
        load_tokenizer(str(folder))


def test_the_first_id_without_a_row_is_refused():
    require_rows("model", largest_id=9, rows=10)
    with pytest.raises(ModelError, match="ids up to 10, and the embedding has 10 rows"):
        require_rows("model", largest_id=10, rows=10)


def test_a_largest_length_that_is_no_number_is_named(model_folder, tmp_path):
    """transformers takes it and ends in a TypeError at the first text."""
    folder = shutil.copytree(model_folder, tmp_path / "copy")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": ""}')
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: model_max_length = '' must be a number"):
        load_tokenizer(str(folder))


def test_a_flag_of_a_tokenizer_that_is_a_text_is_named(tmp_path):
    """transformers makes the text a special token of its own, which the table has no row for."""
    (tmp_path / "vocab.json").write_text('{"<s>": 0, "</s>": 1, "a": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    words = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    for flag, starts in ((False, []), (True, [0])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**words, "add_bos_token": flag}))
        assert load_tokenizer(str(tmp_path))("a")["input_ids"] == [*starts, 2]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**words, "add_bos_token": "false"}))
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: add_bos_token = 'false' must be true or false"
    ):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 9999}, r"num_hidden_layers = 9,999, and the weights are \d+ tensors"),
        ({"vocab_size": 900_000_000}, r"describes 57,600,0\d\d,\d\d\d weights, and the files hold"),
    ],
)
def test_a_model_that_only_the_config_knows_takes_no_memory(folder, change, words):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_a_sampling_that_only_transformers_refuses_names_its_file(folder):
    (folder / "generation_config.json").write_text('{"cache_implementation": "foo"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: cannot be read: Invalid `cache_impl"):
        load(folder)


def test_weights_that_deepspeed_divides_count_whole():
    """It leaves an empty parameter, with the number of elements beside it."""
    model = torch.nn.Linear(4, 3, bias=False)
    model.weight = torch.nn.Parameter(torch.empty(0))
    model.weight.ds_numel = 12
    assert count_weights(model) == elements(model.weight) == 12
