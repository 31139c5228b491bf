"""Mean loss over held-out rows."""

from fitune.data.dataset import TokenDataset
from fitune.data.loader import eval_batches
from fitune.models.language_model import LanguageModel
from fitune.spec.plan import Batch


def evaluate(model: LanguageModel, dataset: TokenDataset, batch: Batch, *, rows: int | None = None) -> float:
    """Mean negative log-likelihood per supervised token, in nats, over every row once, or the first ``rows``."""
    model.whole.eval()
    total, tokens = 0.0, 0
    for micro in eval_batches(dataset, batch, rows=rows):
        total += model.loss(micro).item()
        tokens += int((micro.labels_T >= 0).sum())
    model.whole.train()
    return total / tokens
