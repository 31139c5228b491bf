"""Several texts behind one prompt: the prompt is read once, and its keys and values serve each of them.

Prompts are padded on the left and texts on the right, so all end and begin at one column of the cache.

Shapes: G prompts, B texts, P tokens of the longest prompt, C tokens of the longest text but its last, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fitune.score.engines.engine import Continuation, Likelihood

Weights = Callable[[Sequence[Tensor], Sequence[Sequence[int]]], list[tuple[tuple[float, ...], bool]]]
"""Takes the hidden states before the tokens of each text, and their ids; gives log-probabilities for each text, and
True if each id is the likeliest."""


def prompts_shared(
    continuations: Sequence[Continuation],
) -> tuple[list[list[Continuation]], list[Continuation]]:
    """Continuations of prompts that several have, prompt by prompt, and the others."""
    groups: dict[tuple[int, ...], list[Continuation]] = {}
    for one in continuations:
        groups.setdefault(one.prompt_ids, []).append(one)
    shared = [group for group in groups.values() if len(group) > 1]
    return shared, [group[0] for group in groups.values() if len(group) == 1]


def batches_of(groups: Sequence[list[Continuation]], size: int) -> Iterator[list[list[Continuation]]]:
    """Groups in batches of about ``size`` texts, those with the most tokens first; a group is never divided."""
    batch: list[list[Continuation]] = []
    texts = 0
    for group in sorted(groups, key=_tokens, reverse=True):
        if batch and texts + len(group) > size:
            yield batch
            batch, texts = [], 0
        batch.append(group)
        texts += len(group)
    if batch:
        yield batch


def _tokens(group: Sequence[Continuation]) -> int:
    return len(group[0].prompt_ids) + max(len(one.token_ids) for one in group)


@torch.inference_mode()
def weigh_behind(
    body: Any, groups: Sequence[Sequence[Continuation]], weights: Weights, device: torch.device
) -> list[Likelihood]:
    """Likelihoods of all texts of ``groups``; each group has one prompt."""
    prompts = [group[0].prompt_ids for group in groups]
    width = max(map(len, prompts))
    ids_GP = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in prompts])
    gaps_G1 = torch.tensor([[width - len(ids)] for ids in prompts])
    mask_GP = (torch.arange(width)[None] >= gaps_G1).long()
    cache = DynamicCache()
    places_GP = (torch.arange(width)[None] - gaps_G1).clamp_min(0)
    last_GD = _hidden(body, ids_GP, places_GP, mask_GP, cache, device)[:, -1]

    owners_B = torch.tensor([place for place, group in enumerate(groups) for _ in group])
    texts = [one for group in groups for one in group]
    longest = max(len(one.token_ids) for one in texts) - 1
    hidden_BCD = last_GD.new_zeros(len(texts), 0, last_GD.shape[-1])
    if longest:
        for layer in _filled_layers(cache):
            chosen = owners_B.to(layer.keys.device)
            layer.keys, layer.values = (
                layer.keys.index_select(0, chosen),
                layer.values.index_select(0, chosen),
            )
        read = [one.token_ids[:-1] for one in texts]
        ids_BC = torch.tensor([list(ids) + [0] * (longest - len(ids)) for ids in read])
        real_BC = torch.arange(longest)[None] < torch.tensor([[len(ids)] for ids in read])
        places_BC = width - gaps_G1[owners_B] + torch.arange(longest)[None]
        mask_BW = torch.cat([mask_GP[owners_B], real_BC.long()], dim=1)
        hidden_BCD = _hidden(body, ids_BC, places_BC, mask_BW, cache, device)
    before = [
        torch.cat([last_GD[owners_B[row]][None], hidden_BCD[row, : len(one.token_ids) - 1]])
        for row, one in enumerate(texts)
    ]
    found = weights(before, [one.token_ids for one in texts])
    return [
        Likelihood(id=one.id, logprobs=logprobs, is_greedy=greedy)
        for one, (logprobs, greedy) in zip(texts, found, strict=True)
    ]


def _hidden(
    body: Any, ids: Tensor, places: Tensor, mask: Tensor, cache: DynamicCache, device: torch.device
) -> Tensor:
    hidden: Tensor = body(
        input_ids=ids.to(device), position_ids=places.to(device), attention_mask=mask.to(device),
        past_key_values=cache, use_cache=True, return_dict=True,
    ).last_hidden_state  # fmt: skip
    return hidden


def _filled_layers(cache: DynamicCache) -> list[Any]:
    """The layers that hold keys; some models share keys between layers and leave the rest empty."""
    layers: list[Any] = cache.layers
    return [layer for layer in layers if layer.get_seq_length()]
