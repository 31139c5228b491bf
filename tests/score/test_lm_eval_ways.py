"""Tasks of lm-evaluation-harness with an adapter, as chats, and with answers that are drawn."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from fitune.errors import ScoringFailed
from fitune.session.score.lm_eval import score_tasks
from optional_libraries import NEEDS_LM_EVAL

pytestmark = NEEDS_LM_EVAL

NAMES = ("sums_choice", "sums_written")
DRAWN = {"until": ["\n"], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
NO_SYSTEM = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
    "{{ message.role }}: {{ message.content }}{{ eos_token }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}assistant: {%- endif -%}"
)
"""A template that refuses a system message, as Gemma's does."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Choices with a solved example and a description, written answers, and answers that are drawn."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "sums.jsonl"
    rows = [
        {"question": f"What is {a} plus {b}?", "choices": [f"{a + b}", f"{a} and {b}"], "right": b % 2}
        for a in range(2, 5)
        for b in range(3, 6)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mean = {"aggregation": "mean", "higher_is_better": True}
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
        "doc_to_text": "{{question}}", "description": "Add the numbers.",
    }  # fmt: skip
    written = {
        **common, "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "exact_match", **mean}],
    }  # fmt: skip
    tasks = {
        "sums_choice": {
            **common, "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}",
            "fewshot_split": "test", "num_fewshot": 1, "metric_list": [{"metric": "acc", **mean}],
        },
        "sums_written": {
            **written, "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        },
        "sums_drawn": {**written, "repeats": 2, "generation_kwargs": DRAWN},
        "sums_top_k": {**written, "generation_kwargs": DRAWN | {"top_k": 5}},
    }  # fmt: skip
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **task}))
    return folder


@pytest.fixture(scope="module")
def adapter_and_merged(model_folder, tmp_path_factory):
    """A LoRA adapter that PEFT made and saved, large enough to change answers; and the model that it merged.

    lm-eval's own model given the adapter would first cut the embeddings to the words of the tokenizer: other figures.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    folder = tmp_path_factory.mktemp("adapter")
    merged = Path(shutil.copytree(model_folder, folder / "merged"))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config)
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(merged)
    return folder / "adapter", merged


@pytest.fixture(scope="module")
def chatting(model_folder, tmp_path_factory):
    """The model with a chat template of its own."""
    folder = Path(shutil.copytree(model_folder, tmp_path_factory.mktemp("chatting") / "model"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": NO_SYSTEM}))
    return folder


def ours(folder, out, *tasks, model, said=None, **more):
    """Samples of each task."""

    def tell(event):
        if said is not None:
            said.append(getattr(event, "text", ""))

    score_tasks(model=str(model), tasks=tasks, out=out, tasks_folder=folder, tell=tell, **more)
    return {
        task: [json.loads(line) for line in (out / f"samples_{task}.jsonl").read_text().splitlines()]
        for task in tasks
    }


def theirs(folder, *, chat=False, **model):
    """Samples of each task on lm-eval's own model."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = simple_evaluate(
        HFLM(batch_size=4, dtype="float32", device="cpu", **model), tasks=list(NAMES), bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False), apply_chat_template=chat,
    )  # fmt: skip
    return found["samples"]


def require_same(found, known):
    for task in NAMES:
        for mine, other in zip(found[task], known[task], strict=True):
            assert mine["prompt_hash"] == other["prompt_hash"]
            for (one,), (two,) in zip(mine["resps"], other["resps"], strict=True):
                if isinstance(two, str):
                    assert one == two
                else:
                    assert one[0] == pytest.approx(two[0], rel=1e-5)
                    assert one[1] == two[1]


def answers(samples):
    return [sample["resps"] for sample in samples]


def test_with_an_adapter_the_figures_are_those_of_lm_evals_own_model_that_has_it_merged(
    folder, model_folder, adapter_and_merged, tmp_path
):
    adapter, merged = adapter_and_merged
    found = ours(folder, tmp_path / "adapted", *NAMES, model=model_folder, adapter=str(adapter))
    require_same(found, theirs(folder, pretrained=str(merged)))
    base = ours(folder, tmp_path / "base", *NAMES, model=model_folder)
    assert all(answers(found[task]) != answers(base[task]) for task in NAMES)


def test_as_chats_prompts_and_figures_are_those_of_lm_evals_own_model(folder, chatting, tmp_path):
    said = []
    found = ours(folder, tmp_path / "out", *NAMES, model=chatting, chat_template="own", said=said)
    require_same(found, theirs(folder, pretrained=str(chatting), chat=True))
    asked = found["sums_written"][0]["arguments"][0][0]
    assert asked == "user: What is 2 plus 3?</s>assistant:"
    assert [line for line in said if "system" in line] == [
        "lm-eval: the chat template refuses a system message (no system role): the tasks' descriptions are left out"
    ]


def test_drawn_answers_follow_from_the_seed_alone(folder, model_folder, tmp_path):
    def drawn(name, **more):
        return answers(ours(folder, tmp_path / name, "sums_drawn", model=model_folder, **more)["sums_drawn"])

    first = drawn("first", seed=7)
    assert drawn("again", seed=7, batch_size=3) == first
    assert drawn("other", seed=8) != first
    assert all(one != two for ((one, two),) in first), "each repeat is drawn anew"


def test_a_setting_of_the_draws_that_no_engine_honours_is_refused(folder, model_folder, tmp_path):
    with pytest.raises(ScoringFailed, match="task sums_top_k, row 0: generation_kwargs has top_k = 5"):
        ours(folder, tmp_path / "out", "sums_top_k", model=model_folder)
