"""A ScoreRecipe says what a scoring may be asked for: defaults, limits, and what goes together."""

from pathlib import Path

import pytest

from fitune.errors import RecipeError
from fitune.recipe.score_recipe import ScoreRecipe, checked_recipe, score_recipe
from fitune.score.engines.engine import Sampling
from fitune.score.plan import plan_from

ASKED = {"model": "m", "data": "rows.jsonl"}
TASKS = {"model": "m", "lm_eval": "gsm8k"}


def test_paths_and_lists_are_read_as_people_write_them():
    recipe = score_recipe(
        model=Path("m"), data=[Path("a.jsonl"), "b.jsonl"], out="o", adapter=Path("runs/a"), graders="f1",
        columns=("prompt=q",), batch_size=None, temperature=1,
    )  # fmt: skip
    assert (recipe.model, recipe.data, recipe.out) == ("m", ("a.jsonl", "b.jsonl"), Path("o"))
    assert (recipe.adapter, recipe.graders, recipe.columns) == ("runs/a", ("f1",), {"prompt": "q"})
    assert (recipe.batch_size, recipe.temperature, recipe.max_new_tokens) == (None, 1.0, 256)
    tasks = score_recipe(model="m", lm_eval=["a, b", "a"], lm_eval_tasks=Path("tasks"))
    assert (tasks.lm_eval, tasks.lm_eval_tasks, tasks.data) == (("a", "b"), Path("tasks"), ())


def test_what_is_asked_of_sampling_ids_and_template_is_in_the_plan():
    sampling = {"max_new_tokens": 2, "temperature": 0.5, "top_p": 0.25, "seed": 7}
    plan = plan_from(score_recipe(**ASKED, **sampling, id_column="key", chat_template="own"))
    assert plan.sampling == Sampling(**sampling)
    assert (plan.id_column, plan.chat_template) == ("key", "own")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens = 0: must be at least 1"),
        ({"max_new_tokens": 1.5}, "max_new_tokens = 1.5: must be a whole number"),
        ({"batch_size": True}, "batch_size = True: must be a whole number"),
        ({"temperature": float("nan")}, "temperature = nan: must be at most 1000"),
        ({"seed": 2**63}, "seed = 9223372036854775808: must be at most 9223372036854775807"),
        ({"columns": ["prompt=a", "prompt=b"]}, "--columns 'prompt=b' is not role=column, each role once"),
        ({"columns": {"question": "prompt"}}, "columns: 'question' is not a role\n  try: roles are system, prompt,"),
        ({"columns": {"prompt": ""}}, "columns: prompt names no column"),
        ({"columns": {"prompt": 3}}, "columns.prompt = 3: must be a text"),
        ({"data": []}, "fitune score: --data is missing\n  try: --data FILE, or --lm-eval TASKS"),
        ({"data": ["a", Path("a")]}, "--data a is given twice"),
        ({"modle": "m"}, "unknown key 'modle'; did you mean 'model'?"),
        ({"limit": 3}, "--limit has no effect without --lm-eval\n  try: add --lm-eval, or leave --limit out"),
        ({"allow_https": "perhaps"}, "allow_https = 'perhaps': must be true or false"),
        (TASKS | {"lm_eval": ","}, "--lm-eval ',' names no task\n  try: --lm-eval gsm8k,arc_easy"),
        (TASKS | {"shots": -1}, "shots = -1: must be at least 0"),
        (TASKS | {"data": "x"}, "--data has no effect with --lm-eval"),
        (TASKS | {"graders": "f1"}, "--grader has no effect with --lm-eval\n  try: leave --grader out"),
    ],
)  # fmt: skip
def test_what_a_scoring_cannot_take_is_said(wrong, said):
    with pytest.raises(RecipeError) as refused:
        score_recipe(**wrong if "lm_eval" in wrong else ASKED | wrong)
    assert said in str(refused.value)


def test_numbers_of_a_row_or_a_chat_are_checked_by_the_same_keys():
    assert checked_recipe(ScoreRecipe, top_p=0.5, seed=7).seed == 7
    with pytest.raises(RecipeError, match="top_p = 2: must be at most 1"):
        checked_recipe(ScoreRecipe, top_p=2)
