from collections.abc import Callable
from typing import Any

import pytest

from fitune.spec.hardware import Gpu, Hardware
from fitune.spec.model import ModelSpec
from fitune.spec.plan import (
    AdamW,
    Batch,
    Full,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Single,
    Steps,
)
from fitune.spec.reports import Phase, StepReport


def _step(step: int, **values: Any) -> StepReport:
    defaults: dict[str, Any] = {
        "total_steps": 200, "epoch": step / 30, "loss": 2.314, "learning_rate": 1.9e-4, "grad_norm": 0.8204,
        "tokens": 1234, "supervised_tokens": 400, "step_seconds": 1.0, "data_seconds": 0.01,
        "tokens_per_second": 1234.0, "mfu": 0.0, "memory_bytes": {Phase.IDLE: 1024**2, Phase.BACKWARD: 412 * 1024**2},
    }  # fmt: skip
    return StepReport(step=step, **(defaults | values))


@pytest.fixture
def make_step() -> Callable[..., StepReport]:
    """A step report by its number; any field can be given."""
    return _step


@pytest.fixture
def plan() -> Plan:
    """A plan of the smallest kind; trackers only write it down."""
    model = ModelSpec(
        name="tiny", model_type="llama", num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4,
        num_kv_heads=2, head_dim=16, vocab_size=256, max_seq_len=128, tied_embeddings=True, mlp_type="gated",
        norm_type="rms", norms_per_block=2, linears=(),
    )  # fmt: skip
    cpu = Gpu(
        name="cpu", memory_bytes=2**30, bf16_flops=0, fp16_flops=0, fp32_flops=1e11, bandwidth=1e10,
        capability=(0, 0), link_bandwidth=0, host_bandwidth=0, source="a test",
    )  # fmt: skip
    return Plan(
        model=model,
        model_path="tiny",
        hardware=Hardware(gpu=cpu),
        tuning=Full(),
        precision=Precision.FP32,
        optimizer=AdamW(),
        sharding=Single(),
        recompute=Recompute(blocks=0),
        attention="sdpa",
        loss=PlainLoss(),
        batch=Batch(micro_batch_size=1, accumulation=1, seq_len=64, packing=False),
        schedule=Schedule(
            learning_rate=1e-3,
            kind="linear",
            warmup=Steps(count=2),
            duration=Steps(count=200),
            max_grad_norm=0.0,
        ),
        run=RunPlan(output_dir="out"),
    )
