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


ONE, FIRST_OF_TWO, SECOND_OF_TWO = (
    {"rank": rank, "world_size": world} for rank, world in ((0, 1), (0, 2), (1, 2))
)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("steps", "ranks"),
    [(range(1), ONE), (range(1, 5), SECOND_OF_TWO), (range(3, 17), ONE), (range(16), FIRST_OF_TWO)],
)
def test_each_micro_batch_is_exceeded_in_every_size_by_one_of_the_heaviest(
    packing, accumulation, steps, ranks
):
    loader = Loader(dataset(LENGTHS), batch(packing=packing, accumulation=accumulation), seed=5, **ranks)
    heavy = [(h.step, h.shape, h.adds) for h in loader.heaviest(steps)]

    def sizes(step, shape, adds):
        return shape.tokens, shape.supervised_tokens, shape.pairs(), adds, step > steps.start

    def at_least(one, other):
        return all(np.greater_equal(sizes(*one), sizes(*other)))

    assert not any(at_least(one, other) for one in heavy for other in heavy if one is not other)
    state, there = LoaderState(), []
    for step in range(steps.stop):
        for number, micro in enumerate(loader.batch_at(state).micro_batches):
            if step in steps and micro.row_ids:
                shape = BatchShape.of_rows(micro.sequence_lengths, supervised_tokens=micro.supervised_tokens)
                there.append((step, shape, number > 0))
        state = loader.after(state)
    assert all(any(at_least(one, each) for one in heavy) for each in there)
    assert all(each in there for each in heavy), "none is heavier than those that come"


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
