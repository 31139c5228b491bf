"""Which ways of spreading a plan over ranks do not run on fake tensors. Known without torch."""

from collections.abc import Iterator

from fitune.errors import RecipeError
from fitune.spec.plan import Ddp, Plan, Zero, updates_in_backward


def missing_on_ranks(plan: Plan) -> tuple[str, ...]:
    """In words; empty when the plan can be rehearsed."""
    return tuple(_missing(plan))


def require_ranks(plan: Plan) -> None:
    """Raises RecipeError for what does not run on fake tensors."""
    missing = missing_on_ranks(plan)
    if missing:
        raise RecipeError(
            f"{', '.join(missing)}, so it cannot be rehearsed",
            hint="`fitune plan` estimates it; backend: fsdp can be rehearsed",
        )


def _missing(plan: Plan) -> Iterator[str]:
    match plan.sharding:
        case Ddp():
            yield "DDP's buckets are filled in C++, which fake tensors do not reach"
        case Zero(backend="deepspeed"):
            yield "DeepSpeed does not run on fake tensors"
        case Zero() if updates_in_backward(plan.tuning):
            yield "stepping in backward, as LOMO does, on several ranks is not built yet"
