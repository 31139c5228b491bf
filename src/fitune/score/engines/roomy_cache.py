"""Keys and values of a batch, in buffers with room: a token is written behind its row, nothing else is copied.

transformers' own cache makes a new tensor for each token. Here columns are added in blocks, a row that ends leaves its
place to another, and the columns that no row needs any more are passed over.

Shapes: B rows, n heads, W columns, d of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class RoomyCache(DynamicCache):
    """The cache of a batch; ``growth`` says how many columns are added next time."""

    def __init__(self) -> None:
        super().__init__()
        self.growth = _Growth()
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


@dataclass(slots=True)
class _Growth:
    room: int = 1


class _Layer(DynamicLayer):
    def __init__(self, growth: _Growth) -> None:
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
