"""A cache with room holds what one that copies for every token would, and copies once in 32."""

import gc
import random
import weakref

import torch

from fitune.score.engines.continuous import RoomyCache

HEADS, SIZE = 2, 3


def states(rows, columns):
    return torch.randn(rows, HEADS, columns, SIZE)


def test_rows_that_come_and_go_keep_their_keys_and_values():
    """Beside lists of what each row was given, through 200 random passes."""
    draw = random.Random(0)
    torch.manual_seed(0)
    cache = RoomyCache()
    held = states(3, 5)
    cache.update(held, -held, 0)
    rows = list(held.clone())
    widths = [5, 5, 5]
    for _ in range(200):
        what = draw.choice(["write", "write", "join", "leave"])
        if what == "write":
            cache.growth.room = draw.randint(1, 4)
            new = states(len(rows), 1)
            cache.update(new, -new, 0)
            rows = [torch.cat([row, one], 1) for row, one in zip(rows, new, strict=True)]
            widths = [width + 1 for width in widths]
        elif what == "join" and len(rows) < 6:
            entering, new = RoomyCache(), states(draw.randint(1, 2), draw.randint(1, 30))
            entering.update(new, -new, 0)
            cache.join(entering)
            rows += list(new)
            widths += [new.shape[2]] * len(new)
        elif what == "leave" and len(rows) > 2:
            gone = draw.randrange(len(rows))
            last = len(rows) - 1
            unused = max(widths) - max(widths[:gone] + widths[gone + 1 :])
            rows[gone], widths[gone] = rows[last], widths[last]
            del rows[last], widths[last]
            cache.keep([(last, gone)] if gone != last else [], len(rows), unused)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert keys.shape == (len(rows), HEADS, max(widths), SIZE)
        assert torch.equal(keys, -values)
        for kept, row, width in zip(keys, rows, widths, strict=True):
            assert torch.equal(kept[:, -width:], row)
        assert keys.isfinite().all()  # padding that is no number would spoil the sum that it is left out of


def test_what_is_there_is_copied_once_for_every_growth():
    """Sixty-four tokens behind a prompt, 32 columns at a time: two buffers after the prompt's own."""
    cache = RoomyCache()
    cache.growth.room = 32
    new = states(4, 10)
    cache.update(new, new, 0)
    buffers = set()
    for _ in range(64):
        new = states(4, 1)
        keys, _ = cache.update(new, new, 0)
        buffers.add(keys.untyped_storage().data_ptr())
    assert len(buffers) == 2
    assert cache.columns == 10 + 64


def test_a_cache_that_nobody_holds_is_gone_at_once():
    """Not when garbage is searched: the next batch needs its memory."""
    cache = RoomyCache()
    cache.update(states(2, 5), states(2, 5), 0)
    watched = weakref.ref(cache.layers[0].stores[0])
    gc.disable()
    try:
        del cache
        assert watched() is None
    finally:
        gc.enable()
