"""The moments of backward, each with the bytes alive in it: the end of the loss, the blocks, the embedding.

Under FSDP2 three more follow, in which the root's gradients (embedding, head, final norm) are summed, divided and
stepped: it reduces them last.
"""

from collections.abc import Iterator

from fitune.estimate.blocks.site import FP32
from fitune.estimate.division import num_shares, reduce_width
from fitune.estimate.parameters import embedding_parameters, head_parameters, late_tables
from fitune.estimate.states import leaves_after_the_loss, stepping_bytes
from fitune.estimate.step import StepStages, Terms
from fitune.spec.counts import trained_tensors
from fitune.spec.plan import trains_embeddings, updates_in_backward


def backward_moments(step: StepStages) -> list[Terms]:
    """Terms of every moment that may be the worst, in the order in which they come.

    The ends of every run of equal blocks suffice: from one to the next everything changes by the same.
    """
    layers, split = step.num_layers, step.recomputed
    summed_from = layers - 2 if step.buffers.reduce else 0  # the first block that has sums beside it
    ends = {0, 1, split - 1, split, split + 1, split + 2, summed_from} | step.run_ends
    return [
        _head_used_moment(step),
        _final_norm_moment(step),
        *(_block_moment(step, index) for index in sorted(ends) if step.untouched <= index < layers),
        _embedding_moment(step),
        *_root_moments(step),
    ]


def _head_used_moment(step: StepStages) -> Terms:
    """Bytes while the head is stepped: in backward, before the body goes back, where it is a matrix of its own."""
    if not updates_in_backward(step.plan.tuning) or step.root_waits:
        return {}
    return {
        "gradients": step.head_gradient,
        **step.all_kept(),
        "hidden states": 0 if step.goes_back_twice else 2 * step.hidden,  # and their gradient, on its way
        "temporaries": stepping_bytes(step.plan, head_parameters(step.plan.model)),
    }


def _final_norm_moment(step: StepStages) -> Terms:
    """The head's gradient is the only new one: added to whole ones, waiting beside a share, or already settled."""
    head = step.head_gradient
    settled = step.gradients_before or step.settled(head)
    waits = step.root_waits or leaves_after_the_loss(step.plan)
    return {
        "gradients": step.gradients_before + head if waits else settled,
        "gathered weights": step.buffers.final_norm,
        "reduce buffers": step.buffers.buckets,
        **step.all_kept(),
        "temporaries": step.final_norm.backward - step.hidden,  # no residual gradient beside it yet
    }


def _block_moment(step: StepStages, index: int) -> Terms:
    """Block ``index`` going back: blocks before it still keep theirs, those behind it left their gradients."""
    block = step.blocks[index]
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
        + sum(step.buffers.summed_blocks[index + 1 :]),
    }


def _input_is_kept_by_norm(step: StepStages) -> bool:
    """An fp32 RMSNorm or a LayerNorm keeps the residual stream itself, so a block's input is not held twice."""
    if step.plan.model.is_traced:
        return False  # a recomputed block was traced without its input
    return step.element_bytes == FP32 or step.fp32_stream or step.plan.model.norm_type == "layer"


def _kept_around(step: StepStages, index: int) -> int:
    """Bytes that other blocks keep while ``index`` goes back: those before it, or all if backward runs twice."""
    if not step.goes_back_twice or step.activations_leave:
        return step.kept_before(index)
    own = 0 if index < step.recomputed else step.blocks[index].peak.kept
    return step.kept_before(step.num_layers) + step.final_norm.kept - own


def _inputs_around(step: StepStages, index: int) -> int:
    """Bytes of the recomputed blocks' inputs while ``index`` goes back, its own among them."""
    if not step.goes_back_twice or step.activations_leave:
        held = (step.num_layers - 1 - index) * step.held_behind
        return step.inputs_before(index) + step.own_input(index) + held
    return step.inputs_before(step.num_layers)


def _embedding_moment(step: StepStages) -> Terms:
    """All gradients, and the embedding's made last: beside the head's when tied, or the earlier micro-batches'.

    Or that of a larger table (``late_tables``), just before it.
    """
    elements = embedding_parameters(step.plan.model) if trains_embeddings(step.plan.tuning) else 0
    late = max(late_tables(step.plan.model), default=0) if step.full else 0
    adds = step.gradients_exist or step.gradients != step.whole_gradients
    tied = step.plan.model.tied_embeddings
    table = step.element_bytes * max(
        elements if adds or tied else 0, late if adds and not step.root_waits else 0
    )
    stepped = 0 if step.buffers.root_end else stepping_bytes(step.plan, max(elements, late))
    return {
        **_kept_for_a_second_pass(step),
        "gradients": _blocks_and_waiting(step),
        "temporaries": step.hidden + table + stepped,
        "gathered weights": step.buffers.root,
        "reduce buffers": step.buffers.buckets
        + max(step.buffers.reduce, step.buffers.last_sum)
        + sum(step.buffers.summed_blocks),
    }


def _root_moments(step: StepStages) -> Iterator[Terms]:
    """FSDP2 at the end: the root's whole gradients beside the buffer they are summed from; its shares, summed in the
    reduce type and copied to their own, beside that buffer; and these stepped, where that is done in backward.

    The root's weights are let go by then, unless the loss runs on them again before a second backward. The head's whole
    gradient stays: FSDP2 names the last of a group until its shares are there (foreach_reduce). The nodes' sums of all
    blocks are still held.
    """
    plan, e, buffer = step.plan, step.element_bytes, step.buffers.root_end
    if not buffer:
        return
    parts, width, tied = num_shares(plan), reduce_width(plan), plan.model.tied_embeddings
    shares = [t.count * t.share(parts) for t in trained_tensors(plan) if not t.in_block]
    own = sum(shares) * e + (0 if tied else step.head_gradient)
    kept, gathered = _kept_for_a_second_pass(step), step.buffers.root if step.goes_back_twice else 0
    held = buffer + sum(step.buffers.summed_blocks)
    table = 0 if tied else embedding_parameters(plan.model) * e
    whole = _blocks_and_waiting(step) + table
    yield {**kept, "gradients": whole, "gathered weights": gathered, "reduce buffers": held}
    divided = _blocks_at_rest(step) + own
    held += sum(shares) * width if width > e else 0
    yield {**kept, "gradients": divided, "gathered weights": gathered, "reduce buffers": held}
    if updates_in_backward(plan.tuning):
        stepped = stepping_bytes(plan, max(shares))
        yield {"gradients": own, "temporaries": stepped, "reduce buffers": buffer}


def _kept_for_a_second_pass(step: StepStages) -> Terms:
    """All that the blocks keep, where backward runs twice and this moment is in the first one too."""
    return step.all_kept() if step.goes_back_twice else {}


def _blocks_and_waiting(step: StepStages) -> int:
    """The blocks' gradients as they rest, and the root's whole ones where they wait, all but the embedding's."""
    if not step.root_waits:
        return step.gradients
    late = sum(late_tables(step.plan.model)) * step.element_bytes if step.full else 0
    return _blocks_at_rest(step) + step.head_gradient + step.final_norm.gradients + late


def _blocks_at_rest(step: StepStages) -> int:
    """The gradients that rest on the device when all blocks have gone back."""
    return step.gradients_before or step.settled(step.gradients_of_blocks[-1])
