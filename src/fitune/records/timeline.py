"""The allocated bytes of a published run, moment by moment: fitune's terms, kept as the run's trainer keeps them."""

from fractions import Fraction

from fitune.estimate.memory import predict_memory
from fitune.estimate.parameters import head_parameters
from fitune.estimate.shares import base_bytes, uses_fsdp
from fitune.estimate.stages import Block
from fitune.estimate.states import deepspeed_step_bytes
from fitune.estimate.tensors import base_tensors, trained_tensors
from fitune.records.block import block_of_case, saved_by_operation, stream_bytes
from fitune.records.gathered import gathered_of
from fitune.records.logits import logits_bytes
from fitune.records.mapping import Case
from fitune.records.resident import (
    Terms,
    gradient_bytes,
    resident_terms,
    root_copy_bytes,
    stepped_elements,
    used_at_once,
)
from fitune.spec.plan import AdamW, Ddp, trains_every_weight
from fitune.spec.reports import Phase


def allocated_terms(case: Case) -> dict[Phase, Terms]:
    """Bytes by phase and term on one device, as torch's allocator counts them."""
    if case.habits.is_fitune:
        return predict_memory(case.plan, case.shape).phases
    resident = resident_terms(case)
    block = block_of_case(case)
    backward = max(_backward_moments(case, block), key=lambda terms: sum(terms.values()))
    phases = {
        Phase.IDLE: {},
        Phase.LOSS: _loss_terms(case, block),
        Phase.BACKWARD: backward,
        Phase.UPDATE: _update_terms(case),
    }
    return {phase: {**resident, **terms} for phase, terms in phases.items()}


def working_bytes(case: Case) -> int:
    """What one block takes while it goes back, beyond its input."""
    peak = block_of_case(case).peak
    return peak.kept + peak.temporaries


def _gradients_before(case: Case) -> int:
    """Gradients that exist before backward: of earlier micro-batches, and DDP's, which are its buckets."""
    if case.plan.batch.accumulation > 1 or isinstance(case.plan.sharding, Ddp):
        return gradient_bytes(case)
    return 0


def _recomputed(case: Case) -> int:
    return min(case.plan.recompute.blocks, case.plan.model.num_layers)


def _kept_terms(case: Case, block: Block, before: int) -> Terms:
    """What blocks 0…before−1 keep: inputs of the recomputed ones, everything of the others."""
    if case.by_operation:
        return {"recompute inputs": 0, "activations": before * saved_by_operation(case)}
    inputs = min(before, _recomputed(case))
    others = max(0, before - _recomputed(case))
    terms = {"recompute inputs": inputs * stream_bytes(case), "activations": others * block.kept}
    if case.plan.offload.activations != "device":
        return {name: min(size, 2 * max(block.kept, stream_bytes(case))) for name, size in terms.items()}
    return terms


def _loss_terms(case: Case, block: Block) -> Terms:
    """Everything kept, and the logits at their worst moment."""
    plan, gathered = case.plan, gathered_of(case)
    return {
        "gradients": _gradients_before(case),
        "16-bit copies": _weight_copies(case, blocks=plan.model.num_layers),
        **_kept_terms(case, block, plan.model.num_layers),
        "loss": logits_bytes(case),
        "gathered weights": gathered.loss,
        "reduce buffers": gathered.buckets,
    }


