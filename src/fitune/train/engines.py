"""The engine that runs the steps of a plan: on one device, on replicas, or on shares by FSDP2 or DeepSpeed."""

import shutil
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch.nn import Parameter

from fitune.engine.fused_rules import rule_for
from fitune.engine.in_backward import InBackwardEngine
from fitune.engine.plain import PlainEngine
from fitune.engine.protocol import Engine
from fitune.engine.ranks import local_part
from fitune.models.host import HostMemory
from fitune.models.language_model import LanguageModel
from fitune.models.offload import offload_blocks
from fitune.spec.deepspeed import deepspeed_config, nvme_folder
from fitune.spec.plan import Offload, Plan, Zero, clip_in_backward

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from fitune.engine.fsdp import Trunk
    from fitune.engine.kept_rows import KeptRows


def sharded_engine(
    plan: Plan, sharding: Zero, parts: LanguageModel, mesh: "DeviceMesh | None", rows: "KeptRows | None",
    host: HostMemory | None,
) -> tuple[LanguageModel, Engine]:  # fmt: skip
    """The model as FSDP2 runs it, its states divided over ``mesh`` (the plan's if None), and its engine."""
    from fitune.engine.fsdp import mesh_of, shard

    mesh = mesh_of(sharding, plan.hardware, device=parts.device.type) if mesh is None else mesh
    trunk = shard(
        parts.whole,
        parts.body,
        parts.blocks,
        sharding=sharding,
        mesh=mesh,
        precision=plan.precision,
        rows=rows,
        on_host=plan.offload.parameters == "cpu",
    )
    if host is not None:  # weights are FSDP2's to move
        if plan.offload.parameters == "cpu":
            for parameter in parts.whole.parameters():
                host.adopt(local_part(parameter))
        offload_blocks(
            parts.blocks, Offload(activations=plan.offload.activations), host, trains_weights=False
        )
    parts = replace(parts, body=trunk)
    return parts, _stepped_on_shares(plan, sharding, parts, trunk, mesh, host)


def _stepped_on_shares(
    plan: Plan, sharding: Zero, parts: LanguageModel, trunk: "Trunk", mesh: "DeviceMesh",
    host: HostMemory | None,
) -> Engine:  # fmt: skip
    from fitune.engine.fsdp import ShardedEngine
    from fitune.engine.fsdp_in_backward import ShardedInBackwardEngine

    clip = clip_in_backward(plan.tuning)
    if clip is not None:
        return ShardedInBackwardEngine(
            parts,
            parts.trained,
            trunk=trunk,
            mesh=mesh,
            tuning=plan.tuning,
            clip=clip,
            optimizer=plan.optimizer,
            precision=plan.precision,
        )
    return ShardedEngine(
        parts,
        parts.trained,
        trunk=trunk,
        mesh=mesh,
        sharding=sharding,
        optimizer=plan.optimizer,
        precision=plan.precision,
        max_grad_norm=plan.schedule.max_grad_norm,
        host=host if plan.offload.optimizer == "cpu" else None,
    )


def deepspeed_engine(plan: Plan, parts: LanguageModel) -> tuple[LanguageModel, Engine]:
    """The model as DeepSpeed runs it, its states divided and offloaded by DeepSpeed, and its engine."""
    from fitune.engine.deepspeed import DeepSpeedEngine, Head, require_nvme

    if "nvme" in plan.offload.places:
        require_nvme(plan.offload.nvme_path)
    head = Head(parts.head)
    trained = parts.trained
    parts = replace(parts, head=head)
    engine = DeepSpeedEngine(
        parts,
        trained,
        whole=parts.whole,
        head=head,
        optimizer=plan.optimizer,
        precision=plan.precision,
        config=deepspeed_config(plan),
        device=parts.device,
    )
    if "nvme" in plan.offload.places:  # checkpoints have all of it
        weakref.finalize(engine, shutil.rmtree, nvme_folder(plan), ignore_errors=True)
    return parts, engine


def replicated_engine(plan: Plan, parts: LanguageModel) -> tuple[LanguageModel, Engine]:
    """The model as DDP runs it, whole on every rank, and its engine."""
    from fitune.engine.ddp import ReplicatedEngine, replicate

    body = replicate(parts.body, parts.head)
    parts = replace(parts, body=body)
    engine = ReplicatedEngine(
        parts,
        parts.trained,
        body=body,
        optimizer=plan.optimizer,
        precision=plan.precision,
        max_grad_norm=plan.schedule.max_grad_norm,
    )
    return parts, engine


def engine_for(
    plan: Plan, model: LanguageModel, trained: Mapping[str, Parameter], *, host: HostMemory | None = None
) -> Engine:
    """The engine that turns losses of ``model`` into new ``trained`` weights; ``host`` holds an offloaded optimizer."""
    clip = clip_in_backward(plan.tuning)
    if clip is not None:
        return InBackwardEngine(
            model,
            trained,
            rule=rule_for(trained, tuning=plan.tuning, optimizer=plan.optimizer, precision=plan.precision),
            clip=clip,
            precision=plan.precision,
            used_twice=_used_twice(model, trained),
        )
    return PlainEngine(
        model,
        trained,
        optimizer=plan.optimizer,
        precision=plan.precision,
        max_grad_norm=plan.schedule.max_grad_norm,
        host=host if plan.offload.optimizer == "cpu" else None,
        blocks=_trained_by_block(model, trained),
    )


def _trained_by_block(model: LanguageModel, trained: Mapping[str, Parameter]) -> list[list[str]]:
    names = {id(parameter): name for name, parameter in trained.items()}
    return [[names[id(p)] for p in block.parameters() if id(p) in names] for block in model.blocks]


def _used_twice(model: LanguageModel, trained: Mapping[str, Parameter]) -> list[str]:
    """The head that is the embedding too."""
    both = {id(p) for p in model.head.parameters()} & {id(p) for p in model.body.parameters()}
    return [name for name, parameter in trained.items() if id(parameter) in both]
