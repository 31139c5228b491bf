"""Rows 21 to 24 of the fault table: foreign adapters and model folders, looked at before anything is loaded."""

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from checkpoint.tiny_export import TARGETS, byte_tokenizer, tiny_base, with_adapter
from fitune.checkpoint.export import adapter_weights, export_merged
from fitune.checkpoint.layout import write_adapter
from fitune.errors import CheckpointError
from fitune.models.adapter_check import check_adapter
from fitune.models.adapter_shapes import linear_shapes
from fitune.models.remote_code import refuse_pickle, refuse_remote_code
from fitune.spec.model.model_spec import Linear, ModelSpec

SPEC = ModelSpec(
    name="org/tiny", model_type="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4,
    num_kv_heads=2, head_dim=8, vocab_size=260, max_seq_len=2048, tied_embeddings=False, mlp_type="gated",
    norm_type="rms", norms_per_block=2,
    linears=(
        Linear(name="self_attn.q_proj", in_features=32, out_features=32),
        Linear(name="self_attn.k_proj", in_features=32, out_features=16),
        Linear(name="self_attn.v_proj", in_features=32, out_features=16),
        Linear(name="self_attn.o_proj", in_features=32, out_features=32),
        Linear(name="mlp.gate_proj", in_features=32, out_features=48, part="mlp"),
        Linear(name="mlp.up_proj", in_features=32, out_features=48, part="mlp"),
        Linear(name="mlp.down_proj", in_features=48, out_features=32, part="mlp"),
    ),
)  # fmt: skip

WIDER_DOWN = Linear(name="mlp.down_proj", in_features=96, out_features=32)


def write(model, folder):
    folder.mkdir(exist_ok=True)
    write_adapter(model, folder, adapter_weights(model), "org/tiny", in_whole=False)
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return linear_shapes(tiny_base(tmp_path_factory.mktemp("base")))


@pytest.fixture
def adapter(tmp_path):
    return write(with_adapter(tiny_base(tmp_path / "base")), tmp_path / "adapter")


def edit_config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(adapter, change):
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file(change(weights), adapter / "adapter_model.safetensors")


def key(weights, part):
    return next(name for name in weights if part in name)


# Row 21


def test_a_matching_adapter_passes_on_spec_and_on_shapes(adapter, shapes):
    assert check_adapter(adapter, base=SPEC) == ()
    assert check_adapter(adapter, base=shapes) == ()


def test_linear_shapes_of_the_model_are_those_of_the_spec(shapes):
    in_block = {
        f"model.layers.{i}.{m.name}": (m.in_features, m.out_features) for i in range(2) for m in SPEC.linears
    }
    assert shapes == {**in_block, "lm_head": (32, 260)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1, 2]", "expected an object, found list"),
        ('{"peft_type": "LORA"}', "r is missing"),
        ('{"peft_type": "LORA", "r": "8"}', "r = '8'"),
        ('{"peft_type": "LOHA", "r": 8}', "fitune takes LORA adapters"),
        ("{", "not JSON"),
    ],
)
def test_a_config_that_is_no_adapters(adapter, content, said):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        check_adapter(adapter, base=SPEC)


@pytest.mark.parametrize("rank", [2, 8])
def test_wrong_rank(adapter, rank):
    edit_config(adapter, r=rank)
    with pytest.raises(
        CheckpointError, match=rf"12 keys:\n(.|\n)*q_proj.lora_A: \(4, 32\), expected \({rank}, 32\)"
    ):
        check_adapter(adapter, base=SPEC)


