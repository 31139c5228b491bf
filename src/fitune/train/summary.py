"""metrics.jsonl becomes the RunReport: whatever it says was measured, step by step."""

import importlib.metadata
import platform
from collections.abc import Sequence

from fitune.data.preparing import PreparedData
from fitune.measure.memory import process_bytes
from fitune.models.language_model import LanguageModel
from fitune.models.quantised import count_weights
from fitune.spec.reports import (
    MeasuredMemory,
    MeterKind,
    Phase,
    Retry,
    RunReport,
    Status,
    StepReport,
    settled_steps,
)
from fitune.track.jsonl import step_ranges


def summarise(
    steps: Sequence[StepReport],
    data: PreparedData,
    *,
    model: LanguageModel | None,
    status: Status,
    reason: str,
    meter_kind: MeterKind,
    seconds: float,
    best_eval_loss: float | None,
    steps_of_other_plan: int = 0,
    untold: Sequence[Retry] = (),
) -> RunReport:
    """``model`` None: the run ended before it was loaded. ``best_eval_loss`` is that of earlier attempts too.

    Memory and speed are of the steps after ``steps_of_other_plan``. ``untold``: retries that no step tells of.
    """
    of_this_plan = [step for step in steps if step.step > steps_of_other_plan]
    steady = settled_steps(of_this_plan, kind=meter_kind)
    busy, waited = sum(s.step_seconds for s in steady), sum(s.data_seconds for s in steady)
    tokens = sum(s.tokens for s in steady)
    evaluated = [s.eval_loss for s in steps if s.eval_loss is not None]
    if best_eval_loss is not None:
        evaluated.append(best_eval_loss)
    parameters = [] if model is None else list(model.whole.parameters())
    return RunReport(
        status=status,
        reason="; ".join(filter(None, (reason, _gap(steps)))),
        steps=steps[-1].step if steps else 0,
        total_steps=steps[-1].total_steps if steps else 0,
        first_loss=steps[0].loss if steps else 0.0,
        final_loss=steps[-1].loss if steps else 0.0,
        best_eval_loss=min(evaluated, default=None),
        seconds=seconds,
        tokens=sum(s.tokens for s in steps),
        supervised_tokens=sum(s.supervised_tokens for s in steps),
        tokens_per_second=tokens / busy if busy else 0.0,
        tokens_per_second_with_data=tokens / (busy + waited) if busy else 0.0,
        mfu=sum(s.mfu * s.step_seconds for s in steady) / busy if busy else 0.0,
        memory=_measured_memory(
            of_this_plan, meter_kind, 0 if model is None else process_bytes(model.device)
        ),
        train_data=data.train_ledger,
        eval_data=data.eval_ledger,
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        total_parameters=0 if model is None else count_weights(model.whole),
        retries=(*(retry for step in steps for retry in step.retries), *untold),
        steps_of_other_plan=steps_of_other_plan,
        versions=_versions(),
    )


def _gap(steps: Sequence[StepReport]) -> str:
    """Which steps the log lacks; empty when it has all up to its last."""
    last = steps[-1].step if steps else 0
    lost = set(range(1, last + 1)) - {step.step for step in steps}
    return f"metrics.jsonl lacks steps {step_ranges(lost)}: every figure is without them" if lost else ""


def _measured_memory(steps: Sequence[StepReport], kind: MeterKind, process: int) -> MeasuredMemory | None:
    peaks: dict[Phase, int] = {}
    for step in steps:
        for phase, size in step.memory_bytes.items():
            peaks[phase] = max(peaks.get(phase, 0), size)
    return MeasuredMemory(kind=kind, phases=peaks, process_bytes=process) if peaks else None


def _versions() -> dict[str, str]:
    libraries = ("fitune", "torch", "transformers", "peft")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in libraries},
    }
