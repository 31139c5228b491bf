"""Bytes that dividing the states costs in return: weights gathered for a moment, and buffers that sums pass through."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fitune.estimate.division import accumulates_whole, num_shares, reduce_width, zero_stage
from fitune.estimate.parameters import (
    base_bytes,
    blocks_trained,
    gathered_bytes,
    head_parameters,
    root_weight_bytes,
    trained_parameters,
    trains_in,
    weights_bytes,
    weights_read_bytes,
)
from fitune.estimate.states import gradients_go_to_the_host, resting_gradient_bytes
from fitune.values.counts import (
    ParameterTensor,
    adapter_tensors,
    base_tensors,
    kind_tensors,
    lora_parameters,
    trained_of_kind,
    trained_tensors,
)
from fitune.values.deepspeed import deepspeed_config
from fitune.values.plan import (
    Lora,
    Plan,
    Zero,
    trains_embeddings,
    trains_head,
    updates_in_backward,
)
from fitune.values.remembered import remembered_by

REDUCE_BUCKET = 500_000_000
GATHER_BUCKET = 500_000_000
MAX_LIVE = 1_000_000_000
PERSISTENCE_THRESHOLD = 100_000
"""DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py). Its prefetch of 5e7 is within MAX_LIVE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Bytes alive beside shares and activations, by moment. All zero on one device that keeps its weights."""

    resident: int = 0
    """Small tensors that DeepSpeed never divides."""
    start: int = 0
    """Gathered weights when the embedding begins."""
    gathering: int = 0
    """Gathered weights when the last block's are copied out of their buffer, before it begins."""
    forward: int = 0
    """Gathered weights at the last block's forward."""
    forward_ahead: int = 0
    """More while a block is left to run after the one at work."""
    end: int = 0
    """Gathered weights at the final norm."""
    loss: int = 0
    final_norm: int = 0
    """Before the last block goes back."""
    backward: int = 0
    backward_ahead: int = 0
    """More while a block is left to go back after the one at work."""
    backward_blocks: tuple[int, ...] = ()
    """More for each block that has not gone back yet."""
    root: int = 0
    """Gathered weights when only the embedding is left."""
    buckets: int = 0
    """Stand ready for sums in backward."""
    standing: int = 0
    """The buckets that stand in the loss too."""
    reduce: int = 0
    """Gradients of the block behind, being summed or carried off."""
    last_sum: int = 0
    """The last bucket when backward ends: its rest laid out for the ranks once more, and this rank's share of it."""
    summed_blocks: tuple[int, ...] = ()
    """More for each block that has gone back: the share that nodes summed, held to the end of backward."""
    root_end: int = 0
    """The copy that the root's gradients are summed from, made once its weights are let go."""
    update: int = 0


def gathered_throughout(size: int) -> Buffers:
    """``size`` bytes of gathered weights at every moment of both passes."""
    return Buffers(
        start=size, gathering=size, forward=size, end=size, loss=size, final_norm=size, backward=size, root=size,
    )  # fmt: skip


def buffers_of(plan: Plan) -> Buffers:
    """Bytes on one rank for gathering, streaming and summing, whichever the plan does."""
    if not isinstance(plan.sharding, Zero):
        buffers = _streamed(plan) if plan.offload.parameters != "device" else Buffers()
        carried = max(block_gradients(plan)) if gradients_go_to_the_host(plan) else 0
        return replace(buffers, reduce=carried)
    match plan.sharding.backend:
        case "fsdp":
            return _fsdp(plan)
        case "deepspeed":
            return _deepspeed(plan)


def block_weight_bytes(plan: Plan) -> int:
    """The largest decoder block as it is gathered."""
    return max(block_weights(plan))


