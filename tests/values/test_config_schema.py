"""A config.json, or a generation_config.json, with a value that has no meaning: the file and the field are named."""

import dataclasses
import json

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.activations import ACT2FN

from fitune.errors import ModelError
from fitune.models.readers import empty_model, model_config, read_config
from fitune.recipe.strict_yaml import parse_value
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.config_schema import (
    CONFIG_FIELDS,
    check_config,
    check_generation_config,
    check_tokenizer_config,
)
from fitune.values.model.families import FAMILIES
from fitune.values.model.model_config import spec_from_config
from fitune.values.model.traits import ACTIVATIONS, WITH_WEIGHTS
from plans import SMALL_LLAMA

LLAMA = {**SMALL_LLAMA, "num_hidden_layers": 2, "hidden_act": "silu"}

UNUSED_DROPOUTS = {
    ("gpt2", "summary_first_dropout"),
    ("phi3", "embd_pdrop"),
    ("falcon", "attention_dropout"),  # of parallel blocks; used in sequential ones
}
"""In transformers' configs, and not in its language models."""

NONSENSE = {
    "hidden_act": [5, "sil"],
    "rms_norm_eps": ["abc", float("nan"), float("inf"), -1e-5, 10**400, True, [1e-5]],
    "eos_token_id": ["x", 1.5, [1, "2"], [[1]], 2**40, True, {}],
    "bos_token_id": [-2],
    "attention_dropout": [5.0, -0.1, 1.0],
    "resid_pdrop": [2],
    "any_dropout_prob": ["x"],
    "num_hidden_layers": [10**9, -1, 2.0, "2", True],
    "vocab_size": [10**12, 0],
    "max_position_embeddings": [10**30],
    "num_labels": [10**9],
    "initializer_range": [-1],
    "use_cache": ["yes", 1],
    "tie_word_embeddings": [0],
    "layer_types": ["full_attention", [1]],
    "rope_theta": ["1e4", 0],
    "rope_scaling": [5, [], {"type": 5}, {"factor": "2"}, {"long_factor": ["x"]}],
    "rope_parameters": [{"full_attention": {"rope_theta": "x"}}, {"original_max_position_embeddings": 1e9}],
    "text_config": [{"rms_norm_eps": "abc"}],
    "id2label": [[1]],
    "transformers_version": [5],
    "sliding_window": [-1],
}
CASES = [(field, value) for field, values in NONSENSE.items() for value in values]


@pytest.mark.parametrize(("field", "value"), CASES, ids=lambda value: str(value)[:20])
def test_nonsense_is_named_before_anything_is_planned(field, value):
    with pytest.raises(ModelError) as caught:
        spec_from_config({**LLAMA, field: value}, name="mine")
    while isinstance(value, dict) and value:
        field, value = next(iter(value.items()))
    assert f"{field} = " in caught.value.message
    assert "config.json of mine" in caught.value.message
    assert len(caught.value.message) < 700


def config_file(folder, **change):
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    return str(folder)


@pytest.mark.parametrize("architecture", ["olmo", "gpt_neox"])
def test_nonsense_is_named_where_no_plan_came_before(tmp_path, architecture):
    """fitune scores models that it cannot plan."""
    with pytest.raises(
        ModelError, match=r"config\.json: attention_dropout = 5.0 must be a number at least 0 and less"
    ):
        read_config(config_file(tmp_path, model_type=architecture, attention_dropout=5.0))


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": {"rope_type": "abc"}}, {"layer_types": ["full_attention"]}, {"dtype": "load"}],
)
def test_what_transformers_refuses_is_a_model_error(tmp_path, change):
    folder = config_file(tmp_path, model_type="qwen3", head_dim=16, **change)
    with pytest.raises(ModelError, match="config"):
        empty_model(model_config(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_transformers_is_in_the_table(family):
    simple = ("int", "float", "bool")
    missing = [
        field.name
        for field in dataclasses.fields(CONFIG_MAPPING[family])
        if any(kind in str(field.type) for kind in simple)
        and field.name not in CONFIG_FIELDS
        and "dropout" not in field.name
        and not field.name.endswith("_pdrop")
    ]
    assert missing == []


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropout_of_the_config_is_part_of_the_spec(family):
    """Masks take memory: a dropout that nobody reads would make the estimate too small."""
    config = json.loads(CONFIG_MAPPING[family]().to_json_string())
    for name, value in config.items():
        if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, int | float):
            less, more = (spec_from_config({**config, name: p}, name=family) for p in (0.0, 0.25))
            assert (less != more) == ((family, name) not in UNUSED_DROPOUTS), name


def test_the_activations_are_those_of_transformers():
    assert set(ACT2FN) <= set(ACTIVATIONS) | WITH_WEIGHTS


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("no_such", "is no known activation"),
        ("xielu", "has weights of its own"),
        ("prelu", "has weights of its own"),
    ],
)
def test_another_activation_is_refused_beside_the_known_ones(word, why):
    with pytest.raises(ModelError, match=f"hidden_act = '{word}' {why}") as refusal:
        check_config(ConfigFields(values={"hidden_act": word}, where="config.json"), traced=False)
    assert "gelu_new" in str(refusal.value.hint)
    assert word not in str(refusal.value.hint)


