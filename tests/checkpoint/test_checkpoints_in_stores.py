"""Checkpoints in a store: only whole ones count, the newest few and the best stay, and one attempt at a time writes."""

import itertools
import uuid

import pytest

from checkpoint.killed_saves import state_of
from checkpoint.saves import save_checkpoint
from fitune.checkpoint.commit import Attempt, Descent, Parent, read_commit
from fitune.checkpoint.remote import (
    adopt_line,
    complete_checkpoints,
    fetch_checkpoint,
    is_run,
    newest_in_store,
    prune_store,
    remote_checkpoint,
    remote_line,
    remove_remote_run,
    require_line,
    send_checkpoint,
    take_line,
)
from fitune.checkpoint.resume import begin_line, newest_checkpoint
from fitune.errors import CheckpointError, StoreError
from fitune.stores import opening
from fitune.stores.writing import Store
from fitune.units import format_bytes
from fitune.values.serial import to_json
from runs import contents

pytest.importorskip("fsspec")

FIRST = (Attempt(id="first", after=0),)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(opening, "WAITS_S", ())
    monkeypatch.setitem(opening.WRITTEN, "memory", "fsspec")
    return Store(f"memory://{uuid.uuid4().hex}/runs/x")


def save(root, step, *, line=FIRST, eval_loss=None):
    descent = Descent(line=line, parent=Parent(step=step - 1, digest="") if step > 1 else None)
    return save_checkpoint(root, state_of(step), descent=descent, keep=99, eval_loss=eval_loss)


def steps(store):
    return [remote.commit.step for remote in complete_checkpoints(store)]


def test_a_checkpoint_comes_back_as_it_was_sent(store, tmp_path):
    path, said = save(tmp_path / "here", 3), []
    sent = send_checkpoint(store, path)
    assert sent == sum(map(len, contents(path).values()))
    assert send_checkpoint(store, path) == 0
    (remote,) = complete_checkpoints(store)

    def is_told(line):
        said.append(line)
        assert not (tmp_path / "there/checkpoints/step-3").exists(), "it is told before it takes its time"

    there = fetch_checkpoint(remote, tmp_path / "there", is_told)
    assert said == [f"fetching {remote.url}: {format_bytes(sent - len(to_json(remote.commit)))}"]
    assert contents(there) == contents(path)
    assert newest_checkpoint(tmp_path / "there").path == there
    assert fetch_checkpoint(remote, tmp_path / "there", said.append) == there
    assert len(said) == 1, "it was there already"


def test_one_that_is_damaged_here_is_fetched_from_the_store_and_set_aside(store, tmp_path):
    """Its COMMIT is whole, and the same as the store's: it was once taken for the store's, unread."""
    for step in (1, 2):
        send_checkpoint(store, save(tmp_path, step))
    file = tmp_path / "checkpoints/step-2/model.safetensors"
    saved = file.read_bytes()
    file.write_bytes(saved[:-1] + bytes([saved[-1] ^ 1]))
    assert newest_checkpoint(tmp_path).path == tmp_path / "checkpoints/step-1"
    found = newest_in_store(store, tmp_path, FIRST, after=1, on_note=print)
    assert found == file.parent
    assert file.read_bytes() == saved
    assert (tmp_path / "checkpoints/damaged-step-2").is_dir()


def test_half_a_checkpoint_does_not_count_and_goes_with_the_next(store, tmp_path):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    send_checkpoint(store, old)
    calls = itertools.count()
    with pytest.raises(StoreError, match="stopped"):
        send_checkpoint(store, new, stop=lambda: next(calls) > 1)
    assert any(name.startswith("step-2/") for name in store.infos("checkpoints"))
    assert steps(store) == [1]
    assert newest_in_store(store, tmp_path / "b", FIRST, after=0, on_note=print) is not None
    assert newest_checkpoint(tmp_path / "b").path == tmp_path / "b/checkpoints/step-1"
    left = send_checkpoint(store, new)
    assert 0 < left < sum(map(len, contents(new).values())), "files that were there are not sent again"
    assert steps(store) == [2, 1]
    store.remove(["checkpoints/step-1/COMMIT"])
    prune_store(store, FIRST, keep=1)
    assert not any(name.startswith("step-1/") for name in store.infos("checkpoints"))


