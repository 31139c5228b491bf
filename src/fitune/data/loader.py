"""From a dataset to optimizer steps, without state: which rows a step holds follows from (seed, epoch, position).

Rows are packed to bounded length, with little room left over. Shapes: T is the tokens of one micro-batch, N the rows
of the dataset, U its units. A unit is what a batch counts: a row, a pack of rows, or the rows of one example.
"""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fitune.data.dataset import TokenDataset
from fitune.data.packing import Packs, pack_rows, packs_of_examples
from fitune.values.model.block_profile import IGNORED, BatchShape
from fitune.values.plan import Batch
from fitune.values.predictions import Epoch


@dataclass(frozen=True, slots=True)
class LoaderState:
    """The next step begins at unit ``position`` of epoch ``epoch``'s order.

    Units, not steps: the state stays right when the number of processes or the micro-batch changes.
    """

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows end to end in one stream, without padding. All three tensors are torch.int64 of shape (T,)."""

    input_ids_T: torch.Tensor
    labels_T: torch.Tensor
    """Already shifted: the token to be predicted at each position, or IGNORED; a row's last position has none."""
    position_ids_T: torch.Tensor
    """From 0 in every row: rows do not see one another."""
    sequence_lengths: tuple[int, ...]
    row_ids: tuple[int, ...]
    """Rows of the dataset in the order of the stream."""

    @property
    def supervised_tokens(self) -> int:
        """Labels that are not IGNORED."""
        return int((self.labels_T != IGNORED).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The rows of one optimizer step. ``micro_batches`` are this process's; the counts are those of all processes."""

    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    row_lengths: tuple[int, ...]
    supervised_tokens: int
    """Labels that are not IGNORED, whatever the micro-batches hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeavyBatch:
    """A micro-batch that may be the heaviest of a run."""

    step: int
    """From 0."""
    shape: BatchShape
    adds: bool
    """It finds gradients of another of its step, to which its own are added."""


_EPOCHS_LOOKED_AT = 1_000
_UNITS_LOOKED_AT = 10_000_000
"""Shuffled and weighed in about two seconds, whichever comes first."""


class Loader:
    """Steps of a dataset. Every unit of an epoch is in exactly one step; the last step may hold fewer."""

    def __init__(
        self, dataset: TokenDataset, batch: Batch, *, seed: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self._dataset, self._batch, self._seed = dataset, batch, seed
        self._rank, self._world_size = rank, world_size
        self._packs: Packs | None = None
        if batch.packing:
            self._packs = pack_rows(dataset.lengths, batch.seq_len)
        elif batch.example_rows > 1:
            self._packs = packs_of_examples(len(dataset), batch.example_rows)
        self._labels_per_row_N = dataset.labels_per_row
        self._cached_order: tuple[int, np.ndarray] | None = None

    @property
    def num_units(self) -> int:
        """Units of an epoch: rows, packs of rows, or examples of several."""
        return len(self._dataset) if self._packs is None else len(self._packs)

    @property
    def num_packs(self) -> int:
        """0 without packing, as the ledger counts."""
        return self.num_units if self._batch.packing else 0

    @property
    def units_per_step(self) -> int:
        """The global batch of all ranks together."""
        return self._batch.global_batch_size * self._world_size

    @property
    def steps_per_epoch(self) -> int:
        """⌈units / units of a step⌉."""
        return -(-self.num_units // self.units_per_step)

    def batch_at(self, state: LoaderState) -> GlobalBatch:
        """The step that begins at ``state``. The same units whatever the micro-batch size and the number of ranks."""
        if not 0 <= state.position < self.num_units:
            raise ValueError(f"{state} is outside of an epoch of {self.num_units} units")
        order_U = self._order(state.epoch)
        units = order_U[state.position : state.position + self.units_per_step].tolist()
        rows = np.array(self._rows_of(units), dtype=np.int64)
        mine = units[self._rank :: self._world_size]
        size = self._batch.micro_batch_size
        micro_batches = []
        for i in range(0, len(units[:: self._world_size]), size):
            if mine[i : i + size]:
                micro_batches.append(micro_batch_of(self._dataset, self._rows_of(mine[i : i + size])))
            else:
                # In an epoch's last step this rank may have fewer rows than the first. Ranks gather weights together,
                # so all do equally many micro-batches: the step's shortest row, with nothing to learn from.
                shortest = min(rows.tolist(), key=lambda row: self._dataset.lengths[row])
                micro_batches.append(without_labels(micro_batch_of(self._dataset, [shortest])))
        return GlobalBatch(
            micro_batches=tuple(micro_batches),
            tokens=int(self._dataset.lengths[rows].sum()),
            row_lengths=tuple(self._dataset.lengths[rows].tolist()),
            supervised_tokens=int(self._labels_per_row_N[rows].sum()),
        )

    def after(self, state: LoaderState) -> LoaderState:
        """The state of the next step."""
        position = state.position + self.units_per_step
        return (
            LoaderState(state.epoch + 1, 0)
            if position >= self.num_units
            else LoaderState(state.epoch, position)
        )

    def heaviest(self, steps: range, *, ranks: Iterable[int] | None = None) -> list[HeavyBatch]:
        """The micro-batches of ``steps`` (0-based, from the start of the run) one of which takes the most memory on
        this process, or on any of ``ranks``; an estimate knows which. Memory grows with tokens, labels and squares
        of rows, beside gradients of the same step, and beside optimizer states, which the first of ``steps`` may lack:
        no other micro-batch has at least as much of each.

        Known before the first step, because the order follows from the seed: memory can be predicted for them.
        Of a run of very many epochs the first ones are looked at, so that it begins within seconds.
        """
        sizes, found = list[np.ndarray](), list[HeavyBatch]()
        micro, accumulation = self._batch.micro_batch_size, self._batch.accumulation
        first, last = steps.start // self.steps_per_epoch, (steps.stop - 1) // self.steps_per_epoch
        looked_at = max(1, min(_EPOCHS_LOOKED_AT, _UNITS_LOOKED_AT // self.num_units))
        for epoch, rank in itertools.product(
            range(first, min(last + 1, first + looked_at)), (self._rank,) if ranks is None else ranks
        ):
            mine_U = self._order(epoch)[
                np.arange(self.num_units) % self.units_per_step % self._world_size == rank
            ]
            starts_M = np.arange(0, len(mine_U), micro)
            number_M = np.arange(len(starts_M))
            step_M = epoch * self.steps_per_epoch + number_M // accumulation
            adds_M = number_M % accumulation > 0
            sums = [np.add.reduceat(size_U[mine_U], starts_M) for size_U in self._sizes_per_unit]
            sizes_QM = np.stack([*sums, adds_M, step_M > steps.start])
            asked = np.flatnonzero((step_M >= steps.start) & (step_M < steps.stop))
            for place in asked[_unexceeded(sizes_QM[:, asked])]:
                shape = self._shape_of(mine_U[starts_M[place] : starts_M[place] + micro])
                sizes.append(sizes_QM[:, place])
                found.append(HeavyBatch(step=int(step_M[place]), shape=shape, adds=bool(adds_M[place])))
        return [found[place] for place in _unexceeded(np.stack(sizes, axis=1))] if found else []

    def _shape_of(self, units_U: np.ndarray) -> BatchShape:
        rows = self._rows_of(units_U.tolist())
        supervised = int(self._labels_per_row_N[rows].sum())
        return BatchShape.of_rows(self._dataset.lengths[rows].tolist(), supervised_tokens=supervised)

    def epoch(self) -> Epoch:
        """Counts of one pass over the rows, and its micro-batch of average size."""
        lengths_N = self._dataset.lengths
        rows, tokens = len(lengths_N), int(lengths_N.sum())
        usual = BatchShape.of_average(
            rows=rows,
            tokens=tokens,
            squares=float((lengths_N.astype(float) ** 2).sum()),
            supervised_tokens=int(self._labels_per_row_N.sum()),
            share=min(1.0, self._batch.micro_batch_size / self.num_units),
        )
        return Epoch(
            rows=rows, tokens=tokens, longest_row=int(lengths_N.max()), units=self.num_units, usual=usual
        )

    @functools.cached_property
    def _sizes_per_unit(self) -> np.ndarray:
        """Tokens, labels and squares of rows of every unit."""
        lengths_N = self._dataset.lengths
        sizes = (lengths_N, self._labels_per_row_N, lengths_N.astype(np.int64) ** 2)
        return np.stack([each if self._packs is None else self._packs.sums(each) for each in sizes])

    def _order(self, epoch: int) -> np.ndarray:
        if self._cached_order is None or self._cached_order[0] != epoch:
            order_U = np.random.default_rng([self._seed, epoch]).permutation(self.num_units)
            self._cached_order = (epoch, order_U if self._world_size == 1 else self._dealt(order_U))
        return self._cached_order[1]

    def _dealt(self, order_U: np.ndarray) -> np.ndarray:
        """``order_U`` with the units of each step so arranged that processes work equally long.

        They are dealt one to each process in turn, and processes wait for one another in every micro-batch. So the
        longest go first, into the same micro-batches, and every second round is dealt backwards. Which units a
        step holds stays as it is.
        """
        place_U, world = np.arange(len(order_U)), self._world_size
        sorted_U = order_U[np.lexsort((-self._sizes_per_unit[0, order_U], place_U // self.units_per_step))]
        inside_U = place_U % self.units_per_step
        start_U = place_U - inside_U % world
        steps_end_U = np.minimum(place_U - inside_U + self.units_per_step, len(order_U))
        backwards_U = (inside_U // world % 2 == 1) & (start_U + world <= steps_end_U)
        return sorted_U[np.where(backwards_U, 2 * start_U + world - 1 - place_U, place_U)]

    def _rows_of(self, units: Sequence[int]) -> list[int]:
        return list(units) if self._packs is None else [row for unit in units for row in self._packs[unit]]


def _unexceeded(sizes_QM: np.ndarray) -> list[int]:
    """Places in M than which no other has at least as much of every size; of equal ones the first."""
    share_QM = sizes_QM / np.maximum(1, sizes_QM.max(axis=1, initial=0))[:, None]
    left, found = np.arange(share_QM.shape[1]), list[int]()
    while len(left):
        most = int(left[share_QM[:, left].sum(axis=0).argmax()])
        found.append(most)
        left = left[(share_QM[:, left] > share_QM[:, [most]]).any(axis=0)]
    return found


def micro_batch_of(dataset: TokenDataset, rows: Sequence[int]) -> MicroBatch:
    """The given rows as one stream."""
    pieces = [dataset.row(row) for row in rows]
    lengths = np.array([len(ids) for ids, _ in pieces])
    ids_T = np.concatenate([ids for ids, _ in pieces]).astype(np.int64)
    ends = np.cumsum(lengths)
    learned_T = np.concatenate([supervised for _, supervised in pieces])
    learned_T[ends - lengths] = False  # nothing stands before a row's first token to predict it from
    labels_T = np.roll(np.where(learned_T, ids_T, IGNORED), -1)
    position_ids_T = np.arange(len(ids_T)) - np.repeat(ends - lengths, lengths)
    return MicroBatch(
        input_ids_T=torch.from_numpy(ids_T),
        labels_T=torch.from_numpy(labels_T),
        position_ids_T=torch.from_numpy(position_ids_T),
        sequence_lengths=tuple(lengths.tolist()),
        row_ids=tuple(rows),
    )


def without_labels(micro: MicroBatch) -> MicroBatch:
    """Returns the stream with nothing to learn from: loss and gradients are zero."""
    return replace(micro, labels_T=torch.full_like(micro.labels_T, IGNORED), row_ids=())


def eval_batches(dataset: TokenDataset, batch: Batch, *, rows: int | None) -> Iterator[MicroBatch]:
    """Every row once, or the first ``rows``, in the order of the dataset: ``micro_batch_size`` rows at a time, or,
    with packing, as many as the tokens of a micro-batch have room for. Never more memory than a training step."""
    chosen: list[int] = []
    tokens = 0
    for row, length in enumerate(map(int, dataset.lengths[:rows])):
        full = (
            tokens + length > batch.micro_batch_tokens
            if batch.packing
            else len(chosen) == len(batch.full_rows)
        )
        if chosen and full:
            yield micro_batch_of(dataset, chosen)
            chosen, tokens = [], 0
        chosen.append(row)
        tokens += length
    if chosen:
        yield micro_batch_of(dataset, chosen)
