"""Each kernel that training may take, forward and gradients, beside the same written out in fp32 on the processor.

Both get the same inputs, rounded to the kernel's numbers. The error is |found − expected| / |expected| by the norms of
whole tensors, the largest of outputs and gradients. A bf16 number has 8 bits, so each rounding is off by 0.2 % at most
and a kernel's few roundings by less than 2 %; fp16 has 11 bits.

Shapes: B = 1, T tokens, n heads, k key heads, d head size, D hidden size, V vocabulary, E experts, r rank.
"""

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fitune.errors import HardwareError
from fitune.measure.measurements import ProofCheck
from fitune.models.experts import is_experts, run_by
from fitune.models.liger import operations_on
from fitune.models.loss_head import LossHead
from fitune.models.low_bit.quantised import packed_linear
from fitune.models.readers import config_from, empty_model
from fitune.models.row_attention import Kernel, RowCall, Rows, rows_eager, rows_flash, rows_sdpa
from fitune.values.machines.hardware import Numbers
from fitune.values.plan import Hqq, Kernels, Nf4

DTYPES: dict[Numbers, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCES: dict[Numbers, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 4e-3}
_LOSSES: dict[Kernels, str] = {"torch": "fused loss", "liger": "liger loss"}
_PACKED_AWAY = 0.15
"""Largest distance of a weight in 4 bits from the weight: of normal numbers about 0.09."""


def judged(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor], *, tolerance: float, **figures: float
) -> ProofCheck:
    """The largest relative error over pairs of tensors, held against ``tolerance``; what is not finite fails."""
    errors = [distance(one, other) for one, other in zip(found, expected, strict=True)]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    return ProofCheck(
        name=name,
        passed=error <= tolerance,
        figures={"error": error, "tolerance": tolerance, **figures},
        why="" if error <= tolerance else "the results differ",
    )


def distance(found: Tensor, expected: Tensor) -> float:
    """|found − expected| / |expected|; not a number where ``expected`` is nothing to compare with."""
    exact = expected.detach().double().cpu()
    size = float(exact.norm())
    return float((found.detach().double().cpu() - exact).norm()) / size if 0 < size < math.inf else math.nan


def with_gradients(
    function: Callable[..., Any], inputs: Sequence[Tensor], *, rounded_to: torch.dtype
) -> list[Tensor]:
    """Outputs of ``function`` and the gradients of its ``inputs``, for gradients of the outputs drawn with a seed.

    It is given copies: a kernel may write over what it reads.
    """
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    result = function(*(x.clone() for x in leaves))
    outputs = list(result) if isinstance(result, tuple) else [result]
    generator = torch.Generator().manual_seed(1)
    back = [
        torch.randn(out.shape, generator=generator).to(rounded_to).to(out.device, out.dtype)
        for out in outputs
    ]
    kept = [out.detach().clone() for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, back)
    return [*kept, *gradients]


def beside_eager(
    name: str,
    kernel: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Sequence[Tensor],
    numbers: Numbers,
) -> ProofCheck:
    """``kernel`` on the inputs rounded to ``numbers``, and ``eager`` on the same in fp32 on the processor."""
    dtype = DTYPES[numbers]
    rounded = [x.to(dtype) for x in inputs]
    found = with_gradients(kernel, rounded, rounded_to=dtype)
    expected = with_gradients(eager, [x.cpu().float() for x in rounded], rounded_to=dtype)
    return judged(f"{name} {numbers}", found, expected, tolerance=TOLERANCES[numbers])


