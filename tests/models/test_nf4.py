"""NF4 linears: bit-equal to bitsandbytes' own module, nothing saved for backward, bytes that survive every journey."""

import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fitune.measure.memory import LiveTensors
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.low_bit.quantised import QuantisedLinear, quantised_base
from fitune.values.plan import Dense, Nf4
from models.tiny_models import tiny_model

bitsandbytes = pytest.importorskip("bitsandbytes")


def dense_linear(dtype, *, bias=True, sizes=(128, 64)):
    torch.manual_seed(0)
    return nn.Linear(*sizes, bias=bias, dtype=dtype).requires_grad_(False)


def packed(linear, base):
    holder = nn.Sequential(linear)
    quantise_blocks(holder, base)
    return holder[0]


def library_linear(linear, base):
    theirs = bitsandbytes.nn.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=linear.weight.dtype,
        compress_statistics=base.double_quant, quant_type="nf4", quant_storage=linear.weight.dtype,
    )  # fmt: skip
    theirs.load_state_dict(linear.state_dict())
    return theirs.to(linear.weight.dtype).to("cpu")


def forward_and_gradient(module, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 5, 128, generator=generator).to(dtype).requires_grad_()
    out = module(x)
    out.backward(torch.randn(out.shape, generator=generator).to(dtype))
    return out.detach(), x.grad


def assert_same_bytes(found, expected):
    before = expected.state_dict()
    for name, tensor in found.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert tensor.view(torch.uint8).equal(before[name].view(torch.uint8)), name
    assert torch.equal(found.dequantised(), expected.dequantised())


def assert_fake_is(base):
    real = packed(dense_linear(torch.bfloat16), base)
    with FakeTensorMode():
        fake = packed(nn.Linear(128, 64, dtype=torch.bfloat16), base)
        out = fake(torch.empty(3, 128, dtype=torch.bfloat16, requires_grad=True))
        out.sum().backward()
    assert out.shape == (3, 64)
    shapes = {name: (t.shape, t.dtype) for name, t in real.state_dict().items()}
    assert {name: (t.shape, t.dtype) for name, t in fake.state_dict().items()} == shapes


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_gradient_are_the_librarys_bit_for_bit(dtype, bias, double):
    linear, base = dense_linear(dtype, bias=bias), Nf4(double_quant=double)
    ours = forward_and_gradient(packed(linear, base), dtype)
    theirs = forward_and_gradient(library_linear(linear, base), dtype)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("sizes", [(32, 32), (160, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_is_64_weights_in_a_row_wherever_rows_end(dtype, sizes):
    """Each block alone gives the same. On a CPU bitsandbytes' own module fails where a row ends inside a block."""
    linear = dense_linear(dtype, bias=False, sizes=sizes)
    blocks = [block.view(1, 64) for block in linear.weight.detach().view(-1, 64)]
    whole = packed(linear, Nf4(double_quant=False)).dequantised()
    for found, block in zip(whole.view(-1, 64), blocks, strict=True):
        alone = nn.Linear(64, 1, bias=False, dtype=dtype).requires_grad_(False)
        alone.weight.data = block
        assert torch.equal(found, packed(alone, Nf4(double_quant=False)).dequantised()[0])


def test_backward_keeps_no_activation_and_one_whole_weight():
    linear = packed(dense_linear(torch.float32, sizes=(256, 256)), Nf4())
    x = torch.randn(4, 256, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = linear(linear(x))
    assert not kept
    tracker = LiveTensors([*linear.parameters(), *linear.buffers(), x, out])
    before = tracker.current_bytes
    with tracker:
        out.sum().backward()
    whole = 256 * 256 * 4
    assert whole < max(tracker.peaks.values()) - before < 1.5 * whole


def test_bytes_are_those_of_the_paper():
    """4.127 bit per weight with double quantisation, for a matrix whose scales fill whole blocks."""
    linear = packed(dense_linear(torch.bfloat16, bias=False, sizes=(1024, 1024)), Nf4())
    held = sum(parameter.nbytes for parameter in linear.parameters())
    assert held == pytest.approx(1024 * 1024 * 4.127 / 8, rel=1e-4)


def test_parameters_are_no_whole_numbers():
    """FSDP2 of torch 2.11 divides floating-point parameters alone, frozen or not."""
    linear = packed(dense_linear(torch.bfloat16, sizes=(128, 256)), Nf4())
    assert all(parameter.is_floating_point() for parameter in linear.parameters())


def test_packed_bytes_come_back_bit_identical(tmp_path):
    """What leaves the device and comes back is never quantised again, and no cast touches it."""
    first = packed(dense_linear(torch.bfloat16), Nf4())
    assert_same_bytes(copy.deepcopy(first).half().float().to("cpu", torch.bfloat16), first)
    save_file(first.state_dict(), tmp_path / "packed.safetensors")
    other = packed(nn.Linear(128, 64, dtype=torch.bfloat16), Nf4())
    other.load_state_dict(load_file(tmp_path / "packed.safetensors"))
    assert_same_bytes(other, first)


def test_only_the_blocks_linears_are_packed():
    model = tiny_model("llama").to(torch.bfloat16)
    quantise_blocks(model.model.layers, Nf4())
    packed_names = {n for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}
    assert len(packed_names) == 3 * 7
    assert all(".layers." in name for name in packed_names)
    assert {p.dtype for n, p in model.named_parameters() if n.endswith("weight")} == {torch.bfloat16}
    assert quantised_base(model) == Nf4()
    assert quantised_base(tiny_model()) == Dense()


@pytest.mark.parametrize("family", ["gpt2", "falcon"])
def test_other_shapes_of_linears(family):
    """Transposed weights, and linears of the family's own class."""
    model = tiny_model(family)
    ids = torch.arange(12).reshape(1, 12)
    dense = model(input_ids=ids).logits
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    quantise_blocks(blocks, Nf4(double_quant=False))
    close = model(input_ids=ids).logits
    agreement = torch.nn.functional.cosine_similarity(dense.flatten(), close.flatten(), dim=0)
    assert 0.8 < agreement < 1


def test_packing_on_fake_tensors_gives_the_same_shapes():
    assert_fake_is(Nf4())
