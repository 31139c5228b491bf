"""TRL on several gloo processes, sharded by accelerate's FSDP2 or by DeepSpeed: the other side of vs_trl_ranks.py."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import Tensor
from trl_side import InOrder, Watch, build_model, settings_of

from fitune.measure.memory import LiveTensors
from fitune.values.plan import Plan

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}  # fmt: skip
# The sizes of the buckets are left to transformers: DeepSpeed's own default is a buffer of 500 million numbers.
ZERO_3 = {
    "zero_optimization": {
        "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
}  # fmt: skip


class WatchAll(Watch):
    """Counts every tensor that is alive when the step begins: shards and states are held in many places."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.measured_step - 1:
            gc.collect()
            alive = [each for each in gc.get_objects() if isinstance(each, Tensor)]
            self.tracker = LiveTensors(alive)
            self.tracker.__enter__()


def train_on_ranks(
    plan: Plan,
    tokenizer: Any,
    examples: Sequence[Any],
    folder: Path,
    *,
    backend: str,
    steps: int,
    measured_step: int,
) -> tuple[Watch, list[float]]:
    """``examples`` are (ids, supervised) of every row, the ranks' batches in turn; ends and peak of this rank, losses
    of every step."""
    _take_gloo_for_a_gpu()
    if backend == "fsdp":
        os.environ.update(FSDP2)
    rank = os.environ["RANK"]
    # before the model: transformers divides it as it is read under ZeRO-3
    arguments = settings_of(
        plan,
        folder / f"rank{rank}",
        steps,
        use_cpu=False,
        deepspeed=ZERO_3 if backend == "deepspeed" else None,
    )
    watch = WatchAll(measured_step=measured_step)
    trainer = InOrder(
        model=build_model(plan),
        args=arguments,
        train_dataset=Dataset.from_dict(
            {
                "input_ids": [ids.tolist() for ids, _ in examples],
                "completion_mask": [supervised.astype(int).tolist() for _, supervised in examples],
            }
        ),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return watch, losses


def _take_gloo_for_a_gpu() -> None:
    """accelerate shards over processes with a GPU each; this process has a core."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    PartialState._prepare_backend = lambda *words, **named: ("gloo", DistributedType.MULTI_GPU)
