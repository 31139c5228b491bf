"""How far the reading of weights is, for a person at a terminal; nothing anywhere else."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO


@contextmanager
def loading_bar(*, quiet: bool = False, stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """A bar with bytes on standard error, from the first tensor to the last. Yields what is told bytes read and in all.

    The terminal is given back when loading fails half-way, too.
    """
    stream = sys.stderr if stream is None else stream
    if quiet or not stream.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    text = TextColumn("reading weights")
    bar = Progress(
        text, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        console=Console(file=stream), transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=None)

    def show(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)
        if done >= total:
            bar.stop()

    try:
        yield show
    finally:
        bar.stop()
