"""Laws of TRL's recipes, accelerate's files and the arguments of Unsloth's notebooks."""

import pytest
import yaml

from fitune.errors import RecipeError
from fitune.recipe.foreign import trainer_of
from fitune.session.recipes.reading import convert_recipe
from recipe.foreign.examples import read_keys, typed

PLAIN = {"model_name_or_path": "org/m", "dataset_name": "org/rows"}
UNSLOTH = typed(
    "model_name: unsloth/m, max_seq_length: 2048, load_in_4bit: true, r: 16, lora_alpha: 16, lora_dropout: 0, "
    "bias: none, use_gradient_checkpointing: unsloth, random_state: 3407, use_rslora: false, loftq_config: null, "
    "per_device_train_batch_size: 2, gradient_accumulation_steps: 4, warmup_steps: 5, max_steps: 60, "
    "learning_rate: 2.0e-4, optim: adamw_8bit, weight_decay: 0.01, lr_scheduler_type: linear, output_dir: outputs, "
    "report_to: none, target_modules: [q_proj, k_proj]"
)


def recipe(keys, **changes):
    return read_keys({**keys, **changes}, gpus=2)


def test_trls_defaults_hold():
    read = recipe(PLAIN)
    assert (read.tuning, read.precision, read.seq_len) == ("full", "bf16-master", 1024)
    assert (read.micro_batch_size, read.learning_rate, read.num_epochs) == (8, 2e-5, 3.0)
    assert (read.lr_scheduler, read.warmup_ratio, read.train_on_prompt) == ("linear", 0, True)
    adapters = recipe(PLAIN, use_peft=True, load_in_4bit=True)
    assert (adapters.lora_r, adapters.lora_alpha, adapters.lora_dropout) == (16, 32, 0.05)
    assert (adapters.quantization, adapters.double_quantization) == ("nf4", False)


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ("assistant_only_loss: true", "train_on_prompt", False),
        ("dtype: bfloat16", "precision", "bf16"),
        ("model_init_kwargs: {dtype: bfloat16, device_map: auto}", "precision", "bf16"),
        ("accelerate_config: zero2", "zero", 2),
        ("accelerate_config: fsdp2", "zero", 3),
        ("fsdp: full_shard offload", "offload_parameters", "cpu"),
        ("logging_steps: 0.2", "log_steps", 1),
        ("gradient_checkpointing: false", "gradient_checkpointing", False),
        ("use_peft: true, use_dora: true", "dora", True),
        ("assistant_only_loss: false, completion_only_loss: true", "train_on_prompt", False),
        ("assistant_only_loss: false, completion_only_loss: false", "train_on_prompt", True),
        ("max_length: null", "on_long_row", "error"),
        ("dataset_text_field: body", "columns", {"text": "body"}),
        ("dataset_text_field: text", "columns", {}),
        ("chat_template: '{{ messages }}'", "chat_template", "{{ messages }}"),
        ("chat_template_path: ours.jinja", "chat_template", "ours.jinja"),
        ("use_peft: true, bias: none", "tuning", "lora"),
        (
            "use_peft: true, load_in_4bit: false, bnb_4bit_quant_type: nf4, use_bnb_nested_quant: true",
            "tuning",
            "lora",
        ),
    ],
)
def test_a_key_becomes_the_setting_that_means_it(changes, setting, value):
    assert getattr(recipe(PLAIN, **typed(changes)), setting) == value


@pytest.mark.parametrize(
    "changes",
    [
        "loss_type: dft", "reward_funcs: [a]", "beta: 0.1", "neftune_noise_alpha: 5", "optim: lion_32bit",
        "bias: all, use_peft: true", "loftq_config: {loftq_bits: 4}", "truncation_mode: keep_end",
        "finetune_mlp_modules: false, use_peft: true", "chat_template_path: org/other-instruct",
    ],
)  # fmt: skip
def test_what_would_change_the_result_is_refused(changes):
    with pytest.raises(RecipeError, match=f"{next(iter(typed(changes)))}: .* would change the result"):
        recipe(PLAIN, **typed(changes))


def test_accelerates_file_says_stage_devices_and_what_lies_on_the_host(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "{distributed_type: FSDP, num_machines: 2, num_processes: 16, mixed_precision: bf16, "
        "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD, fsdp_offload_params: true}}"
    )
    read = read_keys({**PLAIN, "accelerate_config": "mine.yaml"}, folder=tmp_path)
    assert (read.zero, read.hybrid_sharding, read.gpus, read.nodes) == (3, True, 8, 2)
    assert read.offload_parameters == "cpu"


def test_the_arguments_of_an_unsloth_notebook():
    assert trainer_of(UNSLOTH) == "Unsloth"
    read = recipe(UNSLOTH)
    assert (read.model, read.tuning, read.lora_r, read.quantization) == ("unsloth/m", "qlora", 16, "nf4")
    assert (read.seed, read.optimizer, read.max_steps, read.warmup_steps) == (3407, "adamw-8bit", 60, 5)
    assert (read.gradient_checkpointing, read.lora_target_modules) == (True, ["q_proj", "k_proj"])
    named = [recipe(UNSLOTH, chat_template=name).chat_template for name in ("llama-3.1", "chatml")]
    assert named == ["", "chatml"]


@pytest.mark.parametrize(
    ("named", "here"),
    [
        (["wandb", "tensorboard"], ["wandb", "tensorboard"]),
        ("comet_ml", ["comet"]),
        ("mlflow,swanlab", ["mlflow"]),
        ("all", ["all"]),
        (["all", "wandb"], ["all"]),
        ("none", []),
        ("trackio", []),
    ],
)
def test_the_trackers_are_the_same(named, here):
    read = recipe(PLAIN, report_to=named, run_name="first")
    assert read.report_to == here
    assert read.run_name == ("first" if here else "")


