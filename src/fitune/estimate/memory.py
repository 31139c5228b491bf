"""The timeline of one optimizer step: for each phase, the terms that make its worst moment.

Never a sum of maxima: every phase is one moment, and its terms add up to what is alive then. The moments
are those of a step after the first, when optimizer states exist, and of its last micro-batch.
"""

from collections.abc import Iterator

from fitune.errors import torch_release
from fitune.estimate import overhead
from fitune.estimate.blocks.site import FP32, norms_keep_input
from fitune.estimate.division import num_ranks, num_shares, reduce_width, uses_fsdp
from fitune.estimate.loss import loss_moments
from fitune.estimate.parameters import embedding_parameters, head_parameters, late_tables
from fitune.estimate.states import gradients_always_exist, gradients_go_to_the_host, stepping_bytes
from fitune.estimate.step import StepStages, Terms
from fitune.values.counts import trained_tensors
from fitune.values.plan import Single, trains_embeddings, updates_in_backward
from fitune.values.predictions import MemoryBreakdown, Phase
from fitune.values.remembered import remembered


@remembered
def memory_of(step: StepStages) -> MemoryBreakdown:
    """The breakdown of a step that is already described; a search varies the description (``varied``)."""
    resident = {**step.resident, "undivided tensors": step.buffers.resident}
    around = step.around()
    always = step.gradients if gradients_always_exist(step.plan) else 0
    kept = {
        **step.all_kept(), "hidden states": step.hidden, "16-bit copies": step.weight_copies,
        "gathered weights": step.buffers.loss, "reduce buffers": step.buffers.standing,
    }  # fmt: skip
    in_loss = [{**kept, **moment} for moment in loss_moments(step, step.gradients_before)]
    measuring = [True, False] if step.plan.goes_back_twice else [False]
    in_backward = [moment for first in measuring for moment in _moments_of_a_pass(step, measuring=first)]
    copies = step.weight_copies * (step.num_layers - step.recomputed) // step.num_layers
    phases = {
        Phase.IDLE: {**resident, "gradients": always},
        Phase.FORWARD: {**resident, **_forward_terms(step)},
        Phase.LOSS: {**resident, **around, **_largest(in_loss)},
        Phase.BACKWARD: {**resident, **around, "16-bit copies": copies, **_largest(in_backward)},
        Phase.UPDATE: {**resident, **step.update, "reduce buffers": step.buffers.update},
    }
    terms_of = {
        phase: {name: size for name, size in terms.items() if size} for phase, terms in phases.items()
    }
    hardware = step.plan.hardware
    sums = {phase: sum(terms.values()) for phase, terms in terms_of.items()}
    cache = 0
    if uses_fsdp(step.plan) and not hardware.gpu.is_cpu:
        gathered = max(step.buffers.start, step.buffers.gathering)
        cache = overhead.stream_cache_bytes(terms_of, gradients=step.gradients, gathered=gathered)
    # where all is trained torch gives back enough: such a step was seen to run
    needed = 0 if step.full else cache
    # a phase of fewer tensors may need more in all, where its blocks run again
    in_all = max(
        size
        + overhead.allocator_slack_bytes(
            hardware,
            moving_bytes=size - sum(resident.values()),
            recomputes="recompute inputs" in terms_of[phase],
        )
        for phase, size in sums.items()
    )
    slack = in_all - max(sums.values())
    return MemoryBreakdown(
        phases=terms_of,
        outside=overhead.outside_terms(hardware, slack_bytes=slack + needed, ranks=num_ranks(step.plan)),
        reclaimable=cache - needed,
    )


def larger(one: MemoryBreakdown, other: MemoryBreakdown) -> MemoryBreakdown:
    """For each phase, the terms of the step with the larger sum."""
    return MemoryBreakdown(
        phases={phase: _largest([terms, other.phases[phase]]) for phase, terms in one.phases.items()},
        outside=_largest([one.outside, other.outside]),
        reclaimable=max(one.reclaimable, other.reclaimable),
    )


