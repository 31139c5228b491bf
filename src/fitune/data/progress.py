"""How far data is on its way from files to tokens, for whoever watches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How far it is."""

    doing: Literal["checking", "tokenising", "done"]
    """Files are hashed; rows are tokenised; once at the end."""
    bytes_read: int
    bytes_in_all: int
    """0 where it is not known."""
    rows: int = 0
    tokens: int = 0


Watch = Callable[[Reading], None]
"""Called several times a second; may raise to stop."""


def ignore_reading(_reading: Reading) -> None:
    """A Watch for callers that show nothing and never stop."""


class Progress:
    """Counts, and tells ``watch``."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._found = self._read = self._rows = self._tokens = 0

    def find(self, count: int) -> None:
        """Bytes of a source that were hashed, and will be read if they are not in the cache."""
        self._found += count
        self._watch(Reading(doing="checking", bytes_read=self._found, bytes_in_all=0))

    def read(self, count: int) -> None:
        self._read += count
        self.beat()

    def made(self, *, rows: int, tokens: int) -> None:
        self._rows += rows
        self._tokens += tokens
        self.beat()

    def beat(self) -> None:
        """Let the watcher stop, without news."""
        self._tell("tokenising")

    def done(self) -> None:
        self._tell("done")

    def _tell(self, doing: Literal["tokenising", "done"]) -> None:
        self._watch(
            Reading(
                doing=doing,
                bytes_read=self._read,
                bytes_in_all=self._found,
                rows=self._rows,
                tokens=self._tokens,
            )
        )

    def beat_bytes(self, _count: int) -> None:
        self.beat()
