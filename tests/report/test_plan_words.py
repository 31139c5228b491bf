"""Every choice a plan can make has words, on the page and on the command line."""

from dataclasses import fields, replace

import pytest

from fitune.report.plan_words import headline, sentences, settings
from fitune.values.plan import (
    AdamW8bit,
    Batch,
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
    PlainLoss,
    Recompute,
    Sgd,
    Steps,
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


def test_the_plan_in_words_has_its_numbers(plan):
    text = " ".join(sentences(plan, total=90))
    for words in (
        "4 × 512 × 2 = 4,096 tokens", "The first 4 of 8 blocks keep only their input",
        "(num_epochs: 3) the learning rate rises to 2.0e-03 over 5 steps and falls to 0 by a cosine.",
    ):  # fmt: skip
        assert words in text
    assert headline(plan) == "LoRA r16 on 7 linears · fp32 · AdamW · 1 × cpu"


def test_the_other_choices_have_words_too(plan):
    other = replace(
        plan, tuning=Full(), optimizer=Sgd(momentum=0.9), loss=PlainLoss(), recompute=Recompute(blocks=8),
        batch=Batch(micro_batch_size=1, accumulation=4, seq_len=64, packing=False),
        schedule=replace(
            plan.schedule, kind="constant", warmup=Steps(count=7), duration=Steps(count=9), max_grad_norm=0.0
        ),
        hardware=replace(plan.hardware, gpus_per_node=8, nodes=2),
    )  # fmt: skip
    text = " ".join(sentences(other, total=1500))
    for words in (
        "Tuning: full.", "All 8 blocks keep", "Optimizer: momentum SGD; weight decay",
        "1 × 64 × 4 × 16 = 4,096 tokens", "Gradients are not clipped.",
        "Over 1,500 steps the learning rate rises to 2.0e-03 over 7 steps and stays there.",
    ):  # fmt: skip
        assert words in text
    assert "Over 1 step the learning rate rises to 2.0e-03 over 1 step" in " ".join(sentences(other, total=1))
    assert "learning rate" not in " ".join(sentences(other, total=None))
    assert headline(other).endswith("2 nodes of 8 × cpu")


def test_every_setting_of_the_plan_is_listed(plan):
    listed = dict(settings(replace(plan, offload=Offload(activations="cpu"))))
    said = {
        "tuning.kind": "Lora", "tuning.rank": "16", "schedule.kind": "cosine", "schedule.duration.kind": "Epochs",
        "hardware.gpu.memory_bytes": "16.00 GiB", "data.sources.0.path": "runs/demo/train.jsonl",
        "batch.packing": "yes", "offload.activations": "cpu", "offload.optimizer": "device",
    }  # fmt: skip
    assert listed.items() >= said.items()
    names = {field.name for field in fields(plan.run)}
    assert {f"run.{name}" for name in names} - set(listed) == {"run.tracking"}
    assert "run.tracking.project" in listed
