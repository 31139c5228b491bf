"""metrics.jsonl, one line per optimizer step: the truth about a run, which every curve and table comes from."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fitune.errors import RunDirectoryError
from fitune.files import open_for_append, open_regular, write_atomically
from fitune.values.plan import Plan
from fitune.values.reports import RunReport, StepReport
from fitune.values.serial import from_data, parse_json, to_data


class MetricsLog:
    """Appends step reports to a file. Opening repairs the line that a killed process left unfinished.

    Every line is handed to the operating system at once, so it survives the death of the process;
    ``sync`` and ``close`` make it survive the death of the machine. The lines are kept in memory as well (some 450
    bytes a step): each checkpoint has a copy. Raises RunDirectoryError naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _usable(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            content = _content(path)
            self._lines = bytearray(b"".join(line + b"\n" for line in _whole_lines(content)))
            if self._lines != content:
                write_atomically(path, self.content)
            self._file = open_for_append(path)

    @property
    def content(self) -> bytes:
        """All lines, those of earlier attempts included."""
        return bytes(self._lines)

    def synced(self) -> bytes:
        """All lines, once they would survive the death of the machine."""
        self.sync()
        return self.content

    def append(self, report: StepReport) -> None:
        """One line more. Raises RunDirectoryError when it cannot be written."""
        line = to_line(report)
        self._lines += line
        with _usable(self.path):
            self._file.write(line)
            self._file.flush()

    def replace_last(self, report: StepReport) -> None:
        """Write the last line anew: its step was evaluated later. Raises RunDirectoryError."""
        self._lines[self._lines.rfind(b"\n", 0, -1) + 1 :] = to_line(report)
        self._replace()

    def restart(self, saved: bytes, *, step: int) -> bool:
        """Let the file be ``saved``, its lines when ``step`` was saved: a run resumed there writes later ones again.

        True if the lines up to ``step`` differed. The file is replaced whole: a reader, or a kill at any moment, sees
        the old lines or the new ones.
        """
        found = self.content
        self._lines = bytearray(saved)
        self._replace()
        return _until(step, found) != _until(step, saved)

    def put_back(self) -> str:
        """Write the file again if it was removed, replaced or cut while it was open; returns a line that says so."""
        with _usable(self.path), suppress(FileNotFoundError):
            self._file.flush()
            ours, there = os.fstat(self._file.fileno()), os.stat(self.path, follow_symlinks=False)
            if os.path.samestat(ours, there) and there.st_size == len(self._lines):
                return ""
        self._replace()
        return f"{self.path} was removed or changed while the run wrote it: all its lines are put back"

    def _replace(self) -> None:
        with _usable(self.path):
            write_atomically(self.path, self.content)
            self.close()
            self._file = open_for_append(self.path)

    def sync(self) -> None:
        """Waits until all lines are on the disk. Raises RunDirectoryError."""
        with _usable(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Syncs and closes; does nothing the second time."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[StepReport]:
    """All reports of a file; none when there is no file.

    An unreadable last line is what a kill leaves behind and is passed over. Any other raises
    RunDirectoryError with ``file:line: cause``.
    """
    with _usable(path):
        content = _content(path)
    return _reports(path, _whole_lines(content))


class GrowingSteps:
    """The steps of a metrics.jsonl that a run still writes: ``steps`` are those in the file at the last look; a look
    reads only what was added since the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[StepReport] = []
        self._file = (0, 0)
        self._read_bytes = 0

    def look(self) -> None:
        """Take in the lines that were added; all of them where the file is another one (a resume replaces it).

        A line without its end is left for the next look. Raises RunDirectoryError naming the file and the line.
        """
        with _usable(self.path):
            try:
                with open_regular(self.path, follow_links=False) as file:
                    found = os.fstat(file.fileno())
                    if (found.st_dev, found.st_ino) != self._file or found.st_size < self._read_bytes:
                        self._forget()
                        self._file = (found.st_dev, found.st_ino)
                    file.seek(self._read_bytes)
                    content = file.read()
            except FileNotFoundError:
                return self._forget()
        whole = content[: content.rfind(b"\n") + 1]
        self.steps += _reports(self.path, whole.splitlines(), before=len(self.steps))
        self._read_bytes += len(whole)

    def _forget(self) -> None:
        self.steps.clear()
        self._file, self._read_bytes = (0, 0), 0


def to_line(report: StepReport) -> bytes:
    """One JSON object and a newline. JSON has no NaN: such numbers are written as "nan", "inf" and "-inf"."""
    data = to_data(report)
    del data["kind"]
    return json.dumps(data, allow_nan=False).encode() + b"\n"


def _until(step: int, content: bytes) -> list[bytes]:
    """The lines up to ``step``, without that step's evaluation, which may have come later."""
    steps = (report for report in _readable(content) if report.step <= step)
    return [to_line(replace(report, eval_loss=None) if report.step == step else report) for report in steps]


def readable_steps(path: Path) -> list[StepReport]:
    """The reports of a file that is to be put back from a checkpoint: lines that cannot be read are passed over."""
    return _readable(_content(path))


def steps_in(content: bytes, *, last: int) -> list[StepReport]:
    """The ``last`` reports of what a checkpoint keeps of the log."""
    return _readable(b"\n".join(content.splitlines()[-last:]))


def last_step(directory: Path) -> int:
    """The last step that metrics.jsonl in ``directory`` tells of, 0 without any."""
    return max((report.step for report in readable_steps(directory / "metrics.jsonl")), default=0)


def _readable(content: bytes) -> list[StepReport]:
    """The reports of all lines that can be read."""
    steps = []
    for raw in content.splitlines():
        with suppress(ValueError):
            steps.append(from_data(StepReport, parse_json(raw)))
    return steps


def _whole_lines(content: bytes) -> list[bytes]:
    """The lines, but for a last one that is no JSON: a kill tore it."""
    lines = content.removesuffix(b"\n").split(b"\n")
    try:
        parse_json(lines[-1])
    except ValueError:  # bad JSON and bad UTF-8 alike
        lines.pop()
    return lines


def _reports(path: Path, lines: list[bytes], *, before: int = 0) -> list[StepReport]:
    """The reports of lines that follow ``before`` others. Raises RunDirectoryError with ``file:line: cause``."""
    reports: list[StepReport] = []
    for number, line in enumerate(lines, before + 1):
        try:
            reports.append(from_data(StepReport, parse_json(line)))
        except ValueError as error:
            raise RunDirectoryError(
                f"{path}:{number}: not a line of metrics: {error}",
                hint="--resume puts the lines back from a checkpoint; without the file, reports are made without its "
                "steps",
            ) from None
    return reports


def _content(path: Path) -> bytes:
    """All of the file; nothing when there is none."""
    try:
        with open_regular(path, follow_links=False) as file:
            return file.read()
    except FileNotFoundError:
        return b""


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Inside, an OSError becomes a RunDirectoryError that names the file."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"{path}: cannot be used: {error.strerror or error}",
            hint="check the free space and the permissions",
        ) from None


class Sink(Protocol):
    """Something that is told how a run goes. ``finish`` gets None when the run ended without a report."""

    def start(self, plan: Plan, run_name: str) -> None:
        """Before the first step."""
        ...

    def step(self, report: StepReport) -> None:
        """After each optimizer step."""
        ...

    def finish(self, report: RunReport | None) -> None:
        """After the last step, however the run ended."""
        ...
