"""The timeline of one optimizer step: for each phase, the terms that make its worst moment.

Never a sum of maxima: every phase is one moment, and its terms add up to what is alive then. The moments
are those of a step after the first, when optimizer states exist, and of its last micro-batch.
"""

from fitune.estimate import overhead
from fitune.estimate.blocks import activations, transient
from fitune.estimate.division import num_shares, reduce_width, uses_fsdp
from fitune.estimate.parameters import embedding_parameters, head_parameters
from fitune.estimate.states import (
    gradients_always_exist,
    leaves_after_the_loss,
    stepping_bytes,
)
from fitune.estimate.step import StepStages, Terms
from fitune.estimate.tensors import trained_tensors
from fitune.spec.plan import PlainLoss, trains_embeddings, updates_in_backward
from fitune.spec.predictions import MemoryBreakdown, Phase
from fitune.spec.remembered import remembered


@remembered
def memory_of(step: StepStages) -> MemoryBreakdown:
    """The breakdown of a step that is already described; a search varies the description (``varied``)."""
    resident = {**step.resident, "undivided tensors": step.buffers.resident}
    around = step.around()
    always = step.gradients if gradients_always_exist(step.plan) else 0
    phases = {
        Phase.IDLE: {**resident, "gradients": always},
        Phase.FORWARD: {**resident, **_forward_terms(step)},
        Phase.LOSS: {**resident, **around, **_loss_terms(step)},
        Phase.BACKWARD: {**resident, **around, **_backward_terms(step)},
        Phase.UPDATE: {**resident, **step.update, "reduce buffers": step.buffers.update},
    }
    kept = {phase: {name: size for name, size in terms.items() if size} for phase, terms in phases.items()}
    moving = max(sum(terms.values()) for terms in kept.values()) - sum(resident.values())
    gpu = step.plan.hardware.gpu
    streams = uses_fsdp(step.plan) and not gpu.is_cpu
    return MemoryBreakdown(
        phases=kept,
        outside=overhead.outside_terms(gpu, moving_bytes=moving),
        reclaimable=overhead.stream_cache_bytes(kept, gradients=step.gradients) if streams else 0,
    )


