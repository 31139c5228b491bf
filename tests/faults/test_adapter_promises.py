"""What an adapter's config promises must be in its file, and every field of the config is looked at."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import TARGETS, tiny_base
from faults.adapters import edit_config, edit_weights
from fitune.checkpoint.export import adapter_weights
from fitune.checkpoint.layout import write_adapter
from fitune.errors import CheckpointError
from fitune.models.adapter_file import check_adapter
from fitune.models.adapters import load_adapter

IDS = torch.arange(3, 27).reshape(2, 12)

KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True, "use_dora": True},
    "bias": {"lora_bias": True},
    "some blocks": {"layers_to_transform": [1], "use_dora": True},
    "ranks": {"rank_pattern": {"v_proj": 2, r"layers\.1\.mlp\..*": 3}, "alpha_pattern": {"down_proj": 5}},
    "tables": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "an expression": {"target_modules": r".*\.(?:q_proj|down_proj)"},
    "all": {"target_modules": "all-linear", "exclude_modules": ["k_proj"]},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("promises") / "base"
    tiny_base(folder)
    return folder


def peft_model(base, words):
    """PEFT's own model of these words, with something in every part of it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(
        **{"r": 4, "lora_alpha": 8, "target_modules": list(TARGETS), "task_type": "CAUSAL_LM", **words}
    )
    adapted = get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return adapted.eval()


@pytest.fixture(scope="module")
def adapters(base):
    """An adapter of each kind as PEFT writes it."""
    for kind, words in KINDS.items():
        peft_model(base, words).save_pretrained(base.parent / kind)
        edit_config(base.parent / kind, base_model_name_or_path="base")
    return base.parent


@pytest.fixture
def written(adapters, tmp_path):
    return lambda kind="lora": Path(shutil.copytree(adapters / kind, tmp_path / "adapter"))


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_as_the_model_that_peft_makes_of_it(base, written, kind):
    adapter = written(kind)
    assert check_adapter(adapter, base=base) == ()
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    with torch.no_grad():
        found, expected = loaded(input_ids=IDS).logits, theirs(input_ids=IDS).logits
        assert torch.equal(found, expected)
        assert (
            expected - AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits
        ).abs().max() > 1e-3


# Finding 14 and its class: each key that is promised, left out


def parts(kind):
    found = {
        "dora": ("magnitude",),
        "rslora": ("magnitude",),
        "bias": ("lora_B.bias",),
        "tables": ("embed_tokens", "lm_head"),
    }
    return ("lora_A", "lora_B.weight", *found.get(kind, ()))


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in KINDS for part in parts(kind)])
def test_a_promised_key_that_is_missing_is_named(base, written, kind, part):
    adapter = written(kind)
    name = next(name for name in load_file(adapter / "adapter_model.safetensors") if part in name)
    edit_weights(adapter, lambda weights: {n: t for n, t in weights.items() if n != name})
    module = name.removeprefix("base_model.model.").removesuffix(".weight")
    with pytest.raises(CheckpointError, match=r"1 key:\n.*missing") as refused:
        check_adapter(adapter, base=base)
    assert module in refused.value.message or "modules_to_save" in refused.value.message


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("lora", {"use_dora": True}, r"lora_magnitude_vector: missing, expected \(32,\)"),
        ("dora", {"use_dora": False}, "does not promise it"),
        ("lora", {"lora_bias": True}, r"lora_B\.bias: missing"),
        ("bias", {"lora_bias": False}, r"lora_B\.bias: adapter_config.json does not promise it"),
        ("lora", {"modules_to_save": ["lm_head"]}, r"lm_head.*: missing"),
        ("tables", {"modules_to_save": None}, "does not promise it"),
        ("some blocks", {"layers_to_transform": None}, r"layers\.0.*: missing"),
        ("lora", {"layers_to_transform": [1]}, "does not promise it"),
        ("lora", {"exclude_modules": ["v_proj"]}, "does not promise it"),
        ("lora", {"exclude_modules": ".*v_proj"}, "does not promise it"),
        ("lora", {"rank_pattern": {"v_proj": 3}}, r"v_proj\.lora_A\.weight: \(4, 32\), expected \(3, 32\)"),
        ("lora", {"target_modules": ".*q_proj"}, "does not promise it"),
    ],
)
def test_config_and_file_must_say_the_same(base, written, kind, changes, said):
    adapter = written(kind)
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[:-1], r"expected \(32,\)"),
        (lambda t: t * float("nan"), "NaN or infinite"),
        (lambda t: t.long(), "holds I64"),
    ],
)
def test_magnitudes_have_their_shape_and_are_numbers(base, written, change, said):
    adapter = written("dora")
    edit_weights(
        adapter, lambda weights: {n: change(t) if "magnitude" in n else t for n, t in weights.items()}
    )
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=base)


