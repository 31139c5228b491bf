"""How many rows the embedded engine answers together where nobody says: as many as fit, at most ``ROWS_AT_ONCE``."""

import sys
from collections.abc import Callable

from fitune.errors import HardwareError, ModelError
from fitune.estimate.answering import rows_that_fit
from fitune.estimate.blocks.key_values import elements_of_blocks
from fitune.measure.hardware import resolve_hardware
from fitune.models.headers import adapter_size
from fitune.score.plan import ScorePlan
from fitune.spec.answering import ROWS_AT_ONCE, Answering, Questions, answering_precision
from fitune.spec.model.model_config import load_model_spec

Room = Callable[[Questions], int]
"""Rows of such questions that may be answered together."""


def unlimited(questions: Questions) -> int:
    """More than there ever are."""
    return sys.maxsize


def room_for(plan: ScorePlan) -> Room:
    """Returns how many rows fit on the device of this process, at most ROWS_AT_ONCE; ``unlimited`` where the plan says
    how many are answered together."""
    if plan.batch_size:
        return unlimited
    answering = answering_of(plan)
    if answering is None:
        return lambda _questions: ROWS_AT_ONCE
    return lambda questions: max(1, rows_that_fit(answering, questions, most=ROWS_AT_ONCE))


def answering_of(plan: ScorePlan) -> Answering | None:
    """The embedded engine on this machine as the estimate takes it, of as many rows as are asked together at most; None
    where nothing can be predicted: for a model whose state is more than keys and values, on GPUs of two kinds."""
    try:
        hardware, model = resolve_hardware(gpus=1), load_model_spec(plan.model)
        elements_of_blocks(model)
        return Answering(
            engine="transformers", model=model, hardware=hardware, precision=answering_precision(hardware),
            batch_size=plan.rows_at_once, adapter=adapter_size(plan.adapter),
        )  # fmt: skip
    except (ModelError, HardwareError):
        return None
