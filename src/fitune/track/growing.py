"""The steps of a metrics.jsonl that a run still writes."""

import os
from pathlib import Path

from fitune.errors import RunDirectoryError
from fitune.files import open_regular
from fitune.spec.reports import StepReport
from fitune.spec.serial import from_data, parse_json
from fitune.track.metrics import unreadable_line
from fitune.units import MIB

_AT_ONCE = 16 * MIB


class GrowingSteps:
    """``steps``: every step in the file at the last look; a look reads only what was added since the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[StepReport] = []
        self._file = (0, 0)
        self._read_bytes = 0

    def look(self) -> None:
        """Take in the lines that were added; all of them where the file is another one (a resume replaces it).

        A line without its end is left for the next look. Raises RunDirectoryError naming the file and the line.
        """
        try:
            with open_regular(self.path, follow_links=False) as file:
                self._begin_again_if_replaced(file.fileno())
                file.seek(self._read_bytes)
                while self._take(file.read(_AT_ONCE)):
                    file.seek(self._read_bytes)
        except FileNotFoundError:
            self._forget()
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path}: cannot be read: {error.strerror or error}", hint="check the permissions"
            ) from None

    def _begin_again_if_replaced(self, handle: int) -> None:
        found = os.fstat(handle)
        if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read_bytes:
            self._forget()
            self._file = (found.st_dev, found.st_ino)

    def _forget(self) -> None:
        self.steps.clear()
        self._file, self._read_bytes = (0, 0), 0

    def _take(self, content: bytes) -> bool:
        """Add the whole lines of ``content``; True if there were any."""
        whole = content[: content.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                self.steps.append(from_data(StepReport, parse_json(line)))
            except ValueError as error:
                raise unreadable_line(f"{self.path}:{len(self.steps) + 1}", error) from None
        self._read_bytes += len(whole)
        return bool(whole)
