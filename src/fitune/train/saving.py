"""Saves of a run by all its ranks, each of which writes its share at the same time; the first one commits. And what a
run that goes on puts back."""

import math
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fitune.checkpoint.commit import FOLDER, Descent
from fitune.checkpoint.save import (
    Written,
    add_evaluation,
    begin_save,
    commit_save,
    save_failed,
    share_bytes,
    write_share,
)
from fitune.checkpoint.slices import SavedTensors, Share, share_of
from fitune.checkpoint.state import TrainState
from fitune.data.loader import LoaderState
from fitune.engine.host import PinnedMemory
from fitune.engine.protocol import EngineState, shape_of
from fitune.engine.ranks import Ranks
from fitune.errors import CheckpointError, FituneError, PeerGone
from fitune.files import remove_stale_siblings
from fitune.threads import give_way
from fitune.track.metrics import read_metrics
from fitune.train.again import find_source
from fitune.train.current import Run
from fitune.train.ending import keep_log
from fitune.train.failure import require_finite_step
from fitune.train.start import Facts
from fitune.values.reports import StepReport
from fitune.values.run_directory import placed
from fitune.values.serial import to_data


class Saver:
    """The saves of one run, one after the other: between two steps, or beside the next ones where the plan says so.

    Beside them a thread writes a copy of the state, and all threads agree in a group of their own. All methods are
    called by every rank.
    """

    def __init__(self, current: Run) -> None:
        self.current = current
        self.copies = HostCopies() if current.plan.run.async_save else None
        self.ranks = current.ranks if self.copies is None else current.ranks.apart()
        self._thread: threading.Thread | None = None
        self.problem: Exception | None = None
        """Why the writing of the last save failed: ``wait`` raises it."""

    def save(self, report: StepReport) -> None:
        """Save the state after the step of ``report``; the last save is waited for.

        Raises, on every rank, CheckpointError when the disk of one of them is full or fails, and TrainingFailed where a
        number is not finite: at once or when the writing is waited for. The checkpoint before is then still there.
        """
        self.current.where.doing = "saving"
        self.wait()
        keep_log(self.current)
        share = _captured(self.current, report)
        if self.copies is None:
            self._write(share, report.eval_loss)
            return
        self._thread = threading.Thread(
            target=self._write_beside, args=(*self.copies.take(share), report.eval_loss), name="saving", daemon=True
        )  # fmt: skip
        self._thread.start()

    def add_evaluation(self, folder: Path, eval_loss: float) -> None:
        """Let the checkpoint in ``folder`` have its loss, which was measured later. Raises CheckpointError."""
        self.wait()
        current = self.current
        add = partial(
            add_evaluation, folder, eval_loss, descent=current.descent, keep=current.plan.run.keep_checkpoints,
            on_note=current.callbacks.on_note,
        )  # fmt: skip
        current.ranks.from_first(add)
        if current.uploads is not None:
            current.uploads.saved()

    def wait(self) -> None:
        """Wait until all is written. Raises why it was not."""
        if self._thread is not None:
            self.current.where.doing = "saving"
            self._thread.join()
            self._thread = None
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem

    def _write_beside(self, copy: Share, wait: Callable[[], object], eval_loss: float | None) -> None:
        give_way()
        try:
            wait()
            self._write(copy, eval_loss)
        except Exception as problem:  # raised by ``wait``, in the thread that trains
            self.problem = problem

    def _write(self, share: Share, eval_loss: float | None) -> None:
        current = self.current
        require_finite_step(share.step, dict(ChainMap(*share.files.values())), ranks=self.ranks)
        save_together(
            self.ranks,
            current.directory,
            share,
            descent=current.descent,
            keep=current.plan.run.keep_checkpoints,
            eval_loss=eval_loss,
            on_note=current.callbacks.on_note,
            spare=() if current.uploads is None else current.uploads.sending,
        )
        if current.uploads is not None:
            current.uploads.saved()


