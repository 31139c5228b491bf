"""Progress of the reading of data in words, and how often to show it."""

from collections.abc import Callable

from fitune.data.ledger import Reading
from fitune.units import format_bytes, format_count, format_seconds

Show = Callable[[Reading], None]

_SHOWN_AFTER_S = 1.0
"""Small data is read before there is anything to see."""


class ReadingPace:
    """Rows a second and the time that is left, since the first row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, clock()

    def line(self, reading: Reading) -> str:
        """``tokenised: 400,000 rows, …``, a line of a log."""
        what = "tokenised" if reading.doing == "done" else reading.doing
        return f"{what}: {self.words(reading)}"

    @staticmethod
    def share(reading: Reading) -> float:
        """Share of all bytes that was read, 0 where the whole is not known; their rows may wait to be tokenised."""
        return min(1.0, reading.bytes_read / reading.bytes_in_all) if reading.bytes_in_all else 0.0

    def words(self, reading: Reading) -> str:
        """``400,000 rows, 21.0 M tokens, 12,345 rows/s, 2 min left``."""
        if not reading.rows:
            return format_bytes(reading.bytes_read)
        passed = max(self._clock() - self._began, 1e-9)
        share = self.share(reading)
        left = f", {format_seconds(passed / share - passed)} left" if 0 < share < 1 else ""
        rate = f"{reading.rows / passed:,.0f} rows/s"
        return f"{reading.rows:,} rows, {format_count(reading.tokens)} tokens, {rate}{left}"


def at_most_every(seconds: float, show: Show, clock: Callable[[], float]) -> Show:
    """``show`` at most once in so many seconds, and not at once."""
    due, shown = clock() + max(seconds, _SHOWN_AFTER_S), False

    def told(reading: Reading) -> None:
        nonlocal due, shown
        if clock() >= due or (reading.doing == "done" and shown):
            due, shown = clock() + seconds, True
            show(reading)

    return told
