"""The allocated bytes of a published run, moment by moment: fitune's terms, kept as the run's trainer keeps them."""

from dataclasses import replace

from fitune.estimate.buffers import REDUCE_BUCKET, Buffers, block_weight_bytes, buffers_of, root_weight_bytes
from fitune.estimate.overhead import cublas_workspace_bytes
from fitune.estimate.parameters import embedding_parameters, head_parameters
from fitune.estimate.shares import (
    base_bytes,
    base_share_bytes,
    num_shares,
    share_elements,
    uses_fsdp,
    weights_are_divided,
    zero_stage,
)
from fitune.estimate.stages import Block
from fitune.estimate.states import deepspeed_step_bytes, eight_bit_state_bytes, states_per_parameter
from fitune.estimate.tensors import base_tensors, trained_tensors
from fitune.records.block import block_of_case, saved_by_operation, stream_bytes
from fitune.records.mapping import Case
from fitune.spec.plan import AdamW, AdamW8bit, ChunkedLoss, Ddp, Lomo, Lora, Single, trains_every_weight
from fitune.spec.reports import Phase

Terms = dict[str, int]


def allocated_terms(case: Case) -> dict[Phase, Terms]:
    """Bytes by phase and term on one device, as torch's allocator counts them."""
    resident = resident_terms(case)
    block = block_of_case(case)
    backward = max(_backward_moments(case, block), key=lambda terms: sum(terms.values()))
    phases = {
        Phase.READY: {},
        Phase.LOSS: _loss_terms(case, block),
        Phase.BACKWARD: backward,
        Phase.UPDATE: _update_terms(case),
    }
    return {phase: {**resident, **terms} for phase, terms in phases.items()}


def resident_terms(case: Case) -> Terms:
    """Weights, trained copies, masters and moments of one rank."""
    plan, storage = case.plan, case.storage
    trained = stepped_elements(case)
    weights = 0 if trains_every_weight(plan.tuning) else base_weight_bytes(case)
    own = _held_elements(case) * storage.weight
    if plan.offload.parameters != "device":
        weights, own = 0, 0
    host_steps = plan.offload.optimizer != "device"
    return {
        "weights": weights,
        "trained weights": own,
        "masters": 0 if host_steps or isinstance(plan.tuning, Lomo) else trained * storage.master,
        "optimizer": 0 if host_steps else _moments_bytes(case, trained),
        "trained copies": _root_copies_bytes(case),
        "cuBLAS workspace": cublas_workspace_bytes(plan.hardware.gpu),
        "bucket copies": _bucket_copies(case),
        "undivided tensors": gathered_of(case).resident,
    }


def _bucket_copies(case: Case) -> int:
    """DDP's buckets hold every gradient a second time unless they are views of one another (torch's default: not).

    gradient_as_bucket_view; torch/nn/parallel/distributed.py. FSDP's NO_SHARD sums its flat gradients in place.
    """
    shares_flat = case.row.says("sharding", "no_shard")
    return gradient_bytes(case) if isinstance(case.plan.sharding, Ddp) and not shares_flat else 0


def base_weight_bytes(case: Case) -> int:
    """The frozen base on one rank; embedding, head and norms in fp32 where the trainer upcasts them."""
    plan = case.plan
    whole = (
        base_share_bytes(plan) if weights_are_divided(plan) else base_bytes(base_tensors(plan.model), plan)
    )
    packed = isinstance(plan.tuning, Lora) and type(plan.tuning.base).__name__ != "Dense"
    if not (packed and case.habits.upcasts_packed and plan.precision.compute_bytes == 2):
        return whole
    dense = base_bytes([t for t in base_tensors(plan.model) if not t.in_block], plan)
    return whole + dense // (num_shares(plan) if weights_are_divided(plan) else 1)


def working_bytes(case: Case) -> int:
    """What one block takes while it goes back, beyond its input."""
    peak = block_of_case(case).peak
    return peak.kept + peak.temporaries


def stepped_elements(case: Case) -> int:
    """Trained parameters that one rank's optimizer steps."""
    return share_elements(trained_tensors(case.plan), case.plan)