def drawn(*shapes: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def attention(backend: str, numbers: Numbers, device: torch.device) -> ProofCheck:
    """torch's attention by one of its kernels, causal."""
    if backend == "efficient" and device.type == "cpu":
        raise HardwareError("the memory-efficient kernel is CUDA's")

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention [1, n, T, d] by the backend alone. Raises RuntimeError where torch has no such kernel."""
        with sdpa_kernel([_BACKENDS[backend]]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why each other kernel is not taken
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention [1, n, T, d] written out."""
        return rows_eager(_row_call(q, k, v, (q.shape[2],))).transpose(1, 2)

    qkv = drawn(*[(1, 4, 256, 64)] * 3, device=device)
    try:
        return beside_eager(f"attention {backend}", fused, eager, qkv, numbers)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise HardwareError(f"torch has no such kernel for {numbers} on this device") from None


def row_attention(path: str, numbers: Numbers, device: torch.device) -> ProofCheck:
    """Rows of a stream kept apart, with fewer key heads than heads and a window that cuts the longest row."""
    kernel: Kernel = {"flash": rows_flash, "sdpa": rows_sdpa}[path]
    lengths = (100, 37, 150)
    inputs = drawn(*[(1, heads, sum(lengths), 64) for heads in (4, 2, 2)], device=device)

    def by(attend: Kernel) -> Callable[..., Any]:
        """Attention of q, k, v by ``attend``: outputs [1, T, n, d] with no window and with one of 64 tokens."""
        return lambda q, k, v: tuple(
            attend(_row_call(q, k, v, lengths, window=window)) for window in (None, 64)
        )

    return beside_eager(f"row attention {path}", by(kernel), by(rows_eager), inputs, numbers)


def _row_call(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None = None
) -> RowCall:
    return RowCall(
        query_BnTd=q, key_BkTd=k, value_BkTd=v, rows=Rows(lengths), scale=None, dropout=0.0, window=window,
        softcap=None, sinks_n=None,
    )  # fmt: skip


def fused_loss(kernels: Kernels, numbers: Numbers, device: torch.device) -> ProofCheck:
    """The loss in chunks of tokens, its gradient for hidden states and for the head, beside autograd's."""
    dtype = DTYPES[numbers]
    hidden_TD, weight_VD = (x.to(dtype) for x in drawn((300, 64), (1000, 64), device=device))
    weight_VD = weight_VD / 8
    labels_T = torch.arange(300, device=device) * 3
    labels_T[::7] = -100
    head = nn.Linear(64, 1000, bias=False, device=device, dtype=dtype)
    head.weight.data.copy_(weight_VD)
    count = int((labels_T >= 0).sum())
    cross_entropy = operations_on(device).cross_entropy if kernels == "liger" else None
    losses_S, gradient_TD = LossHead(
        module=head, chunk_tokens=64, cross_entropy=cross_entropy
    ).losses_and_gradient(hidden_TD, labels_T, scale=1 / count)
    assert head.weight.grad is not None
    leaf_TD, leaf_VD = (x.cpu().float().requires_grad_() for x in (hidden_TD, weight_VD))
    exact = F.cross_entropy(leaf_TD @ leaf_VD.T, labels_T.cpu(), ignore_index=-100)
    expected = [exact.detach(), *torch.autograd.grad(exact, (leaf_TD, leaf_VD))]
    return judged(
        f"{_LOSSES[kernels]} {numbers}", [losses_S.mean(), gradient_TD, head.weight.grad], expected,
        tolerance=TOLERANCES[numbers],
    )  # fmt: skip


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def liger(operation: str, numbers: Numbers, device: torch.device) -> ProofCheck:
    """One of Liger's kernels. Raises HardwareError without CUDA, MissingExtra without liger-kernel."""
    kernels = operations_on(device)
    wide = (1, 64, 96)
    angles = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(0, 32) / 32)).repeat(1, 2)[None]
    turns = [x.to(DTYPES[numbers]) for x in (angles.cos(), angles.sin())]
    on_device, exact = [x.to(device) for x in turns], [x.float() for x in turns]
    known: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
        "norm": (
            lambda x, w: kernels.rms_norm(x, w, eps=1e-6, offset=0.0, in_fp32=False),
            lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w,
            [wide, (96,)],
        ),
        "silu": (kernels.silu_product, lambda gate, up: F.silu(gate) * up, [wide] * 2),
        "gelu": (kernels.gelu_product, lambda gate, up: F.gelu(gate, approximate="tanh") * up, [wide] * 2),
        "halves": (kernels.silu_halves, lambda x: F.silu(x[..., :48]) * x[..., 48:], [wide]),
        "rotate": (
            lambda q, k: kernels.rotate(q, k, *on_device),
            lambda q, k: (_turned(q, *exact), _turned(k, *exact)),
            [(1, 4, 64, 64), (1, 2, 64, 64)],
        ),
    }  # fmt: skip
    kernel, eager, shapes = known[operation]
    return beside_eager(f"liger {operation}", kernel, eager, drawn(*shapes, device=device), numbers)


