"""One function for each rate of a device: (amount of work, seconds) of a few sizes, small ones first.

The least of several times counts, because others can only slow a device down. Shapes are those of language models.
T tokens, D hidden size, F width of the MLP, H heads, N tokens of a row.
"""

import collections
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fitune.units import MIB

Samples = list[tuple[float, float]]

PRODUCTS_TDF = (
    (64, 256, 704), (256, 512, 1408), (512, 1024, 2816), (2048, 2048, 5632), (4096, 4096, 14336),
)  # fmt: skip
ROW_LENGTHS = (64, 256, 1024, 4096)
HEADS, HEAD_SIZE = 32, 128
TENSOR_MIB_CPU, TENSOR_MIB_CUDA = (0.25, 1, 4, 16, 64), (16, 64)
"""On CUDA small tensors only measure the launch, which has a rate of its own."""
POOL_BYTES = 128 * MIB
"""Tensors that take turns, more than caches hold: a step comes back to a tensor when many others were used."""
SLOW_SECONDS = 0.2
"""No larger shape is tried where one call takes longer."""
TRIAL_SECONDS, TRIALS, FEW_TRIALS = 0.01, 9, 4
"""Fewer where one call is a trial: it takes long enough to find a quiet moment of its own."""
ADAM_PARAMETERS = 16 * 1024**2
COPY_BYTES = 256 * MIB
FLOPS_PER_PAIR = 3.5 * 4 * HEADS * HEAD_SIZE
"""Two products forward, five backward (Dao 2023, arXiv 2307.08691)."""


def fastest_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the least over trials of as many calls as a clock needs."""
    once = seconds_of(work, 1, device)
    if once > SLOW_SECONDS:
        return once
    once = seconds_of(work, 1, device)  # the first call found cold caches
    calls = max(1, round(TRIAL_SECONDS / once))
    trials = TRIALS if calls > 1 else FEW_TRIALS
    return min(seconds_of(work, calls, device) / calls for _ in range(trials))


def seconds_of(work: Callable[[], Any], calls: int, device: torch.device) -> float:
    """All calls together, until the device is through with them.

    One thread of a processor is timed by what it ran, not by what passed while others had its core.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    _finish(device)
    start = clock()
    for _ in range(calls):
        work()
    _finish(device)
    return clock() - start


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def product_samples(device: torch.device, dtype: torch.dtype) -> Samples:
    """FLOPs of x · Wᵀ, until one takes too long."""
    samples = []
    for tokens, inner, outer in PRODUCTS_TDF:
        x_TD = torch.randn(tokens, inner, device=device).to(dtype)
        weight_FD = torch.randn(outer, inner, device=device).to(dtype)
        seconds = fastest_seconds(lambda x=x_TD, w=weight_FD: torch.nn.functional.linear(x, w), device)
        samples.append((2.0 * tokens * inner * outer, seconds))
        if seconds > SLOW_SECONDS:
            break
    return samples


def attention_samples(device: torch.device, dtype: torch.dtype) -> Samples:
    """Tokens of one row's causal attention, forward and backward, until one takes too long."""
    samples = []
    for length in ROW_LENGTHS:
        q, k, v = (
            torch.randn(1, HEADS, length, HEAD_SIZE, device=device).to(dtype).requires_grad_() for _ in "qkv"
        )
        gradient = torch.ones_like(q)

        def row(q: Any = q, k: Any = k, v: Any = v, gradient: Any = gradient) -> None:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(out, (q, k, v), gradient)

        seconds = fastest_seconds(row, device)
        samples.append((float(length), seconds))
        if seconds > SLOW_SECONDS:
            break
    return samples


def traffic_samples(device: torch.device) -> Samples:
    """Bytes moved by x · y into a new tensor, as eager code does it: three tensors, none of them just used."""
    samples = []
    for mib in TENSOR_MIB_CPU if device.type == "cpu" else TENSOR_MIB_CUDA:
        size = int(mib * MIB)
        tensors = collections.deque(
            torch.ones(size // 4, device=device) for _ in range(max(3, POOL_BYTES // size))
        )

        def multiply(tensors: collections.deque[torch.Tensor] = tensors) -> None:
            tensors.append(tensors[0] * tensors[1])
            tensors.popleft()

        samples.append((3.0 * size, fastest_seconds(multiply, device)))
    return samples


def launch_samples(device: torch.device) -> Samples:
    """Operations in forward, and in forward and backward, of a model too small to compute."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaModel(config).to(device)
    weights = list(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def forward() -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).last_hidden_state.sum()

    def both() -> None:
        torch.autograd.grad(forward(), weights)

    samples = []
    for work in (forward, both):
        with CountedOperations() as counted:
            work()
        samples.append((float(counted.count), fastest_seconds(work, device)))
    return samples


class CountedOperations(TorchDispatchMode):
    """Operations that compute something: not views, not empty tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += computes(func)
        return func(*args, **(kwargs or {}))


def computes(func: Any) -> bool:
    """Whether an operation reads or writes elements: its result is new or written to, and not left empty."""
    schema = func._schema
    if any(word in schema.name for word in ("empty", "view")) or not schema.returns:
        return False
    return all(r.alias_info is None or r.alias_info.is_write for r in schema.returns)


def host_samples(device: torch.device) -> Samples:
    """Bytes of pinned copies: to the host, and back."""
    on_host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    out = fastest_seconds(lambda: on_host.copy_(on_device, non_blocking=True), device)
    back = fastest_seconds(lambda: on_device.copy_(on_host, non_blocking=True), device)
    return [(float(COPY_BYTES), out), (float(COPY_BYTES), back)]


def cpu_adam_samples() -> Samples:
    """Parameters of torch's fused AdamW in fp32 on the processor."""
    parameter = torch.nn.Parameter(torch.zeros(ADAM_PARAMETERS))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return [(float(ADAM_PARAMETERS), fastest_seconds(optimizer.step, torch.device("cpu")))]
