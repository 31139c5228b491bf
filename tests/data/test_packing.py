"""Laws of packing."""

import math

import numpy as np
import pytest

from fitune.data.packing import pack_rows
from fitune.errors import DataError


def random_lengths(seed, rows=3000, capacity=512):
    lengths = np.random.default_rng(seed).lognormal(4.5, 0.9, rows).astype(int) + 1
    return np.minimum(lengths, capacity)


@pytest.mark.parametrize("seed", range(4))
def test_every_row_is_in_one_pack_that_is_not_too_long_and_little_room_is_left_over(seed):
    lengths = random_lengths(seed)
    packs = pack_rows(lengths, 512)
    assert sorted(row for pack in packs for row in pack) == list(range(len(lengths)))
    sums = [lengths[list(pack)].sum() for pack in packs]
    assert max(sums) <= 512
    assert len(packs) <= 1.01 * math.ceil(sum(lengths) / 512) + 1
    assert packs.sums(lengths).tolist() == sums
    assert packs.rows_N.nbytes + packs.starts.nbytes <= 16 * 3001, "a few bytes for each row"
    assert list(pack_rows(lengths.tolist(), 512)) == list(packs), "the same rows give the same packs"


def test_best_fit_decreasing_by_hand():
    """7 5 4 3 1 into tens: 7 + 3, then 5 + 4 + 1."""
    assert list(pack_rows([3, 5, 7, 4, 1], 10)) == [(2, 0), (1, 3, 4)]


def test_the_pack_that_is_filled_best_is_taken():
    """6 and 7 open two packs with 4 and 3 left; 3 goes where 3 is left, although the other came first."""
    assert list(pack_rows([7, 6, 5, 4, 3], 10)) == [(0, 4), (1, 3), (2,)]


def test_no_rows_make_no_packs():
    assert list(pack_rows([], 10)) == []


def test_a_row_longer_than_a_pack_is_refused():
    with pytest.raises(DataError, match="row 1 has 11 tokens, a pack holds 10"):
        pack_rows([3, 11], 10)
