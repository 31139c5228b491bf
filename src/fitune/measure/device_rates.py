"""One function for each rate of a device: (amount of work, seconds) of a few sizes, small ones first.

The least of several times counts, because others can only slow a device down. Shapes are those of language models.
T tokens, D hidden size, F width of the MLP, H heads, N tokens of a row.
"""

import collections
import mmap
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fitune.units import MIB

T = TypeVar("T")
Samples = list[tuple[float, float]]
CPU = torch.device("cpu")

PRODUCTS_TDF = (
    (64, 256, 704), (256, 512, 1408), (512, 1024, 2816), (2048, 2048, 5632), (4096, 4096, 14336),
)  # fmt: skip
ROW_LENGTHS = (64, 256, 1024, 4096)
PRODUCTS_TDF_CPU = ((64, 64, 176), (256, 256, 704), (256, 512, 1408), (512, 1024, 2816), (1024, 1024, 4096))
"""No result is so large that writing it means new pages of memory, which are measured apart."""
HEADS, HEAD_SIZE = 32, 128
HEADS_CPU, HEAD_SIZES_CPU = 4, (64, 128)
LAYERS_LAUNCHED = (2, 8)
TENSOR_MIB_CUDA = (16, 64)
"""On CUDA small tensors only measure the launch, which has a rate of its own."""
WIDTH = 512
"""Length of the rows that elementwise operations are measured on."""
SLOW_SECONDS = 0.2
"""No larger shape is tried where one call takes longer."""
ADAM_PARAMETERS = 16 * 1024**2
COPY_BYTES = 256 * MIB
NEW_BYTES = 64 * MIB
LOGITS_SV = (256, 16384)
FLOPS_PER_PAIR = 3.5 * 4 * HEADS * HEAD_SIZE
"""Two products forward, five backward (Dao 2023, arXiv 2307.08691)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Time and repetitions that the measuring of a processor takes."""

    trial_seconds: float
    trials: int
    few_trials: int
    """Trials where one call is a trial: it takes long enough to find a quiet moment of its own."""
    rounds: int
    """More than one: other work of a second or two spoils one round alone."""
    products: int
    """Number of PRODUCTS_TDF_CPU that are measured, the small ones first."""
    row_lengths: tuple[int, ...]
    tensor_mib: tuple[float, ...]
    pool_bytes: int
    """Tensors that take turns, more than caches hold: a step comes back to a tensor when many others were used."""


THOROUGH = Effort(
    trial_seconds=0.01, trials=9, few_trials=4, rounds=2, products=5, row_lengths=(64, 128, 256, 512, 1024, 2048),
    tensor_mib=(0.25, 1, 4, 16, 64), pool_bytes=128 * MIB,
)  # fmt: skip
HURRIED = Effort(
    trial_seconds=0.002, trials=3, few_trials=1, rounds=1, products=4, row_lengths=(64, 512),
    tensor_mib=(0.25, 4), pool_bytes=4 * MIB,
)  # fmt: skip
_effort: ContextVar[Effort] = ContextVar("effort", default=THOROUGH)


@contextmanager
def measuring_with(effort: Effort) -> Iterator[None]:
    """Inside, every function here measures with ``effort``."""
    token = _effort.set(effort)
    try:
        yield
    finally:
        _effort.reset(token)


def fastest_seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call: the least over trials of as many calls as a clock needs."""
    seconds_of(work, 1, device)  # finds cold caches and kernels that are not made yet
    once = seconds_of(work, 1, device)
    if once > SLOW_SECONDS:
        return once
    effort = _effort.get()
    calls = max(1, round(effort.trial_seconds / once))
    trials = effort.trials if calls > 1 else effort.few_trials
    return min(seconds_of(work, calls, device) / calls for _ in range(trials))


def seconds_of(work: Callable[[], Any], calls: int, device: torch.device) -> float:
    """All calls together, until the device is through with them.

    One thread of a processor is timed by what it ran, not by what passed while others had its core.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if alone else time.perf_counter
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    finish(device)
    start = clock()
    for _ in range(calls):
        work()
    finish(device)
    return clock() - start


