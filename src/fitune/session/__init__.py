"""One use of the program from start to end: plan, checks, training, out of memory, report. It prints nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitune.spec.model.tracer import trace_with

if TYPE_CHECKING:
    from fitune.spec.model.model_spec import ModelSpec
    from fitune.spec.model.traced_profile import TracedStep
    from fitune.spec.model.tracing import Way


class _LateTracer:
    """Imports torch when something has to be traced, and not before."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> "ModelSpec":
        from fitune.rehearse.profile import TransformersTracer

        return TransformersTracer().shapes(config, name=name, digest=digest, dtype=dtype)

    def profile(self, way: "Way") -> "TracedStep":
        from fitune.rehearse.profile import TransformersTracer

        return TransformersTracer().profile(way)


trace_with(_LateTracer())