def _held_elements(case: Case) -> int:
    """Trained parameters that one rank keeps between steps: its share only where weights are divided."""
    if weights_are_divided(case.plan):
        return stepped_elements(case)
    return sum(t.elements * t.count for t in trained_tensors(case.plan))


def _root_copies_bytes(case: Case) -> int:
    """PEFT's modules_to_save: embedding and head once more, trained in the type they have: weight and two moments.

    peft/utils/other.py, ModulesToSaveWrapper copies the module; only adapters are cast to fp32.
    """
    if not case.trains_root:
        return 0
    plan = case.plan
    elements = embedding_parameters(plan.model) + head_parameters(plan.model)
    return elements * plan.precision.compute_bytes * (1 + states_per_parameter(plan.optimizer))


def _moments_bytes(case: Case, trained: int) -> int:
    plan = case.plan
    if isinstance(plan.tuning, Lomo):
        return 0
    if case.row.says("optimizer", "paged"):
        return 0  # managed memory, beside torch's allocator (bitsandbytes GlobalPageManager)
    if isinstance(plan.optimizer, AdamW8bit):
        return eight_bit_state_bytes(plan)
    return states_per_parameter(plan.optimizer) * trained * case.storage.moment


def gradient_bytes(case: Case) -> int:
    """All gradients when backward is through: a share where they are divided, none where they are used at once."""
    if _used_at_once(case) or case.plan.offload.optimizer != "device":
        return 0
    elements = stepped_elements(case) if zero_stage(case.plan) >= 2 else _held_elements(case)
    copies = _root_copies_bytes(case) // (1 + states_per_parameter(case.plan.optimizer))
    return elements * case.storage.gradient + copies


def _used_at_once(case: Case) -> bool:
    """LOMO, and an optimizer that steps in backward hooks."""
    words = f"{case.row.words['optimizer']} {case.row.remarks}"
    in_backward = any(word in words for word in ("in_bwd", "in backward", "in_backward"))
    return isinstance(case.plan.tuning, Lomo) or in_backward


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


def gathered_of(case: Case) -> Buffers:
    """Whole weights beside shares. FSDP1: the root stays whole from forward on, one block while it works."""
    plan = case.plan
    if case.by_deepspeed:
        # DeepSpeed allocates its bucket as configured, however little is trained
        own = buffers_of(plan)
        return replace(own, buckets=max(own.buckets, REDUCE_BUCKET * plan.precision.compute_bytes))
    if not uses_fsdp(plan) or case.habits.own_fsdp:
        return buffers_of(plan)
    root, block = root_weight_bytes(plan), block_weight_bytes(plan)
    stage = zero_stage(plan)
    whole = root + plan.model.num_layers * block
    held = root if stage == 3 else whole
    return Buffers(loss=held, backward=held + (block if stage == 3 else 0))


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
    fresh = gradient_bytes(case) * later // layers
    recomputed = index < _recomputed(case)
    kept = _kept_terms(case, block, index)
    if recomputed:
        kept["recompute inputs"] += stream_bytes(case)
    hidden = 0 if uses_fsdp(plan) else 2 * stream_bytes(case)
    return {
        "gradients": before or fresh,
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


def _whole_root_gradients(case: Case) -> int:
    """The head's gradient, whole until the root group is summed at the end of backward; alone it just stays."""
    plan = case.plan
    if not trains_every_weight(plan.tuning) or _used_at_once(case):
        return 0
    width = case.storage.gradient if isinstance(plan.sharding, Single) else plan.precision.compute_bytes
    return head_parameters(plan.model) * width


def _update_terms(case: Case) -> Terms:
    """Gradients beside states, and what the update makes: AdamW of many tensors one more set of the stepped."""
    plan = case.plan
    if _used_at_once(case) or plan.offload.optimizer != "device":
        return {}
    temporaries = 0
    if case.by_deepspeed:
        temporaries = deepspeed_step_bytes(plan)
    elif (
        case.habits.foreach and isinstance(plan.optimizer, AdamW) and not case.row.says("optimizer", "fused")
    ):
        temporaries = stepped_elements(case) * (case.storage.master or case.storage.weight)
    return {
        "gradients": gradient_bytes(case),
        "temporaries": temporaries,
        "reduce buffers": gathered_of(case).update,
    }
