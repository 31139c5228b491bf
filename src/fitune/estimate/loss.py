"""All that the loss needs beside the blocks: bytes at its worst moments, and work.

The head takes a chunk of the supervised tokens at a time (models/loss_head.py).
"""

from fitune.estimate.blocks.site import FP32
from fitune.estimate.rates import FUSED_LOGIT_MOVES, LOGIT_BYTES
from fitune.estimate.step import StepStages, Terms
from fitune.estimate.work import Work, count_in_large
from fitune.values.counts import head_flops_per_token
from fitune.values.model.block_profile import BatchShape
from fitune.values.plan import ChunkedLoss, Loss, PlainLoss, trains_head


def loss_bytes(step: StepStages) -> int:
    """Bytes of the worst moment of the loss, beside the gradients that were there before."""
    return max(sum(moment.values()) for moment in loss_moments(step, 0))


def loss_moments(step: StepStages, gradients: int) -> list[Terms]:
    """Softmax of the first chunk, its way back through the head, scatter, and softmax of a later chunk."""
    plan, e, model = step.plan, step.element_bytes, step.plan.model
    if step.logit_bytes and isinstance(plan.loss, PlainLoss):
        logits = step.shape.tokens * model.vocab_size * step.logit_bytes
        return [{"gradients": gradients, "loss": logits}]
    chunk = chunk_tokens(plan.loss, step.shape)
    softmax, backward = _chunk_sizes(step, chunk)
    # the gathered hidden states and the gradient written chunk by chunk
    buffers = 2 * step.shape.supervised_tokens * model.hidden_size * (FP32 if model.fp32_stream else e)
    after_first = gradients if step.adds_in_place else gradients + step.head_gradient
    if plan.goes_back_twice:
        buffers += step.hidden  # the loss runs again while its first gradient waits
    moments: list[Terms] = [
        {"gradients": gradients, "loss": buffers + softmax},
        {"gradients": after_first, "loss": buffers + backward},
        {"gradients": after_first, "loss": buffers + step.hidden},
    ]
    if num_chunks(plan.loss, step.shape) > 1:
        softmax, _ = _chunk_sizes(step, min(chunk, step.shape.supervised_tokens - chunk))
        moments.append({"gradients": after_first, "loss": buffers + softmax})
    return moments


def _chunk_sizes(step: StepStages, tokens: int) -> tuple[int, int]:
    """Bytes of a chunk of the loss: while softmax and gradient are formed, and while it goes back through the head.

    Then there is the logits' gradient, and where the stream is fp32 input and gradient in the head's type.
    """
    model, e = step.plan.model, step.element_bytes
    softmax = tokens * model.vocab_size * (step.logit_bytes or bytes_per_logit(step))
    return softmax, tokens * e * (model.vocab_size + 2 * model.hidden_size * model.fp32_stream)


def bytes_per_logit(step: StepStages) -> int:
    """4 in fp32: the softmax overwrites the logits. 6 in 16 bit: fp32 work 4, beside the logits or their gradient 2.
    A soft cap keeps its tangent, e more; the way back through it overwrites the gradient. e where one kernel does it
    all (models/fused_loss.py).

    transformers' own loss needs 10 forward and 12 backward (docs/memory-model.md).
    """
    e = step.element_bytes
    if step.plan.kernels == "liger":
        return e
    return (e if e == FP32 else e + FP32) + step.plan.model.caps_logits * e


def loss_work(step: StepStages) -> Work:
    """Head forward and backward for supervised tokens, softmax and its gradient between them.

    The head's first gradient of a micro-batch is counted with the others (backward_work). Other trainers' kernels count
    as torch's operations: with casts and copies around them, fms-acceleration's losses move 32 and 46 bytes a logit.
    """
    plan, supervised, e = step.plan, step.shape.supervised_tokens, step.element_bytes
    chunks = num_chunks(plan.loss, step.shape)
    head = plan.model.vocab_size * plan.model.hidden_size * e
    chunk = chunk_tokens(plan.loss, step.shape) * plan.model.vocab_size
    fused = plan.kernels == "liger" and not step.logit_bytes
    copies = (
        (e,) if e == 4 or fused else (e, 4, e)
    )  # logits; in 16 bit also the work in fp32 and the gradient
    moved = FUSED_LOGIT_MOVES * e / LOGIT_BYTES[e] if fused else 1.0
    return Work(
        product_flops=supervised * head_flops_per_token(plan.model, plan.tuning),
        products=chunks * (3 if trains_head(plan.tuning) else 2),
        bytes_in_place=chunks * head * (4 if trains_head(plan.tuning) else 2),
        logits=moved * supervised * plan.model.vocab_size,
        new_bytes=chunks * sum(count_in_large(chunk * size) for size in copies)
        + (chunks - 1) * count_in_large(head) * trains_head(plan.tuning),
        forward_operations=(14.0 if fused else 27.0) * chunks,
    )


def chunk_tokens(loss: Loss, shape: BatchShape) -> int:
    """Supervised tokens whose logits exist at once."""
    match loss:
        case ChunkedLoss(chunk_tokens=size):
            return min(size, shape.supervised_tokens)
        case PlainLoss():
            return shape.supervised_tokens


def num_chunks(loss: Loss, shape: BatchShape) -> int:
    """⌈supervised tokens / chunk⌉ passes over the head; 0 where no token is supervised."""
    size = chunk_tokens(loss, shape)
    return -(-shape.supervised_tokens // size) if size else 0
