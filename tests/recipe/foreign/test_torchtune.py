"""Laws of torchtune's recipes: components become settings, and its defaults hold."""

import pytest

from fitune.errors import RecipeError
from recipe.foreign.examples import read_keys, typed

PLAIN = {
    "output_dir": "out",
    "model": {
        "_component_": "torchtune.models.llama3.lora_llama3_8b", "lora_attn_modules": ["q_proj", "output_proj"],
        "apply_lora_to_mlp": True, "lora_rank": 64, "lora_alpha": 128,
    },
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": None},
    "checkpointer": {"_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": "/x/Llama-3-8B/"},
    "dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset", "packed": False},
    "batch_size": 2, "gradient_accumulation_steps": 8, "epochs": 1, "max_steps_per_epoch": None, "dtype": "bf16",
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": "3e-4"},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 100,
    },
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"}, "clip_grad_norm": None,
}  # fmt: skip


def recipe(changes="", **whole):
    """PLAIN with keys of some of its components changed, as they are written, or with other components."""
    keys = {**PLAIN, **whole}
    for key, value in typed(changes).items():
        keys[key] = {**keys.get(key, {}), **value} if isinstance(value, dict) else value
    return read_keys({key: value for key, value in keys.items() if value != "absent"}, gpus=2)


def test_components_become_settings():
    read = recipe()
    assert (read.model, read.tuning, read.lora_r, read.lora_alpha) == (
        "meta-llama/Llama-3-8B",
        "lora",
        64,
        128,
    )
    assert read.lora_target_modules == ["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert (read.micro_batch_size, read.gradient_accumulation_steps, read.precision) == (2, 8, "bf16")
    assert (read.learning_rate, read.lr_scheduler, read.warmup_steps) == (3e-4, "cosine", 100)
    assert (read.data[0].path, read.data[0].format) == ("yahma/alpaca-cleaned", "alpaca")


def test_its_defaults_are_not_fitunes():
    read = recipe(lr_scheduler="absent")
    assert (read.lr_scheduler, read.warmup_steps) == ("constant", 0)
    assert (read.weight_decay, read.max_grad_norm) == (0.01, 0.0)
    assert (read.train_on_prompt, read.on_long_row) == (True, "error")


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ("model: {_component_: a.qlora_llama3_8b}", "quantization", "nf4"),
        ("model: {use_dora: true}", "dora", True),
        ("clip_grad_norm: 1.0", "max_grad_norm", 1.0),
        ("metric_logger: {_component_: a.metric_logging.WandBLogger, project: p}", "report_to", ["wandb"]),
        ("metric_logger: {_component_: a.metric_logging.DiskLogger}", "report_to", []),
        ("metric_logger: {_component_: a.WandBLogger, mode: disabled}", "report_to", []),
        ("metric_logger: {_component_: a.WandBLogger, mode: offline, job_type: j}", "track_offline", True),
        ("metric_logger: {_component_: a.WandBLogger, name: first}", "run_name", "first"),
        ("max_steps_per_epoch: 50, epochs: 2", "max_steps", 100),
        ("fsdp_cpu_offload: true", "offload_parameters", "cpu"),
        ("optimizer_in_bwd: true", "optimizer_in_backward", True),
        ("dataset: {max_seq_len: 256}", "seq_len", 256),
        ("dataset: {max_seq_len: 256}", "on_long_row", "truncate"),
        ("dataset: {train_on_input: false}", "train_on_prompt", False),
        ("optimizer: {_component_: torchao.prototype.low_bit_optim.AdamW8bit}", "optimizer", "adamw-8bit"),
        ("optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit}", "optimizer", "adamw-8bit"),
    ],
)
def test_a_key_becomes_the_setting_that_means_it(changes, setting, value):
    assert getattr(recipe(changes), setting) == value


def test_a_model_without_lora_in_its_name_is_trained_in_full():
    assert recipe(model={"_component_": "torchtune.models.llama3.llama3_8b"}).tuning == "full"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("quantizer: {_component_: training.quantization.Int8DynActInt4WeightQATQuantizer}", "quantizer"),
        ("loss: {_component_: torchtune.rlhf.loss.DPOLoss}", "loss"),
        ("dataset: {_component_: torchtune.datasets.stack_exchange_paired_dataset}", "dataset"),
        ("model: {_component_: torchtune.models.llama3_2_vision.llama3_2_vision_11b}", "model"),
        ("shuffle: false", "shuffle"),
        ("optimizer: null, tasks: [hellaswag]", "tasks"),
        ("optimizer: null, prompt: {user: Tell a joke.}, max_new_tokens: 9", "prompt"),
        ("resume_from_checkpoint: true", "resume_from_checkpoint"),
    ],
)
def test_what_would_change_the_result_is_refused(changes, key):
    with pytest.raises(RecipeError, match=f"{key}: .* would change the result"):
        recipe(changes)


