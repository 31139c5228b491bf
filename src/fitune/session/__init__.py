"""One use of the program from start to end: plan, checks, training, out of memory, report. It prints nothing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fitune.errors import ModelError
from fitune.spec.model.tracer import Tracer, trace_with

if TYPE_CHECKING:
    from fitune.spec.model.block_profile import TracedStep
    from fitune.spec.model.model_spec import ModelSpec
    from fitune.spec.model.tracing import Way


class _LateTracer:
    """Imports torch when something has to be traced, and not before."""

    def shapes(self, config: Mapping[str, Any], *, name: str, digest: str, dtype: str) -> "ModelSpec":
        """Shapes of the model's parameters, built from ``config`` without their weights."""
        return _tracer().shapes(config, name=name, digest=digest, dtype=dtype)

    def profile(self, way: "Way") -> "TracedStep":
        """Tensors that one step of ``way`` makes and keeps."""
        return _tracer().profile(way)


def _tracer() -> Tracer:
    try:
        from fitune.rehearse.profile import TransformersTracer
    except ModuleNotFoundError as error:
        if (error.name or "fitune").startswith("fitune"):
            raise
        raise ModelError(
            f"its architecture is traced once, which needs {error.name}, and that is not installed",
            hint="pip install 'fitune[train]'",
        ) from None
    return TransformersTracer()


trace_with(_LateTracer())
