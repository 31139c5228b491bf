"""Grades of weighed rows: what the log-probabilities of given texts say.

A weighed row lists its texts with their log-probabilities in nats: ``logprob`` of the text, ``end_logprob`` of the
tokens that end the answer. Choices are compared by their texts alone, as lm-evaluation-harness does; likelihood and
perplexity count the end, too, as the loss of training does. The prompt counts nowhere.
"""

import math
from collections.abc import Callable
from typing import Any

Weighed = dict[str, Any]
"""The body of a weighed row's line."""

_LARGEST_LOG = 700.0
"""exp of more is no float."""
Graded = dict[str, float]
"""``grade``, and beside it ``weight``, how much the row counts in the mean: its tokens or bytes; without it, one."""


def likeliest(body: Weighed, size: Callable[[Any], float] = lambda choice: 1.0) -> int:
    """The place of the choice with the highest log-probability per ``size``; of equal ones the first."""
    scores = [choice["logprob"] / size(choice) for choice in body["choices"]]
    return scores.index(max(scores))


def choice(body: Weighed) -> Graded:
    """1 when the likeliest choice is the right one (lm-evaluation-harness: acc)."""
    return {"grade": float(likeliest(body) == body["right"])}


def choice_norm(body: Weighed) -> Graded:
    """1 when the choice that is likeliest per character is the right one (lm-evaluation-harness: acc_norm)."""
    return {"grade": float(likeliest(body, lambda choice: len(choice["text"])) == body["right"])}


def choice_norm_tokens(body: Weighed) -> Graded:
    """1 when the choice that is likeliest per token is the right one."""
    return {"grade": float(likeliest(body, lambda choice: choice["tokens"]) == body["right"])}


def loglikelihood(body: Weighed) -> Graded:
    """Log-probability of the reference and of the end of the answer, in nats."""
    return {"grade": -_nats(body)}


def perplexity(body: Weighed) -> Graded:
    """exp of the nats per token of the reference and the end of the answer."""
    right = body["choices"][body["right"]]
    return _perplexity(_nats(body), right["tokens"] + right["end_tokens"])


def byte_perplexity(body: Weighed) -> Graded:
    """exp of the nats per UTF-8 byte of the reference: comparable between tokenizers."""
    return _perplexity(_nats(body), len(body["choices"][body["right"]]["text"].encode()))


def _nats(body: Weighed) -> float:
    right = body["choices"][body["right"]]
    return -float(right["logprob"] + right["end_logprob"])


def _perplexity(nats: float, pieces: int) -> Graded:
    return {"grade": math.exp(min(nats / pieces, _LARGEST_LOG)), "weight": float(pieces)}
