"""What a Plan can say and this version cannot run."""

from collections.abc import Iterator

from fitune.errors import RecipeError
from fitune.spec.plan import AdamW8bit, Ddp, Lomo, Lora, Offload, Plan, Zero


def require_supported(plan: Plan) -> None:
    """Raises RecipeError naming every choice of the plan that is not in this version."""
    missing = missing_parts(plan)
    if missing:
        raise RecipeError(
            f"the plan asks for what this version cannot train yet: {', '.join(missing)}",
            hint="full fine-tuning or LoRA on a dense, NF4 or HQQ base, AdamW or SGD, on one device",
        )


def missing_parts(plan: Plan) -> tuple[str, ...]:
    """In words; empty when the plan can be trained."""
    return tuple(_missing(plan))


def _missing(plan: Plan) -> Iterator[str]:
    tuning = plan.tuning
    if isinstance(tuning, Lomo):
        yield f"tuning {'AdaLomo' if tuning.adaptive else 'LOMO'}"
    if isinstance(tuning, Lora) and tuning.dora:
        yield "DoRA"
    if isinstance(plan.optimizer, AdamW8bit):
        yield "optimizer AdamW8bit"
    match plan.sharding:
        case Ddp():
            yield "sharding DDP"
        case Zero(stage=stage, backend=backend):
            yield f"sharding ZeRO-{stage} ({backend})"
    if plan.offload != Offload():
        yield "offload"