@remembered_by("model", "tuning", "precision")
def block_weights(plan: Plan) -> tuple[int, ...]:
    """Bytes of every decoder block as it is gathered: packed where quantised; adapters included."""
    if plan.model.is_traced:
        kinds = [_kind_weight_bytes(plan, kind) for kind in range(len(plan.model.kinds))]
        return tuple(kinds[kind] for kind in plan.model.kind_of)
    e, layers = plan.precision.compute_bytes, plan.model.num_layers
    base = gathered_bytes([t for t in base_tensors(plan.model) if t.in_block], plan)
    adapters = e * sum(t.elements * t.count for t in adapter_tensors(plan))
    own = adapters // blocks_trained(plan)
    return tuple(base // layers + own * trains_in(plan, index) for index in range(layers))


def _kind_weight_bytes(plan: Plan, kind: int) -> int:
    """One block of that kind."""
    example = (plan.model.kinds[kind].example,)
    adapters = (
        plan.precision.compute_bytes * lora_parameters(plan.model, replace(plan.tuning, layers=example))
        if isinstance(plan.tuning, Lora)
        else 0
    )
    return gathered_bytes(kind_tensors(plan.model, kind), plan) + adapters


def block_gradients(plan: Plan, *, width: int = 0) -> tuple[int, ...]:
    """Bytes of every block's gradients, rows padded to the shares, ``width`` bytes each (0: their own type)."""
    if plan.model.is_traced:
        kinds = [
            _padded_bytes(plan, trained_of_kind(plan, kind), width) for kind in range(len(plan.model.kinds))
        ]
        return tuple(kinds[kind] for kind in plan.model.kind_of)
    every = _padded_bytes(plan, (t for t in trained_tensors(plan) if t.in_block), width)
    own = every // blocks_trained(plan)
    return tuple(own * trains_in(plan, index) for index in range(plan.model.num_layers))


def _padded_bytes(plan: Plan, tensors: Iterable[ParameterTensor], width: int) -> int:
    parts = num_shares(plan)
    elements = sum(t.share(parts) * parts * t.count for t in tensors)
    return elements * (width or plan.precision.compute_bytes)


def _fsdp(plan: Plan) -> Buffers:
    """Groups alive: forward 2 (unsharded copy, its all-gather buffer), 3 while the copy is made (the buffer before,
    let go after it), the final norm's backward 1 (the last block's buffer), the blocks' 2 (copy, prefetched buffer) +
    the reduce-scatter input of the block behind, in the reduce type.

    The root group is gathered first, buffer beside copy, and stays whole until the end of backward; its gradients
    are summed last, once its weights are gone. Below stage 3 no block lets its weights go in forward, and while whole
    gradients add up none does in backward; what is summed then takes the place of what had added up.
    _fsdp_param_group.py (wait_for_unshard, post_backward), _fsdp_state.py (_post_forward frees the last buffer);
    rehearsed on a fake process group in tests/laws/test_rehearsal_sharded.py. Offloaded shares pass through the
    device: two more shares of a block.
    """
    block, root, layers = block_weight_bytes(plan), root_weight_bytes(plan), plan.model.num_layers
    whole_gradients, width = accumulates_whole(plan), reduce_width(plan)
    stage = zero_stage(plan) if whole_gradients else max(2, zero_stage(plan))
    passing = 2 * -(-block // num_shares(plan)) if plan.offload.parameters != "device" else 0
    blocks, summed = block_weights(plan), block_gradients(plan, width=width)
    whole = root + sum(blocks)
    if whole_gradients:
        # gathered once, by the first micro-batch, when there are no gradients yet
        above = resting_gradient_bytes(plan)
        gathering, forward = (whole + max(0, n * block - above) for n in (2, 1))
        return replace(gathered_throughout(whole), gathering=gathering, forward=forward, end=forward)
    return Buffers(
        start=2 * root + 2 * block + passing,
        gathering=(root + min(3, layers + 1) * block if stage == 3 else whole + 2 * block) + passing,
        forward=(root + 2 * block if stage == 3 else whole + block) + passing,
        end=(root if stage == 3 else whole) + block,
        loss=root if stage == 3 else whole,
        final_norm=root + block + passing // 2 if stage == 3 else whole,
        backward=(root + min(2, layers) * block if stage == 3 else root) + passing,
        backward_blocks=blocks if stage == 2 else (),
        root=root,
        reduce=max(summed),
        summed_blocks=_held_sums(plan, summed),
        root_end=_padded_bytes(plan, (t for t in trained_tensors(plan) if not t.in_block), width),
    )


def _held_sums(plan: Plan, summed: tuple[int, ...]) -> tuple[int, ...]:
    """Every block's share as the nodes sum it: held beside the gradient where that is another tensor.

    So where the sum is cast, and where it is added to an earlier one. _fsdp_param_group.py, AllReduceState.
    """
    hybrid = isinstance(plan.sharding, Zero) and plan.sharding.hybrid
    is_gradient = reduce_width(plan) == plan.precision.compute_bytes and plan.batch.accumulation == 1
    return tuple(each // num_shares(plan) for each in summed) if hybrid and not is_gradient else ()


def _deepspeed(plan: Plan) -> Buffers:
    """Buffers of the sizes that fitune's own configuration names (values/deepspeed.py), counted in real steps.

    Below stage 3 the reduce bucket is made when backward begins; stage 1 keeps it from the first micro-batch to the
    last. Stage 3 has one that always stands, and gathers until ``stage3_max_live_parameters`` are there (what it takes
    beyond them: ``_gathered_beyond``); the head is gathered beside them, until backward ends where it is trained.
    Tensors of at most ``stage3_param_persistence_threshold`` elements are never divided. All of it is asked for on the
    stream that computes (``overlap_comm`` is off), so no other stream's cache stands beside it, as FSDP2's does.
    """
    zero = deepspeed_config(plan)["zero_optimization"]
    e, stage = plan.precision.compute_bytes, zero_stage(plan)
    bucket = zero["reduce_bucket_size"] * e * (2 if zero["overlap_comm"] else 1)
    if stage < 3:
        stays = stage == 1 and plan.batch.accumulation > 1
        return Buffers(buckets=bucket, standing=bucket if stays else 0)
    beyond, last_beyond = _gathered_beyond(plan, zero["stage3_prefetch_bucket_size"])
    most, weights = zero["stage3_max_live_parameters"] * e, weights_bytes(plan)
    live, root = (min(most + more * e, weights) for more in (beyond, last_beyond))
    head = head_parameters(plan.model) * e
    held = head if trains_head(plan.tuning) else 0
    small = _small_tensor_bytes(plan, zero["stage3_param_persistence_threshold"])
    summed = 0 if updates_in_backward(plan.tuning) else bucket + bucket // num_shares(plan)
    fills = zero["reduce_bucket_size"] < trained_parameters(plan)  # before backward ends
    return replace(
        gathered_throughout(live),
        reduce=summed if fills else 0,
        last_sum=summed,
        resident=small + (0 if updates_in_backward(plan.tuning) else bucket),
        loss=live + head,
        final_norm=live + held,
        backward=root + held,
        root=root + held,
    )


def _gathered_beyond(plan: Plan, bucket: int) -> tuple[int, int]:
    """Elements that stage 3 gathers beyond ``stage3_max_live_parameters``, before backward and in it.

    It fetches whole weights until the limit is passed, at most by the largest of a block. What is fetched at once, up
    to ``bucket`` and the weight that fills it, arrives as one buffer, and stays beside the weights that are copied out
    of it until the last of them is used (partition_parameters.py, AllGatherCoalescedHandle); the limit counts it once.
    In backward a trained embedding is the last that is fetched, and the largest. On the null GPU: 206 of 288 MiB for
    LoRA on 8 B, 711 of 960 on 70 B; full 8 B 76 of 288, in backward 998 of 1,002.
    """
    if bucket == 0:
        return 0, 0
    largest = max(t.elements for t in base_tensors(plan.model) if t.in_block)
    beyond = 2 * largest + bucket
    table = plan.model.vocab_size * plan.model.hidden_size
    return beyond, max(beyond, table) if trains_embeddings(plan.tuning) else beyond


def deepspeed_default_buffers(plan: Plan) -> Buffers:
    """Buffers of DeepSpeed at its defaults. Sums: a bucket of 5e8 elements, twice at stage 3, where overlap_comm is on
    by default; weights after the step: an all-gather bucket of 5e8 at stages 1 and 2. Gathered at stage 3: at most 1e9
    elements.

    Stage 3 without an optimizer object (weights are stepped in backward) has no bucket: the engine only hands out
    parameters (deepspeed/runtime/engine.py, DummyOptim → DeepSpeedZeRoOffload). Each capped by what the model has.
    Tensors of at most 1e5 elements are never divided. deepspeed/runtime/zero/stage_1_and_2.py, stage3.py.
    """
    e, stage = plan.precision.compute_bytes, zero_stage(plan)
    trained = trained_parameters(plan)
    bucket = min(REDUCE_BUCKET, trained) * e
    if stage < 3:
        update = min(GATHER_BUCKET, trained) * e
        return Buffers(buckets=bucket, standing=bucket, update=update)
    live = min(MAX_LIVE * e, weights_bytes(plan))
    sums = 0 if updates_in_backward(plan.tuning) else 2 * bucket
    small = _small_tensor_bytes(plan, PERSISTENCE_THRESHOLD)
    return replace(gathered_throughout(live), resident=small, buckets=sums, standing=sums)


def _small_tensor_bytes(plan: Plan, threshold: int) -> int:
    tensors = [t for t in base_tensors(plan.model) if t.elements <= threshold]
    return base_bytes(tensors, plan) * (num_shares(plan) - 1) // num_shares(plan)


def _streamed(plan: Plan) -> Buffers:
    """Offloaded weights on one device: the block at work and the next one; the last waits for backward in the loss.

    Embedding, final norm, head and adapters stay (engine/streamed_weights.py).
    """
    layers = plan.model.num_layers
    block = (
        max(base_bytes(kind_tensors(plan.model, kind), plan) for kind in range(len(plan.model.kinds)))
        if plan.model.is_traced
        else weights_read_bytes(plan) // layers
    )
    ahead = block if layers > 1 else 0
    return Buffers(
        forward=block,
        forward_ahead=ahead,
        end=block,
        loss=block,
        final_norm=block,
        backward=block,
        backward_ahead=ahead,
    )
