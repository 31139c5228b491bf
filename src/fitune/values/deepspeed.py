"""DeepSpeed's configuration as a pure function of the Plan, in the keys of its ds_config.json.

Buffers are chosen here and not left at DeepSpeed's defaults, which are made for large models: a reduce bucket of 5e8
elements stands ready however little is trained. The estimate counts what is chosen here (estimate/buffers.py).
"""

import hashlib
import os
from pathlib import Path
from typing import Any

from fitune.values.choices import Place, Zero
from fitune.values.counts import base_tensors, count_parameters, trained_in_order, trained_tensors
from fitune.values.plan import Plan, Precision
from fitune.values.remembered import remembered_by

Config = dict[str, Any]

BUCKET_ELEMENTS = 1 << 25
"""Gradients that are summed at once: 64 MiB in 16 bit, which keeps a link busy. Stage 3 fetches as much ahead, and no
more than a block."""
SUB_GROUP_ELEMENTS = 1 << 26
"""Elements of a share that stage 3 steps at a time: their gradients are copied, and made fp32, once more."""
NVME_BUFFERS = 6
"""Weights that are read from NVMe at once, at most: head and embedding, and four of one module, as of experts. Nothing
is read ahead, for DeepSpeed reads ahead until all buffers are taken, and the head is gathered out of its order."""


def deepspeed_config(plan: Plan) -> Config:
    """The ds_config.json that ``plan`` is trained with.

    The learning rate, the optimizer and accumulation over micro-batches are fitune's own: DeepSpeed is given an
    optimizer object, told of the last micro-batch of a step, and divides by nothing.
    """
    zero = plan.sharding
    assert isinstance(zero, Zero)
    micro = plan.batch.micro_batch_size
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": 1,  # the loss is divided by the tokens of all micro-batches already
        "train_batch_size": micro * plan.hardware.num_gpus,
        "gradient_clipping": float(plan.schedule.max_grad_norm),
        **_precision(plan.precision),
        "zero_allow_untested_optimizer": True,  # SGD
        "zero_force_ds_cpu_optimizer": False,  # torch's fused CPU AdamW steps what waits on the host
        "zero_optimization": {
            "stage": zero.stage,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "overlap_comm": False,
            "round_robin_gradients": False,
            "reduce_bucket_size": reduce_bucket_elements(plan),
            **(
                _stage_3(plan) if zero.stage == 3 else {"allgather_bucket_size": reduce_bucket_elements(plan)}
            ),
            **dict(zero.settings),
            **_offload(plan),
        },
    }


def nvme_folder(plan: Plan) -> Path:
    """The run's own folder in ``nvme_path``: two runs may share a disk."""
    run = hashlib.sha256(str(Path(plan.run.output_dir).absolute()).encode()).hexdigest()
    return Path(plan.offload.nvme_path) / f"fitune-{run[:12]}"


def tell_deepspeed_where(*, has_gpu: bool) -> None:
    """Without a GPU DeepSpeed is told so before anything imports it, as transformers does where it saves a model.

    Untold, it warns on standard output that it finds none.
    """
    if not has_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def reduce_bucket_elements(plan: Plan) -> int:
    """Elements of the buffer that gradients are summed in; even, as DeepSpeed wants it."""
    trained = sum(t.elements * t.count for t in trained_tensors(plan))
    return min(BUCKET_ELEMENTS, trained + trained % 2)


def fetches_ahead(plan: Plan) -> bool:
    """True if stage 3 gathers weights before their module is called."""
    return plan.offload.parameters != "nvme"


def largest_share_elements(plan: Plan) -> int:
    """Elements of a rank's share of the largest weight; a stack of experts is one."""
    return -(-max(t.elements for t in base_tensors(plan.model)) // plan.hardware.num_gpus)


def sub_groups(plan: Plan, size: int) -> list[int]:
    """Elements of a rank's share of each sub-group that stage 3 makes with ``sub_group_size: size``.

    One ends with the tensor that fills it; what takes weight decay and what does not are apart (stage3.py,
    _create_fp16_sub_groups).
    """
    found = []
    for shares in _shares_in_order(plan):
        group = 0
        for share in shares:
            group += share
            if group >= size:
                found.append(group)
                group = 0
        found += [group] if group else []
    return found


@remembered_by("model", "tuning", "hardware")
def _shares_in_order(plan: Plan) -> tuple[list[int], list[int]]:
    """Shares of what takes weight decay, and of what does not, as the optimizer has them."""
    shares: tuple[list[int], list[int]] = [], []
    for tensor in trained_in_order(plan):
        shares[not tensor.is_matrix].extend([-(-tensor.elements // plan.hardware.num_gpus)] * tensor.count)
    return shares


def _precision(precision: Precision) -> Config:
    match precision:
        case Precision.FP32:
            return {"bf16": {"enabled": False}, "fp16": {"enabled": False}}
        case Precision.FP16:  # fitune scales the loss: one scale for all engines
            return {"fp16": {"enabled": True, "loss_scale": 1.0}}
    return {"bf16": {"enabled": True, "check_grad_overflow": True}}


def _stage_3(plan: Plan) -> Config:
    model, counts = plan.model, count_parameters(plan.model)
    outside = counts.embeddings + counts.head + model.hidden_size  # the final norm
    block = (counts.total - outside) // model.num_layers  # without adapters
    return {
        "sub_group_size": SUB_GROUP_ELEMENTS,
        "stage3_prefetch_bucket_size": min(BUCKET_ELEMENTS, block) if fetches_ahead(plan) else 0,
        "stage3_param_persistence_threshold": model.hidden_size,  # norms and biases stay whole on every rank
        # embedding, norm and head, and two blocks
        "stage3_max_live_parameters": min(counts.total, counts.total - (model.num_layers - 2) * block),
        "stage3_max_reuse_distance": 0,  # weights are let go as soon as their module is done
    }


def _offload(plan: Plan) -> Config:
    places: dict[str, Place] = {
        "offload_param": plan.offload.parameters,
        "offload_optimizer": plan.offload.optimizer,
    }
    return {
        key: {
            "device": place,
            "pin_memory": True,
            **({"nvme_path": str(nvme_folder(plan))} if place == "nvme" else {}),
            # All that is trained stays there, too: DeepSpeed would keep 1e9 elements on the host.
            **(
                {"buffer_count": NVME_BUFFERS, "buffer_size": largest_share_elements(plan), "max_in_cpu": 0}
                if (key, place) == ("offload_param", "nvme")
                else {}
            ),
        }
        for key, place in places.items()
        if place != "device"
    }