def test_a_traced_model_may_name_its_experts_and_have_none():
    """Granite 4.0 writes 0 where its blocks have one dense MLP; a mixture with a formula must have some."""
    none = {"num_local_experts": 0, "num_experts_per_tok": 0}
    check_config(ConfigFields(values=none, where="config.json"), traced=True)
    with pytest.raises(ModelError, match="num_local_experts = 0"):
        check_config(ConfigFields(values=none, where="config.json"), traced=False)


SAMPLING = {
    "bos_token_id": 128000, "eos_token_id": [128001, 128009], "pad_token_id": 0, "do_sample": True, "temperature": 0.6,
    "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.05, "max_length": 4096, "max_new_tokens": 2048,
    "transformers_version": "4.42.3", "cache_implementation": "hybrid", "_from_model_config": True,
}  # fmt: skip
TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>",
    "pad_token": None, "model_max_length": 1000000000000000019884624838656, "padding_side": "left", "legacy": False,
    "additional_special_tokens": ["<a>", {"content": "<b>"}], "add_bos_token": True, "chat_template": "x",
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}}, "sp_model_kwargs": {},
}  # fmt: skip


@pytest.mark.parametrize("values", [SAMPLING, {"temperature": None}, {}])
def test_an_honest_sampling_is_read(values):
    check_generation_config(ConfigFields(values=values, where="generation_config.json"))
    GenerationConfig(**values)


@pytest.mark.parametrize(
    "nonsense",
    [
        "eos_token_id: [null]", "temperature: -1", "top_p: '0.9'", "top_k: 1.5", "do_sample: 1",
        "repetition_penalty: 0", "max_new_tokens: 0", "suppress_tokens: all", "cache_implementation: {}",
    ],
)  # fmt: skip
def test_nonsense_in_a_sampling_is_named(nonsense):
    values = {**SAMPLING, **parse_value(f"{{{nonsense}}}", where="test")}
    with pytest.raises(ModelError, match=rf"generation_config\.json: {nonsense.split(':')[0]} = "):
        check_generation_config(ConfigFields(values=values, where="generation_config.json"))


@pytest.mark.parametrize(
    "nonsense",
    [
        "model_max_length: ''", "model_max_length: -1", "eos_token: 5", "eos_token: {content: null}", "my_token: []",
        "padding_side: up", "add_bos_token: 'yes'", "additional_special_tokens: [5]", "added_tokens_decoder: {'0': 5}",
        "model_input_names: 5", "legacy: 1",
    ],
)  # fmt: skip
def test_nonsense_of_a_tokenizer_is_named(nonsense):
    check_tokenizer_config(ConfigFields(values=TOKENIZER, where="tokenizer_config.json"))
    values = {**TOKENIZER, **parse_value(f"{{{nonsense}}}", where="test")}
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {nonsense.split(':')[0]} = "):
        check_tokenizer_config(ConfigFields(values=values, where="tokenizer_config.json"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rope_scaling: {type: abc}", "rope_scaling: type = 'abc' is not known"),
        ("rope_scaling: {type: linear}", "rope_scaling: factor = None is missing"),
        ("rope_parameters: {full_attention: {rope_type: yarn}}", "full_attention: factor = None is missing"),
        ("rope_scaling: {rope_type: longrope, long_factor: [1.0], short_factor: [1, 1, 1, 1, 1, 1, 1, 1]}",
         "long_factor = [1.0] has 1 factors, and half a head's turned part has 8"),
        ("layer_types: [full_attention]", "for each of 2 layers"),
        ("layer_types: [full_attention, x]", "must name full_attention or sliding_attention"),
        ("model_type: mistral, num_key_value_heads: 4, layer_types: [full_attention, full_attention]", "ministral"),
        ("rope_scaling: {type: dynamic, factor: 2.0}", None),
        ("rope_parameters: {rope_theta: 10000.0, rope_type: default}", None),
        ("rope_scaling: {rope_type: longrope, long_factor: [1, 1, 1, 1, 1, 1, 1, 1.0], short_factor: "
         "[1, 1, 1, 1, 1, 1, 1, 1]}", None),
        ("layer_types: [sliding_attention, full_attention]", None),
    ],
)  # fmt: skip
def test_only_positions_that_can_be_built_are_planned(change, words):
    config = {**LLAMA, **parse_value(f"{{{change}}}", where="test")}
    if words is None:
        spec_from_config(config, name="mine")
        return
    with pytest.raises(ModelError) as caught:
        spec_from_config(config, name="mine")
    assert words in caught.value.message
