"""Torch's caching allocator by hand: rounding, pages, splitting, joining, growing."""

import pytest

from fitune.rehearse.trace import CachingAllocator
from fitune.units import MIB


@pytest.fixture
def allocator():
    return CachingAllocator()


@pytest.mark.parametrize(
    ("size", "reserved"),
    [(1, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (10 * MIB, 20 * MIB), (20 * MIB, 20 * MIB),
     (21 * MIB, 40 * MIB)],
)  # fmt: skip
def test_a_first_request_maps_whole_pages(allocator, size, reserved):
    allocator.allocate("a", size)
    assert allocator.reserved_bytes == reserved


def test_small_requests_share_a_page_in_blocks_of_512(allocator):
    for index in range(2 * MIB // 512):
        allocator.allocate(index, 1)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate("one more", 1)
    assert allocator.reserved_bytes == 4 * MIB


def test_freed_neighbours_join(allocator):
    for name in "abcd":
        allocator.allocate(name, 5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    for name in "acb":
        allocator.free(name)
    allocator.allocate("abc", 15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_freed_pieces_that_do_not_touch_stay_apart(allocator):
    for name in "abcd":
        allocator.allocate(name, 5 * MIB)
    allocator.free("a")
    allocator.free("c")
    allocator.allocate("ten", 10 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_the_smallest_block_that_fits_is_taken(allocator):
    sizes = {"large": 30, "wall": 5, "medium": 20, "end": 5}
    for name, size in sizes.items():
        allocator.allocate(name, size * MIB)
    allocator.free("large")
    allocator.free("medium")
    allocator.allocate("19", 19 * MIB)
    allocator.allocate("30", 30 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_rest_of_any_size_is_split_off(allocator):
    allocator.allocate("a", 40 * MIB)
    allocator.free("a")
    allocator.allocate("b", 39 * MIB - 512)
    allocator.allocate("c", MIB + 512)
    assert allocator.reserved_bytes == 40 * MIB


def test_small_and_large_requests_never_share(allocator):
    allocator.allocate("large", 12 * MIB)
    allocator.free("large")
    allocator.allocate("small", 1024)
    assert allocator.reserved_bytes == 22 * MIB


def test_the_range_grows_by_what_its_free_end_lacks(allocator):
    allocator.allocate("a", 30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.free("a")
    allocator.allocate("b", 50 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_everything_freed_leaves_one_free_block(allocator):
    sizes = [3, 70, 11, 2, 45, 9]
    for index, size in enumerate(sizes):
        allocator.allocate(index, size * MIB)
    reserved = allocator.reserved_bytes
    for index in (4, 0, 2, 5, 1, 3):
        allocator.free(index)
    allocator.allocate("all", reserved)
    assert allocator.reserved_bytes == reserved


def test_what_one_stream_frees_serves_no_other(allocator):
    allocator.allocate("gathered", 30 * MIB, stream=1)
    allocator.free("gathered")
    allocator.allocate("computed", 30 * MIB)
    assert allocator.reserved_bytes == 80 * MIB
    allocator.allocate("gathered again", 30 * MIB, stream=1)
    assert allocator.reserved_bytes == 80 * MIB
