"""TRL's SFTTrainer on the rows, in the order and precision of fitune's plan: the other side of vs_trl.py."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from fitune.measure.memory import LiveTensors
from fitune.values.plan import Dense, Lora, Nf4, Plan


class InOrder(SFTTrainer):
    """Rows as they come: the order is fitune's."""

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(train_dataset or self.train_dataset)


class Watch(TrainerCallback):
    """Ends of steps, and the live tensors of one step."""

    def __init__(self, *, measured_step: int) -> None:
        self.measured_step = measured_step
        self.ends: list[tuple[float, float]] = []
        self.tracker: LiveTensors | None = None
        self.peak = 0

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if state.global_step == self.measured_step - 1:
            self.tracker = LiveTensors([*model.parameters(), *model.buffers(), *_kept(model, optimizer)])
            self.tracker.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ends.append((time.perf_counter(), time.process_time()))
        if self.tracker is not None:
            self.tracker.__exit__(None, None, None)
            self.peak = max(self.tracker.peaks.values())
            self.tracker = None


def _kept(model: Any, optimizer: Any) -> list[Tensor]:
    """Optimizer states, and the scales that bitsandbytes keeps beside its weights and not as buffers."""
    states = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    scales: list[Tensor] = []
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        for level in (state, getattr(state, "state2", None)):
            if level is not None:
                scales += [level.absmax, level.code]
    return states + scales


def train_by_trl(
    plan: Plan, tokenizer: Any, examples: Sequence[Any], folder: Path, *, steps: int, measured_step: int
) -> tuple[Watch, list[float]]:
    """``examples`` are (ids, supervised) of every row in order; returns ends and peak, and the loss of every step."""
    columns = {
        "input_ids": [ids.tolist() for ids, _ in examples],
        "completion_mask": [supervised.astype(int).tolist() for _, supervised in examples],
    }
    watch = Watch(measured_step=measured_step)
    model = build_model(plan)
    adapters = {name: p.data.clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer = InOrder(
        model=model,
        args=settings_of(plan, folder, steps),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    _give_back(trainer.model, adapters)
    trainer.train()
    return watch, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _give_back(model: Any, adapters: Mapping[str, Tensor]) -> None:
    """TRL casts the adapters of a packed base to bf16; fitune's plan says fp32, so they are what they were."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != adapters[name].dtype:
            parameter.data = adapters[name]


def build_model(plan: Plan) -> Any:
    tuning = plan.tuning
    base = tuning.base if isinstance(tuning, Lora) else Dense()
    how = {"quantization_config": _nf4(base)} if isinstance(base, Nf4) else {}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32, **how)
    if not isinstance(tuning, Lora):
        return model
    set_seed(plan.run.seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=tuning.rank, lora_alpha=tuning.alpha, lora_dropout=0.0, target_modules=list(tuning.targets),
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip


def _nf4(base: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=base.double_quant,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def settings_of(
    plan: Plan, folder: Path, steps: int, *, use_cpu: bool = True, deepspeed: dict[str, Any] | None = None
) -> SFTConfig:
    return SFTConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=plan.batch.micro_batch_size,
        max_length=plan.batch.seq_len, max_steps=steps, learning_rate=plan.schedule.learning_rate,
        lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0, bf16=False, weight_decay=0.0,
        gradient_checkpointing=False, completion_only_loss=True, optim="adamw_torch_fused", logging_steps=1,
        save_strategy="no", report_to="none", use_cpu=use_cpu, disable_tqdm=True, seed=plan.run.seed,
        deepspeed=deepspeed,
    )  # fmt: skip