def _forward_terms(step: StepStages) -> Terms:
    """The largest of: the final norm with everything kept, the last block at work, before and after it, the start."""
    layers, model, e = step.num_layers, step.plan.model, step.element_bytes
    # for each element the scaled fp32 copy, the norm's input, the cast copy unless it is kept; in fp32 the casts are no
    # copies: the scaled one alone, and nothing extra when it is kept
    final_norm = (0 if step.full else FP32) if e == FP32 else FP32 + e + (0 if step.full else e)
    at_the_end: Terms = {
        **step.all_kept(),
        "hidden states": step.hidden,
        "temporaries": 0  # one kernel, from the input that is kept to the hidden states
        if step.plan.kernels == "liger" or model.norm_type == "layer"
        else step.final_norm.forward
        if model.is_traced
        else step.shape.tokens * model.hidden_size * final_norm,
        "gathered weights": step.buffers.end,
    }
    last = layers - 1
    keeps = last >= step.recomputed
    # its output, the MLP's, the inputs of its halves where norms keep copies of them, and what attention gave where
    # that is not let go of: in parallel blocks the sum of both, too
    ending = step.hidden * (
        (2 if norms_keep_input(step.plan) or not keeps else 4)
        + (2 * model.parallel_blocks or model.learned_positions > 0)
    )
    # beside the one before, which leaves only then
    leaving_beside = step.blocks[last].kept + ending if step.activations_leave and keeps else 0
    in_the_last_block: Terms = {
        "activations": step.kept_before(last),
        "recompute inputs": step.inputs_before(last) + step.own_input(last),
        "temporaries": max(
            step.blocks[last].forward, step.blocks[last].building if keeps else 0, leaving_beside
        ),
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
        "temporaries": ending,
        "gathered weights": step.buffers.forward,
    }
    embedded = _embedded_tokens(step)
    at_the_start: Terms = {
        "temporaries": max(0, step.hidden - embedded),
        "gathered weights": step.buffers.start,
    }
    gradients = {"gradients": step.gradients_before}
    moments = [at_the_end, in_the_last_block, before_the_last_block, behind_the_last_block, at_the_start]
    if step.buffers.forward_ahead:  # while the last one's weights come from the host
        moments.append(_in_a_block_earlier(step, max(0, last - 1)))
    if step.plan.model.is_traced:  # where blocks of several kinds take turns, the last may be a small one
        moments += [_in_a_block_earlier(step, index) for index in step.run_ends if index != last]
    largest = _largest(moments)
    hidden = largest.get("hidden states", 0) + embedded
    copies = {"16-bit copies": step.weight_copies}
    forward = {**step.around(in_forward=True), **gradients, **copies, **largest, "hidden states": hidden}
    return {**forward, "reduce buffers": step.buffers.standing}


def _in_a_block_earlier(step: StepStages, index: int) -> Terms:
    return {
        "activations": step.kept_before(index),
        "recompute inputs": step.inputs_before(index) + step.own_input(index),
        "temporaries": step.blocks[index].forward,
        "gathered weights": step.buffers.forward + step.buffers.forward_ahead,
    }


def _embedded_tokens(step: StepStages) -> int:
    """Bytes of the first block's input, which the body holds to the end of forward; elsewhere that block keeps it."""
    if step.plan.model.is_traced:
        return 0  # among what is around
    if step.plan.model.learned_positions:
        return 2 * step.hidden  # the tokens' and the positions', whose sum no name holds
    by_norm = trains_embeddings(step.plan.tuning) and norms_keep_input(step.plan)
    kept_by_block = by_norm or (step.recomputed > 0 and not step.untouched)
    return 0 if kept_by_block and not step.activations_leave else step.hidden


def _moments_of_a_pass(step: StepStages, *, measuring: bool) -> Iterator[Terms]:
    """Terms of every moment that may be the worst, in the order in which they come: the loss, blocks, the embedding.

    The ends of every run of equal blocks suffice: from one to the next everything changes by the same. Where a first
    backward is ``measuring``, all that was kept stays until it is through, and the hidden states and their gradient for
    the loss that runs on them again; the engine lets go of these when the last one begins.
    """
    layers, split = step.num_layers, step.recomputed
    summed_from = layers - 2 if step.buffers.reduce else 0  # the first block that has sums beside it
    ends = {0, 1, split - 1, split, split + 1, split + 2, summed_from} | step.run_ends
    held = {**step.all_kept(), "hidden states": 2 * step.hidden} if measuring else {}
    if not measuring:
        yield _head_used_moment(step)
    yield {**held, **_final_norm_moment(step)}
    for index in sorted(ends):
        if step.untouched <= index < layers:
            yield {**held, **_block_moment(step, index, measuring=measuring)}
    ended = _root_moments(step, measuring=measuring) if step.buffers.root_end else ()
    for moment in (*_embedding_moments(step, measuring=measuring), *ended):
        yield {**held, **moment}


def _head_used_moment(step: StepStages) -> Terms:
    """Bytes while the head is stepped: in backward, before the body goes back, where it is a matrix of its own."""
    if not updates_in_backward(step.plan.tuning) or step.root_waits:
        return {}
    return {
        "gradients": step.head_gradient,
        **step.all_kept(),
        "hidden states": 2 * step.hidden,  # and their gradient, on its way
        "temporaries": stepping_bytes(step.plan, head_parameters(step.plan.model)),
    }


def _final_norm_moment(step: StepStages) -> Terms:
    """The head's gradient is the only new one: added to whole ones, waiting beside a share, or already settled."""
    head = step.head_gradient
    settled = step.gradients_before or step.settled(head)
    # on one device the head's is on its way to the host meanwhile
    waits = step.root_waits or (
        isinstance(step.plan.sharding, Single) and gradients_go_to_the_host(step.plan)
    )
    return {
        "gradients": step.gradients_before + head if waits else settled,
        "gathered weights": step.buffers.final_norm,
        "reduce buffers": step.buffers.buckets,
        **step.all_kept(),
        "temporaries": step.final_norm.backward - step.hidden,  # no residual gradient beside it yet
    }


