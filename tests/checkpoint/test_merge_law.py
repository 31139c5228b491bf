"""A merge is judged by its weights: W + scaling · B A within one rounding; and by logits, with experts fixed."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from checkpoint.tiny_export import into, with_random_b
from fitune.checkpoint import export, parity
from fitune.checkpoint.export import export_merged
from fitune.checkpoint.layout import unverified
from fitune.checkpoint.merge import WeightChange, changes_of, is_merged, merged, without_layers
from fitune.errors import CheckpointError
from fitune.measure.memory import LiveTensors
from models.tiny_models import tiny_model

EXPERTS = {"mixtral": {"num_local_experts": 8}, "qwen3_moe": {"num_experts": 8}}
TARGETS = ["q_proj", "v_proj", "o_proj"]
ATTENTION = {"gpt2": ["c_attn", "attn.c_proj"]}


def adapted(family, *, dtype=torch.bfloat16, folder=None, **words):
    """A tiny model whose adapter moves every logit; read from ``folder`` where the export is to be reloaded."""
    base = tiny_model(family, vocab_size=260, **EXPERTS.get(family, {})).to(dtype)
    if folder is not None:
        base.save_pretrained(folder)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    config = LoraConfig(
        r=4, target_modules=ATTENTION.get(family, TARGETS), task_type="CAUSAL_LM",
        fan_in_fan_out=family == "gpt2", **words,
    )  # fmt: skip
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    return with_random_b(model)


def base_weights(model):
    state = model.get_base_model().state_dict()
    return {without_layers(name): tensor for name, tensor in state.items() if ".lora_" not in name}


def merged_weights(model, dtype):
    base = base_weights(model)
    return {name: merged(base[name], change, dtype)[0] for name, change in changes_of(model).items()}


def is_right(model, weights, dtype):
    base, changes = base_weights(model), changes_of(model)
    assert changes.keys() == weights.keys()
    return {name: is_merged(base[name], change, weights[name]) for name, change in changes.items()}


VARIANTS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "alpha": {"lora_alpha": 64, "rank_pattern": {"v_proj": 2}},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["llama", "gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_every_merged_weight_is_within_one_rounding(variant, family, dtype):
    for trained in (torch.float32, dtype):
        model = adapted(family, dtype=trained, **VARIANTS[variant])
        assert all(is_right(model, merged_weights(model, dtype), dtype).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_one_element_two_roundings_off_breaks_the_law(variant, dtype):
    model = adapted("llama", dtype=dtype, **VARIANTS[variant])
    name = "model.layers.1.self_attn.v_proj.weight"
    weights = merged_weights(model, dtype)
    matrix = weights[name] = weights[name].clone()
    place = matrix.abs().argmax()
    steps = 2 if dtype is torch.bfloat16 else 64  # in fp32 the sum itself is rounded, too
    matrix.view(-1)[place] *= 1 + steps * torch.finfo(dtype).eps
    assert [n for n, right in is_right(model, weights, dtype).items() if not right] == [name]


def test_the_law_holds_a_few_rows_at_a_time():
    """Whole matrices in fp64 took twelve times as long as the merge, and other ranks wait for it."""
    torch.manual_seed(0)
    weight = torch.randn(1024, 512).bfloat16()
    change = WeightChange(
        a=torch.randn(4, 512),
        b=torch.randn(1024, 4),
        scaling=2.0,
        magnitude=torch.rand(1024) + 1,
        transposed=False,
    )
    made, _, _ = merged(weight, change, torch.bfloat16)
    counted = LiveTensors([])
    with counted:
        assert is_merged(weight, change, made)
    assert max(counted.peaks.values()) < weight.nbytes + made.nbytes + 2**20
    made[1000, 3] *= 1.02
    assert not is_merged(weight, change, made)
    made[1000, 3] = torch.inf
    assert not is_merged(weight, change, made)


def forgotten(weight, change, dtype):
    return weight, 1.0, 0.0


def twice_as_much(weight, change, dtype):
    return merged(weight, replace(change, scaling=2 * change.scaling), dtype)


@pytest.mark.parametrize("family", EXPERTS)
def test_a_16_bit_merge_of_a_mixture_of_experts_is_accepted(family, tmp_path):
    """Near-tied routers send tokens elsewhere after one rounding: not the merge is wrong then."""
    model = adapted(family, folder=tmp_path / "base")
    ids, found = torch.arange(3, 30)[None], []

    def card_of(reloaded):
        found.append(reloaded(input_ids=ids).logits)
        return ""

    difference, warnings = export_merged(model, into(tmp_path / "merged"), card_of=card_of)
    assert difference is not None
    assert warnings == ()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    torch.testing.assert_close(found[0], again(input_ids=ids).logits, rtol=0, atol=0.05)


@pytest.mark.parametrize("family", EXPERTS)
@pytest.mark.parametrize("merge", [forgotten, twice_as_much])
def test_a_wrong_merge_of_a_mixture_of_experts_is_refused(family, merge, tmp_path, monkeypatch):
    model = adapted(family, folder=tmp_path / "base")
    monkeypatch.setattr(export, "merged", merge)
    with pytest.raises(CheckpointError, match="is not W"):
        export_merged(model, into(tmp_path / "merged"))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_routers_that_cannot_be_fixed_leave_the_verdict_to_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("fitune.checkpoint.parity._chooses", lambda output: False)
    model = adapted("mixtral", folder=tmp_path / "base")
    difference, warnings = export_merged(model, into(tmp_path / "merged"))
    assert difference is None
    assert "logits are not compared" in warnings[0]


# Out of memory while verifying


def no_memory(*_words, **_named):
    raise RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_copy_that_has_no_room_leaves_the_files_to_be_compared(family, tmp_path, monkeypatch):
    model = adapted(family, folder=tmp_path / "base")
    monkeypatch.setattr(export, "whole_model", no_memory)
    _, warnings = export_merged(model, into(tmp_path / "merged"))
    assert "not verified by reloading" in warnings[0]
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    monkeypatch.setattr(export, "merged", forgotten)
    with pytest.raises(CheckpointError, match="is not W"):
        export_merged(model, into(tmp_path / "wrong"))


def test_what_is_secured_outlives_its_verification(tmp_path, monkeypatch):
    """Whatever ends it: a refusal, a second Ctrl-C, the machine."""
    model = adapted("llama", folder=tmp_path / "base")
    words = {"into": into(tmp_path / "adapter", secure=True), "base": str(tmp_path / "base")}
    kept = unverified(tmp_path / "adapter")

    def interrupted(*_words, **_named):
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(export, "verify_export", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export.export_adapter(model, **words)
    assert (kept / "adapter_model.safetensors").is_file()
    with monkeypatch.context() as refused:
        refused.setattr(parity, "TOLERANCE", dict.fromkeys((torch.bfloat16,), -1.0))
        with pytest.raises(CheckpointError, match="what was trained is kept in .*adapter-unverified"):
            export.export_adapter(model, **words)
    assert (kept / "adapter_config.json").is_file()
    assert not (tmp_path / "adapter").exists()
    export.export_adapter(model, **words)
    assert not kept.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
