"""From a config.json to a ModelSpec: what is read, where it is looked for, what is refused."""

import json
from dataclasses import replace

import pytest
from huggingface_hub import constants, errors

from fitune.errors import ModelError, RecipeError
from fitune.recipe.strict_yaml import parse_value
from fitune.recipe.targets import resolve_targets
from fitune.values.model import model_config
from fitune.values.model.config_schema import dropout_of
from fitune.values.model.families import FAMILIES
from fitune.values.model.known_models import (
    find_known_model,
    known_model_names,
    names_with_formulas,
    text_model_like,
)
from fitune.values.model.model_config import load_model_spec, spec_from_config
from fitune.values.model.model_spec import NO_DROPOUT, Dropout
from plans import SMALL_LLAMA, known


def config_of(name):
    return find_known_model(name).config


def read(config, change="", **different):
    """The spec of a config with other fields, which are written as in its file."""
    return spec_from_config(
        {**config, **parse_value(f"{{{change}}}", where="test"), **different}, name="mine"
    )


def write_config(folder, config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


FALCON_7B, MOE, MIXTRAL = map(config_of, ("falcon-7b", "qwen3-30b-a3b", "mixtral-8x7b"))


def test_the_table_is_large_and_every_entry_reads():
    names = names_with_formulas()
    assert len(names) >= 150
    for name in names:
        assert load_model_spec(name).name == name
    families = {find_known_model(name).config["model_type"] for name in names}
    assert families == set(FAMILIES)
    assert len(known_model_names()) >= 210


@pytest.mark.parametrize(
    ("copy", "model", "stored_as"),
    [
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "meta-llama/Llama-3.2-1B-Instruct", "bitsandbytes"),
        ("Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-8B", "FP8"),
        ("unsloth/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", ""),
    ],
)
def test_copies_have_the_shapes_of_the_model(copy, model, stored_as):
    assert load_model_spec(copy) == replace(load_model_spec(model), name=copy, stored_as=stored_as)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-AWQ", "somebody/Llama-3.1-8B-Instruct"])
def test_copies_that_cannot_be_read_are_not_known(name):
    assert find_known_model(name) is None


def test_the_file_itself_names_its_folder(tmp_path):
    folder = write_config(tmp_path / "model", SMALL_LLAMA)
    assert load_model_spec(str(folder / "config.json")) == load_model_spec(str(folder))


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("llama-2-7b", "meta-llama/Llama-2-7b-hf"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.1"),
        ("gemma-3-4b", "google/gemma-3-4b-pt"),
        ("nemotron-nano-9b-v2", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
        ("gpt2", "gpt2"),
    ],
)
def test_short_names(short, name):
    assert load_model_spec(short).name == name


QWEN = config_of("qwen2.5-7b")
WINDOWS = "use_sliding_window: true, sliding_window: 4096, max_window_layers: 20"


def test_which_blocks_have_the_window():
    """As transformers' config classes fill in layer_types: Qwen's later blocks, all of Gemma's but some."""
    assert known("gemma-2-2b").full_attention_layers == tuple(range(1, 26, 2))
    assert known("gemma-3-1b").full_attention_layers == (5, 11, 17, 23)
    assert read(QWEN, "sliding_window: 131072").sliding_window == 0
    qwen = read(QWEN, WINDOWS)
    assert qwen.full_attention_layers == tuple(range(20))
    assert (qwen.has_window(19), qwen.has_window(20)) == (False, True)
    kinds = ["sliding_attention", *["full_attention"] * 27]
    assert read(QWEN, WINDOWS, layer_types=kinds).full_attention_layers == tuple(range(1, 28))
    with pytest.raises(ModelError, match="layer_types"):
        read(QWEN, WINDOWS, layer_types=kinds[:-1])


@pytest.mark.parametrize(
    ("change", "capped"), [("", True), ("attn_logit_softcapping: null, final_logit_softcapping: null", False)]
)
def test_soft_caps_are_what_the_config_says(change, capped):
    """null switches a cap off; where nothing is said the class decides."""
    gemma = read(config_of("gemma-2-2b"), change)
    assert (gemma.caps_scores, gemma.caps_logits) == (capped, capped)


