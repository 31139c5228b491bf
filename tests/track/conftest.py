import pytest

from fitune.values.predictions import Phase
from fitune.values.reports import StepReport
from plans import plan_for, small_llama


def _step(step, **values):
    defaults = {
        "total_steps": 200, "epoch": step / 30, "loss": 2.314, "learning_rate": 1.9e-4, "grad_norm": 0.8204,
        "tokens": 1234, "supervised_tokens": 400, "step_seconds": 1.0, "data_seconds": 0.01,
        "tokens_per_second": 1234.0, "mfu": 0.0, "memory_bytes": {Phase.IDLE: 1024**2, Phase.BACKWARD: 412 * 1024**2},
    }  # fmt: skip
    return StepReport(step=step, **(defaults | values))


@pytest.fixture
def make_step():
    """A step report by its number; any field can be given."""
    return _step


@pytest.fixture
def plan():
    """A plan of the smallest kind; trackers only write it down."""
    return plan_for(small_llama())
