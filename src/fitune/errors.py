"""One tree of errors meant for people.

Every message names the setting, its value and the arithmetic; ``hint`` is the next thing to try.
The command line prints them without a traceback and exits with ``exit_code``: 2 for a request that
was refused before any work, 1 for work that failed on the way, 3 for memory that ran out, 4 on a
rank whose peer failed.
"""

import errno
import importlib
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from fitune.credentials import without_credentials
from fitune.units import format_bytes


class FituneError(Exception):
    """Error whose message and hint a user can act on."""

    exit_code = 2

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        message = without_credentials(message)
        super().__init__(message)
        self.message = message
        self.hint = None if hint is None else without_credentials(hint)

    @property
    def kind(self) -> str:
        """Name of the error's class, as JSON output and a rank's status have it."""
        return type(self).__name__

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  try: {self.hint}"


class RecipeError(FituneError):
    """A setting is unknown, contradictory or out of range."""


class ModelError(FituneError):
    """A model cannot be described, found or built."""


class HardwareError(FituneError):
    """A device is unknown or cannot do what was asked."""


class NothingFits(FituneError):
    """No plan that keeps the user's choices fits in memory.

    ``facts``: the numbers behind the message, where they are known: what, and how the smallest plan trains it;
    needed_bytes and usable_bytes of a device; where it is short; changes that were planned and fit, each with change,
    settings, peak_bytes and tokens_per_second.
    """

    def __init__(self, message: str, *, hint: str | None = None, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message, hint=hint)
        self.facts = facts or {}


class DataError(FituneError):
    """A file, a row or a template cannot be used."""


class CheckpointError(FituneError):
    """A checkpoint or an adapter is damaged, foreign or does not match."""


class RunDirectoryError(FituneError):
    """The run directory cannot be used."""


class StoreError(FituneError):
    """A store behind a URL cannot be written to, or does not hold what it should."""


class RankFailed(FituneError):
    """Another process of the same job failed, and this one cannot go on without it."""

    exit_code = 4


class PeerGone(RankFailed):
    """Another process of the same job ended while this one waited for it."""

    is_named = False
    """True once the message names that process and its cause."""


class NodeFailed(FituneError):
    """The launcher of another node of the same job failed, and this one cannot go on without it."""

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = 1 if exit_code is None else exit_code


class MissingExtra(FituneError):
    """An optional library is not installed; the hint is the pip command."""

    def __init__(self, what: str, *, extra: str) -> None:
        self.what = what
        super().__init__(f"{what} needs an optional part of fitune", hint=f"pip install 'fitune[{extra}]'")


def require_library(module: str, *, needed_by: str, extra: str) -> None:
    """Load an optional library whose operations are called by name. Raises MissingExtra."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(needed_by, extra=extra) from error


def installed_versions(libraries: Iterable[str]) -> dict[str, str]:
    """The version of Python, and of each of ``libraries`` that is installed by that name: fitune may run from its
    source, and a module may be another package's."""
    from importlib.metadata import PackageNotFoundError, version  # takes a while, and few need it

    found = {"python": platform.python_version()}
    for name in libraries:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


@cache
def torch_release() -> tuple[int, ...]:
    """(2, 13) of torch 2.13.0; where none is installed, as for a plan that runs elsewhere, later than any."""
    torch = installed_versions(("torch",)).get("torch", "99.0")
    return tuple(map(int, torch.split(".")[:2]))


TRAINING = ("torch", "transformers", "peft", "safetensors", "datasets", "numpy", "pyarrow", "tokenizers")
"""Libraries of the extra ``train``: plans, recipes, manifests and fleets do without."""


@contextmanager
def training_libraries() -> Iterator[None]:
    """Inside, a library of training that is not installed is raised as an error with the pip command."""
    try:
        yield
    except ModuleNotFoundError as error:  # importlib.metadata's for a package, too
        library = (error.name or "").partition(".")[0]
        if library not in TRAINING:
            raise
        raise FituneError(
            f"{library} is not installed: training, scoring and what reads their data need it",
            hint="pip install 'fitune[train]'; planning, converting, manifests and fleets work without",
        ) from None


class TrainingFailed(FituneError):
    """Training had to stop: a loss that is not finite, memory that ran out."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Facts known when an allocation failed; 0 where nothing was."""

    doing: str
    """As in ``Failure``: a phase of the step, or what was done between two."""
    step: int = 0
    """Counted from 1; 0 before the first."""
    kind: Literal["live tensors", "cuda allocated", "process resident"] = "process resident"
    in_use_bytes: int = 0
    asked_bytes: int = 0
    """Bytes of the allocation that failed."""
    capacity_bytes: int = 0
    """For tensors of this process on the device: those in use and what was free beside them."""


