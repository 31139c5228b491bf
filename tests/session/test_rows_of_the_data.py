"""Plans are ranked by the rows of the data that is named, and hold its longest: seq_len."""

from dataclasses import replace

import pytest

from fitune.errors import RecipeError
from fitune.estimate.predict import largest_batch, predict, usual_batch
from fitune.estimate.step import describe_step
from fitune.planner.fit import tokens_per_second
from fitune.recipe.recipe import parse_recipe
from fitune.session.clusters.fleet import full_rows
from fitune.session.clusters.launching import launch_file
from fitune.session.planning import pinned, plan_for, plan_on_data, plan_to_train, wanted_hardware
from fitune.session.train.beginning import as_begun
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Steps
from fitune.values.serial import to_json
from jsonl import write_lines

CASES = {
    "lora on a card": {"model": "llama-3.1-8b", "gpu": "rtx-4090", "tuning": "lora"},
    "full on eight": {"model": "llama-3.1-8b", "gpu": "a100-80gb", "gpus": 8, "tuning": "full"},
    "lora of 70b on eight": {"model": "llama-2-70b", "gpu": "a100-80gb", "gpus": 8, "tuning": "lora"},
}
WORDS, MEAN = 1200, 311
"""Bytes of each row's text; its tokens: 1200 / 4, two messages of 5, and one at the start."""


@pytest.fixture
def short_rows(tmp_path):
    rows = [{"prompt": "p" * 600, "completion": "c" * 600}] * 40
    return str(write_lines(tmp_path / "rows.jsonl", rows))


def lora_on_a_card(**settings):
    return parse_recipe({**CASES["lora on a card"], **settings})


def on_rows(plan, mean):
    return replace(plan, batch=replace(plan.batch, mean_row_tokens=mean))


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_short_rows_are_planned_for(short_rows, settings):
    recipe = parse_recipe({**settings, "data": [short_rows]})
    by_full_rows, taken = plan_for(recipe).chosen.plan, plan_on_data(recipe).chosen
    assert taken.plan.batch.mean_row_tokens == MEAN
    assert taken.estimate.tokens_per_second > 1.05 * predict(on_rows(by_full_rows, MEAN)).tokens_per_second
    assert (
        tokens_per_second(describe_step(taken.plan, largest_batch(taken.plan)))
        == taken.estimate.tokens_per_second
    ), "searched, retried, printed"
    assert taken.estimate.memory == predict(on_rows(taken.plan, 0)).memory


def test_what_is_planned_is_what_is_trained(short_rows, tmp_path):
    recipe = lora_on_a_card(data=[short_rows], output_dir=str(tmp_path / "run"))
    planned, trained = plan_on_data(recipe), plan_to_train(recipe, hardware=wanted_hardware(recipe))
    assert trained.chosen.plan == planned.chosen.plan


def test_a_named_average_is_obeyed_and_rows_elsewhere_count_as_full(short_rows):
    named = plan_on_data(lora_on_a_card(data=[short_rows], mean_row_tokens=1500))
    assert named.chosen.plan.batch.mean_row_tokens == 1500
    recipe = lora_on_a_card(data=["owner/name"])
    batch = plan_on_data(recipe).chosen.plan.batch
    assert (batch.mean_row_tokens, batch) == (0, plan_for(recipe).chosen.plan.batch)


def test_a_run_goes_on_by_the_rows_it_began_with(short_rows, tmp_path):
    """More rows of another length may have come since."""
    recipe = lora_on_a_card(data=[short_rows], output_dir=str(tmp_path))
    for planned, tokens in ((plan_on_data(recipe), MEAN), (plan_for(recipe), None)):
        (tmp_path / "plan.json").write_text(to_json(planned.chosen.plan))
        assert as_begun(recipe).mean_row_tokens == tokens


@pytest.mark.parametrize(
    ("said", "batch"),
    [
        ({"micro_batch_size": 3}, 18),
        ({"micro_batch_size": 3, "gradient_accumulation_steps": 1}, None),
    ],
    ids=str,
)
def test_a_run_goes_on_by_the_global_batch_it_began_with(tmp_path, said, batch):
    """By default it is a multiple of the devices: 18 rows on six and 16 on one, which would be refused."""
    six = {"output_dir": str(tmp_path), "gpus": 6, **said}
    (tmp_path / "plan.json").write_text(to_json(plan_for(lora_on_a_card(**six)).chosen.plan))
    assert as_begun(lora_on_a_card(**six | {"gpus": 1, "resume": True})).global_batch_size == batch


def test_devices_that_do_not_divide_the_batch_of_a_run_are_refused_as_such():
    with pytest.raises(RecipeError, match=r"18 cannot be divided evenly: 18 / \(4 devices\)") as refused:
        plan_for(lora_on_a_card(gpus=4, resume=True, global_batch_size=18))
    assert "a run goes on with the global batch that it began with" in str(refused.value.hint)


def test_a_cluster_plans_by_the_same_rows(short_rows):
    recipe = parse_recipe({**CASES["full on eight"], "data": [short_rows]})
    assert pinned(recipe, plan_on_data(recipe).chosen.plan).mean_row_tokens == MEAN
    assert f"mean_row_tokens: {MEAN}" in launch_file(recipe, "slurm", settings=[])[1]


def test_what_a_cluster_is_given_plans_the_same_again():
    """Among all placements two rows at once are taken; in that placement alone one row would be within 3 % of them."""
    model = replace(load_model_spec("llama-3.2-1b"), num_layers=5)
    recipe = parse_recipe(
        {"model": model.name, "gpu": "rtx-3080", "seq_len": 2048, "packing": True, "host_memory": "90GiB"}
    )
    taken = plan_for(recipe, purposes=("plan", "train"), model=model).chosen
    again = plan_for(pinned(recipe, taken.plan), purposes=("plan", "train"), model=model).chosen
    assert taken.plan.batch.micro_batch_size == 2
    assert again == taken


@pytest.mark.parametrize(
    ("packing", "tokens", "rows"), [(False, 2 * 300, 2), (True, 2 * 2048, 2 * 2048 // 300)], ids=str
)
def test_an_average_micro_batch(packing, tokens, rows):
    """Average rows; packs are as full as without an average, of more rows."""
    recipe = lora_on_a_card(tuning="qlora", micro_batch_size=2, packing=packing, mean_row_tokens=300)
    plan = plan_for(recipe).chosen.plan
    shape = usual_batch(plan)
    assert (shape.tokens, shape.rows, shape.row_tokens) == (tokens, rows, 300)
    assert usual_batch(on_rows(plan, 0)) == usual_batch(on_rows(plan, 2048)) == largest_batch(plan)
    epoch = full_rows(plan, 90)
    assert (epoch.tokens, epoch.units) == (90 * 300, -(-90 * 300 // 2048) if packing else 90)
    of_steps = replace(plan, schedule=replace(plan.schedule, duration=Steps(count=5)))
    assert full_rows(of_steps, None).units == 5 * plan.batch.global_batch_size
