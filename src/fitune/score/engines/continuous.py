"""Continuous batching: a row that ends leaves the batch, and the next one enters in its place.

All rows of the batch end at the same column of its cache (score/engines/roomy_cache.py) and are padded on the left, so
one token is written for each by one step of the model. Rows enter in groups, by a forward pass over their prompts
alone, whose cache is joined to the batch's. Prompts come in order of length, so those that enter together need little
padding.

Shapes: B rows of the batch, W columns of the cache.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fitune.models.attention import turns_by_length
from fitune.score.engines.choosing import OnToken, Row, choose, nobody
from fitune.score.engines.engine import Completion, Request
from fitune.score.engines.roomy_cache import RoomyCache
from fitune.spec.answering import CACHE_ROOM

_PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
_ENTER_TOGETHER = 4
"""Rows enter when one place in this many is free: a pass over one prompt costs nearly as much as over several."""

_WATCHED_STEPS = CACHE_ROOM
"""One step in so many is watched, those in which the cache grows: a counter makes a step several times as long."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A pass of the first batch: prompts of at most ``prompt_tokens`` are read, or a token is written and the cache
    has ``width`` columns then."""

    rows: int
    prompt_tokens: int
    width: int


Watch = Callable[[Moment, Callable[[], Iterable[Tensor]]], AbstractContextManager[None]]
"""Opened around some passes of the first batch; told which, and the tensors that exist before."""


def unwatched(_moment: Moment, _alive: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
    """The watch of a run that nobody measures: it does nothing."""
    return nullcontext()


def can_join(model: Any) -> bool:
    """True for a model whose whole state is keys and values, and whose positions can be told for each row.

    Not so: recurrent states (Mamba), positions that follow from the mask's length (Bloom), rotary factors that
    depend on the longest row of a call (longrope, dynamic). Such models answer in batches that start and end together.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config = base.config.get_text_config()
    taken = inspect.signature(base.forward).parameters
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        {"position_ids", "past_key_values", "attention_mask", "logits_to_keep"} <= taken.keys()
        and kinds <= _PLAIN_ATTENTION
        and not getattr(base, "_is_stateful", False)
        and not turns_by_length(base.config)
    )