def quantised(base: Nf4 | Hqq, numbers: Numbers, device: torch.device) -> ProofCheck:
    """A product with a packed weight beside one with the weight that it stands for, and how far that is from the one
    packed. Raises MissingExtra without the library."""
    dtype = DTYPES[numbers]
    x_TD, weight_FD = (x.to(dtype) for x in drawn((96, 256), (384, 256), device=device))
    linear = nn.Linear(256, 384, bias=False, device=device, dtype=dtype)
    packed = packed_linear(linear, weight_FD, base)
    whole = packed.dequantised()
    away = distance(whole, weight_FD)
    found = with_gradients(packed, [x_TD], rounded_to=dtype)
    expected = with_gradients(
        lambda x: F.linear(x, whole.cpu().float()), [x_TD.cpu().float()], rounded_to=dtype
    )
    name = f"{base} {numbers}"
    check = judged(
        name, found, expected, tolerance=TOLERANCES[numbers], weight=away, weight_tolerance=_PACKED_AWAY
    )
    if away <= _PACKED_AWAY:
        return check
    return ProofCheck(name=name, passed=False, figures=check.figures, why="the weight is not what was packed")


def expert_adapters(numbers: Numbers, device: torch.device) -> ProofCheck:
    """Experts with adapters in grouped products, beside one expert after the other with its matrices merged."""
    config = config_from({
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": 64, "moe_intermediate_size": 32,
        "intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "vocab_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": [],
    })  # fmt: skip
    torch.manual_seed(0)
    model = empty_model(config, DTYPES[numbers]).to(device)
    experts: Any = next(module for module in model.modules() if is_experts(module)).requires_grad_(False)
    up_EFD, down_EDF = (getattr(experts, name) for name in ("gate_up_proj", "down_proj"))
    for stack, weights in zip(
        (up_EFD, down_EDF), drawn(up_EFD.shape, down_EDF.shape, device=device), strict=True
    ):
        stack.copy_(weights / 8)
    chosen_TK = torch.rand(48, 4, generator=torch.Generator().manual_seed(0)).topk(2).indices.to(device)

    def grouped(x: Tensor, weights_TK: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Outputs [T, D] of the experts; (a, b) adapts gate_up_proj, (c, d) down_proj."""
        run_by(experts, "gate_up_proj", lambda: (a, b, 2.0))
        run_by(experts, "down_proj", lambda: (c, d, 2.0))
        out_TD: Tensor = experts(x, chosen_TK, weights_TK)
        return out_TD

    loop: Any = copy.deepcopy(experts).cpu()
    loop.config._experts_implementation = "eager"  # transformers' own loop over the experts
    up_cpu_EFD, down_cpu_EDF = up_EFD.cpu().float(), down_EDF.cpu().float()

    def merged(x: Tensor, weights_TK: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Outputs [T, D] of experts whose matrices are W + 2·B·A."""
        matrices = {"gate_up_proj": up_cpu_EFD + 2 * b @ a, "down_proj": down_cpu_EDF + 2 * d @ c}
        out_TD: Tensor = functional_call(loop, matrices, (x, chosen_TK.cpu(), weights_TK))
        return out_TD

    shapes = (48, 64), (48, 2), (4, 8, 64), (4, 64, 8), (4, 8, 32), (4, 64, 8)
    inputs = [x / 4 for x in drawn(*shapes, device=device)]
    return beside_eager("fused adapters", grouped, merged, inputs, numbers)


def kernel_checks(numbers: Numbers, device: torch.device) -> dict[str, Callable[[], ProofCheck]]:
    """Every kernel's check, by what it is called."""
    known: dict[str, tuple[Callable[..., ProofCheck], *tuple[Any, ...]]] = {
        **{f"attention {backend}": (attention, backend) for backend in _BACKENDS},
        **{f"row attention {path}": (row_attention, path) for path in ("flash", "sdpa")},
        **{name: (fused_loss, kernels) for kernels, name in _LOSSES.items()},
        **{
            f"liger {operation}": (liger, operation)
            for operation in ("norm", "silu", "gelu", "halves", "rotate")
        },
        **{str(base): (quantised, base) for base in (Nf4(), Hqq(bits=4))},
        "fused adapters": (expert_adapters,),
    }
    return {f"{name} {numbers}": partial(check, *of, numbers, device) for name, (check, *of) in known.items()}