@pytest.mark.parametrize(
    ("key", "more", "named"),
    [
        (
            "dataset",
            "new_system_prompt: Be kind.",
            "dataset.new_system_prompt: Be kind. would change the result",
        ),
        ("optimizer", "amsgrad: true", r"optimizer.amsgrad: True would change the result: another update"),
        ("optimizer", "weight_decy: 0.1", r"'optimizer.weight_decy' \(did you mean 'weight_decay'\?\)"),
        ("checkpointer", "adapter_checkpoint: a.pt", "an adapter to go on from"),
        ("model", "attn_dropout: 0.1", "unknown key 'model.attn_dropout'"),
    ],
)
def test_a_component_has_no_argument_that_is_left_out_in_silence(key, more, named):
    with pytest.raises(RecipeError, match=named):
        recipe(f"{key}: {{{more}}}")
    assert recipe(f"{key}: {{{more.split(':')[0]}: false}}")


@pytest.mark.parametrize(
    ("dataset", "columns"),
    [
        ("chat_dataset, conversation_style: openai, conversation_column: dialogue", {"messages": "dialogue"}),
        ("chat_dataset, conversation_style: sharegpt, conversation_column: talk", {"messages": "talk"}),
        ("chat_dataset, conversation_style: openai, conversation_column: messages", {}),
        ("instruct_dataset", {"prompt": "input", "completion": "output"}),
        ("instruct_dataset, column_map: {input: theorem, output: proof}", {"prompt": "theorem", "completion": "proof"}),
    ],
)  # fmt: skip
def test_columns_of_a_dataset_are_those_it_names(dataset, columns):
    named = typed(f"source: org/d, _component_: torchtune.datasets.{dataset}")
    assert recipe(dataset=named).data[0].columns == columns


def test_a_place_in_braces_is_its_value():
    """OmegaConf reads these files; keys of one's own are for that alone."""
    read = recipe(
        exp_name="first", root="/x", output_dir="/out/${exp_name}", longest=512,
        checkpointer={**PLAIN["checkpointer"], "checkpoint_dir": "${root}/Llama-3-8B", "output_dir": "${output_dir}"},
        tokenizer={**PLAIN["tokenizer"], "max_seq_len": "${longest}"},
        metric_logger={"_component_": "a.WandBLogger", "group": "${exp_name}", "project": "${metric_logger.group}"},
    )  # fmt: skip
    assert (read.output_dir, read.model, read.seq_len) == ("/out/first", "meta-llama/Llama-3-8B", 512)
    assert read.track_project == "first"
    with pytest.raises(RecipeError, match="unknown key 'exp_name'"):
        recipe(exp_name="first")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("${oc.env:HOME}/a", "names no value of this file"),
        ("${root}/a", "names no value of this file"),
        ("${output_dir}/a", "lead back to itself"),
    ],
)
def test_a_place_that_is_not_here_is_refused(place, why):
    with pytest.raises(RecipeError, match=f"output_dir: .* {why}; write the value"):
        recipe(output_dir=place)


def test_datasets_that_differ_in_what_is_learned_are_refused():
    one = {"_component_": "torchtune.datasets.alpaca_dataset", "train_on_input": False}
    assert [each.path for each in recipe(dataset=[one, one | {"source": "org/b"}]).data] == [
        "tatsu-lab/alpaca", "org/b",
    ]  # fmt: skip
    with pytest.raises(RecipeError, match="packed and train_on_input differ"):
        recipe(dataset=[one, one | {"train_on_input": True}])
    with pytest.raises(RecipeError, match="several data_files"):
        recipe(dataset={"_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
                        "data_files": ["a", "b"]})  # fmt: skip


def test_an_epoch_with_fewer_steps_than_it_may_have_is_told_of():
    notes = []
    read_keys({**PLAIN, "max_steps_per_epoch": 50, "epochs": 2}, on_note=notes.append)
    said = " ".join(" ".join(notes).split())
    assert (
        "in each of 2 epochs; torchtune ends an epoch that has fewer steps; here its rows come again" in said
    )
