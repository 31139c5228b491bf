"""A recipe says what is wanted in anybody's words, and refuses what it does not understand."""

import os
from pathlib import Path

import pytest

from fitune.errors import RecipeError
from fitune.recipe.contradictions import source_weights
from fitune.recipe.recipe import (
    Recipe,
    SourceRecipe,
    canonical_keys,
    dump_recipe,
    given_keys,
    parse_recipe,
)
from fitune.session.recipes.reading import read_any_recipe
from plans import recipe_of as words_recipe

NAMES = {
    "model": "base_model model_name_or_path model_name",
    "tuning": "finetuning_type adapter train_type tuner_type",
    "learning_rate": "lr",
    "micro_batch_size": "per_device_train_batch_size batch_size",
    "seq_len": "max_length max_seq_length max_seq_len sequence_len cutoff_len context_length",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target target_modules",
    "num_epochs": "num_train_epochs epochs",
    "gradient_checkpointing": "recompute enable_activation_checkpointing",
    "attn_implementation": "flash_attn attn_impl attention_implementation",
    "output_dir": "out out_dir output_directory",
    "resume": "resume_from_checkpoint",
    "report_to": "logger tracker log_to",
    "val_fraction": "val_size val_set_size validation_size split_dataset_ratio",
}
"""Ours -> every name that other frameworks use."""


def recipe_of(tmp_path, text, *settings):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return read_any_recipe(path, settings=settings)


def refusal(tmp_path, text, *settings):
    with pytest.raises(RecipeError) as caught:
        recipe_of(tmp_path, text, *settings)
    return str(caught.value)


def test_names_of_other_frameworks_are_ours():
    read = {
        name: [*canonical_keys(dict.fromkeys(others.split(), "2"), where="test")]
        for name, others in NAMES.items()
    }
    assert read == {name: [name] for name in NAMES}


