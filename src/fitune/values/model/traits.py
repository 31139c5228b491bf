"""Traits: memory of the activation function, attention scores, and the fused kernels that fit a model."""

from dataclasses import dataclass

from fitune.errors import torch_release
from fitune.values.machines.hardware import Gpu
from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import Plan, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Counts of tensors of the MLP's width, or of operations."""

    keeps_input: bool = True
    """Autograd keeps what comes in."""
    keeps_output: bool = False
    """It keeps what goes out, where the product behind it keeps the same tensor."""
    inner: int = 0
    """Kept besides these two."""
    makes_output: bool = True
    """False where input and output are one tensor."""
    forward: int = 2
    """At once, with the input, when nothing is kept."""
    backward: int = 2
    """At once beyond what is kept, with the gradients of output and input."""
    reads_and_writes: tuple[int, int] = (2, 3)
    """Numbers of elementwise operations, forward and backward."""
    operations: tuple[int, int] = (1, 1)

    @property
    def kept(self) -> int:
        """Kept besides the output."""
        return self.keeps_input + self.inner


_ONE_KERNEL = Activation()
_FROM_ITS_OUTPUT = Activation(keeps_input=False, keeps_output=True)
_WRITTEN_OUT_TANH = Activation(
    inner=3, forward=4, backward=3, reads_and_writes=(18, 28), operations=(8, 11)
)  # keeps x, ½x, tanh and 1 + tanh

# Some functions are one kernel, others several operations in Python, each of which keeps what its own derivative reads
# (transformers/activations.py). A test counts the same of every function.
ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(
        ("gelu", "gelu_pytorch_tanh", "hardswish", "leaky_relu", "mish", "relu6", "silu", "swish"), _ONE_KERNEL
    ),
    **dict.fromkeys(("relu", "sigmoid", "tanh"), _FROM_ITS_OUTPUT),
    **dict.fromkeys(("gelu_accurate", "gelu_new", "gelu_python_tanh"), _WRITTEN_OUT_TANH),
    "gelu_10": Activation(inner=1, forward=3, backward=3, reads_and_writes=(4, 10), operations=(2, 4)),
    "gelu_fast": Activation(inner=6, forward=5, backward=3, reads_and_writes=(21, 36), operations=(9, 13)),
    "gelu_python": Activation(
        keeps_input=False, inner=3, forward=4, backward=5, reads_and_writes=(11, 24), operations=(5, 10)
    ),
    "laplace": Activation(
        keeps_input=False, inner=1, forward=4, backward=6, reads_and_writes=(10, 15), operations=(5, 7)
    ),
    "linear": Activation(
        keeps_input=False, makes_output=False, forward=1, backward=1, reads_and_writes=(0, 0), operations=(0, 0)
    ),
    "quick_gelu": Activation(inner=1, forward=3, backward=3, reads_and_writes=(7, 14), operations=(3, 5)),
    "relu2": Activation(
        keeps_input=False, inner=1, forward=3, backward=4, reads_and_writes=(4, 10), operations=(2, 4)
    ),
    "sqrtsoftplus": Activation(
        keeps_output=True, forward=3, backward=3, reads_and_writes=(4, 8), operations=(2, 3)
    ),
}  # fmt: skip

WITH_WEIGHTS = frozenset(("prelu", "xielu"))
"""They have parameters of their own, which no part of a plan counts or trains."""


def has_scores(plan: Plan) -> bool:
    """True if scores n·s² are written out, by fitune or by torch."""
    return writes_scores(plan) or falls_back_to_scores(plan)


def writes_scores(plan: Plan) -> bool:
    """True if fitune's own code writes them: eager attention, and models that no fused kernel computes."""
    return plan.attention == "eager" or plan.model.writes_scores


def falls_back_to_scores(plan: Plan) -> bool:
    """True if torch writes them, in fp32: to drop attention out on a CPU, which no fused kernel does there."""
    drops_out = plan.model.dropout.attention > 0 and plan.hardware.gpu.is_cpu
    return drops_out and not writes_scores(plan)


def writes_stream_scores(plan: Plan) -> bool:
    """True if torch writes out the scores of the whole stream, in fp32: Falcon-7B's, whose one key head fused kernels
    take for all queries from torch 2.14 on, on CPUs and GPUs."""
    return plan.model.is_multi_query and torch_release() < (2, 14)


def attends_in_one_call(plan: Plan) -> bool:
    """True if FlashAttention takes the whole stream with its rows and windows (models/attention.py, ``one_call``)."""
    refused = flash_refused(plan.model, plan.hardware.gpu, plan.precision)
    return plan.attention == "flash" and refused is None


def masking_window(plan: Plan) -> int:
    """Rows of more tokens than this keep a mask of s × s each, in the blocks that have a window; 0 where none does."""
    model = plan.model
    by_rows = not (model.masks_whole_stream or has_scores(plan) or attends_in_one_call(plan))
    some = by_rows and any(model.has_window(layer) for layer in range(model.num_layers))
    return model.sliding_window if some else 0


