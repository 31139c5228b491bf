"""The loss of the trained model beside that of the merged one, on the same rows."""

from collections.abc import Callable

from transformers import PreTrainedModel

from fitune.data.preparing import PreparedData
from fitune.errors import FituneError
from fitune.models.attention import use_attention
from fitune.models.language_model import LanguageModel, language_model
from fitune.models.quantised import quantised_base
from fitune.spec.plan import Dense, Plan
from fitune.spec.reports import MergedLoss
from fitune.train.evaluate import evaluate

_ROWS = {True: 256, False: 64}
"""At most so many rows, held out or of the training data: a merged model may answer from the host."""


def measured_trained(plan: Plan, model: LanguageModel, data: PreparedData) -> MergedLoss:
    """The loss of ``model`` as it was trained; ``merged`` is still to be measured (NaN)."""
    held_out = data.eval is not None
    rows = min(_ROWS[held_out], len(data.eval if data.eval is not None else data.train))
    return MergedLoss(
        trained=_loss(plan, model, data, rows),
        merged=float("nan"),
        rows=rows,
        held_out=held_out,
        packed_base=quantised_base(model.whole) != Dense(),
    )


def measured_merged(plan: Plan, merged: PreTrainedModel, data: PreparedData, *, rows: int) -> float:
    """The loss of the merged model, read back from the disk, over the same rows."""
    use_attention(merged, plan.attention)
    return _loss(plan, language_model(merged, plan.loss), data, rows)


def or_say_why_not(measure: Callable[[], MergedLoss], say: Callable[[str], None]) -> MergedLoss | None:
    """Return what ``measure`` does; None when it fails, and ``say`` is told why: a figure must not cost the export."""
    try:
        return measure()
    except (FituneError, OSError, MemoryError, RuntimeError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"the merged model's loss was not measured: {reason}")
        return None


def _loss(plan: Plan, model: LanguageModel, data: PreparedData, rows: int) -> float:
    return evaluate(model, data.train if data.eval is None else data.eval, plan.batch, rows=rows)
