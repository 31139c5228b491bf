"""What people read fits 100 columns and says everything; what programs read has every promised key."""

import json

import pytest

from fitune.planner.defaults import PRICES, price_of, with_host_memory
from fitune.planner.explain import explain_plan, explain_priced, plan_data, verdict
from fitune.planner.search import find_plan
from fitune.spec.machines.gpus import find_gpu
from fitune.spec.model.known_models import find_known_model
from fitune.spec.plan import Plan
from fitune.spec.rules import keeps_rules
from fitune.spec.serial import from_data
from fitune.spec.words import describe_plan
from fitune.units import GIB, format_percent
from plans import CPU, gpu, known, recipe_of, report_of


@pytest.fixture(scope="module")
def report():
    return report_of("llama-3.1-8b", with_host_memory(gpu("rtx-4090")))


def test_the_text_has_every_part_and_fits_100_columns(report):
    text = explain_plan(report)
    for words in (
        "8.03 B parameters",
        "41.9 M trained",
        "Also fits",
        "Does not fit",
        "Decided for you",
        "tokens/s",
    ):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert explain_priced(report.chosen, price=0.0) in text


def test_a_price_of_our_table_is_said_to_be_assumed_and_the_users_own_is_not(report):
    assumed = f"at ${price_of(gpu('rtx-4090').gpu):.2f} per GPU-hour (assumed; yours: price_per_gpu_hour)"
    assert assumed in explain_plan(report)
    own = explain_priced(report.chosen, price=1.25)
    assert "at $1.25 per GPU-hour (price_per_gpu_hour)" in own


def test_every_price_is_of_a_known_card():
    assert [find_gpu(name).name for name in PRICES] == list(PRICES)


def test_the_table_holds_the_figures_of_the_estimate(report):
    memory = report.chosen.estimate.memory
    lines = {line.split("  ")[1]: line for line in explain_plan(report).splitlines() if line.startswith("  ")}
    totals = [float(cell) for cell in lines["tensors"].split()[1:]]
    assert totals == [round(sum(terms.values()) / 2**30, 2) for terms in memory.phases.values()]


def test_one_line_for_a_plan():
    report = report_of(
        "llama-3.1-8b", gpu("h100"), tuning="lora", precision="bf16-master", micro_batch_size=4,
        gradient_accumulation_steps=4, gradient_checkpointing=False, loss="chunked", loss_chunk_tokens=1024,
    )  # fmt: skip
    assert describe_plan(report.chosen.plan) == (
        "LoRA r16 on 7 linears, bf16-master, AdamW, 0 of 32 blocks recomputed, chunked loss (1024), "
        "flash attention, micro-batch 4 × 2048 tokens × 4 accumulated"
    )


@pytest.mark.parametrize(
    ("model", "attends", "how"),
    [
        ("state-spaces/mamba-130m-hf", False, "one token after another"),
        ("mistralai/Mamba-Codestral-7B-v0.1", False, "in chunks of 256 tokens"),
        ("tiiuae/Falcon-H1-0.5B-Base", True, "in chunks of 128 tokens"),
        ("EleutherAI/pythia-70m", True, None),
    ],
)
def test_plans_of_state_space_models_say_whose_mixers_they_are_of_and_name_no_attention_that_is_not_there(
    model, attends, how
):
    plan = report_of(model, gpu("rtx-4090"), tuning="qlora")
    assert (" attention, micro-batch" in describe_plan(plan.chosen.plan)) == attends
    assert any(line.startswith("attention: ") for line in plan.decisions) == attends
    notes = [line for line in plan.decisions if line.startswith("note on mixers: ")]
    assert [how in note for note in notes] == ([True] if how else [])


def test_a_model_that_also_sees_says_which_part_is_planned(tmp_path):
    """A name of the table and a config.json as it is published."""
    note = "has a vision part; its text part alone is planned and trained, and a full or merged export is that part"
    text = {**find_known_model("google/gemma-3-4b-pt").config}
    published = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    for model in ("google/gemma-3-4b-pt", str(tmp_path)):
        report = report_of(model, gpu("rtx-4090"), tuning="qlora")
        assert [line for line in report.decisions if note in line] == [f"note on model: {model} {note}"]
        assert note in " ".join(explain_plan(report).split())
    assert not any(
        note in line for line in report_of("gemma-3-1b", gpu("rtx-4090"), tuning="qlora").decisions
    )


