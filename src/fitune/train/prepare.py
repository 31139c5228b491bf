"""A Plan becomes a model and an engine: one line per transformation, in the order that matters."""

import os
import shutil
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from fitune.engine.fused_rules import rule_for
from fitune.engine.host import HostMemory
from fitune.engine.host_optimizer import HostOptimizer
from fitune.engine.in_backward import InBackwardEngine
from fitune.engine.offload import before_backward, offload_blocks
from fitune.engine.plain import PlainEngine
from fitune.engine.protocol import Engine
from fitune.engine.ranks import ALONE, Ranks, local_part
from fitune.engine.streamed_weights import stay_on
from fitune.errors import HardwareError
from fitune.measure.cuda_cards import require_planned_card
from fitune.models.adapters import add_adapters
from fitune.models.attention import turn_by_rows, use_attention
from fitune.models.language_model import (
    LanguageModel,
    blocks_of,
    compile_blocks,
    language_model,
    recompute_blocks,
)
from fitune.models.liger import use_kernels
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.tokens import add_rows
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import compute_dtype, load_model
from fitune.values.deepspeed import nvme_folder
from fitune.values.model.config_schema import is_random_rate
from fitune.values.plan import (
    Ddp,
    Full,
    Lomo,
    Lora,
    Offload,
    Plan,
    Single,
    Zero,
    base_of,
    clip_in_backward,
    trains_every_weight,
)
from fitune.values.rules import require_rules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fitune.engine.kept_rows import KeptRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Ready to train."""

    model: LanguageModel
    engine: Engine
    host: HostMemory | None = None
    """Host memory in which the plan's offloaded tensors wait; None: nothing leaves the device."""

    def resident_tensors(self) -> Iterator[Tensor]:
        """Everything that stays in memory between two steps."""
        for parameter in self.model.whole.parameters():
            yield local_part(parameter)
            if parameter.grad is not None:  # DDP's buckets
                yield local_part(parameter.grad)
        yield from self.model.whole.buffers()
        yield from self.engine.resident()


def prepare(plan: Plan, *, ranks: Ranks = ALONE, on_bytes: OnBytes = nobody) -> Prepared:
    """Load the plan's model and change it into what the plan says. ``on_bytes`` is told how far the reading is."""
    require_rules(plan, "train")
    require_planned_cards(plan, ranks)
    torch.set_float32_matmul_precision("high" if plan.tf32 else "highest")
    dtype = compute_dtype(plan.precision)
    device = training_device(plan, ranks)
    mesh: DeviceMesh | None = None
    rows: KeptRows | None = None
    sharding, on_host = plan.sharding, plan.offload.parameters != "device"
    if isinstance(sharding, Zero) and sharding.backend == "fsdp":
        from fitune.engine.fsdp import mesh_of
        from fitune.engine.kept_rows import KeptRows as Rows

        mesh = mesh_of(sharding, plan.hardware, device=device.type)
        # new tokens begin as the mean of the table's rows, DoRA as the norms of the weights: both need whole ones
        if not plan.added_tokens and not (isinstance(plan.tuning, Lora) and plan.tuning.dora):
            rows = Rows(mesh, on_host=on_host)
    by_deepspeed = isinstance(sharding, Zero) and sharding.backend == "deepspeed" and sharding.stage == 3
    streamed = on_host or by_deepspeed  # then the device has no room for all of it
    to = torch.device("cpu") if streamed and rows is None else device
    keep = None if rows is None else rows.keep
    base = base_of(plan)
    model = load_model(plan.model_path, dtype=dtype, device=to, base=base, keep=keep, on_bytes=on_bytes)
    add_rows(model, plan)
    return prepare_loaded(model, plan, device=device, mesh=mesh, rows=rows)