def test_the_defaults_leave_the_planner_its_choices():
    recipe = words_recipe("gpt2")
    left_open = {name for name in Recipe.model_fields if getattr(recipe, name) is None}
    assert {"tuning", "precision", "micro_batch_size", "gradient_checkpointing", "loss"} <= left_open


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: gpt2\nlerning_rate: 1", "unknown key 'lerning_rate' … did you mean 'learning_rate'?"),
        ("model: gpt2\nmodel: gpt3", "recipe.yaml:2 … duplicate key 'model', first in line 1: keep one"),
        ("model: gpt2\ndata: [{path: a, wieght: 2}]", "data.0.wieght … did you mean 'weight'?"),
        ("model: !!python/object/apply:os.system [ls]", "recipe.yaml:1:8 … tags ( … python/object/apply"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nmodel: *b", "recipe.yaml:2 … aliases (*name) are not allowed"),
        ("model: gpt2\n? [a, b]\n: c", "recipe.yaml:2 … is no key"),
        ("model: gpt2\nlearning_rate: .nan", "learning_rate = nan … finite"),
        ("model: gpt2\nlearning_rate: -1e-4", "learning_rate = '-1e-4' … greater than 0"),
        ("model: gpt2\nlearning_rate: true", "learning_rate = True … expected a number"),
        ("model: gpt2\nlora_modules_to_save: ['']", "lora_modules_to_save.0 = '' … must not be empty"),
        ("model: gpt2\nseq_len: 0", "seq_len = 0 … at least 2"),
        ("model: gpt2\nlora_r: 1.5", "lora_r = 1.5 … whole number"),
        ("model: gpt2\nseq_len: auto", "seq_len = 'auto' … expected a number"),
        ("model: gpt2\nval_fraction: 1.5", "val_fraction = 1.5 … a share below 1 or, from 2 on"),
        ("model: gpt2\nhost_memory: lots", "host_memory = 'lots' … is not a size"),
        ("model: gpt2\nhost_memory: 64", "host_memory = 64 … less than 1 MiB … 64GiB"),
        ("model: gpt2\ntuning: lroa", "tuning = 'lroa' … 'full', 'lora', 'qlora', 'lomo' or 'adalomo'"),
        ("model: gpt2\ngradient_checkpointing: maybe", "gradient_checkpointing = 'maybe' … number of blocks"),
        ("model: gpt2\ngradient_checkpointing: -2", "gradient_checkpointing = -2 … number of blocks"),
        ("model: gpt2\nbf16: yes please", "bf16 = 'yes please' … expected true or false"),
        ("model: gpt2\nquantization_bit: 5", "quantization_bits = 5 … 2, 3, 4 or 8"),
        ("model: gpt2\ndeepspeed: ds_z3.json", "deepspeed: ds_z3.json: cannot be read … No such file"),
        ("model: gpt2\noffload_optimizer: moon", "offload_optimizer = 'moon' … 'device', 'cpu' or 'nvme'"),
        ("model: ''", "model = '' … must not be empty"),
        ("tuning: lora", "no model is named … --model"),
        ("- model", "`key: value` lines … found list"),
        ("", "`key: value` lines … this file is empty"),
        ("model: [gpt2", "recipe.yaml:1"),
        ("model: gpt2\n\tseq_len: 5", "recipe.yaml:2:1: a tab, where YAML takes spaces alone"),
        ("model: a\n---\nmodel: b", "recipe.yaml:2:1: a second document begins here … a file for each"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(tmp_path, text, words):
    message = refusal(tmp_path, text)
    for word in words.split(" … "):
        assert word in message


@pytest.mark.parametrize(
    ("theirs", "nearest"),
    [
        ("optim: paged_adamw_32bit", "adamw-8bit"),
        ("optim: PAGED_ADAMW", "adamw-8bit"),
        ("optim: adam", "adamw"),
        ("optim: adalomo", "tuning: adalomo"),
        ("lr_scheduler_type: cosine_warmup_with_min_lr", "lr_scheduler: cosine with min_lr_ratio"),
        ("lr_scheduler_kwargs: {min_lr_rate: 0.1}", "lr_scheduler: cosine with min_lr_ratio"),
        ("liger_rms_norm: true", "kernels: liger"),
        ("plugins: true", "kernels: liger"),
    ],
)
def test_what_is_said_elsewhere_and_not_here_is_refused_with_what_comes_nearest(theirs, nearest):
    with pytest.raises(RecipeError, match="is not in this version|unknown key") as caught:
        words_recipe("a", theirs)
    assert nearest in str(caught.value.hint)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    (tmp_path / "image.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("none.yaml", "no such recipe file"),
        ("", "is a folder, not a recipe file"),
        ("rows.jsonl", "rows.jsonl is data by its name, not a recipe"),
        ("image.yaml", "cannot be read"),
    ):
        with pytest.raises(RecipeError, match=words) as caught:
            read_any_recipe(tmp_path / name)
        assert name != "rows.jsonl" or caught.value.hint == f"--data {tmp_path / name}"


def test_two_names_for_one_setting_must_agree(tmp_path):
    message = refusal(tmp_path, "model: gpt2\nlr: 1e-4\nlearning_rate: 2e-4")
    assert "'lr' and 'learning_rate' both set learning_rate, to '1e-4' and '2e-4'" in message
    assert "both set precision" in refusal(tmp_path, "model: gpt2\nbf16: true\nfp16: true")
    recipe = recipe_of(tmp_path, "model: gpt2\nflash_attn: fa2\nattn_impl: flash_attention_2\n")
    assert recipe.attn_implementation == "flash"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("bf16: true", "precision: bf16-master"),
        ("bf16: false, fp16: true", "precision: fp16"),
        ("bf16: auto", "precision: null"),
        ("pure_bf16: true", "precision: bf16"),
        ("gpu: 4090", "gpu: '4090'"),
        ("torch_dtype: bfloat16", "precision: bf16"),
        ("precision: 32", "precision: fp32"),
        ("optim: adamw_torch_fused", "optimizer: adamw"),
        ("optimizer: adamw_8bit", "optimizer: adamw-8bit"),
        ("optim: SGD", "optimizer: sgd"),
        ("optimizer_in_bwd: true", "optimizer_in_backward: true"),
        ("flash_attn: true", "attn_implementation: flash"),
        ("lr_scheduler_type: constant_with_warmup", "lr_scheduler: constant"),
        ("tuning: LoRA", "tuning: lora"),
        ("load_in_4bit: true", "quantization: nf4"),
        ("quant_method: bnb", "quantization: nf4"),
        ("bnb_4bit_use_double_quant: false", "double_quantization: false"),
        ("adapter: QLoRA", "tuning: qlora"),
        ("optim: adamw_bnb_8bit", "optimizer: adamw-8bit"),
        ("use_liger_kernel: true", "kernels: liger"),
        ("compile: true", "torch_compile: true"),
        ("zero_stage: 3", "zero: 3"),
        ("offload_params: true", "offload_parameters: cpu"),
        ("activation_offloading: false", "offload_activations: device"),
        ("resume_from_checkpoint: null", "resume: false"),
        ("val_size: null", "val_fraction: 0.0"),
        ("learning_rate: 1e-4, seq_len: '1024'", "learning_rate: 0.0001, seq_len: 1024"),
        ("gradient_checkpointing: 'off'", "gradient_checkpointing: false"),
        ("gradient_checkpointing: auto", "gradient_checkpointing: null"),
        ("lora_target: all", "lora_target_modules: [all-linear]"),
        ("target_modules: 'q_proj, v_proj'", "lora_target_modules: [q_proj, v_proj]"),
        ("micro_batch_size: auto", "micro_batch_size: null"),
        ("lora_target_linear: true", "lora_target_modules: [all-linear]"),
        ("peft_use_rslora: true", "rslora: true"),
    ],
)
def test_values_of_other_frameworks(theirs, ours):
    """``repr`` tells True from 1."""
    assert repr(words_recipe("m", theirs).model_dump()) == repr(words_recipe("m", ours).model_dump())


