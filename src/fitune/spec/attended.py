"""How a plan's attention treats the scores: two rooms must agree on it, the estimate and the rehearsal."""

from fitune.spec.plan import Plan


def writes_scores(plan: Plan) -> bool:
    """Whether scores n·s² are written out by fitune's own code: eager attention, and where they are capped."""
    return plan.attention == "eager" or plan.model.caps_scores
