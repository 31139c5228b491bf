"""Work that several processes do together before the first step and after the last: compare, and gather the model."""

import platform
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean

import torch
import transformers
from torch import Tensor

from fitune.checkpoint.state import whole_tensor
from fitune.engine.ranks import Ranks
from fitune.errors import RankFailed, RunDirectoryError
from fitune.models.weight_files import weights_identity
from fitune.spec.plan import Plan
from fitune.spec.predictions import Phase
from fitune.spec.reports import RankReport, StepReport
from fitune.spec.run_lock import attempt_in
from fitune.spec.serial import to_json
from fitune.train.current import Run

_SEEN_SECONDS = 5.0
"""A network disk shows a new file to other machines within seconds."""


def require_shared_directory(ranks: Ranks, directory: Path, *, attempt: str) -> None:
    """Raises RunDirectoryError, on every rank, when one of them sees another ``directory`` than the first rank's.

    ``attempt`` owns that one. Else checkpoints would be in pieces, and the ranks could not say why they ended.
    """
    until = time.monotonic() + _SEEN_SECONDS
    seen = ranks.is_first  # whose lock would be given up by closing the file once more
    while not seen and time.monotonic() < until:
        seen = attempt_in(directory) == attempt
        time.sleep(0.0 if seen else 0.2)
    found = ranks.gathered((socket.gethostname(), seen))
    for rank, (host, has_seen) in enumerate(found):
        if not has_seen:
            raise RunDirectoryError(
                f"rank {rank} on {host} does not see output_dir {directory.absolute()} of rank 0 on {found[0][0]}: "
                "under that name it has another folder",
                hint="an output_dir on a disk that all machines share (NFS, Lustre, …), under the same path",
            )


def require_same_on_all(ranks: Ranks, plan: Plan, *, rows: str, base: str) -> None:
    """Raises RankFailed, on every rank, naming what differs between them: they would train different models."""
    if ranks.world != plan.hardware.num_gpus:
        raise RankFailed(
            f"the plan is for {plan.hardware.num_gpus} processes, and {ranks.world} were started",
            hint=f"gpus: {ranks.world}, or start {plan.hardware.num_gpus}",
        )
    if plan.hardware.nodes > 1 and ranks.local == 0 and not base:  # each reads its own copy of them
        base = weights_identity(plan.model_path)
    facts = {
        "the plan": to_json(plan),
        "the training rows": rows,
        "the base model's weights": base,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    found = ranks.gathered(facts)
    for name, value in found[0].items():
        for rank, theirs in enumerate(found):
            if theirs[name] != value and theirs[name]:
                short = "" if name == "the plan" else f": {value[:16]} and {theirs[name][:16]}"
                raise RankFailed(
                    f"{name} differs between rank 0 and rank {rank}{short}",
                    hint="the same files, the same recipe and the same versions on every machine",
                )


def rows_of_ranks(run: Run) -> tuple[RankReport, ...]:
    """Peaks, and time of a step, of every rank; empty for one alone."""
    if run.ranks.is_alone:
        return ()
    peaks: dict[Phase, int] = {}
    for step in run.done:
        for phase, size in step.memory_bytes.items():
            peaks[phase] = max(peaks.get(phase, 0), size)
    steps = run.done[1:] or run.done
    waited = [step.waiting_seconds for step in steps if step.waiting_seconds is not None]
    busiest = max(steps, key=_busy_seconds, default=None)
    own = RankReport(
        rank=run.ranks.rank,
        memory=peaks,
        step_seconds=fmean(step.step_seconds for step in steps) if steps else 0.0,
        waiting_seconds=fmean(waited) if waited else None,
        busiest_step=busiest.step if busiest else 0,
        busiest_seconds=_busy_seconds(busiest) if busiest else 0.0,
    )
    return tuple(run.ranks.gathered(own))


def _busy_seconds(step: StepReport) -> float:
    return step.step_seconds - (step.waiting_seconds or 0.0)


class Gathered(Mapping[str, Tensor]):
    """The trained weights, each gathered from all ranks to the first one's host when it is asked for.

    The first rank asks for every one once, in their order; meanwhile the others ``follow``. So no rank holds more than
    one of them whole.
    """

    def __init__(self, ranks: Ranks, trained: Mapping[str, Tensor]) -> None:
        self._ranks, self._trained = ranks, trained

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._trained[name]
        self._ranks.from_first(_go_on)
        return whole_tensor(tensor).to("cpu")

    def __contains__(self, name: object) -> bool:
        return name in self._trained

    def __iter__(self) -> Iterator[str]:
        return iter(self._trained)

    def __len__(self) -> int:
        return len(self._trained)

    def follow(self) -> None:
        """Does the part of the other ranks. Raises RankFailed when the first one fails before it has asked for all."""
        for tensor in self._trained.values():
            self._ranks.from_first(_go_on)
            whole_tensor(tensor)


def _go_on() -> None:
    """Said by the first rank before each tensor; where it fails, its error is said in this place."""


def gathered_weights(run: Run) -> Gathered | None:
    """The trained weights of all ranks; None where each rank has all of them. Called by every rank."""
    trained = run.loaded.engine.trained()
    divided = any(hasattr(tensor, "full_tensor") for tensor in trained.values())
    return Gathered(run.ranks, trained) if divided else None
