"""Every choice a plan can make has words, on the page and on the command line."""

from dataclasses import replace

import pytest

from fitune.report.plan_words import headline, sentences, settings
from fitune.values.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Offload,
    Zero,
)
from fitune.values.words import describe_placement, describe_plan, method_parts
from plans import gpu, plan_for, small_llama

_LORA = {"rank": 8, "alpha": 8, "dropout": 0.0, "targets": ("q_proj", "v_proj")}


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ({"tuning": Lomo(adaptive=False, clip=ClipByValue(value=1.0))}, "LOMO clipped to ±1, fp32, 0 of 4 blocks"),
        ({"tuning": Lomo(adaptive=True, clip=ClipByNorm(max_norm=1.0))}, "AdaLomo clipped at norm 1"),
        (
            {"tuning": Full(update=InBackward(clip=ClipByNorm(max_norm=1.0)))},
            "full, fp32, AdamW in backward, clipped at norm 1, 0 of 4 blocks",
        ),
        ({"tuning": Full(update=InBackward(clip=ClipByNorm(max_norm=0.0)))}, "AdamW in backward, not clipped"),
        (
            {"tuning": Lora(**_LORA, rslora=True, layers=(0, 2, 3))},
            "rank-stabilised LoRA r8 on 2 linears of blocks 0, 2–3, fp32",
        ),
        (
            {"tuning": Lora(**_LORA, modules_to_save=("lm_head",), base=Nf4())},
            "LoRA r8 on 2 linears, lm_head whole, of a base in NF4 with double quantisation",
        ),
        (
            {"tuning": Lora(**_LORA, base=Nf4(), dora=True)},
            "DoRA r8 on 2 linears of a base in NF4 with double quantisation",
        ),
        (
            {"tuning": Lora(**_LORA, base=Hqq(bits=3))},
            "LoRA r8 on 2 linears of a base in HQQ of 3 bits in groups of 64",
        ),
        ({"optimizer": AdamW8bit()}, "8-bit AdamW"),
        ({"sharding": Ddp()}, "AdamW, DDP on 8 devices, 0 of 4"),
        ({"sharding": Zero(stage=3, backend="fsdp", hybrid=True)}, "ZeRO-3 by FSDP2 within each node"),
        (
            {"sharding": Zero(stage=2, backend="deepspeed"), "offload": Offload(optimizer="cpu", parameters="nvme")},
            "ZeRO-2 by DeepSpeed on 8 devices, parameters on NVMe, optimizer on the CPU",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_choice_has_words(choice, line):
    plan = replace(plan_for(small_llama(), hardware=gpu("h100", gpus=8)), **choice)
    assert line in describe_plan(plan)
    assert headline(plan).split(" · ")[: len(method_parts(plan))] == list(method_parts(plan))
    told = " ".join(sentences(plan, total=None))
    tuned, _, *optimizer = method_parts(plan)
    assert f"Tuning: {tuned}" in told
    assert all(f"Optimizer: {name}; weight decay" in told for name in optimizer)
    assert describe_placement(plan) in told


def test_offload_is_among_the_settings():
    plan = plan_for(small_llama(), offload=Offload(activations="cpu"))
    listed = dict(settings(plan))
    assert listed["offload.activations"] == "cpu"
    assert listed["offload.optimizer"] == "device"
