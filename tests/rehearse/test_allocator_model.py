"""Torch's caching allocator by hand: rounding, segments, splitting, joining, growing."""

import pytest

from fitune.rehearse.trace import CachingAllocator
from fitune.units import MIB


@pytest.fixture
def segments():
    return CachingAllocator(expandable=False)


@pytest.fixture
def expandable():
    return CachingAllocator(expandable=True)


@pytest.mark.parametrize(
    ("size", "segment"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
     (21 * MIB, 22 * MIB)],
)  # fmt: skip
def test_a_first_request_reserves_a_segment(segments, size, segment):
    segments.allocate("a", size)
    assert segments.reserved_bytes == segment


def test_small_requests_share_a_segment_in_blocks_of_512(segments):
    for index in range(2 * MIB // 512):
        segments.allocate(index, 1)
    assert segments.reserved_bytes == 2 * MIB
    segments.allocate("one more", 1)
    assert segments.reserved_bytes == 4 * MIB


def test_freed_neighbours_join(segments):
    for name in "abcd":
        segments.allocate(name, 5 * MIB)
    assert segments.reserved_bytes == 20 * MIB
    for name in "acb":
        segments.free(name)
    segments.allocate("abc", 15 * MIB)
    assert segments.reserved_bytes == 20 * MIB


def test_freed_pieces_that_do_not_touch_stay_apart(segments):
    for name in "abcd":
        segments.allocate(name, 5 * MIB)
    segments.free("a")
    segments.free("c")
    segments.allocate("ten", 10 * MIB)
    assert segments.reserved_bytes == 30 * MIB


def test_the_smallest_block_that_fits_is_taken(segments):
    segments.allocate("large", 40 * MIB)
    segments.allocate("medium", 30 * MIB)
    segments.free("large")
    segments.free("medium")
    segments.allocate("29", 29 * MIB)
    segments.allocate("40", 40 * MIB)
    assert segments.reserved_bytes == 70 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte(segments):
    segments.allocate("a", 32 * MIB)
    segments.free("a")
    segments.allocate("b", 31 * MIB)
    segments.allocate("c", MIB + 512)
    assert segments.reserved_bytes == 52 * MIB, "the last mebibyte was not split off"


def test_small_and_large_requests_never_share(segments):
    segments.allocate("large", 12 * MIB)
    segments.free("large")
    segments.allocate("small", 1024)
    assert segments.reserved_bytes == 14 * MIB


def test_expandable_segments_grow_by_what_is_lacking(expandable):
    expandable.allocate("a", 30 * MIB)
    assert expandable.reserved_bytes == 40 * MIB
    expandable.free("a")
    expandable.allocate("b", 50 * MIB)
    assert expandable.reserved_bytes == 60 * MIB


def test_expandable_segments_reserve_no_more_than_segments_for_a_growing_sequence(segments, expandable):
    for allocator in (segments, expandable):
        for size in range(20, 200, 10):
            allocator.allocate(size, size * MIB)
            allocator.free(size)
    assert expandable.reserved_bytes == 200 * MIB
    assert segments.reserved_bytes > 1000 * MIB


def test_everything_freed_leaves_one_free_block(expandable):
    sizes = [3, 70, 11, 2, 45, 9]
    for index, size in enumerate(sizes):
        expandable.allocate(index, size * MIB)
    reserved = expandable.reserved_bytes
    for index in (4, 0, 2, 5, 1, 3):
        expandable.free(index)
    expandable.allocate("all", reserved)
    assert expandable.reserved_bytes == reserved


def test_what_one_stream_frees_serves_no_other(segments):
    segments.allocate("gathered", 30 * MIB, stream=1)
    segments.free("gathered")
    segments.allocate("computed", 30 * MIB)
    assert segments.reserved_bytes == 60 * MIB
    segments.allocate("gathered again", 30 * MIB, stream=1)
    assert segments.reserved_bytes == 60 * MIB
