"""Only valid checkpoints of the present line count: for resuming, for pruning and as the best."""

import os
from pathlib import Path

import pytest

from checkpoint.killed_saves import same, state_of
from checkpoint.saves import save_checkpoint
from fitune.checkpoint import commit, resume
from fitune.checkpoint.commit import Attempt, Commit, Descent, last_saved, read_commit
from fitune.checkpoint.resume import Found, begin_line, load_checkpoint, newest_checkpoint


class Run:
    """A run directory, and what was said about it."""

    def __init__(self, root):
        self.root, self.folder = root, root / "checkpoints"
        self.said = []
        self.descent = Descent(line=())

    def begin(self, attempt, base=None, damaged=()):
        self.descent = begin_line(
            self.root, attempt=attempt, base=base, damaged=damaged, on_note=self.said.append
        )
        return self

    def resume(self, attempt):
        found = newest_checkpoint(self.root)
        self.begin(attempt, found.path, found.damaged)
        return found

    def save(self, *steps, keep=3, eval_loss=None):
        for step in steps:
            save_checkpoint(
                self.root, state_of(step), descent=self.descent, keep=keep, eval_loss=eval_loss,
                on_note=self.said.append,
            )  # fmt: skip

    def names(self):
        names = (path.name for path in self.folder.iterdir())
        return sorted(name for name in names if name not in ("LINE", "latest"))


@pytest.fixture
def run(tmp_path):
    """Steps 8, 10 and 12 of one attempt."""
    run = Run(tmp_path).begin("first")
    run.save(8, 10, 12)
    return run


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage(run, *steps, name="model.safetensors"):
    for step in steps:
        flip(run.folder / f"step-{step}" / name)


@pytest.fixture
def hashed(monkeypatch):
    """Checkpoints whose model was read to its end."""
    names = []
    real = commit.hash_file

    def noting(path):
        if path.name == "model.safetensors":
            names.append(path.parent.name)
        return real(path)

    monkeypatch.setattr(commit, "hash_file", noting)
    return names


def as_another_process():
    commit._known.clear()


@pytest.mark.parametrize("name", ["model.safetensors", "COMMIT", "state.json", "metrics.jsonl"])
def test_damaged_ones_push_no_good_one_out(tmp_path, name):
    run = Run(tmp_path).begin("first")
    for step in (8, 10, 12):
        state = state_of(step)
        save_checkpoint(
            tmp_path, type(state)(step=step, tensors=state.tensors, facts=state.facts, log=b"lines\n"),
            descent=run.descent, keep=3, eval_loss=None,
        )  # fmt: skip
    damage(run, 10, 12, name=name)
    found = run.resume("second")
    assert found.path == run.folder / "step-8"
    assert load_checkpoint(found.path).log == b"lines\n"
    assert [warning.split()[0] for warning in found.warnings] == ["step-12", "step-10"]
    run.save(9, keep=2)
    assert run.names() == ["damaged-step-10", "damaged-step-12", "step-8", "step-9"]
    assert newest_checkpoint(tmp_path).path == run.folder / "step-9"
    assert any("step-10 is now damaged-step-10" in line for line in run.said)


def test_a_run_that_goes_on_from_an_older_step_leaves_its_old_line(run):
    run.begin("second", run.folder / "step-8")
    assert run.names() == ["abandoned-step-10", "abandoned-step-12", "step-8"]
    run.save(10)
    newest = newest_checkpoint(run.root).path
    assert newest == run.folder / "step-10"
    found = read_commit(newest)
    assert found.line == (Attempt(id="first", after=0), Attempt(id="second", after=8))
    assert found.parent is not None
    assert (found.parent.step, found.parent.digest) == (8, read_commit(run.folder / "step-8").digest)


def test_the_end_that_was_left_can_still_be_named(run):
    run.begin("second", run.folder / "step-8").save(10)
    left = run.folder / "abandoned-step-12"
    assert same(load_checkpoint(left), state_of(12))
    run.begin("third", left)
    assert "abandoned-step-10-2" in run.names()  # of the second attempt
    run.save(14)
    assert read_commit(run.folder / "step-14").line == (
        Attempt(id="first", after=0), Attempt(id="third", after=12),
    )  # fmt: skip