def test_a_rank_pattern_is_understood(tmp_path):
    config = LoraConfig(r=4, target_modules=list(TARGETS), rank_pattern={"v_proj": 2}, task_type="CAUSAL_LM")
    adapter = write(get_peft_model(tiny_base(tmp_path / "base"), config), tmp_path / "adapter")
    assert check_adapter(adapter, base=SPEC)[0].startswith("the adapter changes nothing")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_layers": 1}, "layers.1.mlp.down_proj: the base has no such linear"),
        ({"num_layers": 3}, "layers.2.self_attn.q_proj: missing"),
        ({"linears": SPEC.linears[:-1]}, "mlp.down_proj: the base has no such linear"),
        ({"linears": (*SPEC.linears[:-1], WIDER_DOWN)}, r"expected \(4, 96\)"),
    ],
)  # fmt: skip
def test_wrong_base(adapter, change, reason):
    other = ModelSpec(**{name: getattr(SPEC, name) for name in SPEC.__dataclass_fields__} | change)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        check_adapter(adapter, base=other)
    assert "'org/tiny'" in refusal.value.hint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: {n: t for n, t in w.items() if n != key(w, "lora_B")}, "lora_B: missing"),
        (lambda w: {n: t for n, t in w.items() if "1.self_attn.q_proj" not in n}, r"1\.self_attn\.q_proj: missing"),
        (lambda w: {f"transformer.{n}": t for n, t in w.items()}, "the base has no such linear"),
        (lambda w: {**w, "surprise.weight": torch.ones(2)}, r"surprise\.weight: unknown key"),
        (lambda w: {}, "no lora_A and lora_B at all"),
        (lambda w: {n: t.flatten() for n, t in w.items()}, r"\(128,\), expected \(4, 32\)"),
    ],
)  # fmt: skip
def test_wrong_keys(adapter, shapes, change, reason):
    edit_weights(adapter, change)
    with pytest.raises(CheckpointError, match=reason):
        check_adapter(adapter, base=shapes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite(adapter, value):
    def spoil(weights):
        weights[key(weights, "v_proj.lora_B")][1, 1] = value
        return weights

    edit_weights(adapter, spoil)
    with pytest.raises(CheckpointError, match=r"1 key:\n.*v_proj\.lora_B\.weight: NaN or infinite"):
        check_adapter(adapter, base=SPEC)


def test_a_zero_delta_is_a_warning(tmp_path):
    adapter = write(with_adapter(tiny_base(tmp_path / "base"), zero=True), tmp_path / "adapter")
    assert check_adapter(adapter, base=SPEC) == ("the adapter changes nothing: every B matrix is zero",)


def test_another_base_of_the_same_shapes_is_a_warning(adapter):
    edit_config(adapter, base_model_name_or_path="org/other")
    assert "trained on 'org/other'" in check_adapter(adapter, base=SPEC)[0]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", '{"peft_type": "LORA"}', '{"peft_type": "IA3", "r": 4}']
)
def test_a_config_that_is_none(adapter, content):
    (adapter / "adapter_config.json").write_text(content)
    with pytest.raises(CheckpointError, match="adapter_config.json"):
        check_adapter(adapter, base=SPEC)


@pytest.mark.parametrize("content", [b"", b"\x00" * 8, b"\xff" * 64])
def test_weights_that_are_no_safetensors(adapter, content):
    (adapter / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: damaged"):
        check_adapter(adapter, base=SPEC)


def test_a_long_list_of_keys_is_cut_and_counted(adapter):
    edit_config(adapter, r=16)
    with pytest.raises(CheckpointError, match="and 4 more"):
        check_adapter(adapter, base=SPEC)


# Row 22


@pytest.mark.parametrize("mark", ["config", "weights"])
def test_a_quantised_base_is_not_merged_into(tmp_path, mark):
    model = with_adapter(tiny_base(tmp_path / "base"))
    base = model.get_base_model()
    if mark == "config":
        base.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    else:
        layer = base.model.layers[0].self_attn.q_proj.base_layer
        layer.weight = torch.nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(CheckpointError, match="into a quantised base") as refusal:
        export_merged(model, byte_tokenizer(), tmp_path / "out", chat_template="", card="")
    assert "16-bit base" in refusal.value.hint
    assert not (tmp_path / "out").exists()


# Row 23


class Payload:
    """Unpickling this leaves a file behind."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl"]
)
def test_pickled_weights_are_refused_and_not_run(tmp_path, adapter, name):
    trace = tmp_path / "ran"
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / name).write_bytes(pickle.dumps(Payload(trace)))
    for refuse in (refuse_pickle, lambda folder: check_adapter(folder, base=SPEC)):
        with pytest.raises(CheckpointError, match=rf"pickled \({name}\)"):
            refuse(adapter)
    assert not trace.exists()
    pickle.loads((adapter / name).read_bytes())
    assert trace.exists()  # the payload would have worked


def test_a_pickle_beside_safetensors_is_left_alone(tmp_path, adapter):
    (adapter / "training_args.bin").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    assert check_adapter(adapter, base=SPEC) == ()
    assert not (tmp_path / "ran").exists()


def test_no_weights_at_all(adapter):
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors: missing"):
        check_adapter(adapter, base=SPEC)


# Row 24


@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoModel": "payload.Evil"}},
        {"auto_mapping": {"base_model_class": "Evil", "parent_library": "payload"}},
        {"trust_remote_code": True},
    ],
)
def test_an_adapter_that_brings_code_is_refused_and_nothing_imported(adapter, monkeypatch, changes):
    monkeypatch.syspath_prepend(str(adapter))
    (adapter / "payload.py").write_text("class Evil: ...")
    edit_config(adapter, **changes)
    with pytest.raises(CheckpointError, match="asks to run code"):
        check_adapter(adapter, base=SPEC)
    assert "payload" not in sys.modules


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"model_type": "homemade", "auto_map": {"AutoModelForCausalLM": "payload.Evil"}}, True),
        ({"auto_map": {"AutoModelForCausalLM": "payload.Evil"}}, True),
        ({"model_type": "llama", "trust_remote_code": True}, True),
        ({"model_type": "falcon", "auto_map": {"AutoModelForCausalLM": "modeling_falcon.Falcon"}}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_a_model_that_only_remote_code_can_load_is_refused(tmp_path, config, refused):
    (tmp_path / "config.json").write_text(json.dumps(config))
    if refused:
        with pytest.raises(CheckpointError, match=r"config\.json: .* asks to run code"):
            refuse_remote_code(tmp_path)
    else:
        refuse_remote_code(tmp_path)