def prepare_loaded(
    model: PreTrainedModel,
    plan: Plan,
    *,
    device: torch.device | None = None,
    mesh: "DeviceMesh | None" = None,
    rows: "KeptRows | None" = None,
) -> Prepared:
    """Changes a model that is already in memory as ``prepare`` does: it is in the plan's compute dtype, packed or not.

    ``device``: where it is trained, when that is not where it is.
    ``mesh``: the ranks that a sharded plan is divided over; ``rows``: this rank's of the weights that ``model`` has
    only stand-ins for.
    """
    quantise_blocks(blocks_of(model), base_of(plan))  # before adapters: they wrap the packed linear
    use_attention(model, plan.attention)
    turn_by_rows(model)
    use_kernels(model, plan.kernels, device=device)
    whole = tuned(model, plan)  # before recompute: adapters are inside the blocks that run twice
    # FSDP2 and DeepSpeed have their own way
    if plan.offload.parameters == "cpu" and isinstance(plan.sharding, Single):
        trained = trains_every_weight(plan.tuning)
        stay_on(device or model.device, whole, blocks_of(model), trained=trained)
    # what waits on the host is trained on the device, too
    parts = language_model(whole, plan.loss, kernels=plan.kernels, device=device)
    if plan.compile_blocks:
        compile_blocks(parts.blocks)  # before recompute: the compiled block runs twice
    # A name too many costs a copy of the generator's state; one too few recomputes with another mask: wrong gradients.
    rates = [rate for name, rate in parts.body.config.to_dict().items() if is_random_rate(name)]
    has_dropout = any(isinstance(rate, int | float) and rate > 0 for rate in rates) or any(
        isinstance(module, torch.nn.Dropout) and module.p > 0 for module in whole.modules()
    )
    recompute_blocks(parts.blocks, plan.recompute, has_dropout=has_dropout)
    host = None if plan.offload == Offload() else HostMemory(parts.device)
    whole.train()
    match plan.sharding:
        case Zero(backend="fsdp") as zero:
            parts, engine = _sharded_engine(plan, zero, parts, mesh, rows, host)
        case Zero():
            parts, engine = _deepspeed_engine(plan, parts, host)
            host = None  # DeepSpeed moves what it offloads
        case Ddp():
            from fitune.engine.ddp import ReplicatedEngine, replicate

            parts = replace(parts, body=(body := replicate(parts.body, parts.head.module)))
            engine = ReplicatedEngine(parts, parts.trained, body=body, plan=plan)
            host = None
        case Single():
            engine = engine_for(plan, parts, parts.trained, host=host)
            if host is not None:
                # Gradients first: those of one block are gone before the weights of the next come. After recompute:
                # what leaves is what is kept.
                if isinstance(engine, PlainEngine) and isinstance(engine.optimizer, HostOptimizer):
                    before_backward(parts.blocks, engine.optimizer.goes_back)
                offload_blocks(
                    parts.blocks, plan.offload, host, trains_weights=trains_every_weight(plan.tuning)
                )
    return Prepared(model=parts, engine=engine, host=host)


def training_device(plan: Plan, ranks: Ranks = ALONE) -> torch.device:
    """This rank's device of those the plan was made for. Raises HardwareError when it is not here."""
    if plan.hardware.gpu.is_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareError(
            f"the plan is for {plan.hardware.gpu.name}, and torch sees no CUDA device",
            hint="plan without --gpu to use what is here, or check `nvidia-smi` and your torch build",
        )
    return torch.device("cuda", ranks.local)


def require_planned_cards(plan: Plan, ranks: Ranks = ALONE) -> None:
    """Raises HardwareError where a GPU is less than the plan is for: this rank's, or before there are ranks any of
    them."""
    if plan.hardware.gpu.is_cpu:
        return
    training_device(plan, ranks)
    for index in range(plan.hardware.gpus_per_node) if ranks.is_alone else (ranks.local,):
        require_planned_card(plan.hardware.gpu, index)


def tuned(model: PreTrainedModel, plan: Plan) -> torch.nn.Module:
    """``model`` with what the plan trains made trainable, adapters put beside it."""
    match plan.tuning:
        case Full() | Lomo():
            return model.requires_grad_(True)
        case Lora() as lora:
            return add_adapters(model, lora, dtype=compute_dtype(plan.precision), seed=plan.run.seed)


