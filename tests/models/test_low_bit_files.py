"""Checkpoints in 4 or 8 bits are read as the 16-bit weights that they stand for."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fitune.errors import ModelError
from fitune.models.weight_files import stored_dtype, stored_tensors
from fitune.values.model.model_config import load_model_spec
from models.tiny_models import load

DRAW = torch.Generator().manual_seed(0)
BLOCK = 48
"""Side of a block of FP8: the last blocks of 128 are cut."""


def as_mxfp4(tensors):
    """Stacks of experts as random 4-bit elements, and as the values that transformers computes from them."""
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors[name].shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, generator=DRAW, dtype=torch.uint8)
        scales = torch.randint(118, 126, shape[:3], generator=DRAW, dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales)
    return packed, plain


def as_fp8(tensors, *, block=BLOCK):
    """Linears in e4m3 with a scale for each block, and block by block times its scale; no ``block``: one for all, and
    one for what goes in, which is for products in FP8."""
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].to(torch.float8_e4m3fn)
        side = block or max(weight.shape)
        rows, columns = (-(-length // side) for length in weight.shape)
        scale = 0.5 + torch.rand((rows, columns), generator=DRAW)
        values = weight.to(torch.float32)
        for row in range(rows):
            for column in range(columns):
                at = (slice(side * row, side * row + side), slice(side * column, side * column + side))
                values[at] *= scale[row, column]
        packed |= {name: weight, f"{name}_scale_inv": scale if block else scale.squeeze()}
        if not block:
            packed[f"{name.removesuffix('weight')}activation_scale"] = torch.tensor(3.0)
        plain[name] = values.to(torch.bfloat16)
    return packed, plain


def as_bitsandbytes(tensors, *, nested, kind):
    functional = pytest.importorskip("bitsandbytes.functional")
    packed, plain = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].to(torch.bfloat16)
        data, state = functional.quantize_4bit(
            weight, quant_type=kind, compress_statistics=nested, blocksize=64
        )
        plain[name] = functional.dequantize_4bit(data, state)
        packed |= {
            name: data,
            **{f"{name}.{role}": value for role, value in state.as_dict(packed=True).items()},
        }
    return packed, plain


WAYS = {
    "mxfp4": ("gpt_oss", {"quant_method": "mxfp4"}, as_mxfp4),
    "fp8": ("llama", {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, as_fp8),
    "fp8, one scale": (
        "llama",
        {"quant_method": "fp8", "weight_block_size": None},
        partial(as_fp8, block=None),
    ),
    **{
        f"{kind}{', nested' * nested}": (
            "llama",
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            partial(as_bitsandbytes, nested=nested, kind=kind),
        )
        for kind in ("nf4", "fp4")
        for nested in (False, True)
    },
}


_SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
_SHAPES = {
    # rows of whole blocks of 64: bitsandbytes unpacks no others right on a CPU
    "llama": {**_SIZES, "hidden_size": 128, "intermediate_size": 192},
    "gpt_oss": {**_SIZES, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4},
}


def folders(at, way):
    """The model in few bits, and the same in bf16."""
    family, settings, quantise = WAYS[way]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **_SHAPES[family]), dtype=torch.bfloat16
    )
    model.save_pretrained(at / "plain")
    packed, plain = quantise(load_file(at / "plain" / "model.safetensors"))
    config = json.loads((at / "plain" / "config.json").read_text())
    (at / "packed").mkdir()
    (at / "packed" / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(packed, at / "packed" / "model.safetensors", metadata={"format": "pt"})
    save_file(plain, at / "plain" / "model.safetensors", metadata={"format": "pt"})
    return at / "packed", at / "plain"


def loaded(folder):
    model = load(folder)
    assert getattr(model.config, "quantization_config", None) is None
    return model.state_dict()


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_those_that_their_library_computes(tmp_path, way):
    packed, plain = folders(tmp_path, way)
    found, wanted = loaded(packed), loaded(plain)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert stored_dtype(packed) is torch.bfloat16
    sizes = [tensor.size_bytes for tensor in stored_tensors(packed).values()]
    assert sum(sizes) < (packed / "model.safetensors").stat().st_size


def test_a_plan_of_them_is_that_of_the_16_bit_model(tmp_path):
    packed, plain = (load_model_spec(str(folder)) for folder in folders(tmp_path, "fp8"))
    assert packed.stored_as == "fp8"
    assert replace(packed, name=plain.name, stored_as="") == plain


def removed(tensors, name):
    del tensors[name]


def cut(tensors, name):
    tensors[name] = tensors[name][:-1].clone()


def swollen(tensors, name):
    tensors[name] = torch.cat([tensors[name], torch.full((1 << 20,), ord(" "), dtype=torch.uint8)])


def doubled(tensors, name):
    tensors[f"{name.removesuffix('nf4')}fp4"] = tensors[name].clone()


def cast(tensors, name):
    """To the other kind of number, with a shape that fits."""
    dtype = torch.int16 if tensors[name].is_floating_point() else torch.float16
    tensors[name] = tensors[name].to(dtype)


STATE = "q_proj.weight.quant_state.bitsandbytes__nf4"
DAMAGED = [
    ("mxfp4", removed, "gate_up_proj_scales", "gate_up_proj_scales is missing"),
    ("mxfp4", cut, "gate_up_proj_scales", "are not of one weight"),
    ("fp8", removed, "q_proj.weight_scale_inv", "weight_scale_inv is missing"),
    ("fp8", cut, "q_proj.weight_scale_inv", "are not of one weight"),
    ("nf4", removed, "q_proj.weight.absmax", "absmax is missing"),
    ("nf4", cut, "q_proj.weight.absmax", "are not of one weight"),
    ("nf4", cut, STATE, "no state of a weight"),
    ("nf4", swollen, STATE, "no state of a weight"),
    ("nf4", doubled, STATE, "belongs to two weights"),
    ("mxfp4", cast, "gate_up_proj_scales", "gate_up_proj_scales holds F16, not U8"),
    ("fp8", cast, "q_proj.weight_scale_inv", "weight_scale_inv holds I16, not F64 or F32"),
    ("nf4", cast, "q_proj.weight", "q_proj.weight holds F16, not U8"),
    ("nf4", cast, "q_proj.weight.absmax", "absmax holds I16, not F64"),
    ("nf4", cast, "q_proj.weight.quant_map", "quant_map holds I16, not F64"),
    ("nf4, nested", cast, "q_proj.weight.absmax", "absmax holds F16, not U8"),
    ("nf4, nested", cast, "q_proj.weight.nested_absmax", "nested_absmax holds I16, not F64"),
    ("nf4, nested", cast, "q_proj.weight.nested_quant_map", "nested_quant_map holds I16, not F64"),
]


@pytest.mark.parametrize(("way", "damage", "part", "message"), DAMAGED)
def test_parts_that_do_not_belong_together_are_named(tmp_path, way, damage, part, message):
    packed, _ = folders(tmp_path, way)
    tensors = load_file(packed / "model.safetensors")
    damage(tensors, next(name for name in tensors if name.endswith(part)))
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        loaded(packed)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"bits": 4},
    ],
)
def test_other_quantisers_are_refused(tmp_path, settings):
    _, plain = folders(tmp_path, "fp8")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(ModelError, match="already quantised"):
        load_model_spec(str(plain))
    with pytest.raises(ModelError, match="already quantised"):
        loaded(plain)
