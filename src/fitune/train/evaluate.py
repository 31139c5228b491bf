"""Loss on held-out rows, of the trained and the merged model, and prompts answered before and after training."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fitune.data.conversations.messages import Conversation
from fitune.data.dataset import TokenDataset
from fitune.data.loader import eval_batches, without_labels
from fitune.data.making import PreparedData
from fitune.engine.protocol import LossModel
from fitune.engine.ranks import ALONE, Ranks
from fitune.errors import FituneError, first_line
from fitune.files import write_atomically
from fitune.models.language_model import LanguageModel
from fitune.models.low_bit.quantised import quantised_base
from fitune.values.plan import Batch, Dense, Plan
from fitune.values.reports import MergedLoss, Sample
from fitune.values.serial import read_json


def evaluate(
    model: LossModel,
    dataset: TokenDataset,
    batch: Batch,
    *,
    rows: int | None = None,
    ranks: Ranks = ALONE,
    on_batch: Callable[[], None] = lambda: None,
) -> float:
    """Mean loss (in nats, by the model's divisor: per supervised token) over every row once, or the first ``rows``.

    Each rank takes every ``world``-th micro-batch, and all take equally many: weights are gathered together.
    """
    model.whole.eval()
    total, divisor = 0.0, 0
    batches = eval_batches(dataset, batch, rows=rows)
    while together := list(itertools.islice(batches, ranks.world)):
        mine = together[ranks.rank] if ranks.rank < len(together) else without_labels(together[0])
        on_batch()
        total += model.loss(mine).item()
        divisor += model.divisor(rows=len(mine.row_ids), supervised_tokens=mine.supervised_tokens)
    model.whole.train()
    total, of_all = ranks.summed([total, divisor])
    return total / of_all


_ROWS = {True: 256, False: 64}
"""At most so many rows, held out or of the training data: a merged model may answer from the host."""


def measured_trained(plan: Plan, model: LanguageModel, data: PreparedData) -> MergedLoss:
    """The loss of ``model`` as it was trained; ``merged`` is still to be measured (NaN)."""
    held_out = data.eval is not None
    rows = min(_ROWS[held_out], len(data.eval if data.eval is not None else data.train))
    return MergedLoss(
        trained=sample_loss(plan, model, data, rows),
        merged=float("nan"),
        rows=rows,
        held_out=held_out,
        packed_base=quantised_base(model.whole) != Dense(),
    )


def measured_or_none(measure: Callable[[], MergedLoss], on_note: Callable[[str], None]) -> MergedLoss | None:
    """Return what ``measure`` does; None when it fails, and with a note why: a figure must not cost the export."""
    try:
        return measure()
    except (FituneError, OSError, MemoryError, RuntimeError, ValueError) as error:
        on_note(f"the merged model's loss was not measured: {first_line(error)}")
        return None


def sample_loss(plan: Plan, model: LanguageModel, data: PreparedData, rows: int) -> float:
    """The loss over the first ``rows`` that are held out, or else of the training data."""
    return evaluate(model, data.train if data.eval is None else data.eval, plan.batch, rows=rows)


Answer = Callable[[LanguageModel, Sequence[Conversation]], list[str]]
"""Answers to the last user message of each conversation, by the model as it is now."""

_BEFORE = "samples_before.json"


def answer_before(
    directory: Path, model: LanguageModel, conversations: Sequence[Conversation], answer: Answer
) -> None:
    """Answer with the untrained model and keep the answers on disk: a resumed run cannot ask again."""
    answers = answer(model, conversations)
    write_atomically(directory / _BEFORE, json.dumps(answers, ensure_ascii=False))


def compare_samples(
    directory: Path, model: LanguageModel, conversations: Sequence[Conversation], answer: Answer
) -> tuple[Sample, ...]:
    """Answer the same prompts with the trained model and lay both answers side by side."""
    try:
        found = read_json(directory / _BEFORE)
    except (OSError, ValueError):  # a table that a damaged file leaves empty is not worth a finished run
        found = []
    # A run resumed elsewhere, or with more samples, was never asked all of them. The file stays: it may be made longer.
    said = [text for text in found if isinstance(text, str)] if isinstance(found, list) else []
    before = [*said, *[_NOT_ASKED] * len(conversations)][: len(conversations)]
    after = answer(model, conversations)
    samples = []
    for conversation, was, now in zip(conversations, before, after, strict=True):
        *asked, answered = conversation.messages
        lines = [m.text if m.role == "user" else f"[{m.role}] {m.text}" for m in asked]
        samples.append(Sample(prompt="\n".join(lines), expected=answered.text, before=was, after=now))
    return tuple(samples)


_NOT_ASKED = "(not asked: the run was resumed from elsewhere)"