def test_a_plan_that_cannot_be_trained_yet_stands_beside_the_one_that_is_trained():
    """Two cards, activations on the host: planned for both, trained on one alone."""
    settings, cards = {"tuning": "lora", "seq_len": 2048}, with_host_memory(gpu("rtx-3090", gpus=2))
    report = report_of("qwen3-8b", cards, **settings)
    assert report.chosen.plan.offload.activations == "cpu"
    trained = find_plan(
        recipe_of("qwen3-8b", **settings),
        model=known("qwen3-8b"),
        hardware=cards,
        purposes=("plan", "train"),
    )
    assert report.trained == trained.chosen
    text = " ".join(explain_plan(report).split())
    assert text.startswith("only planned: this version cannot train it, because offload on several devices")
    assert f"What fitune train takes {describe_plan(trained.chosen.plan)}" in text
    data = plan_data(report)
    assert data["trained"]["summary"] == describe_plan(trained.chosen.plan)
    refused = report_of("qwen3-8b", cards, zero=0, offload_activations="cpu", **settings)
    assert refused.trained is None
    assert "no plan that keeps these settings and fits" in explain_plan(refused)


def test_an_assumed_host_is_said_wherever_it_is_used():
    """A copy of a checkpoint waits there, without any offload."""
    report = report_of("llama-3.1-8b", with_host_memory(gpu("rtx-4090")), gpu="rtx-4090", tuning="lora")
    assert "on the host: processes 3.0 + checkpoint copy 0.5" in explain_plan(report)
    (note,) = [line for line in report.decisions if line.startswith("note on the host")]
    assert "taken to be 47.98 GiB" in note
    assert note.endswith("host_memory: 48GiB")


def test_what_is_spare_is_the_difference_of_what_is_printed():
    assert verdict(int(3.5401 * GIB), int(43.1799 * GIB), GIB) == "43.2 usable, 39.7 spare"
    assert verdict(5 * GIB + 1, 5 * GIB, GIB) == "5.0 usable, 0.0 short"


def test_an_offload_is_only_recommended_where_it_can_be_trained():
    """The faster one of two on A100s is planned, and not trained yet."""
    report = report_of(
        "meta-llama/Llama-3.1-70B", with_host_memory(gpu("a100-40gb", gpus=8)), gpu="a100-40gb", gpus=8, tuning="lora"
    )  # fmt: skip
    speed = report.chosen.estimate.tokens_per_second
    gains = {
        keeps_rules(other.plan, "train"): other.estimate.tokens_per_second / speed - 1
        for other in reversed(report.runners_up)
        if other.plan.offload.activations == "cpu"
    }
    assert gains[False] > gains[True] > 0.05
    (line,) = [line for line in report.decisions if line.startswith("offload: none")]
    assert f"up to {format_percent(gains[True], digits=0)} faster" in line


def test_small_models_are_told_in_mib():
    report = report_of("gpt2", CPU, tuning="lora", seq_len=32, micro_batch_size=1)
    assert "MiB" in explain_plan(report)


def test_the_json_object_keeps_its_promise(report):
    data = json.loads(json.dumps(plan_data(report)))
    assert {"model", "plan", "estimate", "runners_up", "rejected", "decisions"} <= set(data)
    assert (data["model"]["name"], data["model"]["num_params"]) == ("meta-llama/Llama-3.1-8B", 8_030_261_248)
    estimate = data["estimate"]
    assert {"peak_bytes", "phases", "step_seconds", "tokens_per_second", "usable_bytes", "outside"} <= set(
        estimate
    )
    tensors = max(sum(terms.values()) for terms in estimate["phases"].values())
    assert estimate["peak_bytes"] == tensors + sum(estimate["outside"].values()) <= estimate["usable_bytes"]
    assert set(estimate["phases"]) == {"idle", "forward", "loss", "backward", "update"}
    assert all({"what", "why"} == set(item) for item in data["rejected"])
    assert all({"summary", "plan", "estimate"} <= set(item) for item in data["runners_up"])
    assert from_data(Plan, data["plan"]) == report.chosen.plan


def test_a_model_that_is_stored_in_few_bits_says_so_and_names_the_one_in_sixteen():
    copy = recipe_of("unsloth/llama-3-8b-bnb-4bit", gpu="rtx-4090")
    decisions = find_plan(copy, model=known(copy.model), hardware=gpu("rtx-4090")).decisions
    assert any(
        "(bitsandbytes)" in each and "meta-llama/Meta-Llama-3-8B is the original" in each
        for each in decisions
    )
