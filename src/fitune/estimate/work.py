"""Work of one optimizer step, phase by phase: products, bytes and operations, counted (eager.py).

The loss has a file of its own (loss.py); how long it all takes is in time.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from fitune.estimate.division import uses_deepspeed, zero_stage
from fitune.estimate.rates import NEW_PAGE_BYTES, Rates
from fitune.estimate.states import has_masters, states_per_parameter
from fitune.estimate.step import StepStages
from fitune.values.counts import trained_tensors
from fitune.values.model.block_profile import Attention, BatchShape
from fitune.values.plan import AdamW8bit, Lomo, Plan, updates_in_backward
from fitune.values.remembered import remembered

MODULE_HOOK_SECONDS = 4e-4
"""DeepSpeed's ZeRO-3 fetches, awaits and releases the weights of every module in Python, once a pass: Qwen's profile of
ZeRO-3 shows half a second a micro-batch of 32 blocks, whether it has 256 tokens or 1,024. Not measured by us."""
STEP_SECONDS = 1.7e-4
"""Python of one call of torch's optimizers, which stepping in backward pays for each weight: measured with AdamW and a
small weight on a core of a cloud EPYC (torch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that one micro-batch (or one update) gives the device in one phase."""

    product_flops: float = 0.0
    products: float = 0.0
    attention_seconds: float = 0.0
    bytes: float = 0.0
    """Moved by operations that write new tensors of about ``tensor_bytes``."""
    tensor_bytes: float = 0.0
    bytes_in_place: float = 0.0
    """Moved otherwise: weights read, states updated, logits overwritten."""
    copied: tuple[tuple[float, float], ...] = ()
    """(bytes moved, bytes of the tensor) of other new tensors."""
    logits: float = 0.0
    """Number of logits that go through softmax and its gradient by torch's operations; one kernel's count in part."""
    new_bytes: float = 0.0
    """Bytes of products' results so large that their memory is new every time."""
    forward_operations: float = 0.0
    backward_operations: float = 0.0
    """Products and all others, launched by Python or by autograd."""
    python_seconds: float = 0.0
    """Beside the operations of the blocks."""

    def __add__(self, more: "Work") -> "Work":
        """One after the other; ``tensor_bytes`` are those of the one that writes such tensors."""
        return Work(**{name: getattr(self, name) + getattr(more, name) for name in Work.__slots__})


def forward_work(step: StepStages, rates: Rates) -> Work:
    """Per token the products of every block, per pair a third of attention's; the blocks' weights are read once."""
    plan, layers, tokens = step.plan, step.num_layers, step.shape.tokens
    return Work(
        product_flops=tokens * step.forward.flops,
        products=step.forward.products,
        attention_seconds=sum(
            count * attention_seconds(each, step.shape, rates)[0] for each, count, _ in step.attentions
        ),
        bytes=tokens * (step.forward.bytes + step.casts[0]),
        tensor_bytes=step.hidden,
        bytes_in_place=step.weights_read + step.copied_out + step.unpacked,
        forward_operations=step.forward.products + step.forward.operations + layers * step.shape.rows,
        python_seconds=_hook_seconds(plan) + rates.forward_start_seconds,
    )


def _hook_seconds(plan: Plan) -> float:
    """Seconds of DeepSpeed's hooks in one pass through the blocks; 0 without them."""
    if not uses_deepspeed(plan) or zero_stage(plan) < 3:
        return 0.0
    modules = len(plan.model.linears) + plan.model.norms_per_block  # of a block, with weights of their own
    return plan.model.num_layers * modules * MODULE_HOOK_SECONDS


def backward_work(step: StepStages, forward: Work, rates: Rates) -> Work:
    """Work of training beside forward, + the forward of the recomputed blocks; gradients written and read.

    Weights are read by both, packed ones made whole for both; FSDP2 gathers them once for the two.
    """
    tokens, again = step.shape.tokens, max(0, step.recomputed - step.untouched) / step.num_layers
    back = step.num_layers - step.untouched
    return Work(
        product_flops=tokens * step.backward.flops + again * forward.product_flops,
        products=step.backward.products + again * forward.products,
        attention_seconds=sum(
            count * attention_seconds(each, step.shape, rates)[1] for each, _, count in step.attentions
        )
        + again * forward.attention_seconds,
        new_bytes=sum(
            count_in_large(each.elements * step.element_bytes) * each.count
            for each in trained_tensors(step.plan)
        ),
        bytes=tokens * (step.backward.bytes + step.casts[1]) + again * forward.bytes,
        tensor_bytes=step.hidden,
        bytes_in_place=back / step.num_layers * step.copied_out
        + (back / step.num_layers + again) * (step.weights_read + step.unpacked)
        + 2 * step.whole_gradients,
        forward_operations=again * forward.forward_operations,
        python_seconds=(1 + again) * _hook_seconds(step.plan),
        backward_operations=step.backward.products + step.backward.operations + 2 * back * step.shape.rows,
    )


def update_work(step: StepStages) -> Work:
    """Weight and states are read and written; the gradient is read for its norm, scaled in place and read again.

    Of the rank's share. With masters the gradient has an fp32 copy: on a processor three operations on each tensor
    beside its norm; a GPU takes all tensors in a few launches, and Python prepares each for about as long as a launch
    takes (results/null_gpu_steps.json: 12 ms for 448). 8-bit states are one byte. The update may be a part of backward
    (step_time_of); an optimizer on the host leaves nothing.
    """
    plan, e = step.plan, step.element_bytes
    if not step.stepped:
        return Work()
    masters = has_masters(plan)
    width = 4 if masters else e
    states = states_per_parameter(plan.optimizer)
    moved = 2 * width + 2 * states * (1 if isinstance(plan.optimizer, AdamW8bit) else width)
    matrices = sum(count for _, count in plan.model.counted_linears())
    tensors = sum(each.count for each in trained_tensors(plan))
    one_by_one = updates_in_backward(plan.tuning) and not isinstance(plan.tuning, Lomo)
    per_parameter = 2 * e + moved + (3 * 4 if masters else 2 * e)
    return Work(
        bytes_in_place=float(step.stepped * per_parameter),
        copied=tuple(_copies_for_masters(step)) if masters else (),
        forward_operations=tensors * (4 if masters and plan.hardware.gpu.is_cpu else 1),
        python_seconds=(matrices if one_by_one else 1) * STEP_SECONDS,
    )


def _copies_for_masters(step: StepStages) -> Iterator[tuple[float, float]]:
    """The fp32 copy of every gradient: e read, 4 written. A processor makes another one for the norm and reads it."""
    plan, e = step.plan, step.element_bytes
    tensors = trained_tensors(plan)
    share = step.stepped / sum(each.count * each.elements for each in tensors)
    times = (2 * (e + 4) + 4) if plan.hardware.gpu.is_cpu and e < 4 else e + 4
    for each in tensors:
        yield share * times * each.count * each.elements, share * 4 * each.elements


def count_in_large(tensor_bytes: float) -> float:
    """``tensor_bytes`` of a tensor whose memory is new every time, else 0."""
    return tensor_bytes if tensor_bytes >= NEW_PAGE_BYTES else 0.0


@remembered
def attention_seconds(attention: Attention, shape: BatchShape, rates: Rates) -> tuple[float, float]:
    """Seconds of one block's attention, forward and backward: as heads were measured, else FLOPs at its rate.

    Backward makes the scores again: 5 products to forward's 2 (Dao 2023, arXiv 2307.08691).
    """
    if not attention.flops_per_pair:
        return 0.0, 0.0
    lengths = shape.row_lengths or (shape.row_tokens,) * (shape.tokens // shape.row_tokens)
    there = back = 0.0
    for length in lengths if attention.over == "rows" else ():
        measured = rates.head_seconds(attention.head_size, length)
        if measured is None:
            break
        there += attention.heads * measured[0]
        back += attention.heads * measured[1]
    if back:
        return there, back
    forward = attention_flops(attention, shape, rates) / 3 / rates.attention_flops
    return forward, 2.5 * forward


def attention_flops(attention: Attention, shape: BatchShape, rates: Rates) -> float:
    """FLOPs of one block's attention both ways: n · (n + row_tokens) / 2 pairs of each row of n, less what lies
    before a window.

    All of row × row where scores are written out, of stream × stream where a mask tells its rows apart.
    """
    pairs = {
        "stream": shape.tokens**2,
        "written rows": shape.pairs(),
        "rows": shape.seen_pairs(attention.sees) + shape.tokens * rates.attention_row_tokens / 2,
    }[attention.over]
    return pairs * attention.flops_per_pair
