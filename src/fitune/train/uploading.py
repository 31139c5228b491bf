"""A run in a store: its checkpoints are sent beside the steps, and the rest when it has ended.

The store never stops the steps. What could not be sent is said, tried again with the next checkpoint and at the end;
what is here stays here.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from fitune.checkpoint.commit import FOLDER, Line, OnNote, read_line, saved_on
from fitune.checkpoint.remote import (
    adopt_line,
    newest_in_store,
    prune_store,
    remove_remote_run,
    require_line,
    send_checkpoint,
    take_line,
)
from fitune.errors import CheckpointError, FituneError, RunDirectoryError, StoreError
from fitune.files import write_atomically
from fitune.stores.writing import Store, nobody_stops, opened_store
from fitune.threads import give_way
from fitune.units import format_bytes
from fitune.values.plan import RunPlan
from fitune.values.run_directory import FILES, FOLDERS
from fitune.values.serial import parse_object

_FIRST_PAPERS = ("plan.json", "recipe.yaml", "estimate.json", "samples_before.json")
"""Written before the steps. metrics.jsonl grows with each of them: a checkpoint holds it as it was."""
_LAST_PAPERS = ("metrics.jsonl", "traceback.txt", "report.html", "report.json")
"""report.json is sent last: where it says that the run is complete, all else is there."""
_QUIET_S = 5.0
"""Seconds of waiting at the end that nothing is said of."""
_EXPORTS = ("adapter", "merged", "model", "tensorboard")
CONFIGS = ("adapter_config.json", "config.json")
"""Sent last: without one of them a folder is no adapter and no model."""


class Uploads:
    """Sends the checkpoints of a run in a thread of its own, the newest first, then the best."""

    def __init__(self, store: Store, root: Path, line: Line, *, keep: int, on_note: OnNote) -> None:
        self._store, self._root, self._line = store, root, line
        self._keep, self._on_note = keep, on_note
        self._saved, self._is_over, self._has_failed = threading.Event(), threading.Event(), False
        self.sending: tuple[str, ...] = ()
        """Names of the checkpoints that are being sent: they must stay."""
        self._thread = threading.Thread(target=self._work, name="sending", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Who is stopped at once by a signal does not wait."""
        if kind is None or issubclass(kind, Exception):
            self.close(tidy=kind is None)

    def saved(self) -> None:
        """There is a new checkpoint."""
        self._saved.set()

    def close(self, *, tidy: bool) -> None:
        """Stop after the files that are on the way; ``send_run`` sends what is missing.

        ``tidy``: remove what stayed here only because it was being sent.
        """
        self._is_over.set()
        self._saved.set()
        self._thread.join(_QUIET_S)
        if self._thread.is_alive():
            self._on_note(f"waiting for {self._store.url}, to which a checkpoint is on its way")
            self._thread.join()
        self._store.close()
        if tidy and (self._root / FOLDER / "latest").is_symlink():
            from fitune.checkpoint.save import prune  # with torch's distributed tensors: a second to import

            prune(self._root / FOLDER, self._line, keep=self._keep, on_note=self._on_note)

    def _work(self) -> None:
        give_way()
        while self._saved.wait() and not self._is_over.is_set():
            self._saved.clear()
            try:
                self._send()
            except FituneError as error:
                if self._is_over.is_set():
                    return
                self._has_failed = True
                self._on_note(
                    f"not sent: {error.message}; the run goes on, and it is tried again with the next checkpoint"
                )

    def _send(self) -> None:
        try:
            for path in kept_checkpoints(self._root, self._line):
                self.sending = (path.name,)
                send_one(self._store, path, self._line, stop=self._is_over.is_set)
                if self._saved.is_set():
                    return  # a newer one comes first
        finally:
            self.sending = ()
        send_papers(self._store, self._root, _FIRST_PAPERS)
        prune_store(self._store, self._line, keep=self._keep)
        if self._has_failed:
            self._has_failed = False
            self._on_note(f"{self._store.url} has the newest checkpoint again")


def kept_checkpoints(root: Path, line: Line) -> list[Path]:
    """The checkpoints of ``line`` that are here: the newest, then the best, then older ones."""
    found = [path for path, _ in saved_on(root, line)]
    best = root / FOLDER / "best"
    target = os.readlink(best) if best.is_symlink() else ""
    return sorted(found, key=lambda path: (path != found[0], path.name != target))


def send_one(store: Store, path: Path, line: Line, *, stop: Callable[[], bool] = nobody_stops) -> int:
    """Send one checkpoint of ``line``; returns the bytes sent. One that was removed meanwhile is left out."""
    require_line(store, line)
    try:
        return send_checkpoint(store, path, stop=stop)
    except CheckpointError:
        if path.is_dir():
            raise
        return 0


