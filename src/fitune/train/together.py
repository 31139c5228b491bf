"""What several processes do together before the first step and after the last: compare, and bring the model home."""

import platform

import torch
import transformers

from fitune.checkpoint.state import whole_tensor
from fitune.engine.ranks import Ranks
from fitune.errors import RankFailed
from fitune.models.language_model import LanguageModel
from fitune.models.weights import compute_dtype
from fitune.spec.plan import Plan
from fitune.spec.predictions import Phase
from fitune.spec.reports import RankReport
from fitune.spec.serial import to_json
from fitune.train.again import with_weights
from fitune.train.current import Run


def require_same_on_all(ranks: Ranks, plan: Plan, *, rows: str, base: str) -> None:
    """Raises RankFailed, on every rank, naming what differs between them: they would train different models."""
    if ranks.world != plan.hardware.num_gpus:
        raise RankFailed(
            f"the plan is for {plan.hardware.num_gpus} processes, and {ranks.world} were started",
            hint=f"gpus: {ranks.world}, or start {plan.hardware.num_gpus}",
        )
    facts = {
        "the plan": to_json(plan),
        "the training rows": rows,
        "the base model's weights": base,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    found = ranks.gathered(facts)
    for name, value in found[0].items():
        for rank, theirs in enumerate(found):
            if theirs[name] != value:
                short = "" if name == "the plan" else f": {value[:16]} and {theirs[name][:16]}"
                raise RankFailed(
                    f"{name} differs between rank 0 and rank {rank}{short}",
                    hint="the same files, the same recipe and the same versions on every machine",
                )


def rows_of_ranks(run: Run) -> tuple[RankReport, ...]:
    """Peaks and step time of every rank; empty for one alone."""
    if run.ranks.is_alone:
        return ()
    peaks: dict[Phase, int] = {}
    for step in run.done:
        for phase, size in step.memory_bytes.items():
            peaks[phase] = max(peaks.get(phase, 0), size)
    seconds = [step.step_seconds for step in run.done[1:] or run.done]
    mean = sum(seconds) / len(seconds) if seconds else 0.0
    return tuple(run.ranks.gathered(RankReport(rank=run.ranks.rank, memory=peaks, step_seconds=mean)))


def whole_on_first(run: Run) -> LanguageModel | None:
    """The trained model on the first rank's host, whole; None on the others, and where a rank has all of it anyway.

    Called by every rank: what is trained is gathered tensor by tensor.
    """
    trained = run.loaded.engine.trained()
    if not any(hasattr(tensor, "full_tensor") for tensor in trained.values()):
        return None
    run.where.doing = "gathering what was trained"
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in trained.items():
        whole = whole_tensor(tensor)
        if run.ranks.is_first:
            weights[name] = whole.to("cpu")
    if not run.ranks.is_first:
        return None
    dtype = compute_dtype(run.plan.precision)
    return with_weights(run.plan, weights, dtype=dtype, device=torch.device("cpu"))