class OutOfMemory(TrainingFailed):
    """The device, or the host, had no room for the next allocation."""

    exit_code = 3

    def __init__(self, message: str, *, hint: str | None = None, shortage: Shortage | None = None) -> None:
        super().__init__(message, hint=hint)
        self.shortage = shortage


class NoPinnedMemory(TrainingFailed):
    """The host could not lock the memory that a plan keeps there. Smaller micro-batches would not help, so this is no
    OutOfMemory."""

    exit_code = OutOfMemory.exit_code

    def __init__(self, asked_bytes: int, *, pinned_bytes: int) -> None:
        """``pinned_bytes``: what this process holds already."""
        import psutil

        free = format_bytes(psutil.virtual_memory().available)
        super().__init__(
            f"the host would not pin {format_bytes(asked_bytes)} of memory for copies to and from the GPU: this "
            f"process has pinned {format_bytes(pinned_bytes)}, and {free} are free",
            hint="end other programs, give the container or job more memory (WSL pins at most half of the host's), or "
            "keep more on the GPU (offload_activations, offload_optimizer, offload_parameters; async_save: false)",
        )


_FAILING = frozenset(
    getattr(errno, name)
    for name in (
        "EIO",
        "ENOSPC",
        "EDQUOT",
        "EMFILE",
        "ENFILE",
        "ESTALE",
        "ETIMEDOUT",
        "EREMOTEIO",
        "ENOLCK",
        "EBADF",
    )
    if hasattr(errno, name)
)
"""Errors of a disk or a system that fails; the others are about what was asked for: a name, a right."""


def exit_code_of(error: FituneError) -> int:
    """The error's own, and 1 instead of 2 where a failing disk or system is behind it: that is no refusal."""
    causes: list[BaseException] = [error]
    for cause in causes:
        causes += [
            one for one in (cause.__cause__, cause.__context__) if one is not None and one not in causes
        ]
    failing = any(isinstance(cause, OSError) and cause.errno in _FAILING for cause in causes)
    return (
        TrainingFailed.exit_code if failing and error.exit_code == FituneError.exit_code else error.exit_code
    )


@contextmanager
def work_under_way() -> Iterator[None]:
    """Inside, nothing is a refusal any more: every FituneError that was one exits with 1."""
    try:
        yield
    except FituneError as error:
        if error.exit_code == FituneError.exit_code:
            error.exit_code = TrainingFailed.exit_code
        raise


class ScoringFailed(FituneError):
    """Rows could not be answered or graded."""

    exit_code = 1


class SystemFailed(FituneError):
    """The operating system, or the device's allocator, refused something in the middle of the work."""

    exit_code = 1

    def __init__(self, error: OSError | MemoryError | RuntimeError) -> None:
        if is_out_of_memory(error):
            first_line = str(error).partition("\n")[0]
            super().__init__(
                f"out of memory: {first_line}".rstrip(": "), hint="end other programs, or take less at once"
            )
            self.exit_code = OutOfMemory.exit_code
            return
        assert isinstance(error, OSError)  # any other RuntimeError is the program's own
        where = f"{error.filename}: " if error.filename is not None else ""
        super().__init__(
            f"{where}{error.strerror or error}", hint="check the path, its rights and the free disk space"
        )


@contextmanager
def system_failures() -> Iterator[None]:
    """Inside, what the system refuses (a disk that fills up, a device that is full) is raised as SystemFailed."""
    try:
        yield
    except BrokenPipeError:  # nobody reads what is printed any more: that is no failure of the work
        raise
    except (OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise SystemFailed(error) from error


def is_failure(error: BaseException) -> bool:
    """True if a library failed on its input; False for lack of memory, Ctrl-C and exits. A panic of Rust is no
    Exception, and its type cannot be imported."""
    is_raised = isinstance(error, Exception) or type(error).__name__ == "PanicException"
    return is_raised and not is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an allocation failed. torch's own type for it is a RuntimeError, and only CUDA's allocator raises that
    one; the others are told by their words."""
    words = str(error).lower()
    is_system = isinstance(error, RuntimeError | OSError)
    return isinstance(error, MemoryError) or (is_system and any(sign in words for sign in _NO_MEMORY))


_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on a CPU
    "cannot allocate memory",  # the operating system (ENOMEM)
    "not enough memory",
    "unable to mmap",  # torch and safetensors, where the address space is full
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "negative dimension",  # transformers makes a tensor of the device's free memory less 1.2 GiB before it loads
)


def first_line(error: BaseException) -> str:
    """The first line of what ``error`` says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def did_you_mean(word: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The closest known word as a hint, or None when nothing is close."""
    import difflib

    close = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.6)
    if not close:
        return None
    original = next(name for name in known if name.lower() == close[0])
    return f"did you mean {original!r}?"


def joined_hints(*hints: str | None) -> str:
    """Join the hints that are not empty into one line: ``did you mean 'h100'? --gpu cpu; or none``."""
    return "; ".join(filter(None, hints)).replace("?; ", "? ")
