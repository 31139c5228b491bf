"""Continuous batching: a row that ends leaves the batch, and the next one enters in its place.

All rows of the batch end at the same column of its cache and are padded on the left, so one token is written for each
by one step of the model. Rows enter in groups, by a forward pass over their prompts
alone, whose cache is joined to the batch's. Prompts come in order of length, so those that enter together need little
padding.

The cache has keys and values in buffers with room: a token is written behind its row, nothing else is copied, where
transformers' own cache makes a new tensor for each token. Columns are added in blocks, a row that ends leaves its place
to another, and the columns that no row needs any more are passed over.

Shapes: B rows of the batch, n heads, W columns of the cache, d of a head.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from fitune.models.attention import turns_by_length
from fitune.models.language_model import cache_argument, without_adapters
from fitune.score.engines.choosing import AnswerRow, OnToken, choose, nobody
from fitune.score.engines.engine import Completion, Request
from fitune.values.answering import CACHE_ROOM

_PLAIN_ATTENTION = {"full_attention", "sliding_attention"}
_ENTER_TOGETHER = 4
"""Rows enter when one place in this many is free: a pass over one prompt costs nearly as much as over several."""

_WATCHED_STEPS = CACHE_ROOM
"""One step in so many is watched, those in which the cache grows: a counter makes a step several times as long."""


@dataclass(frozen=True, slots=True)
class BatchPass:
    """A pass of the first batch: prompts of at most ``prompt_tokens`` are read, or a token is written and the cache
    has ``width`` columns then."""

    rows: int
    prompt_tokens: int
    width: int

    @property
    def is_reading(self) -> bool:
        """True where prompts are read."""
        return self.width == self.prompt_tokens


Watch = Callable[[BatchPass, Callable[[], Iterable[Tensor]]], AbstractContextManager[None]]
"""Opened around some passes of the first batch; told which, and the tensors that exist before."""


def unwatched(_moment: BatchPass, _alive: Callable[[], Iterable[Tensor]]) -> AbstractContextManager[None]:
    """The watch of a run that nobody measures: it does nothing."""
    return nullcontext()


def can_join(model: Any) -> bool:
    """True for a model whose whole state is keys and values, and whose positions can be told for each row.

    Not so: recurrent states (Mamba), positions that follow from the mask's length (Bloom), rotary factors that
    depend on the longest row of a call (longrope, dynamic). Such models answer in batches that start and end together.
    """
    base = without_adapters(model)
    config = base.config.get_text_config()
    taken = inspect.signature(base.forward).parameters
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return (
        {"position_ids", "attention_mask", "logits_to_keep"} <= taken.keys()
        and cache_argument(base) is not None
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
    batch = _Batch(model)
    steps = 0
    while waiting or batch.rows:
        entering: list[AnswerRow] = []
        free = batch_size - len(batch.rows)
        if waiting and (not batch.rows or free >= max(1, batch_size // _ENTER_TOGETHER)):
            entering = [AnswerRow(waiting.popleft(), on_token) for _ in range(min(free, len(waiting)))]
        is_watched = watch is not unwatched and (not steps or steps % _WATCHED_STEPS == 1)
        with watch(batch.moment(entering), batch.tensors) if is_watched else nullcontext():
            if entering:
                batch.enter(entering)
            else:
                batch.step()
        steps += 1
        for completion in batch.leave(stop_ids):
            watch = unwatched  # rows that enter beside others are another case
            yield completion


class _Batch:
    """Rows that are being written, and their cache: ``gaps[row]`` columns of it are padding."""

    def __init__(self, model: Any) -> None:
        self.rows: list[AnswerRow] = []
        self._model = model
        self._cache_argument = str(cache_argument(without_adapters(model)))
        self._cache = RoomyCache()
        self._gaps: list[int] = []

    def tensors(self) -> Iterable[Tensor]:
        """All that live between two passes."""
        cached = ((layer.keys, layer.values) for layer in self._cache.filled)
        return chain(self._model.parameters(), self._model.buffers(), chain.from_iterable(cached))

    def moment(self, entering: Sequence[AnswerRow]) -> BatchPass:
        """The pass that follows: over the prompts of ``entering``, without any over one token of each row."""
        rows = entering or self.rows
        longest = max(len(row.request.prompt_ids) for row in rows)
        full = self._width() >= self._cache.columns
        grown = self._width() + self._room() if full else self._cache.columns
        return BatchPass(len(rows), longest, longest if entering else grown)

    @torch.inference_mode()
    def enter(self, rows: list[AnswerRow]) -> None:
        """Read the prompts of ``rows``, write the first token of each, and join them to the batch."""
        width = max(row.length for row in rows)
        gaps = [width - row.length for row in rows]
        ids = [[0] * gap + list(row.request.prompt_ids) for gap, row in zip(gaps, rows, strict=True)]
        cache = RoomyCache()
        places_BW = (torch.arange(width)[None] - torch.tensor(gaps)[:, None]).clamp_min(0)
        self._forward(torch.tensor(ids), places_BW, _mask(gaps, width), cache, rows)
        if self.rows:
            here = self._width()
            widest = max(here, width)
            self._cache.join(cache)
            self._gaps = [gap + widest - here for gap in self._gaps] + [gap + widest - width for gap in gaps]
        else:
            self._cache, self._gaps = cache, gaps
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
        self, ids: Tensor, places: Tensor, mask_BW: Tensor, cache: "RoomyCache", rows: Sequence[AnswerRow]
    ) -> None:
        device = self._model.device
        output = self._model(
            input_ids=ids.to(device),
            position_ids=places.to(device),
            attention_mask=mask_BW.to(device),
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
            **{self._cache_argument: cache},
        )
        choose(output.logits[:, -1], rows)

    def _width(self) -> int:
        return self.rows[0].length - 1 + self._gaps[0] if self.rows else 0

    def _room(self) -> int:
        """Columns that a growth of the cache adds: no more than the rows may still fill."""
        most = max((row.request.sampling.max_new_tokens - len(row.token_ids) for row in self.rows), default=1)
        return min(CACHE_ROOM, most)

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


class RoomyCache(DynamicCache):
    """The cache of a batch; ``growth`` says how many columns are added next time."""

    def __init__(self) -> None:
        super().__init__()
        self.growth = SimpleNamespace(room=1)
        # layers do not know their cache: in a circle its memory would wait for the search for garbage
        self.layer_class_to_replicate = cast(Any, partial(_Layer, self.growth))

    @property
    def filled(self) -> list["_Layer"]:
        """Layers that hold keys; some models share keys between layers and leave the rest empty."""
        layers: list[Any] = self.layers
        return [layer for layer in layers if layer.is_initialized]

    @property
    def columns(self) -> int:
        """Columns that there are buffers for."""
        return max((layer.stores[0].columns for layer in self.filled), default=0)

    def join(self, entering: "RoomyCache") -> None:
        """Put the rows of ``entering`` below those of this cache; all rows end at the same column."""
        for mine, new in zip(self.filled, entering.filled, strict=True):
            mine.keys = mine.values = None
            for store, other in zip(mine.stores, new.stores, strict=True):
                store.join(other.states)
            mine.show()

    def keep(self, moved: Sequence[tuple[int, int]], rows: int, unused: int) -> None:
        """Keep the first ``rows``, after rows were ``moved`` from a place to another, without ``unused`` columns."""
        for layer in self.filled:
            for store in layer.stores:
                store.keep(moved, rows, unused)
            layer.show()


class _Layer(DynamicLayer):
    def __init__(self, growth: SimpleNamespace) -> None:
        super().__init__()
        self._growth = growth
        self.stores: tuple[_Store, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Adds T columns [B, n, T, d] to keys and values; returns both whole. For transformers, in each forward."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.stores = (_Store(key_states), _Store(value_states))
        else:
            self.keys = self.values = None  # views would hold the old buffers while the new ones are filled
            for store, states in zip(self.stores, (key_states, value_states), strict=True):
                store.append(states, room=self._growth.room)
        return self.show()

    def show(self) -> tuple[Tensor, Tensor]:
        """Keys and values as transformers sees them: those of rows and columns in use."""
        self.keys, self.values = (store.states for store in self.stores)
        return self.keys, self.values


class _Store:
    """``states`` [B, n, W, d] within a buffer that may have more rows, and more columns on both sides."""

    def __init__(self, states: Tensor) -> None:
        self._buffer = states.clone(memory_format=torch.contiguous_format)
        self._rows, self._begin, self._end = len(states), 0, states.shape[2]

    @property
    def states(self) -> Tensor:
        """A view of the rows and columns in use."""
        return self._buffer[: self._rows, :, self._begin : self._end]

    @property
    def columns(self) -> int:
        """Columns of the buffer, used or not."""
        return int(self._buffer.shape[2])

    def append(self, states_BnTd: Tensor, *, room: int) -> None:
        """Writes T columns behind all rows; a full buffer is replaced by one with ``room`` for more columns."""
        new = states_BnTd.shape[2]
        if self._end + new > self.columns:
            self._grow(rows=len(self._buffer), left=0, right=max(new, room))
        self._end += new
        self.states[:, :, -new:] = states_BnTd

    def join(self, states_BnWd: Tensor) -> None:
        """Adds rows at the end, of W columns that end where the others do; the narrower ones get zeros on the left."""
        rows, wider = self._rows + len(states_BnWd), states_BnWd.shape[2] - (self._end - self._begin)
        if rows > len(self._buffer) or wider > self._begin:
            self._grow(rows=max(rows, len(self._buffer)), left=max(0, wider), right=self.columns - self._end)
        if wider > 0:
            self._begin -= wider
            self.states[:, :, :wider] = 0  # a number, so that nothing times it is nothing
        before, self._rows = self._rows, rows
        self.states[before:, :, : max(0, -wider)] = 0
        self.states[before:, :, max(0, -wider) :] = states_BnWd

    def keep(self, moved: Sequence[tuple[int, int]], rows: int, unused: int) -> None:
        """Copies rows as ``moved`` (from, to) says, drops those from ``rows`` on, and the first ``unused`` columns."""
        for source, place in moved:
            self.states[place] = self.states[source]
        self._rows = rows
        self._begin += unused

    def _grow(self, *, rows: int, left: int, right: int) -> None:
        states = self.states
        _, heads, width, size = states.shape
        self._buffer = states.new_empty(rows, heads, left + width + right, size)
        self._begin, self._end = left, left + width
        self.states.copy_(states)