class HostCopies:
    """Room for one copy, kept from save to save: pinned where the state is on a GPU.

    The copy is begun on the GPU's stream in which the steps run, so the next step changes nothing before it is done.
    What is on the host already (an offloaded optimizer) is copied, too: it is changed there.
    """

    def __init__(self) -> None:
        self._rooms: dict[tuple[str, str], Tensor] = {}
        self._pinned = PinnedMemory()

    def take(self, share: Share) -> tuple[Share, Callable[[], object]]:
        """Copy ``share`` over the last one, which must be written by now; returns the copy on the host, and what waits
        until it is complete."""
        copies = {
            file: {name: self._copied((file, name), tensor) for name, tensor in tensors.items()}
            for file, tensors in share.files.items()
        }
        copy = replace(share, files=copies)
        if not any(tensor.is_cuda for tensors in share.files.values() for tensor in tensors.values()):
            return copy, lambda: None
        done = torch.cuda.Event()
        done.record()
        return copy, done.synchronize

    def _copied(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        room = self._rooms.get(key)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            empty = self._pinned.empty if tensor.is_cuda else torch.empty
            room = self._rooms[key] = empty(tensor.shape, dtype=tensor.dtype)
        return room.copy_(tensor.detach(), non_blocking=True)


@contextmanager
def saving(current: Run) -> Iterator[Saver]:
    """Inside, the run is saved; after it all is written, also when an error ends the steps. Who is stopped at once by
    a signal does not wait."""
    saver = Saver(current)
    try:
        yield saver
    except Exception:
        doing = current.where.doing
        try:
            saver.wait()
        except FituneError as problem:  # the run ends by its own error
            current.callbacks.on_note(f"the last checkpoint was not saved: {problem.message}")
        current.where.doing = doing
        raise
    saver.wait()
    if saver.ranks is not current.ranks:
        saver.ranks.part()


def keep_trained(current: Run, error: Exception) -> None:
    """Save a checkpoint where the export failed and nothing else holds what was trained; ``current.kept`` names it.

    Called by every rank with its error: with several, all have the first one's, or one of them is gone.
    """
    doing = current.where.doing
    together = isinstance(error, FituneError) and not isinstance(error, PeerGone)
    try:
        if current.is_trained:
            current.kept = _folder_of_trained(current)
        if not (current.ranks.is_alone or together):
            return
        if current.ranks.from_first(lambda: current.is_trained and not current.kept):
            [last] = current.ranks.from_first(lambda: read_metrics(current.directory / "metrics.jsonl")[-1:])
            with saving(current) as saver:
                saver.save(last)
            current.kept = _folder_of_trained(current)
    except Exception as problem:  # any error here would take the place of the export's and leave no report
        why = getattr(problem, "message", "") or f"{type(problem).__name__}: {problem}"
        current.callbacks.on_note(f"what was trained could not be saved as a checkpoint: {why}")
    finally:
        current.where.doing = doing


def _folder_of_trained(current: Run) -> str:
    try:
        found = find_source(current.directory, current.plan, None, step=current.where.step)
    except CheckpointError:
        return ""
    return str(found.path)


def _captured(current: Run, report: StepReport) -> Share:
    """The share that this rank writes of everything the next step depends on. What is divided over ranks stays so."""
    prepared, ranks = current.loaded, current.ranks
    engine, device = prepared.engine.state(), prepared.model.device
    rng = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(device)
    generators = {
        _of_rank(kind, rank): state
        for rank, own in enumerate(ranks.gathered(rng))
        for kind, state in own.items()
    }
    facts = Facts(
        plan=placed(current.plan),
        rows=current.data.train.fingerprint,
        base=current.base,
        engine=dict(engine.facts),
        epoch=current.position.epoch,
        position=current.position.position,
        steps_of_other_plan=current.steps_of_other_plan,
        best_eval_loss=None if math.isinf(current.best_eval_loss) else current.best_eval_loss,
    )
    state = TrainState(
        step=report.step,
        tensors={"model": prepared.engine.trained(), "optimizer": engine.tensors, "rng": generators},
        facts=to_data(facts),
        log=b"" if current.log is None else current.log.synced(),
    )
    return share_of(state, rank=ranks.rank)


def save_together(ranks: Ranks, root: Path, share: Share, *, descent: Descent, **how: Any) -> None:
    """Save what all ranks hold, each its ``share``. Called by every rank; ``how`` is that of ``commit_save``.

    Raises CheckpointError on every rank, naming the one whose disk is full or fails.
    """
    sizes = ranks.gathered(share_bytes(share))
    try:
        folder = ranks.from_first(lambda: begin_save(root, share, descent=descent, needed_bytes=sum(sizes)))
        written: Written | str
        problem: OSError | None = None
        try:
            written = write_share(folder, share)
        except OSError as error:
            written, problem = error.strerror or str(error), error
        everyones: list[Written] = []
        for rank, theirs in enumerate(ranks.gathered(written)):
            if isinstance(theirs, str):
                whose = "" if ranks.is_alone else f"rank {rank} cannot write its share: "
                cause = f"checkpoint step-{share.step} could not be saved: {whose}{theirs}"
                raise save_failed(root, cause, needed_bytes=sizes[rank]) from problem
            everyones.append(theirs)
        ranks.from_first(lambda: commit_save(root, folder, share, everyones, descent=descent, **how))
    except FituneError:
        if ranks.is_first:
            with suppress(OSError):  # the disk that failed may fail again; the next save tries once more
                remove_stale_siblings(root / FOLDER)
        raise


def _of_rank(kind: str, rank: int) -> str:
    """Name of a generator's state: ``cpu`` of the first rank, ``cpu/1`` of the next."""
    return f"{kind}/{rank}" if rank else kind


def restore(current: Run, state: TrainState, facts: Facts) -> None:
    """Put ``state`` back. A rank that the checkpoint does not know draws numbers of its own."""
    prepared, rank = current.loaded, current.ranks.rank
    model, generators = state.tensors.get("model", {}), state.tensors["rng"]
    saved = {name: shape_of(model, name) for name in model}
    trained = {name: tensor.shape for name, tensor in prepared.engine.trained().items()}
    if saved != trained:
        odd = sorted({name for name, _ in saved.items() ^ trained.items()})
        raise CheckpointError(f"the checkpoint trains other parameters than the plan, e.g. {odd[:3]}")
    prepared.engine.put_back(model)
    try:
        prepared.engine.restore(EngineState(tensors=state.tensors["optimizer"], facts=facts.engine))
        if not rank or _of_rank("cpu", rank) in generators:
            torch.set_rng_state(generators[_of_rank("cpu", rank)])
        if prepared.model.device.type == "cuda" and _of_rank("cuda", rank) in generators:
            torch.cuda.set_rng_state(generators[_of_rank("cuda", rank)], prepared.model.device)
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"the checkpoint of step {state.step} lacks {error}") from error
    for tensors in state.tensors.values():
        if isinstance(tensors, SavedTensors):
            tensors.close()
    current.position = LoaderState(epoch=facts.epoch, position=facts.position)
    current.best_eval_loss = math.inf if facts.best_eval_loss is None else facts.best_eval_loss
