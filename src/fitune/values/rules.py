"""The rules: which choices of a Plan go together, and on which hardware. No other file knows such a rule.

The planner proposes only plans that keep all of them, recipes are refused by them, training and rehearsal assert them.
A rule is data: a predicate on a Plan, the sentence for people, what to do instead, and the settings of a recipe that
may have asked for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fitune.errors import FituneError, HardwareError, RecipeError
from fitune.values.model.architectures import SHARED_LINEARS, takes_adapters_on, trains_like_transformers
from fitune.values.model.traits import (
    capability_words,
    flash_refused_by_device,
    flash_refused_by_model,
    liger_refused_by_device,
    liger_refused_by_model,
)
from fitune.values.plan import (
    AdamW8bit,
    Backend,
    ClipByNorm,
    Ddp,
    Full,
    Lomo,
    Lora,
    Offload,
    Plan,
    Precision,
    Quantiser,
    Sgd,
    Single,
    Tuning,
    Zero,
    base_of,
    updates_in_backward,
)
from fitune.values.quantisers import is_packed

Purpose = Literal["plan", "train", "rehearse"]
"""Use that a plan is wanted for; ``plan``: to be proposed. Training and rehearsal also run what no planner proposes."""

EVERYWHERE: tuple[Purpose, ...] = ("plan", "train", "rehearse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """``broken`` is true for a plan that cannot be; ``reason`` says why, ``instead`` what to do."""

    broken: Callable[[Plan], object]
    reason: str | Callable[[Plan], str] | None = None
    """None where ``broken`` returns it."""
    instead: str
    settings: tuple[str, ...]
    """Keys of a recipe that ask for what is forbidden."""
    binds: tuple[Purpose, ...] = EVERYWHERE
    error: type[FituneError] = RecipeError

    def why(self, plan: Plan) -> str:
        """The reason, with the plan's values."""
        return self.reason if isinstance(self.reason, str) else str((self.reason or self.broken)(plan))


def broken_rules(plan: Plan, *purposes: Purpose) -> tuple[Rule, ...]:
    """Every rule that ``plan`` breaks, of those that bind any of the purposes; empty when it can be done."""
    return tuple(rule for rule in _binding(purposes) if rule.broken(plan))


def keeps_rules(plan: Plan, *purposes: Purpose) -> bool:
    """True if the plan breaks no rule of these purposes."""
    return not any(rule.broken(plan) for rule in _binding(purposes))


