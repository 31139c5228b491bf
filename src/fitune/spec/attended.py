"""How a plan's attention treats the scores: two rooms must agree on it, the estimate and the rehearsal."""

from fitune.spec.plan import Plan


def has_scores(plan: Plan) -> bool:
    """True if scores n·s² are written out, by fitune or by torch: long rows take the most then."""
    return writes_scores(plan) or falls_back_to_scores(plan)


def writes_scores(plan: Plan) -> bool:
    """True if fitune's own code writes them: eager attention, and where they are capped."""
    return plan.attention == "eager" or plan.model.caps_scores


def falls_back_to_scores(plan: Plan) -> bool:
    """True if torch writes them, in fp32: to drop attention out on a CPU, which no fused kernel does there."""
    drops_out = plan.model.dropout.attention > 0 and plan.hardware.gpu.is_cpu
    return drops_out and not writes_scores(plan)
