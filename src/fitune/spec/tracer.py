"""Whoever traces models without formulas: registered here by those who may import torch, asked by ``tracing``."""

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # a model with formulas needs none of these
    from fitune.spec.model import ModelSpec
    from fitune.spec.traced_profile import TracedStep
    from fitune.spec.tracing import Way


class Tracer(Protocol):
    """Builds models without memory; lives where torch may be imported."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> "ModelSpec": ...

    def profile(self, way: "Way") -> "TracedStep": ...


_tracer: ContextVar[Tracer | None] = ContextVar("_tracer", default=None)


def trace_with(tracer: Tracer | None) -> None:
    """From now on ``tracer`` is asked for what no cache has; None: nobody."""
    _tracer.set(tracer)


def current_tracer() -> Tracer | None:
    """The tracer to ask; None where nobody traces."""
    return _tracer.get()