@pytest.mark.parametrize(
    ("name", "change", "dropout"),
    [
        ("gpt2", "", Dropout(attention=0.1, attention_output=0.1, mlp_output=0.1, embedding=0.1)),
        ("llama-3.1-8b", "", NO_DROPOUT),
        ("falcon-7b", "attention_dropout: 0.2, hidden_dropout: 0.3", Dropout(mlp_output=0.3)),
        ("falcon-7b", "attention_dropout: 0.2, hidden_dropout: 0.3, parallel_attn: false",
         Dropout(attention_output=0.2, mlp_output=0.3)),
        ("phi-2", "resid_pdrop: 0.1, embd_pdrop: 0.05", Dropout(attention_output=0.1, mlp_output=0.1, embedding=0.05)),
    ],
)  # fmt: skip
def test_dropout_is_what_the_config_says(name, change, dropout):
    """GPT-2's class drops out where nothing is said; Falcon never drops attention's probabilities."""
    assert read(config_of(name), change).dropout == dropout


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ({"dropout": 0.1, "layerdrop": 0.3}, Dropout(attention_output=0.1, mlp_output=0.1)),
        ({"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "activation_dropout": 0.3},
         Dropout(attention=0.2, attention_output=0.1, mlp_output=0.3)),
        ({"embed_dropout": 0.1, "resid_dropout": 0.2, "classifier_dropout": 0.5},
         Dropout(attention_output=0.2, mlp_output=0.2, embedding=0.1)),
        ({"attn_pdrop": 0.1, "router_jitter_noise": 0.01, "hidden_size": 7}, Dropout(attention=0.1)),
    ],
)  # fmt: skip
def test_a_traced_model_has_its_dropout_by_any_name(rates, found):
    assert dropout_of(rates) == found


def test_gemma3_is_its_text_part():
    """google/gemma-3-4b-pt as it is on the Hub: what equals the class's defaults is left out."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    assert spec_from_config(whole, name="google/gemma-3-4b-pt") == load_model_spec("google/gemma-3-4b-pt")


def test_experts_are_not_adaptable():
    spec = load_model_spec("qwen3-30b-a3b")
    assert spec.adaptable_names == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert spec.intermediate_size == 768
    with pytest.raises(RecipeError, match="'down_proj' is a fused parameter in transformers"):
        resolve_targets(spec, ["down_proj"])


def test_a_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path / "gpt2", SMALL_LLAMA)
    spec = load_model_spec("gpt2")
    assert (spec.name, spec.model_type, spec.dtype, spec.num_kv_heads) == ("gpt2", "llama", "float32", 2)


def test_the_cache_is_read(tmp_path, monkeypatch):
    """The layout of a Hugging Face cache, written by hand."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--llama-mine"
    write_config(repository / "snapshots" / ("a" * 40), SMALL_LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert load_model_spec("someone/llama-mine", offline=True).hidden_size == 64


def test_offline_names_the_switch(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="not in the Hugging Face cache, and the Hub is switched off"):
        load_model_spec("someone/unheard-of")


def test_a_hub_that_does_not_answer_is_an_error_at_once(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ModelError, match=r"http://127.0.0.1:1 does not answer"):
        load_model_spec("someone/unheard-of", offline=False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Qwen/Qwen3-4B-Instruct-2508", "did you mean 'Qwen/Qwen3-4B-Instruct-2507'?"),
        ("Qwen3-14B-Instruct", "did you mean 'qwen3-14b'?"),
        ("lama-3.1-8b", "did you mean 'llama-3.1-8b'?"),
        ("llama3.1:8b", "did you mean 'llama-3.1-8b-instruct'?"),
        ("qwen3-coder", "did you mean 'qwen3-coder-30b-a3b-instruct'?"),
        ("Llama-3.2-3B-Instruct-Q4_K_M.gguf", "llama-3.2-3b-instruct in 16 bits; tuning: qlora packs"),
        ("gemma3n:e4b", "did you mean 'gemma-3n-e4b-it'?"),
        ("state-spaces/mamba-2.8b", "did you mean 'mamba-2.8b'?"),
        ("openai/gpt-4o", "a Hub name"),
        ("", "has no config.json"),
        ("./nowhere", "no such folder"),
        ("https://example.com/model", "is not known"),
        ("an--owner/model", "is not known"),  # names that the Hub's client refuses to ask for
        ("owner/model.git", "is not known"),
        (f"owner/{'m' * 97}", "is not known"),
    ],
)
def test_unknown_models(name, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_model_spec(name, offline=True)
    assert words in str(caught.value)


def test_folders_that_are_no_model(tmp_path):
    """The command for a run in a folder with a space can be pasted."""
    folder = tmp_path / "my run"
    folder.mkdir()

    def refusal(path=folder):
        with pytest.raises(ModelError) as caught:
            load_model_spec(str(path))
        return str(caught.value)

    assert "the folder has no config.json" in refusal()
    (folder / "plan.json").write_text("{}")
    assert "is the directory of a run, not a model" in refusal()
    assert f"fitune export '{folder}' --as merged" in refusal()
    (folder / "adapter_config.json").write_text("{}")
    assert "is an adapter, not a model" in refusal()
    assert "is a file" in refusal(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON: line 1"),
        ('{"hidden_size": 32, "hidden_size": 64}', "the key 'hidden_size' is there twice"),
        ("{}", "model_type is missing"),
        ('{"model_type": "nobodys"}', "model_type = 'nobodys': "),
        ('{"model_type": 7}', "model_type = 7 is not supported"),
        ('{"model_type": "gemma3"}', "text_config = None must be the config of the language model"),
    ],
)
def test_a_config_that_is_none(tmp_path, text, words):
    folder = write_config(tmp_path / "model", text)
    with pytest.raises(ModelError) as caught:
        load_model_spec(str(folder))
    assert words in str(caught.value)
    assert str(folder / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        (SMALL_LLAMA, "hidden_size: null", "hidden_size is missing"),
        (SMALL_LLAMA, "intermediate_size: 96.5", "intermediate_size = 96.5 must be"),
        (SMALL_LLAMA, "num_attention_heads: 5, num_key_value_heads: 5", "64 is not a multiple of num_attention"),
        (SMALL_LLAMA, "num_key_value_heads: 3", "num_attention_heads = 4 is not a multiple of num_key_value_heads = 3"),
        (SMALL_LLAMA, "torch_dtype: int8", "torch_dtype = 'int8' is not supported"),
        (SMALL_LLAMA, "architectures: [LlamaForSequenceClassification]", "is no causal language model"),
        (SMALL_LLAMA, "is_encoder_decoder: true", "decoder-only"),
        (SMALL_LLAMA, "quantization_config: {bits: 4}", "already quantised"),
        ({}, "model_type: gemma3, text_config: {}, quantization_config: {quant_method: gptq}", "quantised by gptq"),
        (SMALL_LLAMA, "auto_map: {AutoModelForCausalLM: modeling_llama.LlamaForCausalLM}", "brings its own model code"),
        (SMALL_LLAMA, "trust_remote_code: true", "is not for the model itself to say"),
        (FALCON_7B, "auto_map: {AutoModelForCausalLM: modeling_mine.Mine}", "brings its own model code"),
        (FALCON_7B, "alibi: true", "alibi = True is not supported"),
        (FALCON_7B, "num_ln_in_parallel_attn: 2", "num_ln_in_parallel_attn = 2 must be 1 or 2"),
        (MOE, "num_experts: null", "num_local_experts is missing"),
        (MOE, "num_experts_per_tok: 129", "num_experts_per_tok = 129 is more than the 128 experts"),
        (MOE, "mlp_only_layers: [0]", "mixes dense and sparse blocks"),
        (MOE, "output_router_logits: true, router_aux_loss_coef: 0.02", "(router_aux_loss_coef = 0.02)"),
        (MIXTRAL, "output_router_logits: true", "output_router_logits = True adds a load-balancing loss"),
    ],
)  # fmt: skip
def test_an_impossible_field_is_named(config, change, words):
    with pytest.raises(ModelError) as caught:
        read(config, change)
    assert words in str(caught.value)
    assert "config.json of mine" in str(caught.value)