def product_samples(device: torch.device, dtype: torch.dtype) -> Samples:
    """FLOPs of x · Wᵀ and of its weight's gradient yᵀ · x, until one takes too long."""
    linear = torch.nn.functional.linear

    def products(shape: tuple[int, int, int]) -> Samples:
        """Both products of one shape (T, D, F)."""
        tokens, inner, outer = shape
        x_TD = torch.randn(tokens, inner, device=device).to(dtype)
        weight_FD = torch.randn(outer, inner, device=device).to(dtype)
        y_TF = linear(x_TD, weight_FD)
        both = (lambda: linear(x_TD, weight_FD), lambda: torch.mm(y_TF.t(), x_TD))
        return [(2.0 * tokens * inner * outer, fastest_seconds(work, device)) for work in both]

    shapes = PRODUCTS_TDF if device.type == "cuda" else PRODUCTS_TDF_CPU[: _effort.get().products]
    return _until_slow(shapes, products)


def _until_slow(sizes: Iterable[T], samples_of: Callable[[T], Samples]) -> Samples:
    """The samples of each size, until one call takes too long."""
    samples: Samples = []
    for size in sizes:
        samples += (found := samples_of(size))
        if max(seconds for _, seconds in found) > SLOW_SECONDS:
            break
    return samples


def attention_samples(device: torch.device, dtype: torch.dtype) -> Samples:
    """Tokens of one row's causal attention, forward and backward, until one takes too long."""

    def row(length: int) -> Samples:
        """Forward and backward together, of a row of ``length`` tokens."""
        q, k, v = (
            torch.randn(1, HEADS, length, HEAD_SIZE, device=device).to(dtype).requires_grad_() for _ in "qkv"
        )
        ones = torch.ones_like(q)
        seconds = fastest_seconds(
            lambda: torch.autograd.grad(_attend(q, k, v, is_causal=True), (q, k, v), ones), device
        )
        return [(float(length), seconds)]

    return _until_slow(ROW_LENGTHS, row)


_attend = torch.nn.functional.scaled_dot_product_attention


def head_samples(dtype: torch.dtype, head_size: int) -> Samples:
    """Tokens of one row and seconds of one head on the processor, forward and backward in turn, until one takes too
    long."""
    heads = max(HEADS_CPU, torch.get_num_threads())

    def row(length: int) -> Samples:
        """All heads of a row of ``length`` tokens: forward, then backward."""
        q, k, v = (
            torch.randn(1, length, heads, head_size).to(dtype).transpose(1, 2).requires_grad_() for _ in "qkv"
        )
        out = _attend(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        both = (
            lambda: _attend(q, k, v, is_causal=True),
            lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True),
        )
        return [(float(length), fastest_seconds(work, CPU)) for work in both]

    return [(tokens, seconds / heads) for tokens, seconds in _until_slow(_effort.get().row_lengths, row)]


def logit_samples(dtype: torch.dtype) -> Samples:
    """Logits, and seconds of their softmax and its gradient in fp32, with the copies that 16 bit need."""
    logits_SV = torch.randn(LOGITS_SV).to(dtype)

    def softmax() -> torch.Tensor:
        """The steps of models/loss_head.py, with the copies."""
        work_SV = logits_SV.float()
        work_SV.sub_(work_SV.amax(dim=1, keepdim=True))
        total_S = work_SV.exp_().sum(dim=1)
        return work_SV.mul_((1 / total_S).unsqueeze(1)).to(dtype)

    return [(float(logits_SV.numel()), fastest_seconds(softmax, CPU))]


def new_page_samples() -> Samples:
    """Bytes of memory fresh from the system, and how much longer it takes to fill them than to fill them again."""
    tensor = torch.frombuffer(_fresh_memory(), dtype=torch.uint8)
    again = fastest_seconds(tensor.zero_, CPU)
    new = fastest_seconds(lambda: torch.frombuffer(_fresh_memory(), dtype=torch.uint8).zero_(), CPU)
    return [(float(NEW_BYTES), max(new - again, new / 100))]


