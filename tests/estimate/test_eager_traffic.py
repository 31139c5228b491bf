"""Operations and bytes between products, counted one by one in fitune's own step, against the formulas."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.estimate.blocks.eager import block_passes
from fitune.measure.device_rates import computes
from fitune.models.weights import compute_dtype
from fitune.rehearse.step import full_stream
from fitune.train.prepare import prepare_loaded
from fitune.values.model.model_config import spec_from_config
from fitune.values.predictions import Phase
from plans import plan_for

TOKENS = 64
SIZES = {
    "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 600, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 40},
    "gemma3_text": {"head_dim": 40},
    "gpt2": {
        "n_embd": 96, "n_head": 6, "n_inner": 224, "n_positions": 512, "num_key_value_heads": 6, "attn_pdrop": 0.0,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"}


class Traffic(TorchDispatchMode):
    """Bytes that elementwise operations read and write, and how many operations there are, by phase."""

    def __init__(self):
        super().__init__()
        self.phase = Phase.FORWARD
        self.bytes = Counter()
        self.operations = Counter()
        self.products = Counter()

    def enter(self, phase):
        self.phase = phase

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if not computes(func) or "attention" in name:
            return out
        if name in PRODUCTS:
            self.products[self.phase] += 1
            return out
        read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.bytes[self.phase] += sum(x.numel() * x.element_size() for x in [*read.values(), *written])
        self.operations[self.phase] += 1
        return out


def counted(family, layers, **choice):
    config = {**SIZES, **FAMILIES[family], "model_type": family, "num_hidden_layers": layers}
    if family == "gpt2":
        config["n_layer"] = layers
    plan = plan_for(spec_from_config(config, name=family), rows=1, seq_len=TOKENS, **choice)
    plan = replace(plan, batch=replace(plan.batch, packing=False))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=compute_dtype(plan.precision)
    )
    prepared = prepare_loaded(model, plan)
    stream = full_stream((TOKENS,))
    stream.input_ids_T.random_(0, 600)
    stream.labels_T.copy_(stream.input_ids_T)
    stream.position_ids_T.copy_(torch.arange(TOKENS))
    with Traffic() as traffic:
        prepared.engine.forward_backward(stream, divisor=TOKENS, enter_phase=traffic.enter)
    return plan, traffic


@pytest.mark.thinned(3)
@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_moves_what_the_formulas_say(family, precision, tuning):
    """One block is what a model of three has more than one of two. Adapters' products are in the formulas' bytes."""
    (_, two), (plan, three) = (
        counted(family, layers, precision=precision, tuning=tuning) for layers in (2, 3)
    )
    forward, backward = block_passes(plan)
    thin = {"full": 0.0, "lora": 1.0}[tuning] * plan.precision.compute_bytes
    ends = sum(
        m.in_features + m.out_features
        for m in plan.model.linears
        if tuning == "lora" and m.name.rsplit(".", 1)[-1] in plan.tuning.targets
    )
    for phase, expected, passes in ((Phase.FORWARD, forward, 1), (Phase.BACKWARD, backward, 2)):
        moved = (three.bytes[phase] - two.bytes[phase]) / TOKENS
        operations = three.operations[phase] - two.operations[phase]
        close = 0.2 if plan.model.num_experts else 0.15
        assert expected.bytes - passes * thin * ends == pytest.approx(moved, rel=close), phase
        assert expected.operations == pytest.approx(operations, rel=0.35), phase
        if not plan.model.num_experts:
            assert expected.products == three.products[phase] - two.products[phase]
