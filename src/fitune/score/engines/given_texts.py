"""Log-probabilities of given texts behind their prompts.

Of several texts behind one prompt the prompt is read once, and its keys and values serve each of them: prompts are
padded on the left and texts on the right, so all end and begin at one column of the cache.

Shapes: G prompts, B texts, P tokens of the longest prompt, C tokens of the longest text but its last, D hidden size,
S tokens of all texts, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fitune.models.language_model import cache_argument
from fitune.score.engines.engine import Continuation, Likelihood

HEAD_TOKENS = 256
"""Tokens that go through the head together: 256 · V logits in fp32 are 150 MiB for a vocabulary of 150,000."""

Groups = list[list[Continuation]]


def batches_by_prompt(continuations: Sequence[Continuation], size: int) -> Iterator[Groups]:
    """Continuations of one prompt side by side, in batches of about ``size`` texts, those with the most tokens first; a
    prompt is never divided."""
    groups: dict[tuple[int, ...], list[Continuation]] = {}
    for one in continuations:
        groups.setdefault(one.prompt_ids, []).append(one)
    batch: Groups = []
    texts = 0

    def tokens(group: list[Continuation]) -> int:
        """Tokens of the prompt and of its longest text."""
        return max(len(one.ids) for one in group)

    for group in sorted(groups.values(), key=tokens, reverse=True):
        if batch and texts + len(group) > size:
            yield batch
            batch, texts = [], 0
        batch.append(group)
        texts += len(group)
    if batch:
        yield batch


@torch.inference_mode()
def loglikelihoods_alone(parts: Any, one: Continuation) -> list[Likelihood]:
    """One pass of the body without a cache, for any model. ``parts`` are those of ``language_model``."""
    ids = torch.tensor([one.ids[:-1]], device=parts.device)
    (hidden_TD,) = parts.body(input_ids=ids, use_cache=False, return_dict=True).last_hidden_state
    return _likelihoods(parts, [hidden_TD[len(one.prompt_ids) - 1 :]], [one])


@torch.inference_mode()
def loglikelihoods_behind(parts: Any, groups: Groups) -> list[Likelihood]:
    """Log-likelihoods of all texts of ``groups``; each group has one prompt."""

    def hidden(ids: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [B, T, D] of ``ids`` [B, T] behind what the cache holds."""
        found: Tensor = parts.body(
            input_ids=ids.to(parts.device), position_ids=places.to(parts.device),
            attention_mask=mask.to(parts.device), use_cache=True, return_dict=True, **{cache_keyword: cache},
        ).last_hidden_state  # fmt: skip
        return found

    prompts = [group[0].prompt_ids for group in groups]
    width = max(map(len, prompts))
    ids_GP = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])
    gaps_G1 = torch.tensor([[width - len(ids)] for ids in prompts])
    mask_GP = (torch.arange(width)[None] >= gaps_G1).long()
    cache, cache_keyword = DynamicCache(), str(cache_argument(parts.body))
    places_GP = (torch.arange(width)[None] - gaps_G1).clamp_min(0)
    last_GD = hidden(ids_GP, places_GP, mask_GP)[:, -1]

    owners_B = torch.tensor([place for place, group in enumerate(groups) for _ in group])
    texts = [one for group in groups for one in group]
    longest = max(len(one.token_ids) for one in texts) - 1
    hidden_BCD = last_GD.new_zeros(len(texts), 0, last_GD.shape[-1])
    if longest:
        layers: list[Any] = cache.layers
        for layer in layers:
            if layer.get_seq_length():  # some models share keys between layers and leave the rest empty
                chosen = owners_B.to(layer.keys.device)
                layer.keys, layer.values = (
                    held.index_select(0, chosen) for held in (layer.keys, layer.values)
                )
        read = [one.token_ids[:-1] for one in texts]
        ids_BC = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in read])
        real_BC = torch.arange(longest)[None] < torch.tensor([[len(ids)] for ids in read])
        places_BC = width - gaps_G1[owners_B] + torch.arange(longest)[None]
        mask_BW = torch.cat([mask_GP[owners_B], real_BC.long()], dim=1)
        hidden_BCD = hidden(ids_BC, places_BC, mask_BW)
    before = [
        torch.cat([last_GD[owners_B[row]][None], hidden_BCD[row, : len(one.token_ids) - 1]])
        for row, one in enumerate(texts)
    ]
    return _likelihoods(parts, before, texts)


def _likelihoods(parts: Any, before: Sequence[Tensor], texts: Sequence[Continuation]) -> list[Likelihood]:
    """Log-probability of each token of each text; ``before`` are the states before them [tokens, D].

    Logits exist for one chunk of tokens at a time.
    """
    hidden_SD = torch.cat(list(before))
    ids_S = torch.tensor([token for one in texts for token in one.token_ids], device=hidden_SD.device)
    head = parts.head
    logprobs: list[float] = []
    greedy: list[bool] = []
    for start in range(0, len(ids_S), HEAD_TOKENS):
        part = slice(start, start + HEAD_TOKENS)
        logits_SV = head.module(hidden_SD[part]).float() * head.logit_scale
        if head.softcap:
            logits_SV = (logits_SV / head.softcap).tanh() * head.softcap
        wanted_S = ids_S[part].to(logits_SV.device)
        chosen_S = logits_SV.gather(1, wanted_S[:, None])[:, 0]
        logprobs += (chosen_S - logits_SV.logsumexp(-1)).tolist()
        greedy += (logits_SV.argmax(-1) == wanted_S).tolist()
    ends = accumulate(len(one.token_ids) for one in texts)
    spans = [slice(end - len(one.token_ids), end) for one, end in zip(texts, ends, strict=True)]
    return [
        Likelihood(id=one.id, logprobs=tuple(logprobs[span]), is_greedy=all(greedy[span]))
        for one, span in zip(texts, spans, strict=True)
    ]
