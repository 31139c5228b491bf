"""The chunked head and loss equal the plain ones, value and gradients, to 1e-6 in fp32.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitune.measure.memory import LiveTensors
from fitune.models.loss_head import LossHead
from fitune.values.model.block_profile import IGNORED
from fitune.values.predictions import Phase

T, D, V = 23, 16, 61
CHUNKS = (None, 1, 7, 23, 100)
"""7 leaves a rest of the 23 tokens; 100 is more than there are."""


@dataclass
class Case:
    """Hidden states, labels and a head with a bias, the same for both sides."""

    labels_T: Tensor
    hidden_TD: Tensor = field(default_factory=lambda: _random(T, D, seed=1))
    head: nn.Linear = field(default_factory=lambda: _head())
    scale: float = 0.125


@dataclass(frozen=True)
class Found:
    losses_S: Tensor
    hidden_gradient_TD: Tensor
    head_gradients: tuple[Tensor | None, ...]


def _random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _head(*, bias=True, frozen=False):
    head = nn.Linear(D, V, bias=bias)
    with torch.no_grad():
        head.weight.copy_(_random(V, D, seed=2))
        if bias:
            head.bias.copy_(_random(V, seed=3))
    return head.requires_grad_(not frozen)


def all_labels():
    return torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(4))


def some_labels():
    labels_T = all_labels()
    labels_T[torch.tensor([0, 1, 2, 7, 11, 22])] = IGNORED
    return labels_T


def ours(case, **settings):
    case.head.zero_grad()
    loss_head = LossHead(module=case.head, **settings)
    losses_S, gradient_TD = loss_head.losses_and_gradient(case.hidden_TD, case.labels_T, scale=case.scale)
    return Found(losses_S, gradient_TD, _head_gradients(case.head))


def plain(case, *, softcap=None, logit_scale=1.0):
    """The loss as it is written in a textbook; autograd does the rest."""
    case.head.zero_grad()
    leaf_TD = case.hidden_TD.clone().requires_grad_()
    logits_TV = case.head(leaf_TD) * logit_scale
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    losses_T = F.cross_entropy(logits_TV, case.labels_T, ignore_index=IGNORED, reduction="none")
    (case.scale * losses_T.sum()).backward()
    losses_S = losses_T.detach()[case.labels_T != IGNORED]
    return Found(losses_S, leaf_TD.grad, _head_gradients(case.head))


def _head_gradients(head):
    return tuple(None if p.grad is None else p.grad.clone() for p in head.parameters())


def assert_equal(found, expected):
    close = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found.losses_S, expected.losses_S, **close)
    torch.testing.assert_close(found.hidden_gradient_TD, expected.hidden_gradient_TD, **close)
    for mine, theirs in zip(found.head_gradients, expected.head_gradients, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, **close)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("labels", [all_labels, some_labels])
@pytest.mark.parametrize("logits", [{}, {"softcap": 3.0}, {"logit_scale": 0.25}], ids=str)
def test_equals_the_plain_loss_of_each_token_with_a_label(labels, chunk_tokens, logits):
    case = Case(labels(), head=_head(bias="logit_scale" not in logits))  # no model has both
    expected = plain(case, **logits)
    assert_equal(ours(case, chunk_tokens=chunk_tokens, **logits), expected)
    evaluated = LossHead(module=case.head, chunk_tokens=chunk_tokens, **logits)
    losses_S = evaluated.losses(case.hidden_TD, case.labels_T)
    torch.testing.assert_close(losses_S, expected.losses_S, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_equals_the_chunked_loss_of_torch():
    case = Case(some_labels())
    found = ours(case, chunk_tokens=7)
    case.head.zero_grad()
    leaf_TD = case.hidden_TD.clone().requires_grad_()
    loss = F.linear_cross_entropy(
        leaf_TD, case.head.weight, case.labels_T, linear_bias=case.head.bias, reduction="sum",
        ignore_index=IGNORED, options=nn.LinearCrossEntropyOptions(batch_chunk_size=7),
    )  # fmt: skip
    (case.scale * loss).backward()
    theirs = Found(loss.detach(), leaf_TD.grad, _head_gradients(case.head))
    assert_equal(replace(found, losses_S=found.losses_S.sum()), theirs)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_a_frozen_head_gets_no_gradient_and_passes_the_same_one_on(chunk_tokens):
    case = Case(some_labels(), head=_head(frozen=True))
    found = ours(case, chunk_tokens=chunk_tokens)
    assert found.head_gradients == (None, None)
    assert_equal(found, plain(case))


def test_a_tied_head_adds_to_the_gradient_that_the_embedding_has():
    case = Case(some_labels(), head=_head(bias=False))
    embedding = nn.Embedding(V, D)
    embedding.weight = case.head.weight
    alone = plain(case).head_gradients[0]
    case.head.zero_grad()
    ids_T = all_labels()
    embedding(ids_T).sum().backward()
    from_embedding = case.head.weight.grad.clone()
    loss_head = LossHead(module=case.head, chunk_tokens=5)
    loss_head.losses_and_gradient(case.hidden_TD, case.labels_T, scale=case.scale)
    torch.testing.assert_close(embedding.weight.grad, from_embedding + alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_without_a_label_there_is_no_loss_and_no_gradient(chunk_tokens):
    """The plain mean would be 0 / 0 here."""
    case = Case(torch.full((T,), IGNORED))
    found = ours(case, chunk_tokens=chunk_tokens)
    assert not len(found.losses_S)
    assert not found.hidden_gradient_TD.any()
    for gradient in found.head_gradients:  # zeros, not None: ranks that sum their gradients wait for it
        assert gradient is not None
        assert not gradient.any()


@pytest.mark.parametrize("labels", ["some", "none"])
def test_ranks_gather_the_head_once_however_many_chunks_their_held_out_rows_are(labels):
    """DeepSpeed gathered it for every chunk, and a rank with fewer of them met the next weights of another there."""
    case = Case(some_labels() if labels == "some" else torch.full((T,), IGNORED))
    said = []

    @contextmanager
    def gathered():
        said.append("gathered")
        yield
        said.append("let go")

    case.head.register_forward_hook(lambda *_: said.append("chunk"))
    LossHead(module=case.head, chunk_tokens=2, gathered=gathered).losses(case.hidden_TD, case.labels_T)
    assert said == ["gathered", *["chunk"] * (len(said) - 2), "let go"]
    assert len(said) == 3 if labels == "none" else len(said) > 3


@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_16_bit_logits_keep_an_fp32_softmax(chunk_tokens):
    """Against fp64 on the same 16-bit numbers: the loss carries the rounding of the logits and no more."""
    case = Case(some_labels(), hidden_TD=_random(T, D, seed=1).bfloat16(), head=_head().bfloat16())
    found = ours(case, chunk_tokens=chunk_tokens)
    logits = case.head(case.hidden_TD).double()
    expected = F.cross_entropy(logits, case.labels_T, ignore_index=IGNORED, reduction="sum")
    assert found.losses_S.sum().item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.hidden_gradient_TD.dtype == torch.bfloat16


def test_logits_of_one_chunk_are_gone_when_the_next_are_made():
    """In evaluation, too: two chunks of logits were alive together."""
    case, peaks = Case(all_labels()), []
    for tokens in (10, 20):
        part_TD, head = case.hidden_TD[:tokens], LossHead(module=case.head, chunk_tokens=10)
        with LiveTensors([part_TD, case.labels_T, *case.head.parameters()]) as live:
            head.losses(part_TD, case.labels_T[:tokens])
        peaks.append(live.peaks[Phase.IDLE])
    assert peaks[1] - peaks[0] < 10 * V * 4
