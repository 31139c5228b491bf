"""What a run's heaviest and usual micro-batches hold is known before its first step."""

import numpy as np
import pytest

from fitune.data.dataset import TokenDataset
from fitune.data.loader import Loader, LoaderState
from fitune.values.model.block_profile import BatchShape
from fitune.values.plan import Batch


def dataset(lengths):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.arange(offsets[-1], dtype=np.int32)
    return TokenDataset(ids=ids, supervised=ids % 3 == 0, offsets=offsets)


def batch(**changes):
    return Batch(**{"micro_batch_size": 2, "accumulation": 2, "seq_len": 50, "packing": False, **changes})


LENGTHS = [int(n) for n in np.random.default_rng(0).integers(2, 50, size=27)]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("steps", [range(1), range(1, 5), range(16), range(3, 17)])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 2)])
def test_the_heaviest_is_found_among_all(packing, steps, rank, world_size):
    loader = Loader(dataset(LENGTHS), batch(packing=packing), seed=5, rank=rank, world_size=world_size)
    state, found = LoaderState(), []
    for step in range(steps.stop):
        if step in steps:
            found += [(len(m.input_ids_T), step, m) for m in loader.batch_at(state).micro_batches]
        state = loader.after(state)
    heavy = loader.heaviest(steps)
    step, shape = max(((h.step, h.shape) for h in heavy), key=lambda each: each[1].tokens)
    assert shape.tokens == max(tokens for tokens, _, _ in found)
    micro = next(m for tokens, at, m in found if (tokens, at) == (shape.tokens, step))
    lengths = micro.sequence_lengths
    assert (shape.rows, shape.longest_row) == (len(lengths), max(lengths))
    assert shape.supervised_tokens == int((micro.labels_T >= 0).sum())


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("first", [0, 3])
def test_each_micro_batch_is_exceeded_in_every_size_by_one_of_the_heaviest(packing, accumulation, first):
    loader = Loader(dataset(LENGTHS), batch(packing=packing, accumulation=accumulation), seed=5)
    steps = range(first, 2 * loader.steps_per_epoch)

    def sizes(step, shape, adds):
        return shape.tokens, shape.supervised_tokens, shape.pairs(), adds, step > first

    def at_least(one, other):
        return all(np.greater_equal(one, other))

    heavy = [sizes(h.step, h.shape, h.adds) for h in loader.heaviest(steps)]
    assert not any(at_least(one, other) for one in heavy for other in heavy if one is not other)
    state = LoaderState()
    for step in range(steps.stop):
        for number, micro in enumerate(loader.batch_at(state).micro_batches):
            labels = int((micro.labels_T >= 0).sum())
            shape = BatchShape.of_rows(micro.sequence_lengths, supervised_tokens=labels)
            this = sizes(step, shape, number > 0)
            assert step < first or any(at_least(one, this) for one in heavy)
        state = loader.after(state)


def test_a_process_without_a_row_has_no_heaviest():
    loader = Loader(dataset([7]), batch(), seed=0, rank=1, world_size=2)
    assert loader.heaviest(range(0, 3)) == []


def test_the_usual_one_is_the_average():
    loader = Loader(dataset([10] * 8), batch(), seed=0)
    usual = loader.epoch().usual
    assert (usual.tokens, usual.rows, usual.longest_row) == (20, 2, 10)


def test_a_dataset_smaller_than_a_micro_batch():
    loader = Loader(dataset([7]), batch(micro_batch_size=4), seed=0)
    assert {h.shape.tokens for h in loader.heaviest(range(0, 3))} == {7}
    assert loader.epoch().usual.tokens == 7
