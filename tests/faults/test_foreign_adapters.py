"""Rows 21 to 24 of the fault table: a foreign adapter is looked at before anything of it is loaded. What its config
promises must be in its file, every field of the config is checked, and neither pickles nor code run."""

import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import TARGETS, tiny_base, with_adapter
from faults.adapters import Payload, edit_config, edit_weights
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


def as_fitune_writes(model, folder):
    folder.mkdir()
    write_adapter(model, folder, adapter_weights(model), "base", in_whole=False)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_it_loads_as_the_model_that_peft_makes_of_it(base, written, kind):
    adapter = written(kind)
    assert check_adapter(adapter, base=base) == ()
    assert check_adapter(adapter, base=AutoModelForCausalLM.from_pretrained(base)) == ()
    loaded = load_adapter(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(adapter)).eval()
    with torch.no_grad():
        found, expected = loaded(input_ids=IDS).logits, theirs(input_ids=IDS).logits
        assert torch.equal(found, expected)
        assert (
            expected - AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits
        ).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["dora", "ranks", "some blocks"])
def test_what_fitune_writes_passes_by_the_same_rules(base, tmp_path, kind):
    assert check_adapter(as_fitune_writes(peft_model(base, KINDS[kind]), tmp_path / kind), base=base) == ()


# What does not fit is named, key by key


PARTS = {
    "dora": ("magnitude",),
    "rslora": ("magnitude",),
    "bias": ("lora_B.bias",),
    "tables": ("embed_tokens", "lm_head"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_promised_key_that_is_missing_is_named(base, written, kind):
    adapter = written(kind)
    for part in ("lora_A", "lora_B.weight", *PARTS.get(kind, ())):
        shutil.rmtree(adapter)
        written(kind)
        name = next(name for name in load_file(adapter / "adapter_model.safetensors") if part in name)
        edit_weights(adapter, lambda weights, left=name: {n: t for n, t in weights.items() if n != left})
        module = name.removeprefix("base_model.model.").removesuffix(".weight")
        with pytest.raises(CheckpointError, match=r"1 key:\n.*missing") as refused:
            check_adapter(adapter, base=base)
        assert module in refused.value.message or "modules_to_save" in refused.value.message


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("lora", {"r": 8}, r"12 keys:\n(.|\n)*q_proj.lora_A.weight: \(4, 32\), expected \(8, 32\)"),
        ("lora", {"use_dora": True}, r"lora_magnitude_vector: missing, expected \(32,\)"),
        ("dora", {"use_dora": False}, "does not promise it"),
        ("lora", {"lora_bias": True}, r"lora_B\.bias: missing"),
        ("bias", {"lora_bias": False}, r"lora_B\.bias: adapter_config.json does not promise it"),
        ("lora", {"modules_to_save": ["lm_head"]}, r"lm_head.*: missing"),
        ("tables", {"modules_to_save": None}, "does not promise it"),
        ("some blocks", {"layers_to_transform": None}, r"layers\.0.*: missing"),
        ("lora", {"layers_to_transform": [1]}, "does not promise it"),
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


def with_each(part, change):
    """Weights of which every one that has ``part`` in its name is changed."""
    return lambda weights: {n: change(t) if part in n else t for n, t in weights.items()}


MANY = {f"base_model.model.k{i}.lora_A.weight": torch.zeros(1) for i in range(3_000)}


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("lora", lambda w: {f"transformer.{n}": t for n, t in w.items()}, "the base has no such linear"),
        ("lora", lambda w: {**w, "surprise.weight": torch.ones(2)}, r"surprise\.weight: does not begin with"),
        ("lora", lambda w: {}, "no lora_A and lora_B at all"),
        ("lora", lambda w: {**w, **MANY}, "and 2992 more"),
        ("lora", with_each("1.self_attn.v_proj.lora_B", lambda t: t / 0), r"1 key:\n.*v_proj.*: NaN or infinite"),
        ("dora", with_each("magnitude", lambda t: t[:-1]), r"expected \(32,\)"),
        ("dora", with_each("magnitude", lambda t: t * float("nan")), "NaN or infinite"),
        ("dora", with_each("magnitude", lambda t: t.long()), "holds I64"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_named(base, written, kind, change, said):
    adapter = written(kind)
    edit_weights(adapter, change)
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 1}, r"layers\.1\.mlp\.down_proj.*: the base has no such linear"),
        ({"num_hidden_layers": 3}, r"layers\.2\.\S*: missing, expected \(4, "),
        ({"model_type": "gpt2", "n_embd": 32}, "the base has no such linear"),
        ({"intermediate_size": 96}, r"expected \(4, 96\)"),
    ],
)
def test_a_base_that_it_was_not_trained_on_is_refused_with_the_one_it_names(
    base, written, tmp_path, change, reason
):
    adapter = written()
    config = json.loads((base / "config.json").read_text()) | change
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps(config))
    for named, hint in (("org/tiny", "'org/tiny'"), (None, "take it with the base it was trained on, or")):
        edit_config(adapter, base_model_name_or_path=named)
        with pytest.raises(CheckpointError, match=reason) as refusal:
            check_adapter(adapter, base=tmp_path / "other")
        assert hint in refusal.value.hint


