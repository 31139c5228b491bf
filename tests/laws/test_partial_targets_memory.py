"""Adapters in some kinds of a hybrid's blocks only: the estimate is the rehearsed step, to 1 % of the peak.

Blocks before the first adapted one keep nothing; those behind it hand a gradient on, adapted or not.
"""

from dataclasses import replace

import pytest
from transformers import AutoConfig

from fitune.estimate.model_profile import model_profile
from fitune.estimate.predict import predict_memory
from fitune.models.readers import model_config
from fitune.rehearse.step import trace_plan
from fitune.values.counts import adapted_blocks, untouched_blocks
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.known_models import configs_to_trace
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracing import NOT_SHIPPED
from fitune.values.plan import Batch
from plans import gpu, plan_for
from rehearse.tiny_configs import tensor_peak

COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "vocab_size": 200, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SMALL = {
    "qwen3_5_text": {
        "layer_types": [*["linear_attention"] * 2, "full_attention", *["linear_attention"] * 2],
        "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"]},
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def folder(tmp_path, traces):
    return tmp_path / "model"


def small(folder, model_type):
    AutoConfig.for_model(model_type, **{**COMMON, **SMALL[model_type]}).save_pretrained(folder)
    return load_model_spec(str(folder))


def with_adapters(spec, targets, *, tokens, **choice):
    batch = Batch(micro_batch_size=1, accumulation=1, seq_len=tokens, packing=False)
    plan = plan_for(spec, tuning="lora", targets=targets, **choice)
    return replace(plan, model_path=spec.name, batch=batch)


def check(plan, config):
    trace, _ = trace_plan(plan, config, exact=False)  # whole where blocks differ
    rehearsed = tensor_peak(trace)
    assert predict_memory(plan).tensor_peak_bytes == pytest.approx(rehearsed, rel=0.01)


@pytest.mark.parametrize("recompute", [0, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.slow if "qwen" in name else ()) for name in SMALL],
)
def test_adapters_on_attention_alone(folder, model_type, recompute):
    """Before the first adapted block no gradient goes, and through all behind it products of backward do."""
    spec = small(folder, model_type)
    plan = with_adapters(spec, ATTENTION, tokens=200, recompute=recompute, chunk=64)
    kinds = SMALL[model_type]["layer_types"]
    attending = tuple(n for n, kind in enumerate(kinds) if kind in ("attention", "full_attention"))
    assert adapted_blocks(spec, plan.tuning) == attending
    first = untouched_blocks(spec, plan.tuning)
    assert first == attending[0]
    check(plan, model_config(spec.name))
    shape = BatchShape(tokens=200, supervised_tokens=199, rows=1)
    for block in model_profile(plan, shape).blocks[first + 1 :]:
        assert block.backward.flops > 0.95 * block.forward.flops


def late_targets(spec):
    """Linears that the first block lacks, or the last one."""
    of_first = {m.short_name for m in spec.linears_of(0)}
    return tuple(n for n in spec.adaptable_names if n not in of_first) or spec.adaptable_names[-1:]


def smallest_of_each_type():
    """Of shipped models that are traced, those with the fewest blocks."""
    names = [name for name in configs_to_trace() if name not in NOT_SHIPPED]
    specs = {name: load_model_spec(name, offline=True) for name in names}
    deepest_first = sorted(names, key=lambda name: -specs[name].num_layers)
    return sorted({specs[name].model_type: name for name in deepest_first}.values())


@pytest.mark.weekly
@pytest.mark.parametrize("name", smallest_of_each_type())
def test_every_shipped_architecture(folder, name):
    """Whole models, nothing recomputed, at 700 tokens; where blocks loop over tokens or chunks, at fewer of them."""
    spec = load_model_spec(name, offline=True)
    plan = with_adapters(
        spec,
        late_targets(spec),
        tokens=min(700, 4 * spec.chunk + 96 if spec.chunk else 700),
        chunk=256,
        rank=16,
        precision="bf16",
        hardware=gpu("h100"),
    )
    check(plan, model_config(name))
