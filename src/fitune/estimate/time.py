"""Seconds of one optimizer step: a roofline per phase.

Matrix products and everything else run one after the other on one stream, so a phase takes
FLOPs / (peak · efficiency) + bytes / (bandwidth · efficiency), and never less than its kernels take to launch.
Transfers between ranks and to the host run beside that or are waited for (transfers.py).
Peaks are datasheet figures; the efficiencies are our assumptions, not measured by us yet.
"""

from dataclasses import dataclass

from fitune.estimate.attention_traits import is_multi_query, materialises_scores
from fitune.estimate.communication import passes_per_step
from fitune.estimate.loss import bytes_per_logit, num_chunks
from fitune.estimate.shape import largest_batch
from fitune.estimate.states import has_masters, states_per_parameter
from fitune.estimate.step import StepStages, describe_step
from fitune.estimate.transfers import Transfers, transfers_of
from fitune.spec.flops import (
    attention_flops_per_pair,
    head_flops_per_token,
    linear_flops_per_token,
    model_flops,
    peak_flops,
)
from fitune.spec.plan import AdamW8bit, Lomo, Plan, trains_every_weight
from fitune.spec.reports import Phase, StepTime
from fitune.spec.shape import BatchShape

MATMUL_EFFICIENCY = 0.60
"""Share of the datasheet peak that large 16-bit products reach; others report 0.5–0.75. Not measured by us."""
ATTENTION_EFFICIENCY = 0.40
"""Share reached by fused attention, forward and backward together (Dao 2023, arXiv 2307.08691: 0.5–0.73 on A100
at 2k tokens and more, less when rows are short). Not measured by us."""
BANDWIDTH_EFFICIENCY = 0.75
"""Share of the datasheet bandwidth that elementwise kernels reach. Not measured by us."""
KERNELS_PER_BLOCK = 60
"""Operations of one block's forward in transformers' eager code (Llama: 2 norms of 6, rotary 12, 7 linears, …)."""
LAUNCH_SECONDS = 6e-6
"""Between two small kernels or CPU operations, Python included. Not measured by us."""
TRAFFIC_FORWARD, TRAFFIC_BACKWARD = 3, 5
"""Each kept byte is written once and read about twice in forward; backward reads it and moves gradients of its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one micro-batch (or one update) asks of the device in one phase."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0


def model_flops_per_token(plan: Plan) -> float:
    """FLOPs that the mathematics needs per token of full rows: 6·P_active + 6·L·q·T for full fine-tuning.

    4·P + 6·P_lora for LoRA, whose base weights get no gradient. Recompute is not counted (Chowdhery et al. 2022,
    arXiv 2204.02311, appendix B; causal attention, T = seq_len). spec/flops.py has the definition.
    """
    shape = largest_batch(plan)
    flops = model_flops(
        plan.model,
        plan.tuning,
        row_lengths=[shape.row_tokens] * (shape.tokens // shape.row_tokens),
        supervised_tokens=shape.supervised_tokens,
    )
    return flops / shape.tokens


def predict_step_time(plan: Plan, shape: BatchShape | None = None) -> StepTime:
    """Seconds by phase of one optimizer step: ``accumulation`` micro-batches and one update."""
    return step_time_of(describe_step(plan, shape or largest_batch(plan)))


def step_time_of(step: StepStages) -> StepTime:
    """The same for a step that is already described."""
    plan = step.plan
    forward = forward_work(step)
    per_micro_batch = {
        Phase.FORWARD: forward,
        Phase.LOSS: loss_work(step),
        Phase.BACKWARD: backward_work(step, forward),
    }
    transfers = transfers_of(step)
    seconds, limits = {}, {}
    for phase, work in per_micro_batch.items():
        once, limit = _roofline(plan, work)
        seconds[phase], limits[phase] = _with_transfers(
            once * passes_per_step(plan), limit, transfers.get(phase)
        )
    update, limit = _roofline(plan, update_work(step))
    seconds[Phase.UPDATE], limits[Phase.UPDATE] = _with_transfers(update, limit, transfers.get(Phase.UPDATE))
    return StepTime(phases=seconds, limits=limits)


def _with_transfers(own: float, limit: str, transfers: Transfers | None) -> tuple[float, str]:
    """The longest of what runs side by side, and then what is waited for; the longest single part is the limit."""
    if transfers is None:
        return own, limit
    together = max(own, *transfers.beside.values()) if transfers.beside else own
    parts = [(own, limit)]
    parts += [
        (seconds, name) for each in (transfers.beside, transfers.waited) for name, seconds in each.items()
    ]
    return together + sum(transfers.waited.values()), max(parts, key=lambda part: part[0])[1]


def forward_work(step: StepStages) -> Work:
    """Per token 2 FLOPs per active weight and adapter, per pair a third of attention's; weights are read once."""
    plan, layers = step.plan, step.num_layers
    return Work(
        matmul_flops=step.shape.tokens * layers * _forward_flops_per_token(plan),
        attention_flops=layers * _attention_pairs(step) * attention_flops_per_pair(plan.model) / 3,
        bytes=step.weights_read + step.unpacked + TRAFFIC_FORWARD * layers * step.other_block.kept,
        kernels=layers * (KERNELS_PER_BLOCK + 2 * step.shape.rows),
    )