def answer_continuously(
    model: Any,
    requests: Sequence[Request],
    *,
    stop_ids: frozenset[int],
    batch_size: int,
    on_token: OnToken = nobody,
    watch: Watch = unwatched,
) -> Iterator[Completion]:
    """Completions as they end. ``requests`` fit into the model's context. ``watch`` is opened until a row leaves."""
    waiting = deque(sorted(requests, key=lambda request: len(request.prompt_ids), reverse=True))
    batch = _Batch(model, on_token)
    steps = 0
    while waiting or batch.rows:
        free = batch_size - len(batch.rows)
        if waiting and (not batch.rows or free >= max(1, batch_size // _ENTER_TOGETHER)):
            entering = [Row(request=waiting.popleft()) for _ in range(min(free, len(waiting)))]
            with watch(batch.moment(entering), batch.tensors) if not steps else nullcontext():
                batch.enter(entering)
        else:
            is_watched = watch is not unwatched and steps % _WATCHED_STEPS == 1
            with watch(batch.moment(), batch.tensors) if is_watched else nullcontext():
                batch.step()
        steps += 1
        for completion in batch.leave(stop_ids):
            watch = unwatched  # rows that enter beside others are another case
            yield completion


class _Batch:
    """Rows that are being written, and their cache: ``gaps[row]`` columns of it are padding."""

    def __init__(self, model: Any, on_token: OnToken) -> None:
        self.rows: list[Row] = []
        self._model, self._on_token = model, on_token
        self._cache = RoomyCache()
        self._gaps: list[int] = []

    def tensors(self) -> Iterable[Tensor]:
        """All that live between two passes."""
        cached = ((layer.keys, layer.values) for layer in self._cache.filled)
        return chain(self._model.parameters(), self._model.buffers(), chain.from_iterable(cached))

    def moment(self, entering: Sequence[Row] = ()) -> Moment:
        """The pass that follows: over the prompts of ``entering``, else over one token of each row."""
        rows = entering or self.rows
        longest = max(len(row.request.prompt_ids) for row in rows)
        full = self._width() >= self._cache.columns
        grown = self._width() + self._room() if full else self._cache.columns
        return Moment(len(rows), longest, longest if entering else grown)

    @torch.inference_mode()
    def enter(self, rows: list[Row]) -> None:
        """Read the prompts of ``rows``, write the first token of each, and join them to the batch."""
        width = max(row.length for row in rows)
        gaps = [width - row.length for row in rows]
        ids = [[0] * gap + list(row.request.prompt_ids) for gap, row in zip(gaps, rows, strict=True)]
        cache = RoomyCache()
        places_BW = (torch.arange(width)[None] - torch.tensor(gaps)[:, None]).clamp_min(0)
        self._forward(torch.tensor(ids), places_BW, _mask(gaps, width), cache, rows)
        self._join(cache, width, gaps)
        self.rows += rows

    @torch.inference_mode()
    def step(self) -> None:
        """Write one token for each row: the last one is read, and follows its row in the cache."""
        last_B1 = torch.tensor([[row.token_ids[-1]] for row in self.rows])
        places_B1 = torch.tensor([[row.length - 1] for row in self.rows])
        mask_BW = _mask(self._gaps, self._width() + 1)
        self._cache.growth.room = self._room()
        self._forward(last_B1, places_B1, mask_BW, self._cache, self.rows)

    @torch.inference_mode()
    def leave(self, stop_ids: frozenset[int]) -> list[Completion]:
        """Take the rows out that are done, and the columns that only they needed."""
        reasons = [row.finish_reason(stop_ids) for row in self.rows]
        done = [
            row.completion(reason)
            for row, reason in zip(self.rows, reasons, strict=True)
            if reason is not None
        ]
        if done:
            self._keep([place for place, reason in enumerate(reasons) if reason is None])
        return done

    def _forward(
        self, ids: Tensor, places: Tensor, mask_BW: Tensor, cache: RoomyCache, rows: Sequence[Row]
    ) -> None:
        device = self._model.device
        output = self._model(
            input_ids=ids.to(device),
            position_ids=places.to(device),
            attention_mask=mask_BW.to(device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        choose(output.logits[:, -1], rows, on_token=self._on_token)

    def _width(self) -> int:
        return self.rows[0].length - 1 + self._gaps[0] if self.rows else 0

    def _room(self) -> int:
        """Columns that a growth of the cache adds: no more than the rows may still fill."""
        most = max((row.request.sampling.max_new_tokens - len(row.token_ids) for row in self.rows), default=1)
        return min(CACHE_ROOM, most)

    def _join(self, entering: RoomyCache, there: int, gaps: list[int]) -> None:
        """Put the rows of ``entering``, ``there`` columns wide, below those of the batch."""
        if not self.rows:
            self._cache, self._gaps = entering, gaps
            return
        here = self._width()
        width = max(here, there)
        self._cache.join(entering)
        self._gaps = [gap + width - here for gap in self._gaps] + [gap + width - there for gap in gaps]

    def _keep(self, kept: list[int]) -> None:
        """Keep the rows of these places: the last ones move to the places of those that leave."""
        moving = [place for place in kept if place >= len(kept)]
        order = [place if place in kept else moving.pop() for place in range(len(kept))]
        self.rows = [self.rows[place] for place in order]
        gaps = [self._gaps[place] for place in order]
        unused = min(gaps, default=0)
        self._gaps = [gap - unused for gap in gaps]
        moved = [(source, place) for place, source in enumerate(order) if source != place]
        if self.rows:
            self._cache.keep(moved, len(self.rows), unused)
        else:
            self._cache = RoomyCache()


def _mask(gaps: Sequence[int], width: int) -> Tensor:
    """1 where a column holds a token of the row [B, W]."""
    return (torch.arange(width)[None] >= torch.tensor(gaps)[:, None]).long()