def test_a_notebook_without_rows_is_told_where_to_name_them(tmp_path):
    said = notes(UNSLOTH)
    assert "no data is named: a notebook loads its rows in Python" in said
    assert "data: FILE in the recipe, or --data FILE" in said
    rows = UNSLOTH | {"train_dataset": "yahma/alpaca-cleaned"}
    assert "no data" not in notes(rows)
    assert recipe(rows).data[0].path == "yahma/alpaca-cleaned"
    assert "no data is named" in notes(UNSLOTH | {"train_dataset": "dataset"})
    assert "no data" not in notes(UNSLOTH, folder=tmp_path, data="rows.jsonl")
    theirs = tmp_path / "notebook.yaml"
    theirs.write_text(yaml.safe_dump(UNSLOTH))
    assert "# data: train.jsonl  # a notebook loads its rows in Python" in convert_recipe(theirs)[0]


def notes(keys, **settings):
    found = []
    read_keys(keys, on_note=found.append, **settings)
    return " ".join(" ".join(found).split())


def test_files_of_a_dataset_are_its_sources_and_its_columns_are_no_secret():
    keys = typed(
        "model_name_or_path: org/m, datasets: [{path: json, data_files: [a.jsonl, b.jsonl]}, "
        "{path: org/rows, name: en, split: test}]"
    )
    assert [(each.path, each.split) for each in recipe(keys).data] == [
        ("a.jsonl", "train"), ("b.jsonl", "train"), ("org/rows:en", "test"),
    ]  # fmt: skip
    with pytest.raises(RecipeError, match=r"datasets\[0\].columns: .* would change the result"):
        recipe(keys | typed("datasets: [{path: d, columns: [messages]}]"))
    with pytest.raises(RecipeError, match=r"unknown key 'datasets\[0\].data_dir'"):
        recipe(keys | typed("datasets: [{path: d, data_dir: sub}]"))


MIXTURE = typed(
    "model_name_or_path: org/m, dataset_mixture: {seed: 0, datasets: "
    "[{id: org/a, config: en, split: train_sft, columns: [messages], weight: 0.5}, {id: org/b, config: default}]}"
)


def test_a_mixture_is_its_sources_with_their_shares():
    read = recipe(MIXTURE)
    assert [(each.path, each.split) for each in read.data] == [
        ("org/a:en", "train_sft[:50%]"), ("org/b", "train"),
    ]  # fmt: skip
    mixture = MIXTURE["dataset_mixture"]
    assert recipe(MIXTURE, dataset_mixture=mixture | {"test_split_size": 0.1}).val_fraction == 0.1
    assert recipe(MIXTURE, dataset_mixture=mixture | {"test_split_size": 1000}).val_fraction == 1000
    pairs = {"datasets": [{"id": "org/p", "columns": ["chosen", "rejected"]}]}
    with pytest.raises(RecipeError, match="columns chosen, rejected; fitune learns from"):
        recipe(MIXTURE, dataset_mixture=pairs)


@pytest.mark.parametrize("strategy", ["eval_strategy", "evaluation_strategy"])
def test_the_first_handbooks_mixer_names_splits_for_all_sources(strategy):
    keys = typed(
        "model_name_or_path: org/m, dataset_mixer: {org/a: 0.25, org/b: 1.0}, dataset_splits: [train_sft, test_sft]"
    )
    read, alone = recipe(keys, **{strategy: "epoch"}), recipe(PLAIN, **{strategy: "epoch"})
    assert [(each.path, each.split) for each in read.data] == [
        ("org/a", "train_sft[:25%]"), ("org/b", "train_sft"),
    ]  # fmt: skip
    assert [(each.path, each.split) for each in (*read.eval_data, *alone.eval_data)] == [
        ("org/a", "test_sft"), ("org/b", "test_sft"), ("org/rows", "test"),
    ]  # fmt: skip
    assert (read.evals_per_epoch, alone.evals_per_epoch, recipe(keys).eval_data) == (1, 1, [])


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        (
            "beta: 0.1, max_prompt_length: 512, never_seen: 1",
            "a recipe of supervised fine-tuning with data for it",
        ),
        ("reward_funcs: [a], use_vllm: true", "a recipe of supervised fine-tuning with data for it"),
        ("neftune_noise_alpha: 5", "leave it out to train without"),
    ],
)
def test_a_refusal_says_the_next_step_and_no_settings_of_another_task(changes, hint):
    with pytest.raises(RecipeError) as caught:
        recipe(PLAIN, **typed(changes))
    assert caught.value.hint == hint
    assert "unknown key" not in caught.value.message


def test_the_tokenizer_may_be_named_if_it_is_the_models_and_no_revision():
    assert recipe(PLAIN, tokenizer_name_or_path="org/m").model == "org/m"
    with pytest.raises(RecipeError, match="tokenizer of another model; save it beside the weights"):
        recipe(PLAIN, tokenizer_name_or_path="org/other")
    with pytest.raises(RecipeError, match="unknown key 'model_init_kwargs.revision'"):
        recipe(PLAIN, model_init_kwargs={"revision": "v1"})


def test_weights_in_what_the_checkpoint_has_are_told_of_their_masters():
    assert "fp32 masters; there they stay in what the checkpoint is stored in" in notes(
        PLAIN | {"dtype": "auto"}
    )


def test_a_template_is_shown_by_its_first_words():
    said = notes(PLAIN | {"chat_template": "{{ messages }}" + "x" * 500})
    assert "chat_template {{ messages }}xxx" in said
    assert "x" * 60 not in said