def long_rows_cost(plan: Plan) -> bool:
    """True if bytes grow with the squares of rows: scores are written out, or a window needs a mask."""
    return has_scores(plan) or 0 < masking_window(plan) < plan.batch.seq_len


def largest_rows(plan: Plan) -> tuple[int, ...]:
    """Lengths of the rows of the largest micro-batch: full ones, and a pack as two rows, whose attention outputs are
    joined into one more copy; where long rows cost, as the one row that takes most."""
    batch = plan.batch
    if not batch.packing or long_rows_cost(plan) or batch.seq_len < 2:
        return batch.full_rows
    half = batch.seq_len // 2
    return (batch.seq_len - half, half) * batch.micro_batch_size


_TRITON = (7, 0)
"""The oldest compute capability that Triton, which Liger's kernels are written in, compiles for."""

_LIGER_PRODUCTS = ("silu", "swish", "gelu_pytorch_tanh")
"""Activations, the last not where one linear makes gate and up (Phi-3)."""


def attends(model: ModelSpec) -> bool:
    """False for a model whose mixers are state spaces alone (Mamba): none of their linears makes queries."""
    return not model.chunk or any(linear.name.endswith("q_proj") for linear in model.linears)


def flash_refused(model: ModelSpec, gpu: Gpu, precision: Precision) -> str | None:
    """Reason why FlashAttention does not run here, or None: device, model or precision."""
    return flash_refused_by_device(gpu) or flash_refused_by_model(model, gpu, precision)


def flash_refused_by_device(gpu: Gpu) -> str | None:
    """Reason why FlashAttention does not run on this device, or None."""
    if gpu.is_cpu:
        return "FlashAttention runs on GPUs"
    if not gpu.has_flash_attention:
        return (
            f"FlashAttention-2 needs compute capability 8.0 or newer (Ampere), and {gpu.name} has "
            f"{capability_words(gpu)}"
        )
    return None


def flash_refused_by_model(model: ModelSpec, gpu: Gpu, precision: Precision) -> str | None:
    """Reason why the FlashAttention kernel cannot compute this model's attention on ``gpu``, which has it, or None."""
    if precision is Precision.FP32:
        return "FlashAttention takes 16-bit numbers, and precision is fp32"
    if model.masks_whole_stream:
        return f"the attention of {model.name} takes a mask over the whole stream, which the kernel does not"
    if model.caps_scores:
        return f"{model.name} caps its attention scores, which no fused kernel does"
    if model.has_sinks:
        return (
            f"a learned score of each head of {model.name} joins the softmax, which the kernel does not take"
        )
    if model.uneven_heads:
        return f"heads of values and of keys of {model.name} differ in size, which the kernel does not take"
    if model.head_dim > 256:
        return f"heads of {model.head_dim} are larger than the 256 the kernel takes"
    if model.head_dim % 8:
        return f"heads of {model.head_dim} are no multiple of the 8 the kernel takes"
    # torch refuses to train these: check_requires_grad_and_head_dim_gt192_constraints in its sdp_utils.cpp
    if not ((8, 6) <= gpu.capability <= (8, 9) or (12, 0) <= gpu.capability <= (12, 1)):
        return None
    where = f"on compute capability {capability_words(gpu)}, and {model.name} has {model.head_dim}"
    if 192 < model.head_dim <= 224:
        return f"its backward takes no heads of 193 to 224 {where}"
    if model.head_dim > 224 and model.dropout.attention > 0:
        return f"its backward takes no heads of more than 224 with dropout {where}"
    return None


def liger_refused_by_device(gpu: Gpu) -> str | None:
    """Reason why Liger's kernels do not run on this device, or None."""
    if gpu.capability >= _TRITON:
        return None
    where = "a CPU" if gpu.is_cpu else f"{gpu.name} ({capability_words(gpu)})"
    return (
        f"Liger's are Triton kernels, which run on GPUs of compute capability 7.0 and newer, not on {where}"
    )


def liger_refused_by_model(model: ModelSpec) -> str | None:
    """Reason why Liger's kernels do not fit this model, or None."""
    if model.is_traced:
        return (
            f"Liger's kernels are fitted to modules that fitune knows, and it only traces {model.model_type}"
        )
    if not model.has_liger_kernels:
        return (
            f"Liger's kernels take RMSNorms and gated MLPs, and {model.name} ({model.model_type}) has others"
        )
    products = _LIGER_PRODUCTS[:2] if model.fuses_gate_and_up else _LIGER_PRODUCTS
    if not model.num_experts and model.activation not in products:
        return f"Liger's gated product is of {', '.join(products)}; {model.name} has {model.activation}"
    if model.rotary_share != 1:
        return f"Liger's kernels turn whole heads by position, and {model.name} turns {model.rotary_share:g} of each"
    return None


def capability_words(gpu: Gpu) -> str:
    """``8.6``."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}"
