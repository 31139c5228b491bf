"""What people read fits 100 columns and says everything; what programs read has every promised key."""

import json

import pytest

from fitune.planner.defaults import PRICES, price_of, with_host_memory
from fitune.planner.explain import explain_plan, explain_priced, plan_data, verdict
from fitune.planner.search import find_plan, taken_on
from fitune.units import GIB, format_percent
from fitune.values.machines.gpus import find_gpu
from fitune.values.model.known_models import find_known_model
from fitune.values.plan import Plan
from fitune.values.rules import keeps_rules
from fitune.values.serial import from_data
from fitune.values.words import describe_plan
from plans import gpu, known, lines_of, recipe_of, report_of


@pytest.fixture(scope="module")
def report():
    return report_of("llama-3.1-8b", with_host_memory(gpu("rtx-4090")))


def test_the_text_has_every_part_and_fits_100_columns(report):
    text = explain_plan(report)
    plan = explain_priced(report.chosen, price=0.0)
    for words in (plan, "41.9 M trained", "Also fits", "Does not fit", "Decided for you"):
        assert words in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_price_of_our_table_is_said_to_be_assumed_and_the_users_own_is_not(report):
    assumed = f"at ${price_of(gpu('rtx-4090').gpu):.2f} per GPU-hour (assumed; yours: price_per_gpu_hour)"
    assert assumed in explain_plan(report)
    assert "at $1.25 per GPU-hour (price_per_gpu_hour)" in explain_priced(report.chosen, price=1.25)


def test_every_price_is_of_a_known_card():
    assert [find_gpu(name).name for name in PRICES] == list(PRICES)


def test_the_table_holds_the_figures_of_the_estimate(report):
    memory = report.chosen.estimate.memory
    lines = {line.split("  ")[1]: line for line in explain_plan(report).splitlines() if line.startswith("  ")}
    totals = [float(cell) for cell in lines["tensors"].split()[1:]]
    assert totals == [round(sum(terms.values()) / 2**30, 2) for terms in memory.phases.values()]


@pytest.mark.parametrize(
    ("model", "attends", "how"),
    [
        ("state-spaces/mamba-130m-hf", False, "one token after another"),
        ("tiiuae/Falcon-H1-0.5B-Base", True, "in chunks of 128 tokens"),
    ],
)
def test_plans_of_state_space_models_say_whose_mixers_they_are_of_and_name_no_attention_that_is_not_there(
    model, attends, how
):
    report = report_of(model, "rtx-4090", tuning="qlora")
    assert (" attention, micro-batch" in describe_plan(report.chosen.plan)) == attends
    assert bool(lines_of(report, "attention: ")) == attends
    [note] = lines_of(report, "note on mixers: ")
    assert how in note


def test_a_model_that_also_sees_says_which_part_is_planned(tmp_path):
    """A name of the table and a config.json as it is published."""
    note = "has a vision part; its text part alone is planned and trained, and a full or merged export is that part"
    name = "google/gemma-3-4b-pt"
    published = {
        "model_type": "gemma3", "text_config": dict(find_known_model(name).config),
        "vision_config": {"model_type": "siglip_vision_model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    for model in (name, str(tmp_path)):
        report = report_of(model, "rtx-4090", tuning="qlora")
        assert lines_of(report, "note on model: ") == [f"note on model: {model} {note}"]
    assert not lines_of(report_of("gemma-3-1b", "rtx-4090", tuning="qlora"), "note on model")


def test_a_plan_that_cannot_be_trained_yet_stands_beside_the_one_that_is_trained():
    """Two cards, activations on the host: planned for both, trained on one alone."""
    model, settings, cards = "qwen3-8b", "tuning: lora", with_host_memory(gpu("rtx-3090", gpus=2))
    report = report_of(model, cards, settings)
    assert report.chosen.plan.offload.activations == "cpu"
    both = ("plan", "train")
    asked = {"recipe": recipe_of(model, settings), "model": known(model), "hardware": cards}
    trained = find_plan(**asked, purposes=both)
    assert report.trained == trained.chosen == taken_on(**asked)
    text = " ".join(explain_plan(report).split())
    assert text.startswith("only planned: this version cannot train it, because offload on several devices")
    assert f"What fitune train takes {describe_plan(trained.chosen.plan)}" in text
    assert plan_data(report)["trained"]["summary"] == describe_plan(trained.chosen.plan)
    refused = report_of(model, cards, settings, zero=0, offload_activations="cpu")
    assert refused.trained is None
    assert "no plan that keeps these settings and fits" in explain_plan(refused)


def test_an_assumed_host_is_said_wherever_it_is_used():
    """A copy of a checkpoint waits there, without any offload."""
    report = report_of("llama-3.1-8b", with_host_memory(gpu("rtx-4090")), gpu="rtx-4090", tuning="lora")
    assert "on the host: processes 3.0 + checkpoint copy 0.5" in explain_plan(report)
    (note,) = lines_of(report, "note on the host")
    assert note.endswith("host_memory: 48GiB")


def test_what_is_spare_is_the_difference_of_what_is_printed():
    assert verdict(int(3.5401 * GIB), int(43.1799 * GIB), GIB) == "43.2 usable, 39.7 spare"
    assert verdict(5 * GIB + 1, 5 * GIB, GIB) == "5.0 usable, 0.0 short"


def test_an_offload_is_only_recommended_where_it_can_be_trained():
    """The faster one of two on A100s is planned, and not trained yet."""
    hardware = with_host_memory(gpu("a100-40gb", gpus=8))
    report = report_of("llama-3.1-70b", hardware, "gpu: a100-40gb, gpus: 8, tuning: lora")
    speed = report.chosen.estimate.tokens_per_second
    gains = {
        keeps_rules(other.plan, "train"): other.estimate.tokens_per_second / speed - 1
        for other in reversed(report.runners_up)
        if other.plan.offload.activations == "cpu"
    }
    assert gains[False] > gains[True] > 0.05
    (line,) = lines_of(report, "offload: none")
    assert f"up to {format_percent(gains[True], digits=0)} faster" in line


def test_the_json_object_keeps_its_promise(report):
    data = json.loads(json.dumps(plan_data(report)))
    assert {"model", "plan", "estimate", "runners_up", "rejected", "decisions"} <= set(data)
    assert (data["model"]["name"], data["model"]["num_params"]) == ("meta-llama/Llama-3.1-8B", 8_030_261_248)
    estimate = data["estimate"]
    assert {"peak_bytes", "phases", "step_seconds", "tokens_per_second", "usable_bytes"} <= set(estimate)
    tensors = max(sum(terms.values()) for terms in estimate["phases"].values())
    assert estimate["peak_bytes"] == tensors + sum(estimate["outside"].values()) <= estimate["usable_bytes"]
    assert set(estimate["phases"]) == {"idle", "forward", "loss", "backward", "update"}
    assert all({"what", "why"} == set(item) for item in data["rejected"])
    assert all({"summary", "plan", "estimate"} <= set(item) for item in data["runners_up"])
    assert from_data(Plan, data["plan"]) == report.chosen.plan


def test_a_model_that_is_stored_in_few_bits_says_so_and_names_the_one_in_sixteen():
    [note] = lines_of(report_of("unsloth/llama-3-8b-bnb-4bit", "rtx-4090"), "note on model: ")
    assert "(bitsandbytes)" in note
    assert "meta-llama/Meta-Llama-3-8B is the original" in note
