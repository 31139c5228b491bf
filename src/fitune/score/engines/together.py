"""Answers by transformers' own ``generate``, in batches padded on the left that start and end together.

For models whose rows cannot enter a batch one by one (score/engines/continuous.py). With longrope (Phi-3.5, Phi-4-mini)
transformers turns all rows of a call by the factors of the longest, so rows on both sides of its boundary never share
a batch, and an answer that could cross the boundary is written alone.

Shapes: B prompts of a batch, T tokens of its longest prompt, V vocabulary.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from fitune.models.attention import longrope_boundary
from fitune.score.engines.choosing import OnToken, Row, choose, nobody
from fitune.score.engines.engine import Completion, Request


def answer_together(
    model: Any,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int],
    pad_id: int,
    batch_size: int,
    on_token: OnToken = nobody,
) -> Iterator[Completion]:
    """Completions, batch after batch. ``requests`` fit into the model's context."""
    by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
    for batch in _batches(by_length, batch_size, longrope_boundary(model.config)):
        yield from _answer_batch(model, batch, stop_ids, pad_id, on_token)


def _batches(requests: Sequence[Request], batch_size: int, boundary: int) -> Iterator[list[Request]]:
    """Requests, sorted by length, in batches whose rows stay on one side of ``boundary``; 0: there is none."""

    def side(request: Request) -> str:
        prompt = len(request.prompt_ids)
        last_read = (
            prompt + request.sampling.max_new_tokens - 1
        )  # the last token that is written is not read again
        return (
            "short" if not boundary or last_read <= boundary else "long" if prompt > boundary else "crosses"
        )

    for where, group in itertools.groupby(requests, side):
        alike, size = list(group), 1 if where == "crosses" else batch_size
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


@torch.inference_mode()
def _answer_batch(
    model: Any, requests: Sequence[Request], stop_ids: frozenset[int], pad_id: int, on_token: OnToken
) -> Iterator[Completion]:
    rows = [Row(request=request) for request in requests]
    longest = max(len(request.prompt_ids) for request in requests)
    gaps = [longest - len(request.prompt_ids) for request in requests]
    ids = [[pad_id] * gap + list(r.prompt_ids) for gap, r in zip(gaps, requests, strict=True)]
    mask = [[0] * gap + [1] * (longest - gap) for gap in gaps]  # generate takes the positions from it
    model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(request.sampling.max_new_tokens for request in requests),
        logits_processor=LogitsProcessorList([_Chosen(rows, stop_ids, on_token)]),
    )
    return (row.completion(row.finish_reason(stop_ids) or "length") for row in rows)


class _Chosen(LogitsProcessor):
    """Scores whose largest is the token that ``choose`` takes: ``generate`` itself only follows. A row that has ended
    is fed ends until the last row of the batch is done."""

    def __init__(self, rows: Sequence[Row], stop_ids: frozenset[int], on_token: OnToken) -> None:
        self._rows, self._stop_ids, self._on_token = rows, stop_ids, on_token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        going = [place for place, row in enumerate(self._rows) if not row.finish_reason(self._stop_ids)]
        chosen_B = torch.full_like(input_ids[:, 0], min(self._stop_ids, default=0))
        rows = [self._rows[place] for place in going]
        chosen_B[going] = choose(scores[going], rows, on_token=self._on_token)
        return torch.full_like(scores, float("-inf")).scatter_(1, chosen_B[:, None], 0.0)
