"""Methods, sharding and offload: what may be taken, in which order, and what is refused."""

from dataclasses import replace

import pytest

from fitune.errors import HardwareError, NothingFits, RecipeError
from fitune.estimate.predict import predict_memory
from fitune.planner.candidates import Request
from fitune.planner.defaults import with_host_memory
from fitune.planner.method_search import MethodSearch
from fitune.planner.methods import methods
from fitune.planner.search import find_plan
from fitune.spec.plan import (
    AdamW8bit,
    ClipByNorm,
    ClipByValue,
    Ddp,
    Hqq,
    Lomo,
    Lora,
    Nf4,
    Precision,
    Sgd,
    Single,
    Zero,
)
from fitune.spec.predictions import Phase
from fitune.units import GIB
from plans import CPU, gpu, known, recipe_of


def methods_of(card, **settings):
    """Those that a plan can be made of."""
    model, hardware, recipe = known("llama-3.1-8b"), gpu(card), recipe_of("llama-3.1-8b", **settings)
    request = Request(recipe=recipe, model=model, hardware=hardware)
    found = methods(request)
    return [method for method in found if MethodSearch(request, method).placements]


def plan_of(model, card, *, gpus=1, nodes=1, host=512, **settings):
    hardware = CPU if card == "cpu" else gpu(card, gpus=gpus)
    hardware = replace(hardware, nodes=nodes, host_memory_bytes=host * GIB)
    return find_plan(recipe_of(model, **settings), model=known(model), hardware=hardware).chosen.plan


def words(method):
    tuning = type(method.tuning).__name__
    base = type(method.tuning.base).__name__ if isinstance(method.tuning, Lora) else ""
    return f"{tuning}{base} {method.precision}"


def test_the_order_of_preference():
    assert [words(method) for method in methods_of("h100")] == [
        "Full bf16-master",
        "LoraDense bf16-master",
        "LoraDense bf16",
        "LoraNf4 bf16-master",
        "LoraNf4 bf16",
        "Full bf16",
        "Lomo bf16",
        "Lomo bf16",
    ]
    assert [words(method) for method in methods_of("h100", tuning="full")] == [
        "Full bf16-master",
        "Full bf16",
    ]


@pytest.mark.parametrize(
    ("settings", "tuning"),
    [
        ({"tuning": "qlora"}, Nf4(double_quant=True)),
        ({"adapter": "lora", "load_in_4bit": True}, Nf4(double_quant=True)),
        ({"tuning": "qlora", "double_quant": False}, Nf4(double_quant=False)),
        ({"finetuning_type": "lora", "quantization_bit": 4}, Nf4(double_quant=True)),
        ({"quantization_method": "hqq"}, Hqq(bits=4)),
        ({"quantization_bit": 3}, Hqq(bits=3)),
        ({"quantization": "hqq", "quantization_bits": 2, "group_size": 16}, Hqq(bits=2, group_size=16)),
    ],
)
def test_the_words_for_a_quantised_base(settings, tuning):
    assert {method.tuning.base for method in methods_of("h100", **settings)} == {tuning}


def test_lomo_is_its_own_optimizer_and_clips_by_value_unless_told():
    plan = plan_of("llama-3.2-1b", "rtx-4090", tuning="lomo")
    assert plan.tuning == Lomo(adaptive=False, clip=ClipByValue(value=1.0))
    assert (plan.optimizer, plan.precision, plan.batch.accumulation) == (Sgd(), Precision.BF16, 1)
    by_norm = plan_of("llama-3.2-1b", "rtx-4090", tuning="adalomo", max_grad_norm=0.5)
    assert by_norm.tuning == Lomo(adaptive=True, clip=ClipByNorm(max_norm=0.5))


def test_eight_bit_states_and_dora_are_kept():
    plan = plan_of("llama-3.2-1b", "rtx-4090", tuning="lora", dora=True, optim="adamw_bnb_8bit")
    assert plan.tuning.dora
    assert plan.optimizer == AdamW8bit()
    assert plan.schedule.learning_rate == 2e-4