@pytest.mark.parametrize(
    "change", ["output_router_logits: false", "output_router_logits: true, router_aux_loss_coef: 0.0"]
)
def test_router_logits_are_accepted_where_they_add_no_loss(change):
    assert read(MOE, change) == read(MOE)


def test_remote_code_that_transformers_adopted_is_not_run_and_not_refused():
    """tiiuae/falcon-7b still carries its auto_map; transformers has the class of that name."""
    remote = {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM",
    }
    config = {**FALCON_7B, "architectures": ["FalconForCausalLM"], "auto_map": remote}
    assert spec_from_config(config, name="tiiuae/falcon-7b") == load_model_spec("tiiuae/falcon-7b")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (errors.GatedRepoError, "is gated"),
        (errors.RepositoryNotFoundError, "the Hub has no such model"),
        (ConnectionError, "could not be downloaded"),
    ],
)
def test_gated_and_missing_models_are_told_apart(kind, words, monkeypatch):
    """The Hub's answers, without the Hub: huggingface_hub raises what the status codes mean."""

    def download(*_, **__):
        raise kind.__new__(kind)

    monkeypatch.setattr(model_config, "answers", lambda url: True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(ModelError, match=words):
        load_model_spec("someone/unheard-of", offline=False)


def test_text_models_of_a_vision_models_size():
    assert text_model_like(QWEN) == "Qwen/Qwen2.5-7B"
    assert text_model_like({**QWEN, "hidden_size": 7}) is None


def test_only_rates_of_dropout_are_held_to_be_rates():
    """Other fields have "drop" in their names: policies and switches."""
    read(SMALL_LLAMA, "token_drop_policy: probs, drop_tokens: true")