def _weight_copies(case: Case, *, blocks: int) -> int:
    """e per wide weight of a linear: autocast's 16-bit copies, cached until its context ends after the loss.

    Of ``blocks`` blocks and the head: of all at the loss, of one while a recomputed block goes back. ATen's
    autocast_mode.cpp, cached_cast. FSDP computes with 16-bit gathered weights instead.
    """
    plan, storage = case.plan, case.storage
    e, layers = plan.precision.compute_bytes, plan.model.num_layers
    if not storage.autocast or storage.weight <= e or uses_fsdp(plan):
        return 0
    matrices = [t for t in trained_tensors(plan) if t.in_block and t.is_matrix]
    head = head_parameters(plan.model) if trains_every_weight(plan.tuning) else 0
    return e * (sum(t.elements * t.count for t in matrices) * blocks // layers + head)


def _backward_moments(case: Case, block: Block) -> list[Terms]:
    """The last block going back and the first: between them everything changes evenly."""
    blocks = [_block_moment(case, block, index) for index in {0, case.plan.model.num_layers - 1}]
    return [*blocks, _root_sum_moment(case)]


def _root_sum_moment(case: Case) -> Terms:
    """FSDP2 at the end: all shares of gradients, and the root's whole ones beside the buffer they are summed from."""
    end = gathered_of(case).root_end
    if not end:
        return {}
    root = base_bytes([t for t in base_tensors(case.plan.model) if not t.in_block], case.plan)
    return {"gradients": gradient_bytes(case), "whole gradients": root, "reduce buffers": end}


def _block_moment(case: Case, block: Block, index: int) -> Terms:
    plan, gathered = case.plan, gathered_of(case)
    layers = plan.model.num_layers
    later = layers - 1 - index
    before = _gradients_before(case)
    fresh = gradient_bytes(case) * later * _share_of_blocks(case) // layers
    recomputed = index < _recomputed(case)
    kept = _kept_terms(case, block, index)
    if recomputed:
        kept["recompute inputs"] += stream_bytes(case)
    last_hidden = case.shape.tokens * plan.model.hidden_size * plan.precision.compute_bytes
    hidden = 0 if uses_fsdp(plan) else 2 * last_hidden  # and its gradient
    return {
        "gradients": before or int(fresh),
        "16-bit copies": _weight_copies(case, blocks=max(1, layers - _recomputed(case))),
        "whole gradients": _whole_root_gradients(case) + block.peak.gradients,
        "recompute inputs": kept["recompute inputs"],
        "activations": kept["activations"] + block.peak.kept,
        "held gradients of inputs": _held_input_gradients(case, later),
        "temporaries": block.peak.temporaries,
        "hidden states": hidden,
        "gathered weights": gathered.backward + (index + 1) * gathered.backward_per_block,
        "reduce buffers": gathered.buckets + gathered.reduce,
    }


def _held_input_gradients(case: Case, later: int) -> int:
    """2 · e·h·t a block: FSDP1 over frozen blocks inside a reentrant checkpoint lets neither input nor gradient go.

    A unit without a trained parameter of its own reshards by a hook on the gradients of its inputs
    (torch/distributed/fsdp/_runtime_utils.py, _register_post_backward_reshard_only_hook). The inputs of a reentrant
    checkpoint are leaves of its own backward; the hook keeps them and their gradients until all of backward is through
    (tests/laws/test_held_inputs.py).
    """
    plan, habits = case.plan, case.habits
    held = uses_fsdp(plan) and not habits.own_fsdp and habits.checkpoints_units and _recomputed(case) > 0
    if not held or trains_every_weight(plan.tuning):
        return 0
    return 2 * later * stream_bytes(case)


def _share_of_blocks(case: Case) -> Fraction:
    """Of all trained parameters."""
    tensors = trained_tensors(case.plan)
    in_blocks = sum(t.elements * t.count for t in tensors if t.in_block)
    return Fraction(in_blocks, sum(t.elements * t.count for t in tensors))


def _whole_root_gradients(case: Case) -> int:
    """The head's fresh gradient while the blocks go back: FSDP sums it whole at the end, DeepSpeed at once.

    On one device and with DDP it stays, and is counted with the others where those exist already.
    """
    plan = case.plan
    if not trains_every_weight(plan.tuning) or used_at_once(case) or case.by_deepspeed:
        return 0
    if uses_fsdp(plan):
        return head_parameters(plan.model) * plan.precision.compute_bytes
    return 0 if _gradients_before(case) else head_parameters(plan.model) * case.storage.gradient


def _update_terms(case: Case) -> Terms:
    """Gradients beside states, and what the update makes: AdamW of many tensors one more set of the stepped."""
    plan = case.plan
    if used_at_once(case) or plan.offload.optimizer != "device":
        return {}
    temporaries = 0
    if case.by_deepspeed:
        temporaries = deepspeed_step_bytes(plan)
    elif (
        case.habits.foreach and isinstance(plan.optimizer, AdamW) and not case.row.says("optimizer", "fused")
    ):
        width = case.storage.master or case.storage.weight
        temporaries = stepped_elements(case) * width + root_copy_bytes(case)
    return {
        "gradients": gradient_bytes(case),
        "temporaries": temporaries,
        "reduce buffers": gathered_of(case).update,
    }
