"""The timeline of one optimizer step: for each phase, the terms that make its worst moment.

Never a sum of maxima: every phase is one moment, and its terms add up to what is alive then. The moments
are those of a step after the first, when optimizer states exist, and of its last micro-batch.
"""

from fitune.estimate import activations, overhead, transient
from fitune.estimate import loss as loss_terms
from fitune.estimate.parameters import embedding_parameters
from fitune.estimate.shape import largest_batch
from fitune.estimate.states import update_temporaries_bytes
from fitune.estimate.step import StepStages, Terms, describe_step
from fitune.spec.plan import Plan
from fitune.spec.reports import MemoryBreakdown, Phase
from fitune.spec.shape import BatchShape


def predict_memory(plan: Plan, shape: BatchShape | None = None) -> MemoryBreakdown:
    """Bytes by phase and term on one device, for a micro-batch of ``shape`` (the most the plan allows if None)."""
    return memory_of(describe_step(plan, shape or largest_batch(plan)))


def memory_of(step: StepStages) -> MemoryBreakdown:
    """The breakdown of a step that is already described; a search varies the description (``varied``)."""
    resident = step.resident
    phases = {
        Phase.READY: resident,
        Phase.FORWARD: {**resident, **_forward_terms(step)},
        Phase.LOSS: {**resident, **_loss_terms(step)},
        Phase.BACKWARD: {**resident, **_backward_terms(step)},
        Phase.UPDATE: {**resident, **_update_terms(step)},
    }
    kept = {phase: {name: size for name, size in terms.items() if size} for phase, terms in phases.items()}
    moving = max(sum(terms.values()) for terms in kept.values()) - sum(resident.values())
    return MemoryBreakdown(
        phases=kept, outside=overhead.outside_terms(step.plan.hardware.gpu, moving_bytes=moving)
    )


def _forward_terms(step: StepStages) -> Terms:
    """The larger of two moments: the final norm with everything kept, or the last block at work."""
    layers = step.num_layers
    at_the_end: Terms = {
        "activations": step.kept_before(layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(layers),
        "hidden states": step.hidden,
        "temporaries": transient.final_norm_forward(
            tokens=step.shape.tokens,
            hidden=step.plan.model.hidden_size,
            element_bytes=step.element_bytes,
            trained=step.full,
        ),
    }
    in_the_last_block: Terms = {
        "activations": step.kept_before(layers - 1),
        "recompute inputs": step.inputs_before(layers),
        "temporaries": step.other_block.forward,
    }
    gradients = {"gradients": step.gradients if step.gradients_exist else 0}
    return {**step.around(), **gradients, **_larger(at_the_end, in_the_last_block)}


def _loss_terms(step: StepStages) -> Terms:
    """Everything kept, the hidden states, and one chunk of logits at its worst moment."""
    gradients = step.gradients if step.gradients_exist else 0
    alive: Terms = {
        **step.around(),
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
        "hidden states": step.hidden,
    }
    return _largest([{**alive, **moment} for moment in _loss_moments(step, gradients)])


def _loss_moments(step: StepStages, gradients: int) -> list[Terms]:
    """Softmax of the first chunk, head backward of the first and of a later chunk, softmax of a later one, scatter."""
    plan, e, model = step.plan, step.element_bytes, step.plan.model
    chunk = loss_terms.chunk_tokens(plan.loss, step.shape)
    capped = loss_terms.is_softcapped(model)
    softmax = loss_terms.logits_bytes(
        tokens=chunk, vocab_size=model.vocab_size, element_bytes=e, softcapped=capped
    )
    backward = loss_terms.head_backward_bytes(
        tokens=chunk,
        hidden=model.hidden_size,
        vocab_size=model.vocab_size,
        element_bytes=e,
        softcapped=capped,
    )
    buffers = loss_terms.loss_buffers_bytes(
        supervised_tokens=step.shape.supervised_tokens, hidden=model.hidden_size, element_bytes=e
    )
    head = step.head_gradient
    after_first = gradients or head
    fresh = {"gradients": after_first, "temporaries": head if gradients else 0}
    moments: list[Terms] = [
        {"gradients": gradients, "loss": buffers + softmax},
        {"loss": buffers + backward, **fresh},
        {"gradients": after_first, "loss": buffers + step.hidden},
    ]
    if loss_terms.num_chunks(plan.loss, step.shape) > 1:
        moments += [
            {"gradients": after_first, "loss": buffers + softmax},
            {"gradients": after_first, "loss": buffers + backward, "temporaries": head},
        ]
    return moments


def _backward_terms(step: StepStages) -> Terms:
    """The largest of: the final norm, the blocks, the embedding.

    Of the blocks the ends of both kinds suffice: from one to the next of a kind everything changes by the same.
    """
    layers, split = step.num_layers, step.recomputed
    ends = {0, 1, split - 1, split, split + 1, layers - 1} & set(range(layers))
    moments = [
        _final_norm_moment(step),
        *(_block_moment(step, index) for index in sorted(ends)),
        _embedding_moment(step),
    ]
    around: Terms = {
        **step.around(),
        "hidden states": 2 * step.hidden,
    }  # the trainer holds them and their gradient
    return {**around, **_largest(moments)}


def _final_norm_moment(step: StepStages) -> Terms:
    gradients = step.gradients if step.gradients_exist else step.head_gradient
    return {
        "gradients": gradients,
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
        "temporaries": step.final_norm.backward - step.hidden,  # no residual gradient beside it yet
    }


def _block_moment(step: StepStages, index: int) -> Terms:
    """Block ``index`` going back: blocks before it still keep theirs, those behind it left their gradients."""
    block = step.block(index)
    peak = block.peak
    later = step.num_layers - 1 - index
    done = step.head_gradient + step.final_norm.gradients + later * step.other_block.gradients
    kept = peak.kept
    if index < step.recomputed and _input_is_kept_by_norm(step):
        kept -= step.hidden  # the block's input, counted with the recomputed ones' inputs
    return {
        "gradients": step.gradients if step.gradients_exist else done + peak.gradients,
        "activations": step.kept_before(index) + kept,
        "recompute inputs": step.inputs_before(index + 1),
        "temporaries": peak.temporaries,
    }


def _embedding_moment(step: StepStages) -> Terms:
    """All gradients, and the embedding's made last: beside the head's when tied, or the earlier micro-batches'."""
    table = embedding_parameters(step.plan.model) * step.element_bytes if step.full else 0
    adds = step.gradients_exist or step.plan.model.tied_embeddings
    return {
        "gradients": step.gradients,
        "temporaries": step.hidden + (table if adds else 0),
    }


def _update_terms(step: StepStages) -> Terms:
    return {"gradients": step.gradients, "temporaries": update_temporaries_bytes(step.plan)}


def _input_is_kept_by_norm(step: StepStages) -> bool:
    """An fp32 RMSNorm or a LayerNorm keeps the residual stream itself, so a block's input is not held twice."""
    return step.element_bytes == activations.FP32 or step.plan.model.norm_type == "layer"


def _larger(one: Terms, other: Terms) -> Terms:
    return one if sum(one.values()) >= sum(other.values()) else other


def _largest(moments: list[Terms]) -> Terms:
    return max(moments, key=lambda terms: sum(terms.values()))
