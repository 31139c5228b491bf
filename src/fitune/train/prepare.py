"""A Plan becomes a model and an engine: one line per transformation, in the order that matters."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fitune.engine.plain import PlainEngine
from fitune.engine.protocol import Engine
from fitune.engine.ranks import ALONE, Ranks, local_part
from fitune.errors import HardwareError
from fitune.measure.cuda_cards import require_planned_card
from fitune.models.adapters import add_adapters
from fitune.models.attention import turn_by_rows, use_attention
from fitune.models.host import HostMemory, stay_on
from fitune.models.language_model import (
    LanguageModel,
    blocks_of,
    compile_blocks,
    language_model,
    recompute_blocks,
)
from fitune.models.liger import use_kernels
from fitune.models.low_bit.packing import quantise_blocks
from fitune.models.offload import before_backward, offload_blocks
from fitune.models.tokens import add_rows
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import compute_dtype, load_model
from fitune.spec.model.config_schema import is_random_rate
from fitune.spec.plan import Ddp, Full, Lomo, Lora, Offload, Plan, Single, Zero, base_of, trains_every_weight
from fitune.spec.rules import require_rules
from fitune.train.engines import deepspeed_engine, engine_for, replicated_engine, sharded_engine

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
    mesh = _mesh(plan, device)
    rows = _kept_rows(plan, mesh)
    # then the device has no room for all of it
    streamed = plan.offload.parameters != "device" or _divided_by_deepspeed(plan)
    to = torch.device("cpu") if streamed and rows is None else device
    keep = None if rows is None else rows.keep
    base = base_of(plan)
    model = load_model(plan.model_path, dtype=dtype, device=to, base=base, keep=keep, on_bytes=on_bytes)
    add_rows(model, plan)
    return prepare_loaded(model, plan, device=device, mesh=mesh, rows=rows)


def _kept_rows(plan: Plan, mesh: "DeviceMesh | None") -> "KeptRows | None":
    """The place for a rank's rows while it reads; None where all of a weight is needed before it is divided.

    New tokens begin as the mean of the table's rows, DoRA as the norms of the weights.
    """
    needs_whole = plan.added_tokens or (isinstance(plan.tuning, Lora) and plan.tuning.dora)
    if mesh is None or needs_whole:
        return None
    from fitune.engine.kept_rows import KeptRows

    return KeptRows(mesh, on_host=plan.offload.parameters != "device")


def _mesh(plan: Plan, device: torch.device) -> "DeviceMesh | None":
    """The ranks that FSDP2 divides the states of ``plan`` over; None where it does not."""
    if not isinstance(plan.sharding, Zero) or plan.sharding.backend != "fsdp":
        return None
    from fitune.engine.fsdp import mesh_of

    return mesh_of(plan.sharding, plan.hardware, device=device.type)


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
    parts = language_model(whole, plan.loss)
    if device is not None:  # what waits on the host is still trained there
        parts = replace(parts, device=device)
    if plan.compile_blocks:
        compile_blocks(parts.blocks)  # before recompute: the compiled block runs twice
    recompute_blocks(parts.blocks, plan.recompute, has_dropout=_has_dropout(parts))
    host = None if plan.offload == Offload() else HostMemory(parts.device)
    whole.train()
    match plan.sharding:
        case Zero(backend="fsdp") as zero:
            parts, engine = sharded_engine(plan, zero, parts, mesh, rows, host)
        case Zero():
            parts, engine = deepspeed_engine(plan, parts)
            host = None  # DeepSpeed moves what it offloads
        case Ddp():
            parts, engine = replicated_engine(plan, parts)
            host = None
        case Single():
            engine = engine_for(plan, parts, parts.trained, host=host)
            if host is not None:
                _offload(plan, parts, engine, host)  # after recompute: what leaves is what is kept
    return Prepared(model=parts, engine=engine, host=host)


def _offload(plan: Plan, parts: LanguageModel, engine: Engine, host: HostMemory) -> None:
    """Gradients first: those of one block are gone before the weights of the next come."""
    if isinstance(engine, PlainEngine) and plan.offload.optimizer == "cpu":
        before_backward(parts.blocks, engine.goes_back)
    offload_blocks(parts.blocks, plan.offload, host, trains_weights=trains_every_weight(plan.tuning))


def _divided_by_deepspeed(plan: Plan) -> bool:
    """True if DeepSpeed divides the weights themselves."""
    sharding = plan.sharding
    return isinstance(sharding, Zero) and sharding.backend == "deepspeed" and sharding.stage == 3


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


def _has_dropout(parts: LanguageModel) -> bool:
    """True if anything in the model draws random numbers while training, by its modules or by its config.

    A name too many costs a copy of the generator's state; one too few recomputes with another mask: wrong gradients.
    """
    config = parts.body.config.to_dict()
    rates = [rate for name, rate in config.items() if is_random_rate(name)]
    in_config = any(isinstance(rate, int | float) and rate > 0 for rate in rates)
    return in_config or any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in parts.whole.modules())
