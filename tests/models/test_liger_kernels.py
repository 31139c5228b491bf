"""Liger's kernels are put where they belong, and say what transformers' own modules say.

Triton compiles for GPUs. Written-out operations show that every family is wired rightly; Liger's own run in Triton's
interpreter where triton and liger-kernel are installed: three families always, the others are slow.
"""

import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from fitune.errors import HardwareError, MissingExtra, ModelError
from fitune.models.attention import use_attention
from fitune.models.language_model import language_model
from fitune.models.liger import Operations, computing_with, operations_of_liger, use_kernels
from fitune.values.plan import PlainLoss
from models.streams import make_rows, stream_of
from models.tiny_models import FAMILIES, tiny_model
from models.triton_interpreter import interpreted_liger

ROWS = make_rows((9, 4, 13))


def written_out(calls):
    """What each kernel computes, in plain torch, counted."""

    def rms_norm(x, weight, *, eps, offset, in_fp32):
        calls["norm"] += 1
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        if in_fp32:
            return (normed * (offset + weight.float())).to(x.dtype)
        return normed.to(x.dtype) * (offset + weight)

    def silu_product(gate, up):
        calls["product"] += 1
        return F.silu(gate) * up

    def gelu_product(gate, up):
        calls["product"] += 1
        return F.gelu(gate, approximate="tanh") * up

    def silu_halves(both):
        return silu_product(*both.chunk(2, dim=-1))

    def turned(x, cos, sin):
        low, high = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]

    def rotate(query, key, cos, sin):
        calls["rotation"] += 1
        return turned(query, cos, sin), turned(key, cos, sin)

    def cross_entropy(logits_SV, labels_S, *, scale, softcap):
        calls["loss"] += 1
        leaf_SV = logits_SV.detach().requires_grad_()
        with torch.enable_grad():
            capped_SV = leaf_SV if softcap is None else softcap * torch.tanh(leaf_SV / softcap)
            losses_S = F.cross_entropy(capped_SV, labels_S, reduction="none")
            (gradient_SV,) = torch.autograd.grad(scale * losses_S.sum(), leaf_SV)
        logits_SV.copy_(gradient_SV)
        return losses_S.detach()

    return Operations(
        rms_norm=rms_norm, silu_product=silu_product, gelu_product=gelu_product, silu_halves=silu_halves, rotate=rotate,
        cross_entropy=cross_entropy,
    )  # fmt: skip


def hidden_and_gradients(family, operations, rows=ROWS):
    """The last hidden states, and gradients of hidden states and of the head by the loss, of all weights by theirs."""
    model = tiny_model(family).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.2)
    kernels = "torch" if operations is None else "liger"
    use_attention(model, "sdpa")
    with computing_with(operations):
        use_kernels(model, kernels)
        parts = language_model(model, PlainLoss(), kernels=kernels)
    stream = stream_of(rows)
    hidden_TD = parts.hidden_states(stream)
    loss, gradient_TD = parts.loss_and_gradient(hidden_TD.detach(), stream, scale=0.5)
    hidden_TD.backward(torch.randn(hidden_TD.shape, generator=torch.Generator().manual_seed(4)))
    gradients = {n: p.grad for n, p in parts.trained.items() if p.grad is not None}
    return hidden_TD.detach(), gradients | {"loss": loss, "hidden states": gradient_TD}


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-5 * scale)


WITH_KERNELS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3",
)  # fmt: skip
NORMS = {"gemma2": 13, "gemma3_text": 19, "qwen3": 13, "qwen3_moe": 13}
"""Three blocks of two norms and the last one; four in Gemma's; queries' and keys' where they have any."""


@pytest.mark.parametrize("family", WITH_KERNELS)
def test_every_family_is_wired_rightly(family):
    calls = Counter()
    assert_same(hidden_and_gradients(family, written_out(calls)), hidden_and_gradients(family, None))
    experts = family in ("mixtral", "qwen3_moe")
    assert calls["rotation"] == 3
    assert calls["product"] == (0 if experts else 3)
    assert calls["norm"] == NORMS.get(family, 7)
    assert calls["loss"] == 1


@pytest.fixture(scope="module")
def operations():
    with interpreted_liger() as operations:
        yield operations


ALL_KERNELS = ("llama", "gemma2", "phi3")
"""Norms and products of two kinds, halves, rotation, the loss with and without a soft cap."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ALL_KERNELS else pytest.mark.slow)
        for family in WITH_KERNELS
    ],
)
def test_ligers_own_kernels_in_tritons_interpreter(family, operations):
    rows = make_rows((4, 2))
    ours, transformers = (hidden_and_gradients(family, each, rows) for each in (operations, None))
    assert_same(ours, transformers)


def test_the_kernel_of_the_loss_rounds_once(operations):
    """Losses are those of the same logits in fp64, gradients one rounding away, at a width that no block divides."""
    for dtype, roundings in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        logits_SV = (torch.randn((6, 20_001), generator=torch.Generator().manual_seed(5)) * 6).to(dtype)
        labels_S = torch.arange(0, 20_001, 4_000)
        leaf_SV = logits_SV.double().requires_grad_()
        expected_S = F.cross_entropy(30 * torch.tanh(leaf_SV / 30), labels_S, reduction="none")
        (gradient_SV,) = torch.autograd.grad(0.25 * expected_S.sum(), leaf_SV)
        losses_S = operations.cross_entropy(logits_SV, labels_S, scale=0.25, softcap=30.0)
        torch.testing.assert_close(losses_S.double(), expected_S.detach(), rtol=0, atol=1e-5)
        assert (logits_SV.double() - gradient_SV).norm() <= roundings * gradient_SV.norm()


def test_other_models_of_the_family_stay_as_they_are():
    calls = Counter()
    hidden_and_gradients("llama", written_out(calls))
    before = dict(calls)
    hidden_and_gradients("llama", None)
    assert dict(calls) == before


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(WITH_KERNELS)))
def test_other_families_are_refused_by_name(family):
    with pytest.raises(ModelError, match=rf"\({family}\) has others"):
        use_kernels(tiny_model(family), "liger")


def test_refused_on_a_cpu_and_named_when_not_installed(monkeypatch):
    with pytest.raises(HardwareError, match="run on CUDA"):
        use_kernels(tiny_model(), "liger")
    monkeypatch.setitem(sys.modules, "liger_kernel.ops", None)
    with pytest.raises(MissingExtra) as caught:
        operations_of_liger()
    assert "fitune[liger]" in str(caught.value)


def test_where_the_model_is_trained_decides_not_where_its_weights_wait(monkeypatch):
    """Weights that are streamed are on the host when the kernels are put in place."""
    calls = Counter()
    monkeypatch.setattr("fitune.models.liger.operations_of_liger", lambda: written_out(calls))
    model = tiny_model()
    use_kernels(model, "liger", device=torch.device("cuda"))
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert calls["norm"] == NORMS.get("llama", 7)


def test_heads_that_are_turned_in_part_are_refused():
    """As Phi-4-mini's are: the kernel would turn all of each head."""
    model = tiny_model("phi3", partial_rotary_factor=0.5)
    with computing_with(written_out(Counter())), pytest.raises(ModelError, match=r"turns 0\.5 of each"):
        use_kernels(model, "liger")


def test_an_activation_without_a_kernel_is_refused():
    with computing_with(written_out(Counter())), pytest.raises(ModelError, match="relu"):
        use_kernels(tiny_model(hidden_act="relu"), "liger")