def loss_work(step: StepStages) -> Work:
    """Head forward and backward for supervised tokens; each logit's bytes move about four times."""
    plan, supervised = step.plan, step.shape.supervised_tokens
    chunks = num_chunks(plan.loss, step.shape)
    head = plan.model.vocab_size * plan.model.hidden_size * step.element_bytes
    per_logit = bytes_per_logit(element_bytes=step.element_bytes)
    return Work(
        matmul_flops=supervised * head_flops_per_token(plan.model, plan.tuning),
        bytes=4.0 * supervised * plan.model.vocab_size * per_logit + chunks * head * (4 if step.full else 2),
        kernels=20.0 * chunks,
    )


def backward_work(step: StepStages, forward: Work) -> Work:
    """What training needs beside forward, + the forward of the recomputed blocks; gradients written and read.

    LOMO's update is in it: the weight read and written once more. Packed weights are made whole for every pass.

    Attention's backward makes the scores again: 5 products to forward's 2 (Dao 2023, arXiv 2307.08691).
    """
    layers, again = step.num_layers, step.recomputed / step.num_layers
    total = (
        step.shape.tokens
        * layers
        * sum(linear_flops_per_token(m, step.plan.tuning) for m in step.plan.model.linears)
    )
    return Work(
        matmul_flops=total - forward.matmul_flops + again * forward.matmul_flops,
        attention_flops=(2.5 + again) * forward.attention_flops,
        bytes=step.weights_read
        + (1 + again) * step.unpacked
        + (2 + 2 * isinstance(step.plan.tuning, Lomo)) * step.whole_gradients
        + (TRAFFIC_BACKWARD + again * TRAFFIC_FORWARD) * layers * step.other_block.kept,
        kernels=(2 + again) * forward.kernels,
    )


def update_work(step: StepStages) -> Work:
    """Weight and states are read and written, the gradient read twice; with masters its fp32 copy too.

    Of the rank's share; 8-bit states are one byte. Nothing is left for LOMO and for an optimizer on the host.
    """
    plan, e = step.plan, step.element_bytes
    if not step.stepped:
        return Work()
    masters = has_masters(plan)
    width = 4 if masters else e
    states = states_per_parameter(plan.optimizer)
    moved = 2 * width + 2 * states * (1 if isinstance(plan.optimizer, AdamW8bit) else width)
    per_parameter = 2 * e + moved + (3 * 4 + e if masters else 0)
    return Work(
        bytes=float(step.stepped * per_parameter),
        kernels=len(plan.model.linears) * plan.model.num_layers,
    )


def _roofline(plan: Plan, work: Work) -> tuple[float, str]:
    gpu = plan.hardware.gpu
    peak = max(peak_flops(gpu, plan.precision), 1.0)
    compute = work.matmul_flops / (peak * MATMUL_EFFICIENCY) + work.attention_flops / (
        peak * ATTENTION_EFFICIENCY
    )
    traffic = work.bytes / (gpu.bandwidth * BANDWIDTH_EFFICIENCY)
    launch = work.kernels * LAUNCH_SECONDS
    if launch >= compute + traffic:
        return launch, "launch"
    return compute + traffic, "compute" if compute >= traffic else "memory bandwidth"


def _forward_flops_per_token(plan: Plan) -> float:
    """2 per active weight of a block, and 2·r·(in + out) per adapter: of linear_flops_per_token's 6 (or 4 + 6)."""
    base = sum(2.0 * m.in_features * m.out_features * m.active_copies for m in plan.model.linears)
    if trains_every_weight(plan.tuning):
        return base
    total = sum(linear_flops_per_token(m, plan.tuning) for m in plan.model.linears)
    return base + (total - 2 * base) / 3


def _attention_pairs(step: StepStages) -> float:
    """Pairs attended to: causal within rows; all of row × row (or stream × stream) where scores are written out."""
    shape = step.shape
    if is_multi_query(step.plan.model):
        return float(shape.tokens**2)
    if materialises_scores(step.plan):
        return float(shape.tokens * shape.row_tokens)
    return shape.tokens * (shape.row_tokens + 1) / 2