def test_what_fits_and_may_not_be_meant_is_a_warning(base, written, tmp_path):
    adapter = written()
    edit_config(adapter, base_model_name_or_path="org/other", use_something_new=True, something_else=None)
    unknown, other = check_adapter(adapter, base=base)
    assert unknown.endswith("unknown and ignored: use_something_new")
    assert "trained on 'org/other'" in other
    zero = as_fitune_writes(with_adapter(tiny_base(tmp_path / "base"), zero=True), tmp_path / "zero")
    assert check_adapter(zero, base=base) == ("the adapter changes nothing: every B matrix is zero",)


# Every field of adapter_config.json

WRONG = {
    "peft_type": ("LOHA", None),
    "task_type": ("SEQ_CLS", 3),
    "base_model_name_or_path": (5,),
    "r": ("8", 0, True, None, 10**9),
    "lora_alpha": ("x", None, float("nan")),
    "lora_dropout": ("0.1", -0.1, 1.5, float("nan")),
    "target_modules": (5, [], [5], "", None),
    "exclude_modules": ([5],),
    "layers_to_transform": ("1", -1, [-1]),
    "layers_pattern": ([5],),
    "rank_pattern": ("x", {"q_proj": 0}, {"": 4}),
    "alpha_pattern": ({"q_proj": "4"}, {"q_proj": float("nan")}),
    "modules_to_save": ("lm_head", ["lm_head|.*"], [""]),
    "fan_in_fan_out": ("no",),
    "use_rslora": (1,),
    "use_dora": (None,),
    "lora_bias": ("yes",),
    "bias": ("all", None),
    "init_lora_weights": ("loftq", None, "pissa_niter_100000"),
    "auto_mapping": ([1],),
    "trainable_token_indices": ([1, 2],),
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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target_modules": ".*q", "layers_to_transform": [1]}, "layers_to_transform = .* needs target_modules"),
        ({"target_modules": "("}, "unterminated subpattern"),
        ({"rank_pattern": {"a": 4, "(": 4}}, "unterminated subpattern"),
    ],
)  # fmt: skip
def test_fields_that_select_nothing_are_refused(base, written, changes, said):
    adapter = written()
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=base)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("adapter_config.json", b"[1, 2]", "expected an object, found list"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "r is missing"),
        ("adapter_config.json", b"{", "not JSON"),
        ("adapter_config.json", None, r"no adapter_config\.json"),
        ("adapter_model.safetensors", b"\xff" * 64, "damaged"),
        ("adapter_model.safetensors", None, "missing"),
    ],
)
def test_a_file_that_is_none_or_not_there_is_named(base, written, name, content, said):
    file = written() / name
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as refused:
        check_adapter(file.parent, base=base)
    assert name in refused.value.message


# No code runs


@pytest.mark.parametrize("name", ["adapter_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl"])
def test_pickled_weights_are_refused_and_not_run(base, written, tmp_path, name):
    adapter, trace = written(), tmp_path / "ran"
    (adapter / name).write_bytes(pickle.dumps(Payload(trace)))
    assert check_adapter(adapter, base=base) == ()  # beside safetensors it is left alone
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"pickled \({name}\)"):
        check_adapter(adapter, base=base)
    assert not trace.exists()
    pickle.loads((adapter / name).read_bytes())
    assert trace.exists()  # the payload would have worked


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModel": "payload.Evil"}},
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "payload"}},
        {"trust_remote_code": True},
    ],
)
def test_an_adapter_that_brings_code_is_refused_and_nothing_imported(base, written, monkeypatch, changes):
    adapter = written()
    monkeypatch.syspath_prepend(str(adapter))
    (adapter / "payload.py").write_text("class Evil: ...")
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match="asks to run code"):
        check_adapter(adapter, base=base)
    assert "payload" not in sys.modules
