"""Registry of the tracer, set by those who may import torch, and which traces count."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a model with formulas needs none of these
    from fitune.values.model.block_profile import TracedStep
    from fitune.values.model.model_spec import ModelSpec
    from fitune.values.model.tracing import Way


class Tracer(Protocol):
    """Builds models without memory; lives where torch may be imported."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> "ModelSpec":
        """The shapes of the model that ``config`` describes. Raises ModelError where it cannot be built."""
        ...

    def profile(self, way: "Way") -> "TracedStep":
        """Bytes of its blocks, trained this way. Raises ModelError for blocks that cannot be traced."""
        ...


OpenTracer = Callable[[], Tracer]
"""Imports torch and returns the tracer: called when something has to be traced, and not before. Raises ModelError where
torch is not installed."""
_open_tracer: OpenTracer | None = None


def trace_with(open_tracer: OpenTracer | None) -> None:
    """Has its tracer asked, from now on and in all threads, for what no cache has; None: nobody."""
    global _open_tracer
    _open_tracer = open_tracer


def current_tracer() -> OpenTracer | None:
    """The function that opens the tracer to ask; None where nobody traces."""
    return _open_tracer


_installed_alone: ContextVar[bool] = ContextVar("_installed_alone", default=False)


@contextmanager
def by_installed_libraries() -> Iterator[None]:
    """Inside, no profile of other versions is taken: what trains or rehearses runs the installed ones."""
    before = _installed_alone.set(True)
    try:
        yield
    finally:
        _installed_alone.reset(before)


def installed_alone() -> bool:
    """True inside ``by_installed_libraries``."""
    return _installed_alone.get()
