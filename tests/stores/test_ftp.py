"""A store of another kind, without hashes and with folders: an FTP server."""

import pytest

from checkpoint.killed_saves import save, state_of
from fitune.checkpoint.commit import Attempt
from fitune.checkpoint.remote import (
    complete_checkpoints,
    newest_in_store,
    prune_store,
    require_line,
    send_checkpoint,
    take_line,
)
from fitune.checkpoint.resume import newest_checkpoint
from fitune.errors import StoreError
from fitune.stores import opening
from fitune.stores.writing import Store
from optional_libraries import NEEDS_FTP
from runs import contents
from stores.ftp_server import PASSWORD, USER, running_ftp_server

pytestmark = NEEDS_FTP

LINE = (Attempt(id="only", after=0),)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with running_ftp_server(folder) as port:
        yield folder, port


@pytest.fixture
def login(monkeypatch):
    """As FSSPEC_FTP_USERNAME and FSSPEC_FTP_PASSWORD in the environment, which fsspec reads when it is imported."""
    from fsspec.config import conf

    monkeypatch.setitem(conf, "ftp", {"username": USER, "password": PASSWORD})
    monkeypatch.setattr(opening, "WAITS_S", (0.01,))


def test_checkpoints_are_sent_counted_pruned_and_fetched(login, served, tmp_path):
    folder, port = served
    store = Store(f"ftp://127.0.0.1:{port}/runs/x")
    store.require_writable()
    take_line(store, LINE)
    require_line(store, LINE)
    paths = [save(tmp_path / "here", state_of(step), keep=9, eval_loss=None) for step in (1, 2, 3)]
    for path in paths:
        assert send_checkpoint(store, path) > 0
        assert contents(folder / "runs/x/checkpoints" / path.name) == contents(path)
        assert send_checkpoint(store, path) == 0
    assert prune_store(store, LINE, keep=2) == ("checkpoints/step-1",)
    assert [remote.commit.step for remote in complete_checkpoints(store)] == [3, 2]
    (folder / "runs/x/checkpoints/step-3/COMMIT").unlink()
    found = newest_in_store(store, tmp_path / "there", LINE, after=0, on_note=print)
    assert found == newest_checkpoint(tmp_path / "there").path == tmp_path / "there/checkpoints/step-2"
    assert contents(found) == contents(paths[1])
    (folder / "runs/x/checkpoints/step-3/optimizer.safetensors").write_bytes(b"cut")
    whole = sum(map(len, contents(paths[2]).values()))
    assert send_checkpoint(store, paths[2]) < whole, "what is there already stays"
    assert contents(folder / "runs/x/checkpoints/step-3") == contents(paths[2])


def test_a_folder_that_is_read_only_and_a_login_that_is_wrong_are_refused(login, served, monkeypatch):
    from fsspec.config import conf

    _, port = served
    with pytest.raises(StoreError, match="does not let you write it: 550"):
        Store(f"ftp://127.0.0.1:{port}/read-only").require_writable()
    monkeypatch.setitem(conf, "ftp", {"username": USER, "password": "wrong-and-never-shown"})
    with pytest.raises(StoreError, match="530") as caught:
        Store(f"ftp://127.0.0.1:{port}/runs/y").require_writable()
    assert "wrong-and-never-shown" not in str(caught.value)