def _fresh_memory() -> mmap.mmap:
    """Not malloc's, which may have kept some; given back when nothing refers to it."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    return mmap.mmap(-1, NEW_BYTES, **private)


def traffic_samples(device: torch.device, dtype: torch.dtype, *, launch_seconds: float) -> Samples:
    """Bytes of a tensor, and seconds for each byte that elementwise operations on such tensors move.

    On CUDA x · y into a new tensor. On a processor exponentials, reductions and casts take longer than their bytes:
    there it is what lies between the products of a block, forward and backward, less the time to launch it.
    """
    if device.type == "cuda":
        return [_multiplied(int(mib * MIB), device) for mib in TENSOR_MIB_CUDA]
    return [_between_products(int(mib * MIB), dtype, launch_seconds) for mib in _effort.get().tensor_mib]


def _multiplied(size: int, device: torch.device) -> tuple[float, float]:
    """Three tensors, none of them just used."""
    tensors = collections.deque(
        torch.ones(size // 4, device=device) for _ in range(max(3, _effort.get().pool_bytes // size))
    )

    def multiply() -> None:
        """The two tensors used longest ago; the oldest makes room for their product."""
        tensors.append(tensors[0] * tensors[1])
        tensors.popleft()

    return float(size), fastest_seconds(multiply, device) / (3 * size)


def _between_products(size: int, dtype: torch.dtype, launch_seconds: float) -> tuple[float, float]:
    """Two norms, queries and keys turned, a gated activation and three sums, in more blocks than caches hold."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

    tokens = max(1, size // (WIDTH * dtype.itemsize))
    x_BTD = torch.randn(1, tokens, WIDTH).to(dtype).requires_grad_()
    norm = LlamaRMSNorm(WIDTH).to(dtype)
    cosine = torch.rand(1, tokens, HEAD_SIZE // 2).to(dtype)
    blocks = max(1, _effort.get().pool_bytes // (16 * size))
    ones = torch.ones_like(x_BTD)

    def block(x: torch.Tensor) -> torch.Tensor:
        """A block without its products, [B, T, D] of ``x`` [B, T, D]."""
        heads = norm(x).view(1, tokens, -1, HEAD_SIZE // 2).transpose(1, 2)
        q, k = apply_rotary_pos_emb(heads, heads, cosine, cosine)
        x = x + q.transpose(1, 2).reshape(x.shape) + k.transpose(1, 2).reshape(x.shape)
        normed = norm(x)
        return x + torch.nn.functional.silu(normed) * normed

    def work() -> None:
        """All blocks, forward and backward."""
        x = x_BTD
        for _ in range(blocks):
            x = block(x)
        torch.autograd.grad(x, (x_BTD, norm.weight), ones)

    with CountedOperations() as counted:
        work()
    seconds = fastest_seconds(work, CPU)
    moving = max(seconds - counted.count * launch_seconds, seconds / 4)
    return float(size), moving / counted.bytes


def launch_samples(device: torch.device) -> Samples:
    """Operations of models too small to compute: forward of few blocks and of many, forward and backward of many."""
    few, many = (_launched(layers, device) for layers in LAYERS_LAUNCHED)
    return [few[0], *many]


def _launched(layers: int, device: torch.device) -> Samples:
    """Operations and seconds in forward, and in forward and backward."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaModel(config).to(device)
    weights = list(model.parameters())
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)

    def forward() -> torch.Tensor:
        """The sum of the last hidden states."""
        return model(input_ids=ids, use_cache=False).last_hidden_state.sum()

    samples = []
    for work in (forward, lambda: torch.autograd.grad(forward(), weights)):
        with CountedOperations() as counted:
            work()
        samples.append((float(counted.count), fastest_seconds(work, device)))
    return samples


class CountedOperations(TorchDispatchMode):
    """Operations that compute something, not views, not empty tensors; and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if computes(func):
            self.count += 1
            self.bytes += moved_bytes(args, kwargs, out)
        return out


def moved_bytes(args: Any, kwargs: Any, out: Any) -> int:
    """Bytes of the tensors that an operation reads, each of them once, and of those that it returns."""
    read = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
    written = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    return sum(x.numel() * x.element_size() for x in [*read.values(), *written])


def computes(func: Any) -> bool:
    """True if an operation reads or writes elements: its result is new or written to, and not left empty."""
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
    return [(float(ADAM_PARAMETERS), fastest_seconds(optimizer.step, CPU))]
