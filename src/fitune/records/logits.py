"""The loss hump of a published run."""

from fitune.estimate.parameters import head_parameters
from fitune.records.mapping import Case
from fitune.spec.plan import ChunkedLoss, trains_every_weight


def logits_bytes(case: Case) -> int:
    """t · (V·bytes per logit + copies·e·h); a chunk's worth of the first where the loss is chunked."""
    plan, logits, tokens = case.plan, case.habits.logits, case.shape.tokens
    e = plan.precision.compute_bytes
    copies = logits.hidden_copies * e * plan.model.hidden_size * tokens
    vocabulary = plan.model.vocab_size
    if isinstance(plan.loss, ChunkedLoss):
        chunk = _liger_chunk(tokens, plan.model.hidden_size, vocabulary)
        head = head_parameters(plan.model) * e if trains_every_weight(plan.tuning) else 0
        return copies + chunk * vocabulary * (e + 4) + head
    per_logit = 16 if e == 4 else logits.per_logit
    return copies + tokens * vocabulary * logits.whole + tokens * vocabulary * per_logit // logits.chunks


def _liger_chunk(tokens: int, hidden: int, vocabulary: int) -> int:
    """next power of two of t / ⌈V/h⌉ (liger_kernel/ops/fused_linear_cross_entropy.py)."""
    size = -(-tokens // -(-vocabulary // hidden))
    return 1 << (size - 1).bit_length()
