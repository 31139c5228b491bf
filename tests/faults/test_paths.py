"""Rows 6 and 26 of the fault table: names that leave their folder, directories with another owner."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fitune.checkpoint.commit import Commit, Stored, sealed, verify
from fitune.errors import CheckpointError, RunDirectoryError
from fitune.values import run_lock
from fitune.values.run_lock import lock_directory
from fitune.values.serial import to_json

EMPTY = hashlib.sha256().hexdigest()

# Row 26: names stay inside


def commit_of(name):
    files = {name: Stored(sha256="", bytes=0)}
    return Commit(step=1, line=(), parent=None, eval_loss=None, files=files)


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "..", "/etc/x", "C:/x", "a\\..\\x", "", ".", "a\0b", "a/b.json", ".x"]
)
def test_names_that_leave_are_refused(name):
    with pytest.raises(ValueError, match="no file inside its folder"):
        commit_of(name)


@pytest.mark.parametrize("target", ["/etc/hostname", "step-1.log"])
def test_symbolic_links_are_refused_wherever_they_lead(tmp_path, target):
    (tmp_path / "step-1.log").write_text("")
    path = tmp_path / "step-1"
    path.mkdir()
    (path / "state.json").symlink_to(target if target[0] == "/" else f"../{target}")
    commit = sealed(replace(commit_of("state.json"), files={"state.json": Stored(sha256=EMPTY, bytes=0)}))
    (path / "COMMIT").write_text(to_json(commit))
    with pytest.raises(CheckpointError):
        verify(path)


# Row 6: the output directory


def test_the_directory_is_made_and_its_lock_names_the_owner(tmp_path):
    with lock_directory(tmp_path / "a/b") as attempt:
        owner = json.loads((tmp_path / "a/b/run.lock").read_text())
        assert (owner["pid"], owner["attempt"]) == (str(os.getpid()), attempt)
    assert (tmp_path / "a/b/run.lock").read_text() == ""


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "run").write_text("precious")
    for name, said in (("run", "is a file"), ("run/below", "cannot be written")):
        with pytest.raises(RunDirectoryError, match=said), lock_directory(tmp_path / name):
            pass
    assert (tmp_path / "run").read_text() == "precious"


def test_an_unwritable_directory_is_refused(tmp_path, monkeypatch):
    """Injected, since nothing is unwritable for root."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(RunDirectoryError, match=f"cannot be written: {os.strerror(errno.EROFS)}"),
        lock_directory(tmp_path),
    ):
        pass


def test_a_second_run_in_this_process_is_refused_and_the_first_keeps_its_lock(tmp_path):
    with lock_directory(tmp_path):
        for _ in range(2):
            with (
                pytest.raises(RunDirectoryError, match=f"in use by process {os.getpid()}"),
                lock_directory(tmp_path),
            ):
                pass
        assert try_elsewhere(tmp_path).startswith("RunDirectoryError")
    assert try_elsewhere(tmp_path) == "owned"


def test_a_refused_run_leaves_no_lock_in_a_folder_of_others(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/adapter_config.json").write_text("{}")
    for name in ("theirs", "new"):
        with pytest.raises(RunDirectoryError, match="no run"), lock_directory(tmp_path / name):
            raise RunDirectoryError("it is no run")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["adapter_config.json", "theirs"]


def test_a_run_that_wrote_something_and_fails_gives_its_lock_up_and_leaves_the_file(tmp_path):
    def fail():
        (tmp_path / "run/plan.json").write_text("{}")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), lock_directory(tmp_path / "run"):
        fail()
    assert (tmp_path / "run/run.lock").read_text() == ""
    with lock_directory(tmp_path / "run"):
        pass


def test_a_lock_that_was_removed_before_it_was_got_is_made_anew(tmp_path, monkeypatch):
    """The owner before was refused between our opening of the file and its lock."""
    import fcntl

    locked = fcntl.flock
    removed = []

    def refused_before(handle, *how):
        if not removed:
            removed.append((tmp_path / "run.lock").unlink())
        return locked(handle, *how)

    monkeypatch.setattr(fcntl, "flock", refused_before)
    with lock_directory(tmp_path) as attempt:
        assert attempt in (tmp_path / "run.lock").read_text()
        assert try_elsewhere(tmp_path).startswith("RunDirectoryError")


def test_another_live_process_is_named_and_a_killed_one_is_taken_over(tmp_path):
    hold = "print(attempt, flush=True); input()"
    code = f"{_IMPORT}\nwith lock_directory(Path({str(tmp_path)!r})) as attempt: {hold}"
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )
    older = owner.stdout.readline().strip()
    with pytest.raises(RunDirectoryError, match=f"in use by process {owner.pid} on .*, attempt {older}"):
        lock_directory(tmp_path).__enter__()
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    assert older in (tmp_path / "run.lock").read_text()
    with lock_directory(tmp_path) as newer:
        assert newer in (tmp_path / "run.lock").read_text()


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / "run.lock").symlink_to("precious")
    with pytest.raises(RunDirectoryError), lock_directory(tmp_path):
        pass
    assert (tmp_path / "precious").read_text() == "text"


@pytest.mark.parametrize(
    ("pid", "host", "refused"), [("1", "", True), (str(2**22 + 1), "", False), ("1", "other", True)]
)
def test_without_file_locks_the_text_of_the_lock_decides(tmp_path, monkeypatch, pid, host, refused):
    import fcntl
    import socket

    def unsupported(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    (tmp_path / "run.lock").write_text(
        json.dumps({"pid": pid, "host": host or socket.gethostname(), "attempt": "x"})
    )
    lock = lock_directory(tmp_path)
    if refused:
        with pytest.raises(RunDirectoryError, match="in use by process"):
            lock.__enter__()
    else:
        with lock:
            pass


_IMPORT = "from pathlib import Path\nfrom fitune.values.run_lock import lock_directory"


def try_elsewhere(folder):
    code = f"""{_IMPORT}
try:
    with lock_directory(Path({str(folder)!r})): print("owned")
except Exception as error: print(type(error).__name__)"""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_look_at_the_lock_refuses_no_run_that_begins_meanwhile(tmp_path, monkeypatch):
    """Whoever asks if a lock is held has it for a moment."""
    import fcntl

    (tmp_path / "run.lock").write_text('{"pid": "1", "host": "node", "attempt": "x"}')
    look = (tmp_path / "run.lock").open()
    fcntl.flock(look, fcntl.LOCK_SH)
    monkeypatch.setattr(
        run_lock, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: look.close())
    )
    with lock_directory(tmp_path):
        assert look.closed


def test_a_forked_child_that_lives_longer_does_not_have_the_lock(tmp_path):
    ends = "print(os.getpid(), flush=True); os.kill(os.getppid(), 9); time.sleep(120)"
    code = f"""{_IMPORT}
import os, time
with lock_directory(Path({str(tmp_path)!r})):
    if os.fork():
        time.sleep(120)
    {ends}"""
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = int(owner.stdout.readline())
    assert owner.wait() == -signal.SIGKILL
    try:
        with lock_directory(tmp_path):
            os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        owner.stdout.close()
