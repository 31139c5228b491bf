"""Experts in few bits: each matrix as if it were alone, transformers' own experts over the dequantised weights."""

import copy
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from fitune.estimate.parameters import stored_bytes
from fitune.measure.memory import LiveTensors
from fitune.models import experts as ours
from fitune.models.experts import STACKS, is_experts
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.low_bit.quantised import PackedWeight, packed_linear, packed_stack
from fitune.values.plan import Hqq, Nf4

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")

BASES = [Nf4(), Nf4(double_quant=False), Hqq(bits=4), Hqq(bits=3), Hqq(bits=2, group_size=16)]
EXPERTS, CHOSEN, HIDDEN, WIDTH, TOKENS = 6, 2, 32, 64, 40


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 64, 128), (3, 96, 320)], ids=["even", "half a block of scales"])
def test_each_matrix_is_packed_as_if_it_were_alone(base, dtype, shape):
    torch.manual_seed(0)
    stack = torch.randn(shape).mul(torch.tensor([1.0, 30.0, 0.1])[:, None, None]).to(dtype)
    packed = packed_stack(stack, base)
    whole = packed.dequantised()
    assert whole.shape == stack.shape
    assert whole.dtype == dtype
    for matrix, found in zip(stack, whole, strict=True):
        alone = packed_linear(nn.Linear(shape[2], shape[1], bias=False, dtype=dtype), matrix, base)
        assert torch.equal(found, alone.dequantised())
    held = sum(t.nbytes for t in (*packed.parameters(), *packed.buffers()))
    assert held == stored_bytes(stack.numel(), base, element_bytes=dtype.itemsize, copies=3)


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_a_stack_of_more_weights_than_the_kernel_counts_is_the_same(double, monkeypatch):
    stack, base = torch.randn(3, 96, 320, dtype=torch.bfloat16), Nf4(double_quant=double)
    whole = packed_stack(stack, base)
    monkeypatch.setattr("fitune.models.low_bit.nf4.MOST_COUNTED", 96 * 320)
    one_by_one = packed_stack(stack, base)
    for name, tensor in whole.state_dict().items():
        assert one_by_one.state_dict()[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name
    found = one_by_one.dequantised()
    monkeypatch.undo()
    assert torch.equal(found, whole.dequantised())


def of_family(family):
    words = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": WIDTH}
    kind, words = {
        "qwen3_moe": (Qwen3MoeExperts, {**words, "num_experts": EXPERTS}),
        "gpt_oss": (GptOssExperts, {**words, "num_local_experts": EXPERTS, "intermediate_size": WIDTH}),
        "nemotron_h": (NemotronHExperts, {**words, "n_routed_experts": EXPERTS}),
    }[family]
    config = AutoConfig.for_model(family, **words)
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    assert is_experts(module)
    return module.requires_grad_(False)


def with_weights_of(packed, dense):
    """transformers' own experts over what the packed ones stand for."""
    for name in STACKS:
        if hasattr(packed, f"packed_{name}"):
            dense.get_parameter(name).copy_(packed.get_submodule(f"packed_{name}").dequantised())
    return dense


def ran(module):
    """Output and the gradients of what came in; one expert gets no token."""
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    scores = torch.randn(TOKENS, EXPERTS - 1).softmax(-1)
    weights, chosen = scores.topk(CHOSEN, dim=-1)
    weights = weights.detach().requires_grad_()
    out = module(hidden, chosen, weights)
    out.backward(torch.randn(out.shape))
    return out.detach(), hidden.grad, weights.grad


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("one_by_one", [False, True], ids=["grouped", "one by one"])
def test_they_are_transformers_experts_over_the_same_weights(family, one_by_one, monkeypatch):
    """Fused gates, interleaved ones with biases and transposed matrices, and none at all."""
    dense = of_family(family)
    packed = copy.deepcopy(dense)
    quantise_blocks(packed, Nf4())
    assert sum(isinstance(m, PackedWeight) for m in packed.modules()) == 2
    if one_by_one:
        monkeypatch.setattr(ours, "grouped_product", ours._one_by_one)
    for found, expected in zip(ran(packed), ran(with_weights_of(packed, dense)), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_nothing_whole_is_kept_and_one_stack_is_whole_at_a_time():
    packed = of_family("qwen3_moe")
    quantise_blocks(packed, Nf4())
    hidden = torch.randn(4, HIDDEN, requires_grad=True)
    weights, chosen = torch.rand(4, EXPERTS).topk(CHOSEN, dim=-1)
    kept = []
    tracker = LiveTensors([*packed.parameters(), *packed.buffers(), hidden])
    before = tracker.current_bytes
    with tracker, torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = packed(hidden, chosen, weights)
        del weights
        whole = EXPERTS * 2 * WIDTH * HIDDEN * 4
        assert all(t.numel() < whole / 8 for t in kept)
        out.sum().backward()
    assert whole < max(tracker.peaks.values()) - before < 1.4 * whole


def test_a_copy_of_them_runs_on_its_own_weights():
    packed = of_family("qwen3_moe")
    quantise_blocks(packed, Nf4())
    other = copy.deepcopy(packed)
    other.packed_down_proj.weight.data.zero_()
    assert isinstance(other.forward, MethodType)
    assert not torch.equal(ran(other)[0], ran(packed)[0])
