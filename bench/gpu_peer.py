"""The other side of gpu_speed.py: transformers' model and loss, PEFT's adapters, bitsandbytes' linears and optimizer.

What a plain training script does with the very same random model, rows and number of trained weights: SDPA attention,
PEFT's default adapters (fp32 beside a bf16 base), fused AdamW, clipping at norm 1. Recompute is none or all: none is
tried first.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from gpu_cases import Case, Shape, config_of, full_rows, random_model
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from fitune.values.plan import AdamW8bit, Lora, Nf4, Plan

NONE = "no peer: LOMO is no part of transformers, PEFT or bitsandbytes"


@dataclass(slots=True, kw_only=True)
class Peer:
    """A model, its optimizer and one micro-batch [rows, tokens]."""

    model: Any
    optimizer: torch.optim.Optimizer
    ids_BT: Tensor

    def step(self) -> float:
        loss = self.model(input_ids=self.ids_BT, labels=self.ids_BT, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.trained(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def resident(self) -> Iterator[Tensor]:
        """What stays between two steps."""
        states = (v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
        yield from chain(self.model.parameters(), self.model.buffers(), states)


def peer_of(case: Case, shape: Shape, plan: Plan, device: torch.device, *, recompute: bool) -> Peer:
    config = config_of(shape)
    config._attn_implementation = "sdpa"
    model = random_model(plan, config, device)
    tuning = plan.tuning
    if isinstance(tuning, Lora):
        if isinstance(tuning.base, Nf4):
            pack_by_bitsandbytes(model, tuning.base)
        lora = LoraConfig(
            r=tuning.rank, lora_alpha=tuning.alpha, target_modules=list(tuning.targets), task_type="CAUSAL_LM",
            use_dora=tuning.dora,
        )  # fmt: skip
        model = get_peft_model(model, lora)
    model.to(device).train()
    if recompute:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows = full_rows(plan)
    ids_BT = rows.input_ids_T.view(plan.batch.micro_batch_size, plan.batch.seq_len).to(device)
    return Peer(model=model, optimizer=_optimizer(plan, model), ids_BT=ids_BT)


def _optimizer(plan: Plan, model: Any) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    rate = plan.schedule.learning_rate
    if isinstance(plan.optimizer, AdamW8bit):
        from bitsandbytes.optim import AdamW8bit as TheirAdamW8bit

        theirs: torch.optim.Optimizer = TheirAdamW8bit(trained, lr=rate, weight_decay=0.0)
        return theirs
    return torch.optim.AdamW(trained, lr=rate, weight_decay=0.0, fused=True)


def pack_by_bitsandbytes(model: PreTrainedModel, base: Nf4) -> None:
    """Every linear of the blocks becomes their Linear4bit; packed when it is moved to the device."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                device, dtype = child.weight.device, child.weight.dtype
                packed = Linear4bit(
                    child.in_features, child.out_features, bias=child.bias is not None, quant_type="nf4",
                    compute_dtype=dtype, compress_statistics=base.double_quant, device="meta",
                )  # fmt: skip
                packed.weight = Params4bit(
                    child.weight.data.cpu(), requires_grad=False, quant_type="nf4",
                    compress_statistics=base.double_quant, module=packed,
                )  # fmt: skip
                setattr(parent, name, packed.to(device))
    model.is_loaded_in_4bit = True
