"""Whoever traces models without formulas, registered by those who may import torch, and which traces count."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a model with formulas needs none of these
    from fitune.spec.model.block_profile import TracedStep
    from fitune.spec.model.model_spec import ModelSpec
    from fitune.spec.model.tracing import Way


class Tracer(Protocol):
    """Builds models without memory; lives where torch may be imported."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> "ModelSpec":
        """The shapes of the model that ``config`` describes. Raises ModelError where it cannot be built."""
        ...

    def profile(self, way: "Way") -> "TracedStep":
        """Bytes of its blocks, trained this way. Raises ModelError for blocks that cannot be traced."""
        ...


_tracer: ContextVar[Tracer | None] = ContextVar("_tracer", default=None)


def trace_with(tracer: Tracer | None) -> None:
    """Has ``tracer`` asked, from now on, for what no cache has; None: nobody."""
    _tracer.set(tracer)


def current_tracer() -> Tracer | None:
    """The tracer to ask; None where nobody traces."""
    return _tracer.get()


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
