"""Every way that one device trains by, as plans of the small Llama of cpu_memory.py: what cpu_methods.py measures."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpu_memory import LAYERS, plan_of

from fitune.values.model.model_spec import ModelSpec
from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Offload,
    Plan,
    Sgd,
)

Setting = Mapping[str, Any]
FP32_KEPT: Setting = {"precision": "fp32", "recompute": 0, "chunked": True}
BF16_HALF: Setting = {"precision": "bf16", "recompute": LAYERS // 2, "chunked": False}
BF16_ALL: Setting = {"precision": "bf16", "recompute": LAYERS, "chunked": True}
MASTER_HALF: Setting = {"precision": "bf16-master", "recompute": LAYERS // 2, "chunked": True}
FP16_ALL: Setting = {"precision": "fp16", "recompute": LAYERS, "chunked": True}
PLAIN: tuple[Setting, ...] = (FP32_KEPT, BF16_HALF, BF16_ALL)
EVERY: tuple[Setting, ...] = (*PLAIN, MASTER_HALF, FP16_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One plan and where its row goes."""

    method: str
    setting: Setting
    plan: Plan

    @property
    def words(self) -> str:
        loss = "chunked" if self.setting["chunked"] else "plain"
        return f"{self.setting['precision']}, {self.setting['recompute']} of {LAYERS} recomputed, {loss} loss"


def _full(**choice: Any) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, **choice)


def _lora(*, offload: Offload | None = None, **choice: Any) -> Callable[[Plan], Plan]:
    def changed(plan: Plan) -> Plan:
        assert isinstance(plan.tuning, Lora)
        return replace(plan, tuning=replace(plan.tuning, **choice), offload=offload or Offload())

    return changed


def _lomo(clip: ClipByValue | ClipByNorm, *, adaptive: bool = False) -> Callable[[Plan], Plan]:
    return _full(tuning=Lomo(adaptive=adaptive, clip=clip), optimizer=Sgd())


def _in_backward(clip: ClipByValue | ClipByNorm, **choice: Any) -> Callable[[Plan], Plan]:
    return _full(tuning=Full(update=InBackward(clip=clip)), **choice)


BY_VALUE, BY_NORM = ClipByValue(value=1.0), ClipByNorm(max_norm=1.0)
AWAY = {
    "activations": Offload(activations="cpu"),
    "optimizer": Offload(optimizer="cpu"),
    "weights": Offload(parameters="cpu"),
    "weights and optimizer": Offload(parameters="cpu", optimizer="cpu"),
    "all three": Offload(parameters="cpu", optimizer="cpu", activations="cpu"),
}
METHODS: dict[str, tuple[str, Callable[[Plan], Plan], tuple[Setting, ...]]] = {
    "full, AdamW": ("full", _full(), EVERY),
    "full, 8-bit AdamW": ("full", _full(optimizer=AdamW8bit()), PLAIN),
    "full, AdamW in backward, clipped by value": ("full", _in_backward(BY_VALUE), (*PLAIN, MASTER_HALF)),
    "full, AdamW in backward, clipped by norm": ("full", _in_backward(BY_NORM), PLAIN),
    "full, 8-bit AdamW in backward": ("full", _in_backward(BY_VALUE, optimizer=AdamW8bit()), PLAIN),
    "full, momentum SGD": ("full", _full(optimizer=Sgd(momentum=0.9)), PLAIN),
    "full, SGD": ("full", _full(optimizer=Sgd()), PLAIN),
    "LOMO, clipped by value": ("full", _lomo(BY_VALUE), (*PLAIN, FP16_ALL)),
    "LOMO, clipped by norm": ("full", _lomo(BY_NORM), (*PLAIN, FP16_ALL)),
    "AdaLomo, clipped by value": ("full", _lomo(BY_VALUE, adaptive=True), PLAIN),
    "AdaLomo, clipped by norm": ("full", _lomo(BY_NORM, adaptive=True), PLAIN),
    "LoRA": ("lora", _lora(), EVERY),
    "LoRA in the last three blocks": ("lora", _lora(layers=tuple(range(LAYERS // 2, LAYERS))), PLAIN),
    "DoRA": ("lora", _lora(dora=True), PLAIN),
    "QLoRA, NF4": ("lora", _lora(base=Nf4()), EVERY),
    "QLoRA, NF4, single scales": ("lora", _lora(base=Nf4(double_quant=False)), PLAIN),
    "DoRA on NF4": ("lora", _lora(dora=True, base=Nf4()), PLAIN),
    "LoRA on HQQ 8 bit": ("lora", _lora(base=Hqq(bits=8)), PLAIN),
    "LoRA on HQQ 4 bit": ("lora", _lora(base=Hqq(bits=4)), PLAIN),
    "LoRA on HQQ 3 bit": ("lora", _lora(base=Hqq(bits=3)), PLAIN),
    "LoRA on HQQ 2 bit": ("lora", _lora(base=Hqq(bits=2)), PLAIN),
    "full, activations on the host": ("full", _full(offload=AWAY["activations"]), PLAIN),
    "full, optimizer on the host": ("full", _full(offload=AWAY["optimizer"]), EVERY),
    "full, weights and optimizer on the host": ("full", _full(offload=AWAY["weights and optimizer"]), PLAIN),
    "full, all three on the host": ("full", _full(offload=AWAY["all three"]), PLAIN),
    "LoRA, activations on the host": ("lora", _lora(offload=AWAY["activations"]), PLAIN),
    "LoRA, weights on the host": ("lora", _lora(offload=AWAY["weights"]), PLAIN),
    "QLoRA, weights on the host": ("lora", _lora(base=Nf4(), offload=AWAY["weights"]), PLAIN),
}
"""What each method trains by in cpu_memory.py's words, what it changes in that plan, and by which settings."""


def cases(model: ModelSpec) -> Iterator[Case]:
    for name, (tuning, change, settings) in METHODS.items():
        for setting in settings:
            plan = change(plan_of(model, tuning=tuning, **setting))
            yield Case(method=name, setting=setting, plan=plan)
