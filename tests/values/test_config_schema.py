"""A config.json with a value that has no meaning: the file and the field are named."""

import json

import pytest
from transformers import CONFIG_MAPPING
from transformers.activations import ACT2FN

from fitune.errors import ModelError
from fitune.models.readers import empty_model, model_config, read_config
from fitune.recipe.strict_yaml import parse_value
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.config_schema import check_config
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
    "attention_dropout": [5.0, -0.1, 1.0],
    "resid_pdrop": [2],
    "any_dropout_prob": ["x"],
    "num_hidden_layers": [10**9, -1, 2.0, "2", True],
    "vocab_size": [10**12, 0],
    "max_position_embeddings": [10**30],
    "num_labels": [10**9],
    "tie_word_embeddings": [0],
    "layer_types": ["full_attention", [1]],
    "rope_scaling": [{"type": 5}, {"type": ["yarn"]}],
    "rope_parameters": [{"full_attention": {"rope_type": "x"}}],
    "text_config": [{"attention_dropout": "abc"}],
    "use_bidirectional_attention": [True],
    "transformers_weights": ["other.safetensors"],
    "quantization_config": [5],
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


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("attention_dropout", 5.0, r"attention_dropout = 5.0 must be a number at least 0 and less"),
        ("num_hidden_layers", 10**9, "num_hidden_layers = 1000000000 is more than any model has"),
    ],
)
def test_nonsense_is_named_where_no_plan_came_before(tmp_path, field, value, why):
    """fitune scores models that it cannot plan, and traces others."""
    with pytest.raises(ModelError, match=rf"config\.json: {why}"):
        read_config(config_file(tmp_path, model_type="olmo", **{field: value}))


@pytest.mark.parametrize(
    "change",
    [{"rope_parameters": {"rope_type": "abc"}}, {"dtype": "load"}],
)
def test_what_transformers_refuses_is_a_model_error(tmp_path, change):
    folder = config_file(tmp_path, model_type="qwen3", head_dim=16, **change)
    with pytest.raises(ModelError, match="config"):
        empty_model(model_config(folder))


@pytest.mark.parametrize("change", [{"rms_norm_eps": "abc"}, {"eos_token_id": [[1]]}])
def test_fields_that_no_shape_needs_are_checked_by_transformers(tmp_path, change):
    (name,) = change
    with pytest.raises(ModelError, match=rf"config\.json: cannot be read: .*'{name}'"):
        read_config(config_file(tmp_path, **change))


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
        ("prelu", "has weights of its own"),
    ],
)
def test_another_activation_is_refused_beside_the_known_ones(word, why):
    with pytest.raises(ModelError, match=f"hidden_act = '{word}' {why}") as refusal:
        check_config(ConfigFields(values={"hidden_act": word}, where="config.json"), traced=False)
    assert "gelu_new" in str(refusal.value.hint)
    assert word not in str(refusal.value.hint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("rope_scaling: {type: abc}", "rope_scaling: type = 'abc' is not known"),
        ("rope_scaling: {type: linear}", "rope_scaling: factor = None is missing"),
        ("rope_parameters: {full_attention: {rope_type: yarn}}", "full_attention: factor = None is missing"),
        ("rope_scaling: {rope_type: longrope, long_factor: [1.0], short_factor: [1, 1, 1, 1, 1, 1, 1, 1]}",
         "long_factor = [1.0] must be 8 factors"),
        ("layer_types: [full_attention]", "for each of 2 layers"),
        ("layer_types: [full_attention, x]", "must name full_attention or sliding_attention"),
        ("model_type: mistral, num_key_value_heads: 4, layer_types: [full_attention, full_attention]", "ministral"),
        ("rope_scaling: {type: dynamic, factor: 2.0}", None),
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