def _forward_terms(step: StepStages) -> Terms:
    """The largest of: the final norm with everything kept, the last block at work, before and after it, the start."""
    layers = step.num_layers
    at_the_end: Terms = {
        "activations": step.kept_before(layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(layers),
        "hidden states": step.hidden,
        "temporaries": 0  # one kernel, from the input that is kept to the hidden states
        if step.plan.kernels == "liger"
        else step.final_norm.forward
        if step.plan.model.is_traced
        else transient.final_norm_forward(
            tokens=step.shape.tokens,
            hidden=step.plan.model.hidden_size,
            element_bytes=step.element_bytes,
            trained=step.full,
        ),
        "gathered weights": step.buffers.end,
    }
    last = layers - 1
    leaving_beside = step.block(last).kept if step.activations_leave and last >= step.recomputed else 0
    in_the_last_block: Terms = {
        "activations": step.kept_before(last) + leaving_beside,
        "recompute inputs": step.inputs_before(last) + step.own_input(last),
        "temporaries": 3 * step.hidden  # residual, output, their sum
        if leaving_beside
        else max(step.block(last).forward, 0 if last < step.recomputed else step.block(last).building),
        "gathered weights": step.buffers.forward,
    }
    before_the_last_block: Terms = {
        "activations": step.kept_before(layers - 1),
        "recompute inputs": step.inputs_before(layers - 1),
        "temporaries": step.hidden,
        "gathered weights": step.buffers.gathering,
    }
    behind_the_last_block: Terms = {
        "activations": step.kept_before(layers),
        "recompute inputs": step.inputs_before(layers),
        "temporaries": 2 * step.hidden,
        "gathered weights": step.buffers.forward,
    }
    at_the_start: Terms = {"temporaries": step.hidden, "gathered weights": step.buffers.start}
    gradients = {"gradients": step.gradients_before}
    moments = [at_the_end, in_the_last_block, before_the_last_block, behind_the_last_block, at_the_start]
    if step.buffers.forward_ahead:  # while the last one's weights come from the host
        moments.append(_in_a_block_earlier(step, max(0, last - 1)))
    if step.plan.model.is_traced:  # where blocks of several kinds take turns, the last may be a small one
        moments += [_in_a_block_earlier(step, index) for index in step.run_ends if index != last]
    largest = _largest(moments)
    hidden = largest.get("hidden states", 0) + _embedded_tokens(step)
    copies = {"16-bit copies": step.weight_copies}
    forward = {**step.around(in_forward=True), **gradients, **copies, **largest, "hidden states": hidden}
    return {**forward, "reduce buffers": step.buffers.standing}


def _in_a_block_earlier(step: StepStages, index: int) -> Terms:
    return {
        "activations": step.kept_before(index),
        "recompute inputs": step.inputs_before(index) + step.own_input(index),
        "temporaries": step.block(index).forward,
        "gathered weights": step.buffers.forward + step.buffers.forward_ahead,
    }


def _embedded_tokens(step: StepStages) -> int:
    """Bytes of the first block's input, which the body holds to the end of forward; elsewhere that block keeps it."""
    if step.plan.model.is_traced:
        return 0  # among what is around
    kept_by_block = trains_embeddings(step.plan.tuning) or (step.recomputed > 0 and not step.untouched)
    return 0 if kept_by_block else step.hidden


def _loss_terms(step: StepStages) -> Terms:
    """Everything kept, the hidden states, and one chunk of logits at its worst moment."""
    alive: Terms = {
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
        "hidden states": step.hidden,
        "16-bit copies": step.weight_copies,
        "gathered weights": step.buffers.loss,
        "reduce buffers": step.buffers.standing,
    }
    return _largest([{**alive, **moment} for moment in _loss_moments(step, step.gradients_before)])


def _loss_moments(step: StepStages, gradients: int) -> list[Terms]:
    """Softmax of the first chunk, head backward of the first and of a later chunk, softmax of a later one, scatter."""
    plan, e, model = step.plan, step.element_bytes, step.plan.model
    if step.logit_bytes and isinstance(plan.loss, PlainLoss):
        logits = step.shape.tokens * model.vocab_size * step.logit_bytes
        return [{"gradients": gradients, "loss": logits}]
    chunk = activations.chunk_tokens(plan.loss, step.shape)
    softmax, backward = _chunk_sizes(step, chunk)
    buffers = activations.loss_buffers_bytes(
        supervised_tokens=step.shape.supervised_tokens, hidden=model.hidden_size, element_bytes=e
    )
    head = step.head_gradient
    after_first = gradients if step.adds_in_place else gradients + head
    fresh = {"gradients": after_first, "temporaries": head if step.adds_in_place else 0}
    if step.goes_back_twice:
        buffers += step.hidden  # the loss runs again while its first gradient waits
    moments: list[Terms] = [
        {"gradients": gradients, "loss": buffers + softmax},
        {"loss": buffers + backward, **fresh},
        {"gradients": after_first, "loss": buffers + step.hidden},
    ]
    if activations.num_chunks(plan.loss, step.shape) > 1:
        softmax, backward = _chunk_sizes(step, min(chunk, step.shape.supervised_tokens - chunk))
        moments += [
            {"gradients": after_first, "loss": buffers + softmax},
            {"gradients": after_first, "loss": buffers + backward, "temporaries": head},
        ]
    return moments


def _chunk_sizes(step: StepStages, tokens: int) -> tuple[int, int]:
    """Bytes of a chunk of the loss: while softmax and gradient are formed, and while it goes back through the head."""
    model, e = step.plan.model, step.element_bytes
    softmax = activations.logits_bytes(
        tokens=tokens, vocab_size=model.vocab_size, element_bytes=e, softcapped=model.caps_logits
    )
    backward = activations.head_backward_bytes(
        tokens=tokens,
        hidden=model.hidden_size,
        vocab_size=model.vocab_size,
        element_bytes=e,
        softcapped=model.caps_logits,
    )
    return softmax, backward


def _backward_terms(step: StepStages) -> Terms:
    """The largest of: the final norm, the blocks, the embedding.

    The ends of every run of equal blocks suffice: from one to the next everything changes by the same.
    """
    layers, split = step.num_layers, step.recomputed
    summed_from = layers - 2 if step.buffers.reduce else 0  # the first block that has sums beside it
    ends = {0, 1, split - 1, split, split + 1, split + 2, summed_from} | step.run_ends
    moments = [
        _head_used_moment(step),
        _final_norm_moment(step),
        *(_block_moment(step, index) for index in sorted(ends) if step.untouched <= index < layers),
        _embedding_moment(step),
        _root_sum_moment(step),
        _root_divided_moment(step),
        _root_stepped_moment(step),
    ]
    held: Terms = {
        "hidden states": 2 * step.hidden,  # the trainer holds them and their gradient
        "16-bit copies": step.weight_copies * (step.num_layers - step.recomputed) // step.num_layers,
    }
    return {**held, **_largest(moments)}


def _head_used_moment(step: StepStages) -> Terms:
    """Bytes while the head is stepped: in backward, before the body goes back, where it is a matrix of its own."""
    if not updates_in_backward(step.plan.tuning) or step.root_waits:
        return {}
    return {
        "gradients": step.head_gradient,
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
        "temporaries": stepping_bytes(step.plan, head_parameters(step.plan.model)),
    }


def _final_norm_moment(step: StepStages) -> Terms:
    return {
        "gradients": _before_the_blocks(step, step.head_gradient),
        "gathered weights": step.buffers.final_norm,
        "reduce buffers": step.buffers.buckets,
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
        "temporaries": step.final_norm.backward - step.hidden,  # no residual gradient beside it yet
    }


def _block_moment(step: StepStages, index: int) -> Terms:
    """Block ``index`` going back: blocks before it still keep theirs, those behind it left their gradients."""
    block = step.block(index)
    peak = block.recomputed_peak if index < step.recomputed else block.peak
    later = step.num_layers - 1 - index
    root = step.head_gradient + step.final_norm.gradients
    blocks = step.gradients_of_blocks[-1] - step.gradients_of_blocks[index + 1]
    resting = step.gradients_before or step.settled(blocks if step.root_waits else root + blocks)
    waiting = root if step.root_waits else 0
    kept = peak.kept
    if index < step.recomputed and _input_is_kept_by_norm(step):
        kept -= step.hidden  # the block's input, counted with the recomputed ones' inputs
    return {
        "gradients": resting + waiting + peak.gradients,
        "activations": _kept_around(step, index) + kept,
        "recompute inputs": _inputs_around(step, index),
        "temporaries": peak.temporaries,
        "gathered weights": step.gathered_in_backward(index),
        "reduce buffers": step.buffers.buckets
        + (step.buffers.reduce if later else 0)
        + later * step.buffers.summed_per_block,
    }


def _kept_around(step: StepStages, index: int) -> int:
    """Bytes that other blocks keep while ``index`` goes back: those before it, or all if backward runs twice."""
    if not step.goes_back_twice or step.activations_leave:
        return step.kept_before(index)
    own = 0 if index < step.recomputed else step.block(index).peak.kept
    return step.kept_before(step.num_layers) + step.final_norm.kept - own


def _inputs_around(step: StepStages, index: int) -> int:
    """Bytes of the recomputed blocks' inputs while ``index`` goes back, its own among them."""
    if not step.goes_back_twice or step.activations_leave:
        held = (step.num_layers - 1 - index) * step.held_behind
        return step.inputs_before(index) + step.own_input(index) + held
    return step.inputs_before(step.num_layers)


def _embedding_moment(step: StepStages) -> Terms:
    """All gradients, and the embedding's made last: beside the head's when tied, or the earlier micro-batches'."""
    elements = embedding_parameters(step.plan.model) if trains_embeddings(step.plan.tuning) else 0
    divided = step.gradients != step.whole_gradients
    adds = step.gradients_exist or step.plan.model.tied_embeddings or divided
    table = elements * step.element_bytes if adds else 0
    stepped = 0 if step.buffers.root_end else stepping_bytes(step.plan, elements)
    return {
        **_kept_for_a_second_pass(step),
        "gradients": _blocks_and_waiting(step),
        "temporaries": step.hidden + table + stepped,
        "gathered weights": step.buffers.root,
        "reduce buffers": step.buffers.buckets
        + max(step.buffers.reduce, step.buffers.last_sum)
        + _summed_by_nodes(step),
    }


def _root_sum_moment(step: StepStages) -> Terms:
    """FSDP2 at the end: the root's whole gradients beside the buffer they are summed from.

    Its weights are let go by then, unless the loss runs on them again before a second backward.
    """
    if not step.buffers.root_end:
        return {}
    table = embedding_parameters(step.plan.model) * step.element_bytes
    return {
        **_kept_for_a_second_pass(step),
        "gradients": _blocks_and_waiting(step) + (0 if step.plan.model.tied_embeddings else table),
        "gathered weights": step.buffers.root if step.goes_back_twice else 0,
        "reduce buffers": step.buffers.root_end + _summed_by_nodes(step),
    }


def _summed_by_nodes(step: StepStages) -> int:
    """Shares of all blocks that FSDP2 still holds when only the root is left."""
    return step.num_layers * step.buffers.summed_per_block


def _root_divided_moment(step: StepStages) -> Terms:
    """The root's shares, summed in the reduce type and copied to their own, beside the buffer they came from."""
    if not step.buffers.root_end:
        return {}
    width = reduce_width(step.plan)
    shares = sum(_root_shares(step))
    return {
        **_kept_for_a_second_pass(step),
        "gradients": _blocks_at_rest(step) + shares * step.element_bytes + _last_of_root(step),
        "gathered weights": step.buffers.root if step.goes_back_twice else 0,
        "reduce buffers": step.buffers.root_end
        + _summed_by_nodes(step)
        + (shares * width if width > step.element_bytes else 0),
    }


def _root_stepped_moment(step: StepStages) -> Terms:
    """The root's shares being stepped in backward, beside the buffer that they were summed from."""
    if not step.buffers.root_end or not updates_in_backward(step.plan.tuning):
        return {}
    shares = _root_shares(step)
    return {
        "gradients": sum(shares) * step.element_bytes + _last_of_root(step),
        "temporaries": stepping_bytes(step.plan, max(shares)),
        "reduce buffers": step.buffers.root_end,
    }


def _last_of_root(step: StepStages) -> int:
    """The head's whole gradient: FSDP2 names the last of a group until its shares are there (foreach_reduce)."""
    return 0 if step.plan.model.tied_embeddings else step.head_gradient


def _root_shares(step: StepStages) -> list[int]:
    """Elements of this rank's shares of what is trained outside the blocks."""
    parts = num_shares(step.plan)
    return [t.count * t.share(parts) for t in trained_tensors(step.plan) if not t.in_block]


def _kept_for_a_second_pass(step: StepStages) -> Terms:
    """All that the blocks keep, where backward runs twice and this moment is in the first one too."""
    if not step.goes_back_twice:
        return {}
    return {
        "activations": step.kept_before(step.num_layers) + step.final_norm.kept,
        "recompute inputs": step.inputs_before(step.num_layers),
    }


def _blocks_and_waiting(step: StepStages) -> int:
    """The blocks' gradients as they rest, and the whole ones of head and final norm where they wait."""
    if not step.root_waits:
        return step.gradients
    return _blocks_at_rest(step) + step.head_gradient + step.final_norm.gradients


def _blocks_at_rest(step: StepStages) -> int:
    """The gradients that rest on the device when all blocks have gone back."""
    return step.gradients_before or step.settled(step.gradients_of_blocks[-1])


def _before_the_blocks(step: StepStages, head: int) -> int:
    """Gradients when only the head's is new: added to whole ones, waiting beside a share, or already settled."""
    if step.root_waits or leaves_after_the_loss(step.plan):
        return step.gradients_before + head
    return step.gradients_before or step.settled(head)


def _input_is_kept_by_norm(step: StepStages) -> bool:
    """An fp32 RMSNorm or a LayerNorm keeps the residual stream itself, so a block's input is not held twice."""
    if step.plan.model.is_traced:
        return False  # a recomputed block was traced without its input
    return step.element_bytes == activations.FP32 or step.fp32_stream or step.plan.model.norm_type == "layer"


def _largest(moments: list[Terms]) -> Terms:
    return max(moments, key=lambda terms: sum(terms.values()))
