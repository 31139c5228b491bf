"""Steps follow from a small value, hold every row once, and do not depend on how they are cut."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fitune.data.dataset import TokenDataset
from fitune.data.loader import IGNORED, Loader, LoaderState, eval_batches, micro_batch_of
from fitune.values.plan import Batch


def make_dataset(rows=23, seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 12, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(3, 99, offsets[-1]).astype(np.int32)
    supervised = rng.random(offsets[-1]) < 0.5
    supervised[offsets[1:] - 1] = True
    return TokenDataset(ids, supervised, offsets)


def make_batch(size=2, accumulation=2, packing=False):
    return Batch(micro_batch_size=size, accumulation=accumulation, seq_len=16, packing=packing)


def epoch_of(loader, epoch=0):
    state, steps = LoaderState(epoch), []
    while state.epoch == epoch:
        steps.append(loader.batch_at(state))
        state = loader.after(state)
    assert state == LoaderState(epoch + 1, 0)
    return steps


def rows_of(step):
    return [row for micro_batch in step.micro_batches for row in micro_batch.row_ids]


def test_labels_positions_and_lengths_by_hand():
    ids, supervised = np.array([10, 11, 12, 20, 21], np.int32), np.array([False, True, True, True, True])
    dataset = TokenDataset(ids, supervised, np.array([0, 3, 5]))
    stream = micro_batch_of(dataset, [1, 0])
    assert stream.input_ids_T.tolist() == [20, 21, 10, 11, 12]
    assert stream.labels_T.tolist() == [21, IGNORED, 11, 12, IGNORED]
    assert stream.position_ids_T.tolist() == [0, 1, 0, 1, 2]
    assert stream.sequence_lengths == (2, 3)
    assert {stream.input_ids_T.dtype, stream.labels_T.dtype, stream.position_ids_T.dtype} == {torch.int64}
    assert dataset.labels_per_row.tolist() == [2, 1]


BOTH = pytest.mark.parametrize("packing", [False, True])


@BOTH
def test_an_epoch_holds_every_row_once_in_streams_of_bounded_length_and_counts_tokens_and_labels(packing):
    dataset, batch = make_dataset(61), make_batch(packing=packing)
    loader = Loader(dataset, batch, seed=1)
    steps = epoch_of(loader)
    assert len(steps) == loader.steps_per_epoch == -(-loader.num_units // 4)
    assert sorted(row for step in steps for row in rows_of(step)) == list(range(61))
    streams = [micro for step in steps for micro in step.micro_batches]
    assert all(len(micro.input_ids_T) <= batch.micro_batch_tokens for micro in streams)
    assert sum(step.tokens for step in steps) == dataset.lengths.sum()
    assert (loader.num_packs > 0) == packing
    for step in steps:
        assert step.tokens == sum(len(m.input_ids_T) for m in step.micro_batches)
        assert step.supervised_tokens == sum(int((m.labels_T != IGNORED).sum()) for m in step.micro_batches)


@BOTH
def test_the_global_batch_does_not_depend_on_the_micro_batch(packing):
    wide, narrow = (
        [(rows_of(step), step.supervised_tokens) for step in epoch_of(Loader(make_dataset(), batch, seed=3))]
        for batch in (make_batch(4, 1, packing), make_batch(1, 4, packing))
    )
    assert wide == narrow


def test_the_order_follows_from_the_seed_and_the_epoch():
    def order(seed, epoch):
        steps = epoch_of(Loader(make_dataset(), make_batch(), seed=seed), epoch)
        return [row for step in steps for row in rows_of(step)]

    assert order(1, 0) == order(1, 0) == np.random.default_rng([1, 0]).permutation(23).tolist()
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_a_loader_made_anew_goes_on_where_the_other_was():
    first, again = (Loader(make_dataset(), make_batch(), seed=5) for _ in range(2))
    state = LoaderState()
    for _ in range(8):
        state = first.after(state)
    assert state == LoaderState(1, 8)
    assert rows_of(again.batch_at(state)) == rows_of(first.batch_at(state))


def test_a_state_outside_of_the_epoch_is_refused():
    with pytest.raises(ValueError, match="outside of an epoch of 23 units"):
        Loader(make_dataset(), make_batch(), seed=5).batch_at(LoaderState(0, 23))


@BOTH
def test_evaluation_goes_through_the_rows_in_order(packing):
    dataset, batch = make_dataset(), make_batch(size=3, packing=packing)
    streams = list(eval_batches(dataset, batch, rows=None))
    assert [row for stream in streams for row in stream.row_ids] == list(range(23))
    assert all(len(stream.input_ids_T) <= batch.micro_batch_tokens for stream in streams)
    assert len(streams) == 8 if not packing else len(streams) < 8


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_rows_of_an_example_stay_together(world):
    dataset, batch = make_dataset(24), replace(make_batch(), example_rows=2)
    loaders = [Loader(dataset, batch, seed=5, rank=rank, world_size=world) for rank in range(world)]
    streams = [micro for loader in loaders for step in epoch_of(loader) for micro in step.micro_batches]
    streams = [micro for micro in streams if micro.row_ids]
    assert sorted(row for micro in streams for row in micro.row_ids) == list(range(24))
    for micro in (*streams, *eval_batches(dataset, batch, rows=None)):
        assert [row ^ 1 for row in micro.row_ids[::2]] == list(micro.row_ids[1::2])
        assert len(micro.row_ids) <= len(batch.full_rows) == 4
    assert (loaders[0].num_units, loaders[0].num_packs) == (12, 0)


def waited_tokens(steps_of_ranks, world):
    """Tokens that ranks could have done while they waited for the slowest in a micro-batch."""
    streams = [
        [len(micro.input_ids_T) for step in steps for micro in step.micro_batches] for steps in steps_of_ranks
    ]
    return sum(max(each) * world - sum(each) for each in zip(*streams, strict=True))


@pytest.mark.parametrize(
    ("rows", "world", "micro", "accumulation"), [(64, 2, 1, 4), (96, 4, 2, 3), (50, 3, 1, 2)]
)
def test_ranks_wait_little_for_one_another_and_train_the_rows_of_one_process(
    rows, world, micro, accumulation
):
    dataset, batch = make_dataset(rows), make_batch(micro, accumulation)
    alone = epoch_of(Loader(dataset, make_batch(micro, accumulation * world), seed=7))
    loaders = [Loader(dataset, batch, seed=7, rank=rank, world_size=world) for rank in range(world)]
    dealt = [epoch_of(loader) for loader in loaders]
    for step, *parts in zip(alone, *dealt, strict=True):
        assert sorted(rows_of(step)) == sorted(row for part in parts for row in rows_of(part))
        assert {part.supervised_tokens for part in parts} == {step.supervised_tokens}
        assert len({len(part.micro_batches) for part in parts}) == 1
    for loader in loaders:  # in the shuffled order
        loader._cached_order = (0, np.random.default_rng([7, 0]).permutation(rows))
    assert waited_tokens(dealt, world) < 0.5 * waited_tokens([epoch_of(loader) for loader in loaders], world)