# Finding 9: every field of adapter_config.json

WRONG = {
    "peft_type": ("LOHA", 5, None),
    "task_type": ("SEQ_CLS", 3),
    "base_model_name_or_path": (5, ["a"]),
    "r": ("8", 0, 2.5, True, None, 10**9),
    "lora_alpha": ("x", None, float("nan"), True),
    "lora_dropout": ("0.1", -0.1, 1.5, float("nan")),
    "target_modules": (5, [], [5], "", {"a": 1}, None),
    "exclude_modules": (5, [5]),
    "layers_to_transform": ("1", -1, [1.5], [-1], [True]),
    "layers_pattern": (5, [5]),
    "rank_pattern": ("x", [4], {"q_proj": "4"}, {"q_proj": 0}, {"": 4}),
    "alpha_pattern": ("x", {"q_proj": "4"}, {"q_proj": float("nan")}),
    "modules_to_save": ("lm_head", [5], ["lm_head|.*"], [""]),
    "fan_in_fan_out": ("no",),
    "use_rslora": (1,),
    "use_dora": (None,),
    "lora_bias": ("yes",),
    "bias": ("all", 5, None),
    "init_lora_weights": ("loftq", 5, None, "pissa_niter_100000"),
    "auto_mapping": ("x", [1]),
    "trainable_token_indices": ([1, 2], {"embed_tokens": [1]}),
    "target_parameters": (["mlp.experts.down_proj"],),
    "layer_replication": ([[0, 1]],),
    "alora_invocation_tokens": ([1],),
    "use_qalora": (True,),
    "megatron_config": ({"a": 1},),
}


@pytest.mark.parametrize("field", WRONG)
def test_a_field_that_cannot_be_is_named(base, written, field):
    adapter = written()
    right = (adapter / "adapter_config.json").read_text()
    for value in WRONG[field]:
        (adapter / "adapter_config.json").write_text(right)
        edit_config(adapter, **{field: value})
        with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {field}\b") as refused:
            check_adapter(adapter, base=base)
        assert refused.value.hint


def test_a_layer_number_needs_names(base, written):
    adapter = written()
    edit_config(adapter, target_modules=".*q_proj", layers_to_transform=[1])
    with pytest.raises(CheckpointError, match="layers_to_transform = .* needs target_modules to be a list"):
        check_adapter(adapter, base=base)


def test_what_is_unknown_and_not_empty_is_said(base, written):
    adapter = written()
    edit_config(adapter, use_something_new=True, something_else=None)
    (said,) = check_adapter(adapter, base=base)
    assert "unknown and ignored: use_something_new" in said


@pytest.mark.parametrize("changes", [{"target_modules": "("}, {"rank_pattern": {"a": 4, "(": 4}}])
def test_what_is_no_expression_is_an_error(base, written, changes):
    adapter = written()
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match="unterminated subpattern"):
        check_adapter(adapter, base=base)


def test_keys_by_the_thousand_are_counted(base, written):
    adapter = written()
    keys = {f"base_model.model.k{i}.lora_A.weight": torch.zeros(1) for i in range(3_000)}
    edit_weights(adapter, lambda weights: {**weights, **keys})
    with pytest.raises(CheckpointError, match="and 2992 more"):
        check_adapter(adapter, base=base)


def test_what_fitune_writes_is_checked_by_the_same_rules(base, tmp_path):
    for kind in ("dora", "ranks", "some blocks"):
        model = peft_model(base, KINDS[kind])
        folder = tmp_path / kind
        folder.mkdir()
        write_adapter(model, folder, adapter_weights(model), "base", in_whole=False)
        assert check_adapter(folder, base=base) == ()
