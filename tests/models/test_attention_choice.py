"""Which kernel attends, by what the device can, and what the one call for a whole stream is told.

The kernel itself runs on GPUs only (the test marked ``gpu``). Here its documented contract, written out, stands for
it: streams [T, n, d], bounds of the rows, how many tokens to the left are seen.
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from fitune.models.attention import attends_by_rows
from fitune.models.row_attention import (
    Rows,
    attend_by,
    attending_as,
    one_call,
    rows_eager,
    rows_flash,
    rows_sdpa,
)

LENGTHS = (9, 1, 13)
A100, H100, V100, CPU = (8, 0), (9, 0), (7, 0), (0, 0)


def queries_keys_values(*, dtype=torch.float32, device="cpu"):
    """Grouped heads, laid out as a projection of [1, T, n · d] gives them."""
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, sum(LENGTHS), heads, 8, generator=generator)
        .to(device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    )  # fmt: skip


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_size", "softcap", "expected"),
    [
        (A100, torch.bfloat16, 128, None, True),
        (H100, torch.float16, 256, None, True),
        (H100, torch.float32, 128, None, False),
        (H100, torch.bfloat16, 128, 50.0, False),
        (H100, torch.bfloat16, 12, None, False),
        (H100, torch.bfloat16, 264, None, False),
        (V100, torch.float16, 128, None, False),
        (CPU, torch.bfloat16, 128, None, False),
    ],
)
def test_one_call_where_flash_attention_takes_the_stream(capability, dtype, head_size, softcap, expected):
    with FakeTensorMode(), attending_as(capability):
        query = torch.empty(1, 4, 16, head_size, dtype=dtype)
        assert one_call(query, softcap=softcap) is expected


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("capability", "calls"), [(H100, 1), (V100, len(LENGTHS))])
def test_what_runs_on_a_gpu(capability, calls, window):
    """Fake tensors on the CPU stand for CUDA's: Ampere and newer call once, older ones for each row."""
    with FakeTensorMode(), attending_as(capability), Operations() as seen:
        q, k, v = queries_keys_values(dtype=torch.float16)
        output, _ = attend_by(rows_flash)(
            nn.Module(), q, k, v, None, rows=Rows(LENGTHS), sliding_window=window
        )
        assert output.shape == (1, sum(LENGTHS), 4, 8)
        output.sum().backward()
        assert k.grad is not None
        assert k.grad.shape == k.shape
    attended = [name for name in seen.names if "attention" in name and "backward" not in name]
    assert len(attended) == calls
    assert ("aten::_flash_attention_forward" in attended) is (capability == H100)


def kernel_by_contract(
    q_Tnd, k_Tkd, v_Tkd, bounds, bounds_k, longest, longest_k, dropout, causal, debug,
    *, scale, window_size_left, window_size_right,
):  # fmt: skip
    """torch.ops.aten._flash_attention_forward as torch documents it (torch.nn.attention.varlen), written out."""
    assert bounds.dtype == torch.int32
    assert longest == int((bounds[1:] - bounds[:-1]).max())
    groups = q_Tnd.shape[1] // k_Tkd.shape[1]
    rows = []
    for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        q, k, v = (x[start:end].transpose(0, 1) for x in (q_Tnd, k_Tkd, v_Tkd))
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        back = torch.arange(end - start)[:, None] - torch.arange(end - start)[None, :]
        seen = back >= -window_size_right
        if window_size_left >= 0:
            seen &= back <= window_size_left
        scores = (q @ k.transpose(1, 2) * (scale or q.shape[-1] ** -0.5)).masked_fill(~seen, float("-inf"))
        rows.append((scores.softmax(dim=-1) @ v).transpose(0, 1))
    return torch.cat(rows), None, None, None, None


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_the_one_call_says_what_row_by_row_says(window, scaling, monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel_by_contract)
    monkeypatch.setattr("fitune.models.row_attention.one_call", lambda *_, **__: True)
    results = []
    for function in (rows_flash, rows_sdpa, rows_eager):
        q, k, v = queries_keys_values()
        output, _ = attend_by(function)(
            nn.Module(), q, k, v, None, rows=Rows(LENGTHS), sliding_window=window, scaling=scaling
        )
        gradients = torch.autograd.grad(output.square().sum(), (q, k, v))
        results.append((output, *gradients))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
def test_the_kernel_equals_attention_written_out(window):
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU with FlashAttention")
    results = []
    for function, dtype in ((rows_flash, torch.bfloat16), (rows_eager, torch.float32)):
        q, k, v = (
            x.detach().bfloat16().to(dtype).requires_grad_() for x in queries_keys_values(device="cuda")
        )
        output, _ = attend_by(function)(nn.Module(), q, k, v, None, rows=Rows(LENGTHS), sliding_window=window)
        results.append((output, *torch.autograd.grad(output.float().square().sum(), (q, k, v))))
    for mine, written_out in zip(*results, strict=True):
        torch.testing.assert_close(mine.float(), written_out, rtol=3e-2, atol=3e-2)


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}
KINDS = {
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
}
BY_ROWS = {
    "llama": True,
    "qwen3_5_text": True,
    "nemotron_h": True,
    "stablelm": False,
    "nemotron": False,
    "falcon": False,
    "mamba": False,
}


@pytest.mark.parametrize("model_type", BY_ROWS)
def test_a_model_attends_by_rows_where_its_blocks_ask_for_a_function_and_hand_the_rows_on(
    model_type,
):
    """Classes of Qwen3.5 and Nemotron-H do not say so, their code does; blocks of StableLM keep the rows back."""
    words = KINDS.get(model_type, {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **words))
    assert attends_by_rows(model) == BY_ROWS[model_type]
