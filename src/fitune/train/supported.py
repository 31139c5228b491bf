"""What a Plan can say and this version cannot run."""

from collections.abc import Iterator

from fitune.errors import RecipeError
from fitune.spec.plan import (
    AdamW8bit,
    Ddp,
    Full,
    Lomo,
    Offload,
    Plan,
    Precision,
    Sgd,
    Single,
    Zero,
    updates_in_backward,
)


def require_supported(plan: Plan) -> None:
    """Raises RecipeError naming every choice of the plan that is not in this version."""
    _refuse(missing_parts(plan))


def require_method(plan: Plan) -> None:
    """The same but for how many processes train together."""
    _refuse(missing_method(plan))


def missing_method(plan: Plan) -> tuple[str, ...]:
    """In words; empty when one process could train its part of the plan."""
    return (*_missing(plan), *_missing_of_offload(plan), *_missing_of_kernels(plan))


def missing_parts(plan: Plan) -> tuple[str, ...]:
    """In words; empty when the plan can be trained."""
    return (*_missing(plan), *_processes(plan), *_missing_of_offload(plan), *_missing_of_kernels(plan))


def _refuse(missing: tuple[str, ...]) -> None:
    if missing:
        raise RecipeError(
            f"the plan asks for what this version cannot train yet: {', '.join(missing)}",
            hint="full fine-tuning, LOMO, AdaLomo, or LoRA on a dense, NF4 or HQQ base, on one device and its host",
        )


def _missing(plan: Plan) -> Iterator[str]:
    tuning = plan.tuning
    if isinstance(tuning, Lomo):
        name = "AdaLomo" if tuning.adaptive else "LOMO"
        if plan.precision is Precision.BF16_MASTER:
            yield f"{name} with fp32 masters (it updates the weights themselves: precision bf16 or fp32)"
        if not isinstance(plan.optimizer, Sgd) or plan.optimizer.momentum:
            yield f"{name} with another optimizer (its update is its own: Sgd())"
    if updates_in_backward(tuning):
        yield from _missing_in_backward(plan)


def _missing_in_backward(plan: Plan) -> Iterator[str]:
    if plan.batch.accumulation > 1:
        yield "gradients of several micro-batches that are used in backward (they cannot add up: accumulation 1)"
    if isinstance(plan.tuning, Full) and plan.offload.optimizer != "device":
        yield "an optimizer that steps in backward and on the host"


def _processes(plan: Plan) -> Iterator[str]:
    match plan.sharding:
        case Ddp():
            yield "sharding DDP"
        case Zero(stage=stage, backend=backend):
            yield f"sharding ZeRO-{stage} ({backend})"


def _missing_of_offload(plan: Plan) -> Iterator[str]:
    offload = plan.offload
    if offload != Offload() and not isinstance(plan.sharding, Single):
        yield "offload together with sharding"
    if offload.parameters == "nvme":
        yield "offload of parameters to nvme"
    if offload.parameters == "cpu" and isinstance(plan.tuning, Lomo):
        yield "offload of weights that LOMO updates where they are"
    if offload.parameters == "cpu" and isinstance(plan.tuning, Full) and offload.optimizer == "device":
        yield "offload of trained weights without their optimizer (offload_optimizer: cpu)"
    if offload.optimizer == "nvme":
        yield "offload of optimizer to nvme"
    if offload.optimizer == "cpu" and isinstance(plan.tuning, Lomo):
        yield "offload of an optimizer that LOMO has not"
    if offload.optimizer == "cpu" and isinstance(plan.optimizer, AdamW8bit):
        yield "AdamW8bit on the host (its states are fp32 there: AdamW())"
    if offload.activations == "nvme":
        yield "offload of activations to nvme"
    if offload.activations != "device" and plan.goes_back_twice:
        yield "offload of activations that backward reads twice (updating in it, and clipping by norm or in fp16)"


def _missing_of_kernels(plan: Plan) -> Iterator[str]:
    if plan.kernels == "liger" and plan.goes_back_twice:
        yield "Liger's kernels where backward runs twice (updating in it, and clipping by norm or in fp16)"
    if not plan.compile_blocks:
        return
    if updates_in_backward(plan.tuning):
        yield "updating in backward with compiled blocks (a compiled block has all its gradients at once)"
    if plan.offload != Offload():
        yield "offload together with compiled blocks"
    if not isinstance(plan.sharding, Single):
        yield "sharding together with compiled blocks"
