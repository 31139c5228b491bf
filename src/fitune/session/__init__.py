"""One use of the program from start to end: plan, checks, training, out of memory, report. It prints nothing."""

from fitune.errors import ModelError
from fitune.values.model.tracer import Tracer, trace_with


def _open_tracer() -> Tracer:
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


trace_with(_open_tracer)
