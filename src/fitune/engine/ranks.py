"""The processes of one job, as each of them sees the others: who is first, and what all agree on.

Tensors of the model travel through their engine. What goes through here is small: a loss, a path, a request to stop.
"""

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fitune.errors import FituneError, HardwareError, PeerGone, RankFailed, first_line
from fitune.values.machines.environment import launched_as

T = TypeVar("T")

WAIT = timedelta(hours=2)
"""Longest wait of a rank for the others in a collective: the first one may tokenise, write a checkpoint or merge
meanwhile. A rank that dies is seen at once, by its closed connections, and one that hangs in a step by the watch
(train/peers.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process is ``rank`` of ``world``, and ``local`` on its machine. All methods are called by every rank."""

    rank: int = 0
    world: int = 1
    local: int = 0
    group: dist.ProcessGroup | None = None
    """None for the group of the training itself."""

    def apart(self) -> "Ranks":
        """These ranks in a group of their own, for a thread beside the training: its messages must not get between
        those of the steps."""
        return self if self.is_alone else replace(self, group=dist.new_group(backend="gloo", timeout=WAIT))

    def part(self) -> None:
        """End the group that ``apart`` made."""
        if self.group is not None:
            dist.destroy_process_group(self.group)

    @property
    def is_first(self) -> bool:
        """True on the one rank that owns the run directory, writes logs and exports, and talks to people."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """True where one process trains: then nothing is sent."""
        return self.world == 1

    def summed(self, values: Sequence[float]) -> list[float]:
        """Each of ``values``, added up over all ranks in fp64."""
        if self.is_alone:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64)
        with peers_needed():
            dist.all_reduce(sums, group=self.group)
        return sums.tolist()

    def gathered(self, value: T) -> list[T]:
        """The ``value`` of every rank, in their order."""
        if self.is_alone:
            return [value]
        everyone: list[T | None] = [None] * self.world
        with peers_needed():
            dist.all_gather_object(everyone, value, group=self.group)
        return [each for each in everyone if each is not None]

    def from_first(self, make: Callable[[], T]) -> T:
        """Returns what ``make`` returns on the first rank, the only one that calls it.

        An error there is raised on every rank: nobody waits for what will not come.
        """
        if self.is_alone:
            return make()
        told, failed = _tried(make, here=self.is_first)
        box = [told]
        # after an error a rank that is gone need not know
        with peers_needed() if failed is None else suppress(RuntimeError):
            dist.broadcast_object_list(box, src=0, group=self.group)
        if failed is not None:
            raise failed
        return box[0].value_or_raise()

    def in_turn(self, make: Callable[[], T]) -> T:
        """``make`` on every rank, the first one before the others: they find what it left on the disk.

        Another machine may not have that disk, so its first rank goes before its others, too.
        """
        if self.is_alone:
            return make()
        made: list[T] = []
        self.from_first(lambda: made.append(make()))
        self.once_a_node(lambda: None if made else made.append(make()))
        return made[0] if made else make()

    def once_a_node(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the first rank of this machine alone, and return its result on every rank there.

        An error on any machine is raised on every rank.
        """
        if self.is_alone:
            return make()
        host = socket.gethostname()
        own, failed = _tried(make, here=self.local == 0)
        everyone = self.gathered((host, own))
        if failed is not None:
            raise failed
        told = {
            where: each.value_or_raise(rank)
            for rank, (where, each) in enumerate(everyone)
            if each.values or each.error
        }
        return told[host] if host in told else make()


ALONE = Ranks()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told(Generic[T]):
    """One value that a rank sends to the others, or why there is none."""

    values: tuple[T, ...] = ()
    error: str = ""

    def value_or_raise(self, rank: int = 0) -> T:
        """The value; raises RankFailed with the error of ``rank`` where there is none."""
        if self.values:
            return self.values[0]
        raise RankFailed(f"rank {rank} stopped: {self.error}")