def _block_moment(step: StepStages, index: int, *, measuring: bool) -> Terms:
    """Block ``index`` going back: blocks before it still keep theirs, those behind it left their gradients. All keep
    theirs while ``measuring``.

    A norm that keeps its input keeps the residual stream itself, so a block's input is not held twice.
    """
    plan, later = step.plan, step.num_layers - 1 - index
    block = (step.measured_blocks if measuring else step.blocks)[index]
    recomputes = index < step.recomputed
    peak = block.recomputed_peak if recomputes else block.peak
    root = step.head_gradient + step.final_norm.gradients
    blocks = step.gradients_of_blocks[-1] - step.gradients_of_blocks[index + 1]
    resting = step.gradients_before or step.settled(blocks if step.root_waits else root + blocks)
    waiting = root if step.root_waits else 0
    if measuring:
        others = step.all_kept()["activations"] - (0 if recomputes else peak.kept)
        inputs = step.all_kept()["recompute inputs"]
    else:
        others = step.kept_before(index)
        inputs = step.inputs_before(index) + step.own_input(index) + later * step.held_behind
    # a traced block that recomputes was traced without its input
    by_norm = not plan.model.is_traced and (norms_keep_input(plan) or step.fp32_stream)
    own = peak.kept - step.hidden if recomputes and by_norm else peak.kept
    return {
        "gradients": resting + waiting + peak.gradients,
        "activations": others + own,
        "recompute inputs": inputs,
        "temporaries": peak.temporaries,
        "gathered weights": step.gathered_in_backward(index),
        "reduce buffers": step.buffers.buckets
        + (step.buffers.reduce if later else 0)
        + sum(step.buffers.summed_blocks[index + 1 :]),
    }


def _embedding_moments(step: StepStages, *, measuring: bool) -> Iterator[Terms]:
    """All gradients, and the embedding's made last: beside the head's when tied, or the earlier micro-batches'; then,
    where that is done in backward, it is stepped.

    Or that of a larger table (``late_tables``), just before it.
    """
    elements = embedding_parameters(step.plan.model) if trains_embeddings(step.plan.tuning) else 0
    late = max(late_tables(step.plan.model), default=0) if step.full else 0
    adds = step.gradients_exist or step.gradients != step.whole_gradients
    tied = step.plan.model.tied_embeddings
    table = step.element_bytes * max(
        elements if adds or tied else 0, late if adds and not step.root_waits else 0
    )
    beside: Terms = {
        "gradients": _blocks_and_waiting(step),
        "gathered weights": step.buffers.root,
        "reduce buffers": step.buffers.buckets
        + max(step.buffers.reduce, step.buffers.last_sum)
        + sum(step.buffers.summed_blocks),
    }
    yield {**beside, "temporaries": step.hidden + table}
    if updates_in_backward(step.plan.tuning) and not (measuring or step.buffers.root_end):
        own = 0 if tied else table  # a tied table's two gradients are one by then
        yield {**beside, "temporaries": own + stepping_bytes(step.plan, max(elements, late))}


def _root_moments(step: StepStages, *, measuring: bool) -> Iterator[Terms]:
    """FSDP2 at the end: the root's whole gradients beside the buffer they are summed from; its shares, summed in the
    reduce type and copied to their own, beside that buffer; and these stepped, where that is done in backward.

    The root's weights are let go by then, unless the loss runs on them again before a second backward. The head's whole
    gradient stays: before torch 2.15 FSDP2 names the last of a group until its shares are there (foreach_reduce). The
    nodes' sums of all blocks are still held.
    """
    plan, e, buffer = step.plan, step.element_bytes, step.buffers.root_end
    parts, width, tied = num_shares(plan), reduce_width(plan), plan.model.tied_embeddings
    shares = [t.count * t.share(parts) for t in trained_tensors(plan) if not t.in_block]
    head_stays = not tied and torch_release() < (2, 15)
    own = sum(shares) * e + (step.head_gradient if head_stays else 0)
    gathered = step.buffers.root if measuring else 0
    held = buffer + sum(step.buffers.summed_blocks)
    table = 0 if tied else embedding_parameters(plan.model) * e
    whole = _blocks_and_waiting(step) + table
    yield {"gradients": whole, "gathered weights": gathered, "reduce buffers": held}
    divided = _blocks_at_rest(step) + own
    held += sum(shares) * width if width > e else 0
    yield {"gradients": divided, "gathered weights": gathered, "reduce buffers": held}
    if updates_in_backward(plan.tuning) and not measuring:
        stepped = stepping_bytes(plan, max(shares))
        yield {"gradients": own, "temporaries": stepped, "reduce buffers": buffer}


def _blocks_and_waiting(step: StepStages) -> int:
    """The blocks' gradients as they rest, and the root's whole ones where they wait, all but the embedding's."""
    if not step.root_waits:
        return step.gradients
    late = sum(late_tables(step.plan.model)) * step.element_bytes if step.full else 0
    return _blocks_at_rest(step) + step.head_gradient + step.final_norm.gradients + late


def _blocks_at_rest(step: StepStages) -> int:
    """The gradients that rest on the device when all blocks have gone back."""
    return step.gradients_before or step.settled(step.gradients_of_blocks[-1])


def _largest(moments: list[Terms]) -> Terms:
    return max(moments, key=lambda terms: sum(terms.values()))