def test_the_newest_few_and_the_best_stay(store, tmp_path):
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.7), (4, None), (5, float("nan"))):
        send_checkpoint(store, save(tmp_path, step, eval_loss=loss))
    assert prune_store(store, FIRST, keep=2) == ("checkpoints/step-1", "checkpoints/step-3")
    assert steps(store) == [5, 4, 2]
    other = save(tmp_path / "other", 9, line=(Attempt(id="another", after=0),))
    send_checkpoint(store, other)
    prune_store(store, FIRST, keep=1)
    assert steps(store) == [9, 5, 2], "what is on another line is neither counted nor removed"


def test_a_checkpoint_whose_commit_cannot_be_read_is_not_removed(store, tmp_path):
    """Another version may have written it."""
    for step in (1, 2, 3):
        send_checkpoint(store, save(tmp_path / "here", step))
    store.write("checkpoints/step-1/COMMIT", b'{"of": "a later version"}')
    before = [name for name in store.infos() if "/step-1/" in name]
    assert prune_store(store, FIRST, keep=1) == ("checkpoints/step-2",)
    assert [name for name in store.infos() if "/step-1/" in name] == before
    assert steps(store) == [3]


@pytest.mark.parametrize("damage", [b"", b"x" * 50, None])
def test_a_checkpoint_that_is_damaged_in_the_store_is_named_and_passed_over(store, tmp_path, damage):
    for step in (1, 2):
        send_checkpoint(store, save(tmp_path / "a", step))
    name, said = "checkpoints/step-2/model.safetensors", []
    content = bytearray(store.read(name) or b"")
    content[len(content) // 2] ^= 1
    store.write(name, bytes(content) if damage is None else damage)
    found = newest_in_store(store, tmp_path / "b", FIRST, after=0, on_note=said.append)
    assert found == tmp_path / "b/checkpoints/step-1"
    assert any("step-2 is skipped" in line and "model.safetensors" in line for line in said)
    assert not list((tmp_path / "b/checkpoints").glob("step-2")), "nothing half-made is kept"


def test_a_commit_that_names_files_elsewhere_is_refused(store, tmp_path):
    send_checkpoint(store, save(tmp_path / "a", 1))
    (remote,) = complete_checkpoints(store)
    store.write(
        f"{remote.name}/COMMIT", to_json(remote.commit).replace("state.json", "../../outside").encode()
    )
    assert not complete_checkpoints(store)
    with pytest.raises(CheckpointError, match="damaged: .*no file inside its folder"):
        remote_checkpoint(store, remote.name)


def test_what_went_on_elsewhere_is_taken_over(store, tmp_path):
    """A trains to step 2 and sends it, B goes on from there to step 4; then A starts again."""
    here, there = tmp_path / "a", tmp_path / "b"
    begin_line(here, attempt="first", base=None, damaged=(), on_note=print)
    send_checkpoint(store, save(here, 2))
    take_line(store, FIRST)
    save(here, 3)  # never sent
    adopt_line(store, there, print)
    base = newest_in_store(store, there, FIRST, after=0, on_note=print)
    second = begin_line(there, attempt="second", base=base, damaged=(), on_note=print).line
    take_line(store, second)
    send_checkpoint(store, save(there, 4, line=second))
    with pytest.raises(StoreError, match="another attempt"):
        require_line(store, FIRST)
    require_line(store, second)
    line = adopt_line(store, here, print)
    assert line == second == remote_line(store)
    found = newest_checkpoint(here)
    assert found.path is not None
    assert read_commit(found.path).step == 2, "step 3 is not on the line any more"
    assert newest_in_store(store, here, line, after=2, on_note=print) == here / "checkpoints/step-4"


def test_an_attempt_whose_line_the_store_has_not_yet_goes_on(store, tmp_path):
    take_line(store, FIRST)
    longer = (*FIRST, Attempt(id="second", after=2))
    save(tmp_path, 3, line=longer)
    assert adopt_line(store, tmp_path, print) == FIRST
    require_line(store, longer)
    found = newest_checkpoint(tmp_path)
    assert found.path == tmp_path / "checkpoints/step-3"


def test_a_run_in_the_store_is_known_and_removed_when_asked(store, tmp_path):
    assert not is_run(store)
    send_checkpoint(store, save(tmp_path, 1))
    store.write("notes.txt", b"mine")
    assert is_run(store)
    remove_remote_run(store, ("checkpoints", "report.json"))
    assert set(store.infos()) == {"notes.txt"}
