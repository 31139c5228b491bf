"""Cost of dropout in words: the adapters', which the recipe asks for, and the model's own, from its config."""

from collections.abc import Iterator
from dataclasses import replace

from fitune.estimate.memory import predict_memory
from fitune.estimate.time import predict_step_time
from fitune.spec.attended import falls_back_to_scores
from fitune.spec.model import NO_DROPOUT
from fitune.spec.plan import Lora, Plan
from fitune.spec.words import describe_dropout
from fitune.units import format_bytes


def dropout_decisions(plan: Plan) -> Iterator[str]:
    """Yields no line without dropout."""
    yield from _adapters(plan)
    yield from _model(plan)


def _adapters(plan: Plan) -> Iterator[str]:
    """Every adapted linear keeps its own dropped input and the mask, where linears beside one another share one."""
    if not (isinstance(plan.tuning, Lora) and plan.tuning.dropout):
        return
    without = replace(plan, tuning=replace(plan.tuning, dropout=0.0))
    yield (
        f"lora_dropout: {plan.tuning.dropout:g} keeps a dropped input and a mask for each adapted linear: "
        f"{_costs(plan, without, 'lora_dropout: 0')}"
    )


def _model(plan: Plan) -> Iterator[str]:
    """The config stays as it is: its cost is said, and where it could be changed."""
    if plan.model.dropout == NO_DROPOUT:
        return
    without = replace(plan, model=replace(plan.model, dropout=NO_DROPOUT))
    scores = (
        "no kernel of the CPU drops attention out, so its scores are written out; "
        if falls_back_to_scores(plan)
        else ""
    )
    yield (
        f"{describe_dropout(plan.model.dropout)}, from the model's config: {scores}"
        f"{_costs(plan, without, 'without')}. Rates of 0 in its config.json switch it off"
    )


def _costs(plan: Plan, without: Plan, name: str) -> str:
    peaks = [predict_memory(each).peak_bytes for each in (plan, without)]
    seconds = [predict_step_time(each).step_seconds for each in (plan, without)]
    return (
        f"{format_bytes(max(0, peaks[0] - peaks[1]))} more at the peak than {name}, and a step takes "
        f"{seconds[0] / seconds[1] - 1:.1%} longer"
    )
