"""Plans and their arithmetic in one line."""

import textwrap

from fitune.spec.plan import AdamW, ChunkedLoss, Full, Lora, Loss, Optimizer, Plan, Sgd
from fitune.spec.reports import Estimate, Phase
from fitune.units import GIB, MIB


def describe_plan(plan: Plan) -> str:
    """``LoRA r16 on 7 linears, bf16-master, AdamW, 0 of 32 blocks recomputed, chunked loss (1024), flash attention,
    micro-batch 4 × 2048 tokens × 4 accumulated``."""
    batch = plan.batch
    return ", ".join(
        (
            *family_words(plan),
            f"{plan.recompute.blocks} of {plan.model.num_layers} blocks recomputed",
            describe_loss(plan.loss),
            f"{plan.attention} attention",
            f"micro-batch {batch.micro_batch_size} × {batch.seq_len} tokens × {batch.accumulation} accumulated",
        )
    )


def describe_family(plan: Plan) -> str:
    """``full, bf16-master, AdamW``."""
    return ", ".join(family_words(plan))


def family_words(plan: Plan) -> tuple[str, str, str]:
    match plan.tuning:
        case Full():
            tuning = "full"
        case Lora(rank=rank, targets=targets):
            tuning = f"LoRA r{rank} on {len(targets)} linears"
    return tuning, plan.precision.value, describe_optimizer(plan.optimizer)


def describe_optimizer(optimizer: Optimizer) -> str:
    match optimizer:
        case AdamW():
            return "AdamW"
        case Sgd(momentum=momentum):
            return "momentum SGD" if momentum > 0 else "SGD"


def describe_loss(loss: Loss) -> str:
    return f"chunked loss ({loss.chunk_tokens})" if isinstance(loss, ChunkedLoss) else "plain loss"


def memory_sum(estimate: Estimate) -> str:
    """``weights 15.0 + gradients 15.0 + … = 131.2 GiB in backward, 22.5 usable, 108.7 short (or: 1.2 spare)``."""
    terms = {**estimate.memory.phases[estimate.memory.peak_phase], **estimate.memory.outside}
    unit, name = unit_for(estimate.peak_bytes)
    shown = [f"{term} {size / unit:,.1f}" for term, size in terms.items() if size >= unit / 20]
    rest = sum(size for size in terms.values() if size < unit / 20)
    if rest >= unit / 20:
        shown.append(f"others {rest / unit:,.1f}")
    difference = (estimate.usable_bytes - estimate.peak_bytes) / unit
    verdict = f"{difference:,.1f} spare" if difference >= 0 else f"{-difference:,.1f} short"
    return (
        f"{' + '.join(shown)} = {estimate.peak_bytes / unit:,.1f} {name} {moment(estimate.memory.peak_phase)}, "
        f"{estimate.usable_bytes / unit:,.1f} usable, {verdict}"
    )


def unit_for(size: int) -> tuple[int, str]:
    """GiB, or MiB for what is smaller than one GiB."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def moment(phase: Phase) -> str:
    words = {
        Phase.READY: "between steps",
        Phase.FORWARD: "at the end of forward",
        Phase.LOSS: "in the loss",
        Phase.BACKWARD: "in backward",
        Phase.UPDATE: "in the update",
    }
    return words[phase]


def wrapped(text: str, *, indent: int = 2, hanging: int = 0) -> str:
    """``text`` in lines of at most 100 columns; the lines after the first are indented by ``hanging`` more."""
    return textwrap.fill(
        text,
        width=100,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
