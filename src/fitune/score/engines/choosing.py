"""The next token of each row, and its log-probability.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from fitune.score.engines.engine import Completion, FinishReason, Request


class AnswerRow:
    """A request and what is written for it so far; ``on_token`` is called with it after each token."""

    def __init__(self, request: Request, on_token: "OnToken") -> None:
        self.request, self._on_token = request, on_token
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        draws = bool(request.sampling.temperature)
        self.generator = torch.Generator().manual_seed(request.seed) if draws else None
        self.is_stopped = False
        """True when one of the request's stop texts is written."""

    def add(self, token: int, logprob: float) -> None:
        """Take in the next token of the answer."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self._on_token(self)

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt_ids) + len(self.token_ids)

    def finish_reason(self, stop_ids: frozenset[int]) -> FinishReason | None:
        """Reason why the row ended; None as long as it goes on."""
        if self.is_stopped or (self.token_ids and self.token_ids[-1] in stop_ids):
            return "stop"
        return "length" if len(self.token_ids) >= self.request.sampling.max_new_tokens else None

    def completion(self, reason: FinishReason) -> Completion:
        """The answer as it stands, ended for ``reason``."""
        return Completion(
            id=self.request.id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            tokens=len(self.token_ids),
        )


OnToken = Callable[[AnswerRow], None]
"""Called when a token was written for a row."""


def nobody(_row: AnswerRow) -> None:
    """An OnToken for callers that wait for whole answers."""


def stopping(on_token: OnToken, decode: Callable[[list[int]], str]) -> OnToken:
    """``on_token``, and then a look at the row's last tokens for the texts at which its request stops."""

    def look(row: AnswerRow) -> None:
        """Stops the row where one of its texts is written."""
        on_token(row)
        if row.request.stop and not row.is_stopped:
            # a token is a byte or more; some at the front may be parts of a character, or lose their space
            longest = max(len(text.encode()) for text in row.request.stop)
            tail = decode(row.token_ids[-longest - 4 :])
            row.is_stopped = any(text in tail for text in row.request.stop)

    return look


def choose(logits_BV: Tensor, rows: Sequence[AnswerRow]) -> Tensor:
    """The next token of each row [B], also added to the rows with its log-probability."""
    logits_BV = logits_BV.float()
    chosen_B = logits_BV.argmax(-1)
    for place, row in enumerate(rows):
        if row.generator is not None:
            chosen_B[place] = _draw(logits_BV[place], row)
    logprobs_B = logits_BV.gather(1, chosen_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
    for row, token, logprob in zip(rows, chosen_B.tolist(), logprobs_B.tolist(), strict=True):
        row.add(token, logprob)
    return chosen_B


def _draw(logits_V: Tensor, row: AnswerRow) -> Tensor:
    """A draw from the softmax: the largest of the logits plus Gumbel noise (Maddison et al., arXiv 1411.0030).

    The noise is −log of exponential noise, from the row's own generator on the CPU: the same row draws the same
    answer in any batch, on any device and after any restart.
    """
    sampling = row.request.sampling
    nothing = torch.empty(1, 0, dtype=torch.long)
    scores = TemperatureLogitsWarper(float(sampling.temperature))(nothing, logits_V[None])
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(nothing, scores)
    waiting_V = torch.empty(len(logits_V)).exponential_(generator=row.generator)
    return (scores[0] - waiting_V.log().to(scores.device)).argmax()