@cache
def _binding(purposes: tuple[Purpose, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in RULES if any(purpose in rule.binds for purpose in purposes))


def require_rules(plan: Plan, *purposes: Purpose) -> None:
    """Raises RecipeError or HardwareError naming every rule that the plan breaks."""
    broken = broken_rules(plan, *purposes)
    if broken:
        raise broken[0].error(
            "; ".join(rule.why(plan) for rule in broken),
            hint="; ".join(dict.fromkeys(r.instead for r in broken)),
        )


def adds_gradients_up(tuning: Tuning) -> bool:
    """True if gradients of several micro-batches can be accumulated: not where each is used as soon as it exists."""
    return not updates_in_backward(tuning)


def _who(plan: Plan) -> str:
    """Name of the method that uses a gradient as soon as it exists."""
    match plan.tuning:
        case Lomo(adaptive=adaptive):
            return "AdaLomo" if adaptive else "LOMO"
    return "optimizer_in_backward"


def _in_backward(plan: Plan) -> bool:
    return updates_in_backward(plan.tuning)


def _is_lomo(plan: Plan) -> bool:
    return isinstance(plan.tuning, Lomo)


def _is_single(plan: Plan) -> bool:
    return isinstance(plan.sharding, Single)


def _steps_in_backward(plan: Plan) -> bool:
    """Another optimizer than LOMO's own."""
    return isinstance(plan.tuning, Full) and _in_backward(plan)


def _on(plan: Plan, backend: Backend, *stages: int) -> bool:
    way = plan.sharding
    return isinstance(way, Zero) and way.backend == backend and way.stage in (stages or (1, 2, 3))


def _states_away(plan: Plan) -> bool:
    return plan.offload.parameters != "device" or plan.offload.optimizer != "device"


_DEPTH = {"device": 0, "cpu": 1, "nvme": 2}
_IN_BACKWARD = ("tuning", "optimizer_in_backward")
_STATES = ("offload_parameters", "offload_optimizer")
_PLACES = (*_STATES, "offload_activations")
_DEVICES = ("zero", "backend", "hybrid_sharding", "gpus", "nodes")


METHODS = (
    Rule(
        broken=lambda plan: _is_lomo(plan) and plan.precision is Precision.BF16_MASTER,
        reason=lambda plan: f"{_who(plan)} updates the weights themselves and keeps no fp32 masters",
        instead="precision: bf16",
        settings=("tuning", "precision"),
    ),
    Rule(
        broken=lambda plan: (
            _is_lomo(plan) and (not isinstance(plan.optimizer, Sgd) or plan.optimizer.momentum > 0)
        ),
        reason=lambda plan: f"{_who(plan)} is an optimizer itself and takes no other",
        instead="leave optimizer out, or tuning: full",
        settings=("tuning", "optimizer", "momentum"),
    ),
    Rule(
        broken=lambda plan: (
            isinstance(plan.tuning, Lomo)
            and isinstance(plan.tuning.clip, ClipByNorm)
            and plan.tuning.clip.max_norm == 0
        ),
        reason=lambda plan: f"{_who(plan)} needs clipped gradients, and a norm of 0 turns clipping off",
        instead="max_grad_value: 1.0, which costs no second backward, or max_grad_norm: 1.0",
        settings=("tuning", "max_grad_norm"),
        binds=("plan",),
    ),
    Rule(
        broken=lambda plan: not adds_gradients_up(plan.tuning) and plan.batch.accumulation > 1,
        reason=lambda plan: (
            f"{_who(plan)} uses every gradient as soon as it exists, so nothing can be added up over "
            f"{plan.batch.accumulation} micro-batches"
        ),
        instead="gradient_accumulation_steps: 1 with a larger micro_batch_size or a smaller global_batch_size, or "
        "tuning: full without optimizer_in_backward",
        settings=(*_IN_BACKWARD, "gradient_accumulation_steps", "global_batch_size", "micro_batch_size"),
    ),
    Rule(
        broken=lambda plan: isinstance(plan.optimizer, AdamW8bit) and plan.hardware.gpu.is_cpu,
        reason="8-bit AdamW has its kernels for GPUs: on a CPU, bitsandbytes steps at a fortieth of AdamW's speed",
        instead="optimizer: adamw",
        settings=("optimizer",),
        binds=("plan",),
        error=HardwareError,
    ),
    Rule(
        broken=lambda plan: (
            isinstance(plan.optimizer, AdamW8bit)
            and (_on(plan, "deepspeed") or plan.offload.optimizer != "device")
        ),
        reason="8-bit AdamW steps on the device; DeepSpeed and an offloaded optimizer keep fp32 states",
        instead="optimizer: adamw, or neither backend: deepspeed nor an offloaded optimizer",
        settings=("optimizer", "backend", "offload_optimizer"),
    ),
    Rule(
        broken=lambda plan: isinstance(plan.tuning, Lora) == (plan.run.export == "full"),
        reason=lambda plan: (
            "export: full is for tuning: full; LoRA trains an adapter"
            if isinstance(plan.tuning, Lora)
            else f"export: {plan.run.export} needs an adapter, and this method trains none"
        ),
        instead="leave export out, or tuning: full with export: full, tuning: lora with export: adapter or merged",
        settings=("tuning", "export", "optimizer_in_backward", "max_grad_value"),
        binds=("plan",),
    ),
)

MODEL = (
    Rule(
        broken=lambda plan: plan.batch.seq_len > plan.model.max_seq_len,
        reason=lambda plan: (
            f"seq_len = {plan.batch.seq_len} is {plan.batch.seq_len - plan.model.max_seq_len} more than the "
            f"{plan.model.max_seq_len} positions that {plan.model.name} was made for"
        ),
        instead="seq_len at most that, or a model made for longer rows",
        settings=("seq_len",),
        binds=("plan",),
    ),
    Rule(
        broken=lambda plan: plan.recompute.blocks > plan.model.num_layers,
        reason=lambda plan: (
            f"gradient_checkpointing = {plan.recompute.blocks} blocks, and {plan.model.name} has "
            f"{plan.model.num_layers}"
        ),
        instead="gradient_checkpointing: true, for all of them",
        settings=("gradient_checkpointing",),
        binds=("plan",),
    ),
    Rule(
        broken=lambda plan: _uneven_group(plan),
        instead="quantization_group_size: 64, or a power of two that divides every matrix",
        settings=("quantization_group_size", "quantization_bits"),
    ),
)


def _uneven_group(plan: Plan) -> str | None:
    """The first linear that the quantiser cannot pack, and why."""
    base = base_of(plan)
    for linear in plan.model.linears:
        if isinstance(base, Quantiser) and is_packed(linear, base):
            misfit = base.misfit(linear.out_features, linear.in_features, copies=linear.copies)
            if misfit is not None:
                return f"quantization_group_size: {linear.name} has {misfit}"
    return None


def _adapts_experts(plan: Plan) -> bool:
    """True if LoRA has pairs beside the stacked matrices of experts."""
    lora = plan.tuning
    return isinstance(lora, Lora) and any(m.stacked and m.is_target(lora.targets) for m in plan.model.linears)


def _packs_experts(plan: Plan) -> bool:
    return any(m.stacked and is_packed(m, base_of(plan)) for m in plan.model.linears)


HARDWARE = (
    Rule(
        broken=lambda plan: (
            plan.precision in (Precision.BF16, Precision.BF16_MASTER) and not plan.hardware.gpu.has_bf16
        ),
        reason=lambda plan: (
            f"{plan.hardware.gpu.name} (compute capability {capability_words(plan.hardware.gpu)}) has no bf16 matrix "
            "units; they came with 8.0"
        ),
        instead="precision: fp16, which keeps fp32 masters and scales the loss",
        settings=("precision",),
        binds=("plan",),
        error=HardwareError,
    ),
    Rule(
        broken=lambda plan: plan.precision is Precision.FP16 and plan.hardware.gpu.is_cpu,
        reason="fp16 is for GPUs; torch trains on a CPU in fp32 or bf16",
        instead="precision: fp32",
        settings=("precision",),
        binds=("plan",),
        error=HardwareError,
    ),
    Rule(
        broken=lambda plan: plan.attention == "flash" and flash_refused_by_device(plan.hardware.gpu),
        instead="attn_implementation: sdpa",
        settings=("attn_implementation",),
        binds=("plan",),
        error=HardwareError,
    ),
    Rule(
        broken=lambda plan: (
            plan.attention == "flash"
            and flash_refused_by_model(plan.model, plan.hardware.gpu, plan.precision)
        ),
        instead="attn_implementation: sdpa",
        settings=("attn_implementation",),
        binds=("plan",),
    ),
    Rule(
        broken=lambda plan: plan.kernels == "liger" and liger_refused_by_device(plan.hardware.gpu),
        instead="kernels: torch",
        settings=("kernels",),
        binds=("plan",),
        error=HardwareError,
    ),
    Rule(
        broken=lambda plan: plan.hardware.gpu.is_cpu and plan.offload != Offload(),
        reason="the model trains on the CPU, so there is no other memory to offload to",
        instead="no offload, or gpu: NAME to plan for a GPU",
        settings=_PLACES,
        binds=("plan",),
    ),
)

KERNELS = (
    Rule(
        broken=lambda plan: plan.kernels == "liger" and liger_refused_by_model(plan.model),
        instead="kernels: torch",
        settings=("kernels",),
    ),
    Rule(
        broken=lambda plan: plan.kernels == "liger" and plan.goes_back_twice,
        reason=lambda plan: (
            f"Liger's kernels overwrite activations with gradients, and {_who(plan)} reads them again in a second "
            "backward pass (to clip by norm, or to detect an overflow of fp16)"
        ),
        instead="kernels: torch, or max_grad_value: 1.0 in bf16",
        settings=("kernels", *_IN_BACKWARD, "max_grad_norm", "precision"),
    ),
    Rule(
        broken=lambda plan: plan.compile_blocks and plan.kernels == "liger",
        reason="Liger's kernels overwrite saved activations with gradients, which torch_compile does not expect",
        instead="one of them: kernels: torch, or no torch_compile",
        settings=("torch_compile", "kernels"),
    ),
    Rule(
        broken=lambda plan: plan.compile_blocks and _in_backward(plan),
        reason=lambda plan: (
            f"{_who(plan)} uses each gradient as soon as it exists, and a compiled block yields all of its gradients "
            "at once"
        ),
        instead="no torch_compile",
        settings=("torch_compile", *_IN_BACKWARD),
    ),
    Rule(
        broken=lambda plan: plan.compile_blocks and plan.offload != Offload(),
        reason="a compiled block expects its tensors to stay where they are, and offload moves them",
        instead="no torch_compile, or no offload",
        settings=("torch_compile", *_PLACES),
    ),
    Rule(
        broken=lambda plan: plan.compile_blocks and not _is_single(plan),
        reason="torch_compile is for one device in this version",
        instead="no torch_compile, or gpus: 1",
        settings=("torch_compile", *_DEVICES),
    ),
)

SHARDING = (
    Rule(
        broken=lambda plan: plan.hardware.num_gpus == 1 and not _is_single(plan),
        reason="zero, backend and hybrid_sharding are for several devices, and there is 1",
        instead="gpus: 2 or more; on one device leave them out (offload_optimizer: cpu also frees its memory)",
        settings=_DEVICES,
        binds=("plan", "train"),
    ),
    Rule(
        broken=lambda plan: (
            isinstance(plan.sharding, Zero)
            and plan.sharding.hybrid
            and (plan.hardware.nodes == 1 or plan.hardware.gpus_per_node == 1)
        ),
        reason=lambda plan: (
            "hybrid_sharding shards within each node and replicates across nodes, and the recipe has nodes: "
            f"{plan.hardware.nodes}, gpus: {plan.hardware.gpus_per_node}"
        ),
        instead="nodes: 2 or more with gpus: 2 or more in each, or no hybrid_sharding",
        settings=_DEVICES,
        binds=("plan",),
    ),
    Rule(
        broken=lambda plan: (
            isinstance(plan.sharding, Zero) and plan.sharding.hybrid and not _on(plan, "fsdp", 2, 3)
        ),
        reason="hybrid_sharding is for FSDP2 at ZeRO stages 2 and 3",
        instead="backend: fsdp, zero: 3",
        settings=_DEVICES,
    ),
    Rule(
        broken=lambda plan: (
            _is_lomo(plan)
            and not _is_single(plan)
            and not (
                isinstance(plan.sharding, Zero) and plan.sharding.stage == 3 and not plan.sharding.hybrid
            )
        ),
        # Lv et al. 2023, arXiv 2306.09782, section 3.2
        reason=lambda plan: (
            f"{_who(plan)} updates each rank's share of the weights in backward, which takes stage 3 over all devices"
        ),
        instead="zero: 3, or tuning: full",
        settings=("tuning", *_DEVICES),
    ),
    Rule(
        broken=lambda plan: _steps_in_backward(plan) and not _is_single(plan) and not _on(plan, "fsdp", 2, 3),
        reason="optimizer_in_backward steps each rank's share once its gradient is summed, which FSDP2 does in "
        "backward at stages 2 and 3",
        instead="zero: 2 or 3 with backend: fsdp, gpus: 1, or leave optimizer_in_backward out",
        settings=("optimizer_in_backward", *_DEVICES),
    ),
)

OFFLOAD = (
    Rule(
        broken=lambda plan: _is_lomo(plan) and plan.offload.optimizer != "device",
        reason=lambda plan: f"{_who(plan)} keeps no optimizer states that could be offloaded",
        instead="no offload_optimizer",
        settings=("tuning", "offload_optimizer"),
    ),
    Rule(
        broken=lambda plan: _in_backward(plan) and _is_single(plan) and _states_away(plan),
        reason=lambda plan: (
            f"{_who(plan)} steps weights on the device, and offloaded ones are stepped on the host"
        ),
        instead="no offload_parameters or offload_optimizer; or tuning: full without optimizer_in_backward, whose "
        "offloaded gradients go block by block anyway",
        settings=(*_IN_BACKWARD, *_STATES),
    ),
    Rule(
        broken=lambda plan: plan.offload.activations != "device" and plan.goes_back_twice,
        reason=lambda plan: (
            f"{_who(plan)} reads the activations in two backward passes (to clip by norm, or in fp16), and offloaded "
            "ones come back once"
        ),
        instead="offload_activations: device, or max_grad_value: 1.0 in bf16",
        settings=("offload_activations", *_IN_BACKWARD, "max_grad_norm", "precision"),
    ),
    Rule(
        broken=lambda plan: plan.offload.activations == "nvme",
        reason="activations can be offloaded to the host, not to NVMe",
        instead="offload_activations: cpu",
        settings=("offload_activations",),
    ),
    Rule(
        broken=lambda plan: isinstance(plan.sharding, Ddp) and _states_away(plan),
        reason="DDP (zero: 0) keeps weights and optimizer on every device",
        instead="zero: 3; below it only DeepSpeed offloads, the optimizer alone",
        settings=("zero", *_STATES),
    ),
    Rule(
        broken=lambda plan: (
            plan.offload.parameters != "device"
            and plan.offload.optimizer == "device"
            and isinstance(plan.tuning, Full)
            and not _in_backward(plan)
        ),
        reason="trained weights that are offloaded are updated on the host, so the optimizer must be there",
        instead="offload_optimizer: cpu as well",
        settings=_STATES,
    ),
    Rule(
        broken=lambda plan: (
            _on(plan, "fsdp")
            and not _is_lomo(plan)
            and (plan.offload.parameters == "device") != (plan.offload.optimizer == "device")
        ),
        reason="FSDP2 offloads weights and optimizer together",
        instead="both offload_parameters and offload_optimizer, or neither",
        settings=("backend", *_STATES),
    ),
    Rule(
        broken=lambda plan: _on(plan, "deepspeed", 1, 2) and plan.offload.parameters != "device",
        reason=lambda plan: (
            f"DeepSpeed keeps weights on the device at zero = {getattr(plan.sharding, 'stage', 0)}"
        ),
        instead="zero: 3",
        settings=("zero", "backend", "offload_parameters"),
    ),
    Rule(
        broken=lambda plan: (
            _on(plan, "deepspeed", 3)
            and not _is_lomo(plan)
            and _DEPTH[plan.offload.parameters] > _DEPTH[plan.offload.optimizer]
        ),
        reason="DeepSpeed offloads weights no farther (device, cpu, nvme) than the optimizer",
        instead="offload_optimizer at least as far as offload_parameters",
        settings=_STATES,
    ),
    Rule(
        broken=lambda plan: (
            "nvme" in (plan.offload.parameters, plan.offload.optimizer) and not _on(plan, "deepspeed", 3)
        ),
        reason="offload to NVMe needs DeepSpeed at stage 3, on two devices or more",
        instead="gpus: 2 or more, zero: 3, backend: deepspeed; or cpu in place of nvme",
        settings=("zero", "backend", "gpus", *_STATES),
    ),
    Rule(
        broken=lambda plan: (
            plan.offload.parameters == "nvme"
            and isinstance(plan.sharding, Zero)
            and bool(dict(plan.sharding.settings).get("stage3_prefetch_bucket_size", 0))
        ),
        reason="DeepSpeed reads weights ahead from NVMe until no buffer is left for the head",
        instead="no stage3_prefetch_bucket_size in deepspeed, or offload_parameters: cpu",
        settings=("deepspeed", "offload_parameters"),
    ),
    Rule(
        broken=lambda plan: (
            "nvme" in (plan.offload.parameters, plan.offload.optimizer) and not plan.offload.nvme_path
        ),
        reason="offload to nvme needs a folder, and nvme_path is not set",
        instead="nvme_path: /mnt/nvme",
        settings=_STATES,
    ),
)

NOT_BUILT = (
    Rule(
        broken=lambda plan: (
            isinstance(plan.tuning, Lora)
            and _adapts_experts(plan)
            and bool(plan.tuning.dropout or plan.tuning.dora or plan.tuning.layers)
        ),
        reason="PEFT adapts experts in all blocks alike, without dropout and without DoRA",
        instead="lora_dropout: 0, dora: false and no lora_layers, or no experts in lora_target_modules",
        settings=("lora_target_modules", "lora_dropout", "dora", "lora_layers"),
    ),
    Rule(
        broken=lambda plan: _adapts_experts(plan) and _on(plan, "deepspeed"),
        reason="DeepSpeed gathers a module's weights when the module is called, and adapters of experts are not: the "
        "experts read them",
        instead="backend: fsdp",
        settings=("lora_target_modules", *_DEVICES),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: plan.compile_blocks and (_adapts_experts(plan) or _packs_experts(plan)),
        reason="torch_compile has not been tried with quantised or adapted experts",
        instead="no torch_compile",
        settings=("torch_compile", "lora_target_modules", "quantization"),
    ),
    Rule(
        broken=lambda plan: (
            not plan.model.separates_rows and (plan.batch.packing or plan.batch.micro_batch_size > 1)
        ),
        reason=lambda plan: (
            f"blocks of {plan.model.model_type} carry a state from token to token, or count tokens from the first of "
            "the batch, so a row would depend on the rows before it in the same batch"
        ),
        instead="packing: false with micro_batch_size: 1",
        settings=("model", "packing", "micro_batch_size"),
    ),
    Rule(
        broken=lambda plan: 0 < plan.model.longest_stream < plan.batch.micro_batch_tokens,
        reason=lambda plan: (
            f"blocks of {plan.model.model_type} take {plan.model.longest_stream} tokens in one micro-batch, and "
            f"{plan.batch.micro_batch_size} × {plan.batch.seq_len} are more"
        ),
        instead="a smaller micro_batch_size, or a shorter seq_len",
        settings=("model", "micro_batch_size", "seq_len"),
    ),
    Rule(
        broken=lambda plan: plan.attention == "eager" and plan.model.masks_whole_stream,
        reason=lambda plan: (
            f"blocks of {plan.model.model_type} bring an attention of their own, which is kept"
        ),
        instead="leave attn_implementation out",
        settings=("model", "attn_implementation"),
    ),
    Rule(
        broken=lambda plan: (
            plan.model.is_traced and isinstance(plan.tuning, Lora) and bool(plan.tuning.layers)
        ),
        reason=lambda plan: f"{plan.model.model_type} has no formulas, and lora_layers needs them",
        instead="leave lora_layers out",
        settings=("tuning", "lora_layers"),
    ),
    Rule(
        broken=lambda plan: not trains_like_transformers(plan.model),
        reason=lambda plan: (
            f"{plan.model.model_type} cannot be trained yet: no small model of it has reproduced transformers' losses "
            "and the predicted peak"
        ),
        instead="`fitune plan` and `fitune rehearse` work; models of Llama, Mistral, Qwen and Gemma train",
        settings=("model",),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: (
            isinstance(plan.tuning, Lora) and not takes_adapters_on(plan.model, plan.tuning.targets)
        ),
        reason=lambda plan: (
            f"PEFT reads adapters on {', '.join(SHARED_LINEARS)} of {plan.model.model_type} as adapters on its routed "
            "experts; those of attention are read as they are: lora_target_modules: "
            + ",".join(name for name in plan.model.adaptable_names if name not in SHARED_LINEARS)
        ),
        instead="lora_target_modules without gate_proj, up_proj and down_proj, or tuning: full",
        settings=("tuning", "lora_target_modules"),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: isinstance(plan.optimizer, AdamW8bit) and _on(plan, "fsdp"),
        reason="8-bit states are scaled by blocks of each rank's share, and checkpoints hold whole tensors: "
        "they cannot be saved yet",
        instead="optimizer: adamw, or zero: 0, where every rank has all of them",
        settings=("optimizer", *_DEVICES),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: (
            _on(plan, "deepspeed") and (_is_lomo(plan) or isinstance(base_of(plan), Quantiser))
        ),
        reason=lambda plan: (
            f"{_who(plan)} updates shares in backward, which is built for FSDP2"
            if _is_lomo(plan)
            else "packed weights are divided by FSDP2 only"
        ),
        instead="backend: fsdp, zero: 3; `fitune plan` estimates it by DeepSpeed, too",
        settings=("tuning", "quantization", *_DEVICES),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: isinstance(plan.sharding, Ddp),
        reason="DDP fills its buckets in C++, which fake tensors do not reach, so it cannot be rehearsed",
        instead="`fitune plan` estimates it; zero: 3 with backend: fsdp can be rehearsed",
        settings=_DEVICES,
        binds=("rehearse",),
    ),
    Rule(
        broken=lambda plan: _on(plan, "deepspeed"),
        reason="DeepSpeed does not run on fake tensors, so it cannot be rehearsed",
        instead="`fitune plan` estimates it; backend: fsdp can be rehearsed",
        settings=_DEVICES,
        binds=("rehearse",),
    ),
    Rule(
        broken=lambda plan: (
            _steps_in_backward(plan) and not _is_single(plan) and isinstance(plan.optimizer, AdamW8bit)
        ),
        reason="8-bit AdamW with optimizer_in_backward on several devices is not built yet",
        instead="optimizer: adamw, or gpus: 1",
        settings=("optimizer", "optimizer_in_backward", *_DEVICES),
    ),
    Rule(
        broken=lambda plan: (
            not _is_single(plan)
            and plan.offload != Offload()
            and (isinstance(plan.sharding, Ddp) or _in_backward(plan))
        ),
        reason="offload on several devices is built for ZeRO, and not for updates in backward",
        instead="zero: 3 and tuning: full, lora or qlora; `fitune plan` estimates the others",
        settings=(*_PLACES, *_IN_BACKWARD, *_DEVICES),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: _on(plan, "deepspeed") and plan.offload.activations != "device",
        reason="offload_activations is not built for DeepSpeed",
        instead="offload_activations: device, or backend: fsdp",
        settings=("offload_activations", "backend"),
        binds=("train",),
    ),
    Rule(
        broken=lambda plan: not _is_single(plan) and plan.offload != Offload(),
        reason="offload on several devices cannot be rehearsed yet",
        instead="`fitune plan` estimates it; one device with offload, or several without, can be rehearsed",
        settings=(*_PLACES, *_DEVICES),
        binds=("rehearse",),
    ),
)

RULES: tuple[Rule, ...] = (*METHODS, *MODEL, *HARDWARE, *KERNELS, *SHARDING, *OFFLOAD, *NOT_BUILT)
