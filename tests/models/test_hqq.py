"""HQQ linears: bit-equal to hqq's own module for every number of bits, without what that module keeps."""

import copy

import pytest
import torch

from fitune.errors import ModelError
from fitune.values.plan import Hqq
from models.test_nf4 import assert_fake_is, assert_same_bytes, dense_linear, forward_and_gradient, packed

hqq = pytest.importorskip("hqq.core.quantize")

BITS = [8, 4, 3, 2]


def library_linear(linear, base):
    config = hqq.BaseQuantizeConfig(nbits=base.bits, group_size=base.group_size)
    return hqq.HQQLinear(copy.deepcopy(linear), config, compute_dtype=linear.weight.dtype, device="cpu")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_forward_and_gradient_are_the_librarys_bit_for_bit(dtype, bits):
    linear, base = dense_linear(dtype, bias=bits in (8, 3)), Hqq(bits=bits, group_size=32)
    theirs = forward_and_gradient(library_linear(linear, base), dtype)
    ours = forward_and_gradient(packed(linear, base), dtype)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_kept_for_backward_and_bytes_are_never_cast(bits):
    linear = packed(dense_linear(torch.float32, bias=False, sizes=(128, 128)), Hqq(bits=bits))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        linear(linear(torch.randn(4, 128, requires_grad=True)))
    assert not kept
    assert_same_bytes(copy.deepcopy(linear).half().bfloat16().to("cpu", torch.float32), linear)


@pytest.mark.parametrize("bits", BITS)
def test_packing_on_fake_tensors_gives_the_same_shapes(bits):
    assert_fake_is(Hqq(bits=bits))


def test_a_matrix_that_leaves_a_rest_is_refused():
    with pytest.raises(ModelError, match=r"63 × 96 weights, which leaves a rest"):
        packed(dense_linear(torch.float32, sizes=(96, 63)), Hqq(bits=4))