def test_what_is_divided_grows_with_the_need():
    assert plan_of("qwen3-0.6b", "h100", gpus=8, tuning="lora").sharding == Ddp()
    assert plan_of("llama-2-70b", "h100", gpus=8, tuning="lora").sharding.stage == 3
    assert plan_of("qwen3-0.6b", "h100", tuning="full").sharding == Single()


def test_seventy_billion_at_home():
    """QLoRA with FSDP on two gaming cards: what the answer.ai team showed, on 128 GB of host memory."""
    plan = plan_of("llama-2-70b", "rtx-4090", gpus=2, host=119)
    assert isinstance(plan.tuning, Lora)
    assert isinstance(plan.tuning.base, Nf4)
    assert plan.sharding == Zero(stage=3, backend="fsdp")


@pytest.mark.parametrize(
    ("pins", "check"),
    [
        ({"zero": 0}, lambda plan: plan.sharding == Ddp()),
        (
            {"zero": 2, "backend": "deepspeed"},
            lambda plan: plan.sharding == Zero(stage=2, backend="deepspeed"),
        ),
        ({"zero": 1}, lambda plan: plan.sharding.stage == 1),
        ({"offload_optimizer": "cpu"}, lambda plan: plan.offload.optimizer == "cpu"),
        ({"offload_params": True}, lambda plan: plan.offload.parameters == "cpu"),
        ({"activation_offloading": True}, lambda plan: plan.offload.activations == "cpu"),
        ({"offload_optimizer": "nvme", "nvme_path": "/n"}, lambda plan: plan.offload.nvme_path == "/n"),
    ],
)
def test_pins_on_sharding_and_offload_are_kept(pins, check):
    assert check(plan_of("llama-3.2-1b", "a100-40gb", gpus=2, tuning="full", **pins))


def test_hybrid_sharding_stays_within_a_node():
    plan = plan_of("llama-3.1-8b", "h100", gpus=8, nodes=2, tuning="full", hybrid_sharding=True)
    assert plan.sharding.hybrid
    assert plan.sharding.backend == "fsdp"


def test_the_global_batch_is_shared_by_all_devices():
    plan = plan_of("qwen3-0.6b", "h100", gpus=4, tuning="full", global_batch_size=32, seq_len=256)
    assert plan.batch.global_batch_size * 4 == 32


def test_a_processor_offloads_nothing():
    model = known("qwen3-0.6b")
    recipe = recipe_of("qwen3-0.6b", tuning="full")
    request = Request(recipe=recipe, model=model, hardware=CPU)
    method = methods(request)[0]
    assert [placement.is_plain for placement in MethodSearch(request, method).placements] == [True]