def test_data_is_a_path_a_source_or_a_list(tmp_path):
    alone = SourceRecipe(path="a.jsonl")
    assert recipe_of(tmp_path, "model: m\ndata: a.jsonl").data == [alone]
    assert recipe_of(tmp_path, "model: m\ndata: {path: a.jsonl}").data == [alone]
    assert recipe_of(tmp_path, "model: m\ndata:").data == []
    mixed = recipe_of(
        tmp_path, "model: m\ndata:\n- a.jsonl\n- {path: b, columns: {prompt: q, completion: a}}"
    )
    assert [source.path for source in mixed.data] == ["a.jsonl", "b"]
    assert mixed.data[1].columns == {"prompt": "q", "completion": "a"}


def test_set_reaches_inside(tmp_path):
    text = "model: m\ndata:\n- a.jsonl\n- {path: b.jsonl, weight: 2}\n"
    recipe = recipe_of(tmp_path, text, "data.0.weight=3", "data.1.columns.prompt=question", "lr=1e-3")
    assert recipe.data[0] == SourceRecipe(path="a.jsonl", weight=3)
    assert recipe.data[1] == SourceRecipe(path="b.jsonl", weight=2, columns={"prompt": "question"})
    assert recipe.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["dataset.format=alpaca"], SourceRecipe(path="a.jsonl", format="alpaca")),
        (["data=b.jsonl", "data.sample=5"], SourceRecipe(path="b.jsonl", sample=5)),
        (["data.0.path=c.jsonl"], SourceRecipe(path="c.jsonl")),
    ],
)
def test_set_in_a_list_of_one(tmp_path, settings, expected):
    assert recipe_of(tmp_path, "model: m\ndata: a.jsonl", *settings).data == [expected]


def test_set_in_columns_that_are_written_as_a_text(tmp_path):
    text = "model: m\ncolumns: prompt=q\ndata: [{path: a, columns: prompt=ask}]"
    recipe = recipe_of(tmp_path, text, "columns.completion=r", "data.columns.completion=reply")
    assert recipe.columns == {"prompt": "q", "completion": "r"}
    assert recipe.data[0].columns == {"prompt": "ask", "completion": "reply"}
    said = refusal(tmp_path, "model: m\ncolumns: q", "columns.prompt=r")
    assert "columns = 'q': 'q' is not role=column" in said


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lora_r", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("lora_q=3", "did you mean 'lora_r'?"),
        ("data.7.path=x", "'7' is no position in a list of 2"),
        ("model.x=3", "there is nothing inside 'm' to set"),
        ("push_to_hub=true", "names the repository here: OWNER/NAME"),
        ("data.0.nmae=x", "unknown key 'data.0.nmae'"),
        ("seq_len=!!python/name:os.system", "tags ("),
    ],
)
def test_set_that_makes_no_sense(tmp_path, setting, words):
    assert words in refusal(tmp_path, "model: m\nlora_r: 4\ndata: [a, b]", setting)


def test_what_was_given_is_read_back_and_nothing_else(tmp_path):
    """A weight of 1 that nobody gave contradicts data_weights; a max_grad_norm of 1 that was given has LOMO clip by the
    norm, one that was not by the value."""
    text = (
        "model: m\ndata: [a#5, {path: b, columns: {prompt: q}}]\ndata_weights: [2, 1]\nmax_grad_norm: 1.0\n"
        "lora_target: q_proj,v_proj\nrecompute: 3"
    )
    recipe = recipe_of(tmp_path, text)
    again = recipe_of(tmp_path, dump_recipe(recipe))
    assert again == recipe
    assert given_keys(again) == given_keys(recipe)
    given = {
        "model",
        "data",
        "data_weights",
        "max_grad_norm",
        "lora_target_modules",
        "gradient_checkpointing",
    }
    assert again.model_fields_set == given
    assert source_weights(parse_recipe(given_keys(recipe))) == [2, 1]


def test_a_recipe_may_come_through_a_pipe_that_the_caller_opened():
    end, other = os.pipe()
    with open(end, "rb"), open(other, "w") as written:
        written.write("model: llama-2-7b\ntuning: lora\n")
        written.close()
        assert read_any_recipe(Path(f"/dev/fd/{end}")).tuning == "lora"