def _sharded_engine(
    plan: Plan, sharding: Zero, parts: LanguageModel, mesh: "DeviceMesh | None", rows: "KeptRows | None",
    host: HostMemory | None,
) -> tuple[LanguageModel, Engine]:  # fmt: skip
    """The model as FSDP2 runs it, its states divided over ``mesh`` (the plan's if None), and its engine."""
    from fitune.engine.fsdp import ShardedEngine, ShardedInBackwardEngine, mesh_of, shard

    mesh = mesh_of(sharding, plan.hardware, device=parts.device.type) if mesh is None else mesh
    trunk = shard(
        parts.whole,
        parts.body,
        parts.blocks,
        sharding=sharding,
        mesh=mesh,
        precision=plan.precision,
        rows=rows,
        host=host if plan.offload.parameters == "cpu" else None,
    )
    if host is not None:  # weights are FSDP2's to move
        if plan.offload.parameters == "cpu":
            for parameter in parts.whole.parameters():
                host.adopt(local_part(parameter))
            host.reserve_copies([local_part(parameter) for parameter in parts.trained.values()])
        offload_blocks(
            parts.blocks, Offload(activations=plan.offload.activations), host, trains_weights=False
        )
    parts = replace(parts, body=trunk)
    clip, trained = clip_in_backward(plan.tuning), parts.trained
    if clip is not None:
        return parts, ShardedInBackwardEngine(parts, trained, trunk=trunk, mesh=mesh, plan=plan, clip=clip)
    host = host if plan.offload.optimizer == "cpu" else None
    return parts, ShardedEngine(parts, trained, trunk=trunk, mesh=mesh, plan=plan, host=host)


def _deepspeed_engine(
    plan: Plan, parts: LanguageModel, host: HostMemory | None
) -> tuple[LanguageModel, Engine]:
    """The model as DeepSpeed runs it, its states divided and offloaded by DeepSpeed, and its engine."""
    from fitune.engine.deepspeed import DeepSpeedEngine, Head, require_nvme

    if "nvme" in plan.offload.places:
        require_nvme(plan.offload.nvme_path)
    # srun and mpirun have other words for it
    os.environ.setdefault("LOCAL_RANK", str(parts.device.index or 0))
    head = Head(parts.head.module)
    trained = parts.trained
    parts = replace(parts, head=replace(parts.head, module=head, gathered=head.held))
    engine = DeepSpeedEngine(
        parts,
        trained,
        whole=parts.whole,
        head=head,
        plan=plan,
        host=host if parts.device.type == "cuda" else None,
    )
    if "nvme" in plan.offload.places:  # checkpoints have all of it
        weakref.finalize(engine, shutil.rmtree, nvme_folder(plan), ignore_errors=True)
    return parts, engine


def engine_for(
    plan: Plan, model: LanguageModel, trained: Mapping[str, Parameter], *, host: HostMemory | None = None
) -> Engine:
    """The engine that turns losses of ``model`` into new ``trained`` weights; ``host`` holds an offloaded optimizer."""
    clip = clip_in_backward(plan.tuning)
    if clip is not None:
        both = {id(p) for p in model.head.module.parameters()} & {id(p) for p in model.body.parameters()}
        return InBackwardEngine(
            model,
            trained,
            rule=rule_for(trained, tuning=plan.tuning, optimizer=plan.optimizer, precision=plan.precision),
            clip=clip,
            precision=plan.precision,
            used_twice=[
                name for name, p in trained.items() if id(p) in both
            ],  # the head that is the embedding too
        )
    names = {id(parameter): name for name, parameter in trained.items()}
    return PlainEngine(
        model,
        trained,
        optimizer=plan.optimizer,
        precision=plan.precision,
        max_grad_norm=plan.schedule.max_grad_norm,
        host=host if plan.offload.optimizer == "cpu" else None,
        blocks=[[names[id(p)] for p in block.parameters() if id(p) in names] for block in model.blocks],
    )