@pytest.mark.parametrize("moves", [0, 1])
def test_killed_while_it_leaves_its_old_line_a_run_is_on_the_new_one(run, monkeypatch, moves):
    left = [moves]

    def killed(path, word):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return commit.set_aside(path, word)

    with monkeypatch.context() as dying:
        dying.setattr(resume, "set_aside", killed)
        with pytest.raises(KeyboardInterrupt):
            run.begin("second", run.folder / "step-8")
    found = run.resume("third")
    assert found.path == run.folder / "step-8"
    assert all("went on from an older step" in warning for warning in found.warnings)
    assert run.names() == ["abandoned-step-10", "abandoned-step-12", "step-8"]


@pytest.mark.parametrize("harm", [Path.unlink, flip, lambda path: path.write_text("")])
def test_without_its_line_the_newest_valid_one_is_taken_and_that_is_said(run, harm):
    harm(run.folder / "LINE")
    found = run.resume("second")
    assert found.path == run.folder / "step-12"
    assert "LINE: cannot be read" in found.warnings[0]
    assert newest_checkpoint(run.root).warnings == ()


def test_a_checkpoint_that_was_gone_on_from_and_is_lost_is_named(run):
    run.resume("second")
    (run.folder / "step-12").rename(run.root / "lost")
    found = newest_checkpoint(run.root)
    assert found.path == run.folder / "step-10"
    assert found.warnings == ("step-12, from which the last attempt went on, is not in checkpoints/",)


def test_a_run_that_began_elsewhere_and_saved_nothing_does_not_start_again(run, tmp_path):
    other = Run(tmp_path / "other").begin("second", run.folder / "step-12")
    found = newest_checkpoint(other.root)
    assert (found.path, len(found.warnings)) == (None, 1)
    other.save(14)
    assert newest_checkpoint(other.root) == Found(path=other.folder / "step-14")


def test_one_that_is_damaged_while_the_run_goes_on_is_not_counted(run):
    damage(run, 12)
    run.save(14, keep=2)
    assert run.names() == ["damaged-step-12", "step-10", "step-14"]
    assert "step-12/model.safetensors: damaged, sha256" in run.said[0]


def test_what_this_process_wrote_or_hashed_is_not_hashed_again(run, hashed):
    run.save(14, 16)
    assert hashed == []
    as_another_process()
    run.resume("second")
    assert hashed == ["step-16"]
    run.save(18, 20)
    assert hashed == ["step-16", "step-14"]  # the third of those that are kept, once


def test_files_that_were_touched_are_hashed_again(run, hashed):
    os.utime(run.folder / "step-12" / "model.safetensors")
    run.save(14)
    assert hashed == ["step-12"]


def test_the_best_is_a_valid_one_of_the_present_line(tmp_path):
    run = Run(tmp_path).begin("first")
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 0.5)):
        run.save(step, keep=9, eval_loss=loss)
    run.begin("second", run.folder / "step-6")
    damage(run, 4)
    run.save(7, keep=1)
    assert os.readlink(run.folder / "best") == "step-6"
    assert run.names() == ["abandoned-step-8", "best", "damaged-step-4", "step-6", "step-7"]
    damage(run, 6)
    run.save(9, keep=1)
    assert "best" not in run.names()


def test_what_others_say_to_go_on_from_is_on_the_line(run):
    run.begin("second", run.folder / "step-8")
    saved = last_saved(run.root)
    assert saved is not None
    assert saved.step == 8


FIRST, SECOND, THIRD = (Attempt(id=name, after=step) for name, step in (("a", 0), ("b", 8), ("c", 10)))


@pytest.mark.parametrize(
    ("saved_on", "step", "counts"),
    [
        ((FIRST,), 6, True),
        ((FIRST,), 8, True),
        ((FIRST,), 10, False),
        ((FIRST, SECOND), 10, True),
        ((FIRST, SECOND), 12, False),
        ((FIRST, SECOND, THIRD), 99, True),
        ((FIRST, THIRD), 12, False),
        ((SECOND,), 8, False),
        ((), 2, False),
    ],
)
def test_a_line_passes_through(saved_on, step, counts):
    saved = Commit(step=step, line=saved_on, parent=None, eval_loss=None, files={})
    assert saved.is_on((FIRST, SECOND, THIRD)) is counts
