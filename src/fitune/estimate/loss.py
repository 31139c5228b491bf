"""Head and cross-entropy: the hump between forward and backward (models/language_model.py).

The loss sees detached hidden states and only tokens that have a label; its gradient is written over the
logits, so forward and backward of a chunk are one moment.
"""

from fitune.spec.plan import ChunkedLoss, Loss, PlainLoss
from fitune.spec.shape import BatchShape


def chunk_tokens(loss: Loss, shape: BatchShape) -> int:
    """Supervised tokens whose logits exist at once."""
    match loss:
        case ChunkedLoss(chunk_tokens=size):
            return min(size, shape.supervised_tokens)
        case PlainLoss():
            return shape.supervised_tokens


def num_chunks(loss: Loss, shape: BatchShape) -> int:
    size = chunk_tokens(loss, shape)
    return -(-shape.supervised_tokens // size) if size else 0


def bytes_per_logit(*, element_bytes: int) -> int:
    """4 in fp32: the softmax overwrites the logits. 8 in 16 bit: logits 2, fp32 work 4, gradient 2.

    transformers' own loss needs 10 forward and 12 backward (docs/memory-model.md).
    """
    return 4 if element_bytes == 4 else 2 * element_bytes + 4


def logits_bytes(*, tokens: int, vocab_size: int, element_bytes: int, softcapped: bool) -> int:
    """c · V · bytes per logit, while softmax and gradient are formed.

    A soft cap keeps its tangent, e more; in fp32 the way back through it is the worst moment, 16: tangent, gradient,
    and one behind each of the product and the tangent. In 16 bit that takes 10, as the softmax does.
    """
    capped = (element_bytes if element_bytes < 4 else 3 * element_bytes) if softcapped else 0
    return tokens * vocab_size * (bytes_per_logit(element_bytes=element_bytes) + capped)


def head_backward_bytes(
    *, tokens: int, hidden: int, vocab_size: int, element_bytes: int, softcapped: bool
) -> int:
    """c · e · (2·V + h) [fp32: V + h]: logits, their gradient (fp32: the same storage), gradient of the input.

    Behind a soft cap the gradient is another one, + V.
    """
    tensors = (1 if element_bytes == 4 else 2) + (1 if softcapped else 0)
    return tokens * element_bytes * (tensors * vocab_size + hidden)


def loss_buffers_bytes(*, supervised_tokens: int, hidden: int, element_bytes: int) -> int:
    """2·e·h per supervised token: the gathered hidden states and the gradient written chunk by chunk."""
    return 2 * supervised_tokens * hidden * element_bytes