def send_papers(store: Store, root: Path, names: Sequence[str]) -> None:
    """Sends those of ``names`` that are files in ``root``, the last of them last. Raises StoreError."""
    there = [name for name in names if (root / name).is_file()]
    store.put_folder(root, "", there, last=names[-1] if names[-1] in there else "", keeps_others=True)


def send_run(run: RunPlan, on_note: OnNote) -> None:
    """Send all that the run left here and that the store lacks: checkpoints, exports, reports.

    Raises StoreError, with what is missing and what to do.
    """
    if not run.upload_to:
        return
    root = Path(run.output_dir)
    with opened_store(run.upload_to) as store:
        try:
            line = read_line(root / FOLDER)
            sent = sum(send_one(store, path, line) for path in kept_checkpoints(root, line))
            prune_store(store, line, keep=run.keep_checkpoints)
            for name in _EXPORTS:
                if (root / name).is_dir():
                    sent += send_export(store, root / name, name)
            send_papers(store, root, (*_FIRST_PAPERS, *_LAST_PAPERS))
        except FituneError as error:
            raise StoreError(
                f"the end of the run is not in {store.url}: {error.message}; all of it is in {root}",
                hint=f"the same command with --resume sends what is missing; {error.hint or ''}".rstrip("; "),
            ) from error
    on_note(f"sent: {store.url}" + (f" ({format_bytes(sent)} since the steps ended)" if sent else ""))


def send_export(store: Store, folder: Path, name: str, *, keeps_others: bool = False) -> int:
    """Let ``name`` in the store hold the files of ``folder``, its config last; returns the bytes that were sent.

    Raises StoreError.
    """
    files = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]
    try:
        last = next((config for config in CONFIGS if config in files), "")
        return store.put_folder(folder, name, files, last=last, keeps_others=keeps_others)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be read: {error.strerror or error}") from error


def examined_store(run: RunPlan, *, overwrite: bool) -> bool:
    """True if the run is complete in its store and not here, and its papers were fetched.

    Raises StoreError where the store cannot be written to: a small file is put there and removed.
    """
    root = Path(run.output_dir)
    with opened_store(run.upload_to) if run.upload_to else nullcontext() as store:
        if store is None:
            return False
        store.require_writable()
        if overwrite or (root / "report.json").exists() or (root / "metrics.jsonl").exists():
            return False
        report = store.read("report.json")
        try:
            if report is None or parse_object(report).get("status") != "complete":
                return False
            fetch_papers(store, root)
            return True
        except ValueError as error:
            raise StoreError(f"{store.below('report.json')}: damaged: {error}", hint="--overwrite") from error
        except OSError as error:
            raise RunDirectoryError(
                f"output_dir {root} cannot be written: {error.strerror or error}"
            ) from error


def fetch_papers(store: Store, root: Path) -> None:
    """Bring what a run says of itself into ``root``. Raises StoreError, OSError."""
    root.mkdir(parents=True, exist_ok=True)
    for name in (*_FIRST_PAPERS, *_LAST_PAPERS):
        content = store.read(name)
        if content is not None:
            write_atomically(root / name, content)


def fetch_run(store: Store, root: Path, on_note: OnNote) -> None:
    """Bring a run from its store into ``root``, to be exported: what it says of itself, and its weights.

    Those are its adapter or model, or where it has none its newest checkpoint. Raises FituneError.
    """
    try:
        fetch_papers(store, root)
        if not (root / "plan.json").is_file():
            raise RunDirectoryError(f"{store.url}: no plan.json there, so this is no run of fitune")
        if store.get_folder("adapter", root / "adapter") or store.get_folder("model", root / "model"):
            on_note(f"{store.url} is fetched into {root}")
            return
        newest_in_store(store, root, adopt_line(store, root, on_note), after=0, on_note=on_note)
    except OSError as error:
        raise RunDirectoryError(f"{root} cannot be written: {error.strerror or error}") from error


def begin_in_store(run: RunPlan, line: Line, on_note: OnNote, *, overwrite: bool) -> Uploads | None:
    """Make this attempt the one that writes to the store, and start to send; None for a run that stays here.

    ``overwrite``: remove an earlier run there first.
    """
    if not run.upload_to:
        return None
    store = Store(run.upload_to)
    if overwrite:
        remove_remote_run(store, (*FILES, *FOLDERS))
    take_line(store, line)
    return Uploads(store, Path(run.output_dir), line, keep=run.keep_checkpoints, on_note=on_note)