def _tried(make: Callable[[], T], *, here: bool) -> tuple[_Told[T], FituneError | None]:
    """Call ``make`` where ``here`` is true. Returns what the other ranks are told, its value or the text of its error,
    and the error itself, None without one."""
    if not here:
        return _Told(), None
    try:
        return _Told(values=(make(),)), None
    except FituneError as error:
        return _Told(error=error.message), error


_GONE = (
    "connection closed by peer",  # gloo
    "connection reset by peer",
    "broken pipe",
    "remote process exited",  # NCCL
    "socket timeout",
    "communicator was aborted",
    "timed out waiting",  # gloo, after WAIT
    "application timeout caused pair closure",
)


def is_peer_gone(error: BaseException) -> bool:
    """True if a collective failed because another rank is no longer there; torch tells by words only."""
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in words for sign in _GONE)


@contextmanager
def peers_needed() -> Iterator[None]:
    """Inside, a collective that another rank has left raises PeerGone."""
    try:
        yield
    except RuntimeError as error:
        if is_peer_gone(error):
            raise PeerGone("another rank is gone") from error
        raise


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is divided; any other tensor itself."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(local, "ds_tensor", local)  # of a weight that DeepSpeed divides


MEETING = timedelta(minutes=10)
"""Longest wait for all ranks to be there, as long as that of several nodes for each other (launch/place.py)."""


def launched_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """This process as its launcher describes it; ALONE without one. Raises HardwareError for numbers that cannot be."""
    rank, world, local = launched_as(environment)
    return Ranks(rank=rank, world=world, local=local)


def meeting_point(environment: Mapping[str, str]) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT where a launcher does not set them: the first node of a SLURM step, this machine for
    MPI; a port that differs between jobs.

    Raises HardwareError where MPI has several machines: it does not say which is the first.
    """
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return {}
    if "SLURM_STEP_NUM_TASKS" in environment:
        host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
        job = int(environment.get("SLURM_JOB_ID", "0")) + int(environment.get("SLURM_STEP_ID", "0"))
    else:
        world = environment.get("OMPI_COMM_WORLD_SIZE", "")
        if "MASTER_ADDR" not in environment and environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", world) != world:
            raise HardwareError(
                "mpirun started processes on several machines, and MASTER_ADDR does not say where rank 0 is",
                hint="mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500 …",
            )
        host, job = "127.0.0.1", os.getppid()  # mpirun starts all processes of one machine itself
    return {
        "MASTER_ADDR": environment.get("MASTER_ADDR", host),
        "MASTER_PORT": environment.get("MASTER_PORT", str(20_000 + job % 20_000)),
    }


def first_host(nodes: str) -> str:
    """The first machine of a SLURM node list: ``gpu[03-07,9],login`` begins with gpu03."""
    found = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    if found is None:
        raise HardwareError(
            f"the node list {nodes!r} names no machine", hint="set MASTER_ADDR and MASTER_PORT"
        )
    return found[1] + (found[2] or "")


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Inside, the processes of one launcher are a group: NCCL between GPUs, gloo between processors."""
    ranks = launched_ranks()
    if ranks.is_alone or dist.is_initialized():
        yield ranks
        return
    has_gpus = torch.cuda.is_available()
    if has_gpus:
        torch.cuda.set_device(ranks.local)
    _join(ranks, "cpu:gloo,cuda:nccl" if has_gpus else "gloo")
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _join(ranks: Ranks, backend: str) -> None:
    """Raises HardwareError when the ranks cannot meet."""
    os.environ.update(meeting_point(os.environ))
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    try:
        store, *_ = next(iter(dist.rendezvous("env://", ranks.rank, ranks.world, timeout=MEETING)))
        store.set_timeout(WAIT)
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=WAIT)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            raise HardwareError(
                f"the port of {where} is taken, so the {ranks.world} ranks cannot meet there",
                hint="another MASTER_PORT; or end the job that has it",
            ) from error
        raise HardwareError(
            f"rank {ranks.rank} of {ranks.world} did not meet the others at {where}: {first_line(error)}",
            hint="were all ranks started, and can every machine reach that address?",
        ) from error