@pytest.mark.parametrize(
    ("card", "gpus", "settings", "error", "message"),
    [
        ("h100", 1, {"tuning": "lomo", "gradient_accumulation_steps": 4}, RecipeError, "steps: 4"),
        ("h100", 1, {"tuning": "lomo", "precision": "bf16-master"}, RecipeError, "no fp32 masters"),
        ("h100", 1, {"tuning": "adalomo", "optimizer": "adamw"}, RecipeError, "optimizer itself"),
        ("h100", 1, {"tuning": "lomo", "max_grad_norm": 0}, RecipeError, "max_grad_norm: 0"),
        ("h100", 8, {"tuning": "lomo", "zero": 2}, RecipeError, "stage 3 .* zero: 2"),
        ("h100", 1, {"tuning": "full", "quantization": "nf4"}, RecipeError, "cannot be trained"),
        ("h100", 1, {"tuning": "qlora", "quantization": "none"}, RecipeError, "forbids"),
        ("h100", 1, {"quantization": "nf4", "quantization_bits": 8}, RecipeError, "4 bits, not quantization_bits = 8"),
        ("h100", 1, {"tuning": "full", "dora": True}, RecipeError, "adapters"),
        ("cpu", 1, {"optimizer": "adamw-8bit"}, HardwareError, "kernels for GPUs"),
        ("h100", 8, {"optimizer": "adamw-8bit", "backend": "deepspeed"}, RecipeError, "fp32 states"),
        ("h100", 1, {"tuning": "full", "max_grad_value": 1.0}, RecipeError, "for lomo and adalomo"),
        ("h100", 1, {"zero": 3}, RecipeError, "for several devices, and there is 1"),
        ("h100", 1, {"backend": "fsdp"}, RecipeError, "several devices"),
        ("h100", 8, {"hybrid_sharding": True}, RecipeError, "nodes: 1, gpus: 8"),
        ("h100", 8, {"zero": 0, "backend": "deepspeed"}, RecipeError, "DDP"),
        ("h100", 3, {"global_batch_size": 16}, RecipeError, r"16 / \(3 devices\) = 5.33"),
        ("h100", 2, {"global_batch_size": 12, "micro_batch_size": 4}, RecipeError, r"12 / \(2 devices × .* 4\) = 1.50"),
        ("cpu", 1, {"offload_optimizer": "cpu"}, RecipeError, "no other memory to offload to"),
        ("h100", 2, {"offload_optimizer": "cpu", "zero": 0}, RecipeError, "DDP"),
        ("h100", 2, {"offload_parameters": "cpu", "zero": 2, "backend": "deepspeed"}, RecipeError, "zero = 2"),
        ("h100", 2, {"offload_optimizer": "nvme"}, RecipeError, "needs a folder"),
        ("h100", 1, {"tuning": "lomo", "offload_optimizer": "cpu"}, RecipeError, "no optimizer states"),
        ("h100", 1, {"quantization_bits": 3, "group_size": 100}, RecipeError, "leaves a rest"),
        ("h100", 1, {"offload_optimizer": "nvme", "nvme_path": "/n"}, RecipeError, "DeepSpeed at stage 3"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(card, gpus, settings, error, message):
    with pytest.raises(error, match=message) as caught:
        plan_of("llama-3.2-1b", card, gpus=gpus, **settings)
    assert caught.value.hint


def test_what_cannot_run_here_is_left_out():
    model, hardware = known("qwen3-0.6b"), with_host_memory(gpu("h100", gpus=2))
    report = find_plan(recipe_of("qwen3-0.6b"), model=model, hardware=hardware, purposes=("plan", "rehearse"))
    assert report.chosen.plan.sharding.backend == "fsdp"
    recipe = recipe_of("qwen3-0.6b", backend="deepspeed")
    with pytest.raises(RecipeError, match="DeepSpeed does not run on fake tensors"):
        find_plan(recipe, model=model, hardware=hardware, purposes=("plan", "rehearse"))


def test_a_pinned_accumulation_keeps_lomo_out():
    pins = {"export": "full", "micro_batch_size": 1, "gradient_accumulation_steps": 4}
    plan = plan_of("mistral-7b", "h200", host=16, **pins)
    assert (plan.batch.micro_batch_size, plan.batch.accumulation) == (1, 4)


def test_what_is_pinned_is_never_chosen_against():
    """8-bit states are stepped on the device by torch's engines; an optimizer that is named keeps LOMO out."""
    model = known("llama-3.1-8b")
    for gpus in (1, 4):
        hardware = replace(gpu("rtx-4090", gpus=gpus), host_memory_bytes=256 * GIB)
        recipe = recipe_of("llama-3.1-8b", tuning="full", optimizer="adamw-8bit")
        request = Request(recipe=recipe, model=model, hardware=hardware)
        for method in methods(request):
            for placement in MethodSearch(request, method).placements:
                assert placement.offload.optimizer == "device"
                assert getattr(placement.sharding, "backend", "fsdp") == "fsdp"
    assert not [f for f in methods_of("h100", optimizer="momentum") if isinstance(f.tuning, Lomo)]
    assert {type(f.tuning) for f in methods_of("h100", max_grad_value=0.5)} == {Lomo}


def test_cheapest_keeps_the_pins_and_says_how_many_devices_it_took():
    model, hardware = known("llama-3.1-8b"), gpu("rtx-4090", gpus=2)
    pins = {"tuning": "lora", "objective": "cheapest"}
    pinned = recipe_of("llama-3.1-8b", zero=3, backend="deepspeed", **pins)
    taken = find_plan(pinned, model=model, hardware=hardware).chosen.plan
    assert taken.sharding == Zero(stage=3, backend="deepspeed")
    report = find_plan(recipe_of("llama-3.1-8b", **pins), model=model, hardware=gpu("h100", gpus=8))
    used = report.chosen.plan.hardware.num_gpus
    assert used == 8 or report.decisions[0].startswith(f"devices: {used} of 8")


def test_an_offload_that_is_faster_and_not_taken_is_named_with_the_setting_that_takes_it():
    model, hardware, full = known("llama-3.2-1b"), with_host_memory(gpu("rtx-4090")), {"tuning": "full"}
    report = find_plan(recipe_of("llama-3.2-1b", **full), model=model, hardware=hardware)
    [line] = [line for line in report.decisions if line.startswith("offload: none; ")]
    settings = {**full, "offload_parameters": "cpu", "offload_optimizer": "cpu"}
    taken = find_plan(recipe_of("llama-3.2-1b", **settings), model=model, hardware=hardware).chosen.estimate
    gain = taken.tokens_per_second / report.chosen.estimate.tokens_per_second - 1
    said = float(line.split("up to ")[1].split(" %")[0]) / 100
    assert 0.05 < gain <= said + 0.005 < 0.25  # the setting takes the simplest within 3 % of the fastest
    assert "offload_parameters: cpu, offload_optimizer: cpu" in line
    pinned = recipe_of("llama-3.2-1b", **full, offload_optimizer="device")
    decisions = find_plan(pinned, model=model, hardware=hardware).decisions
    assert not any(line.startswith("offload: none;") for line in decisions)


def test_a_disk_that_is_too_small_is_refused_with_its_sum():
    hardware = replace(gpu("h100", gpus=8), host_memory_bytes=2048 * GIB, nvme_bytes=GIB)
    pins = {"offload_parameters": "nvme", "offload_optimizer": "nvme", "nvme_path": "/n", "tuning": "full"}
    with pytest.raises(NothingFits, match=r"on\s+NVMe"):
        find_plan(recipe_of("llama-2-70b", **pins), model=known("llama-2-70b"), hardware=hardware)


def test_a_row_is_no_longer_than_the_model_takes_unless_asked():
    report = find_plan(recipe_of("gpt2"), model=known("gpt2"), hardware=gpu("t4"))
    assert report.chosen.plan.batch.seq_len == 1024
    assert any(line.startswith("seq_len: 1024 (the longest") for line in report.decisions)


def test_qwen3_30b_qlora_is_planned_on_one_24_gb_card():
    """30.5 B weights at 4.127 bit, less the tables in 16 bit; one block's experts whole at a time."""
    report = find_plan(
        recipe_of("qwen3-30b-a3b", tuning="qlora"), model=known("qwen3-30b-a3b"), hardware=gpu("rtx-4090")
    )
    tables = 2 * 151936 * 2048
    packed = (30_532_122_624 - tables) * 4.127 / 8
    weights = predict_memory(report.chosen.plan).phases[Phase.IDLE]["weights"]
    assert weights == pytest.approx(packed + 2 * tables, rel=0.002)
    whole = next(line for line in report.decisions if line.startswith("note on experts"))
    assert "experts: quantised, " in whole
    assert any("made whole" in line and "768.0 MiB at most" in line for line in report.decisions)


def test_experts_that_stay_in_16_bit_are_named():
    report = find_plan(
        recipe_of("qwen3-30b-a3b", tuning="lora", seq_len=512),
        model=known("qwen3-30b-a3b"), hardware=gpu("h100"),
    )  # fmt: skip
    assert any("experts: not adapted (lora_target_modules" in line for line in report.decisions)
