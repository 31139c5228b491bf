"""Laws of LLaMA-Factory's recipes, of both versions."""

import json
from pathlib import Path

import pytest

from fitune.errors import RecipeError
from fitune.recipe.foreign import read_foreign
from recipe.foreign.examples import read_keys, typed

PLAIN = typed(
    "model_name_or_path: org/llama, stage: sft, do_train: true, finetuning_type: lora, lora_target: all, "
    "dataset: 'identity, alpaca_en', template: llama3"
)
SECOND = typed(
    "model: org/llama, model_class: llm, train_dataset: org/rows, cutoff_len: 512, "
    "peft_config: {name: lora, r: 16, lora_alpha: 32, target_modules: all}, dist_config: {name: fsdp2}"
)


def recipe(keys, *, folder=Path("nowhere"), gpus=1, **changes):
    return read_keys({**keys, **changes}, folder=folder, gpus=gpus)


def registered(folder, entry, name="a"):
    """The source of a dataset whose entry in ``data/dataset_info.json`` is this."""
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(typed(f"{name}: {{{entry}}}")))
    return recipe(PLAIN, folder=folder, dataset=name).data[0]


def test_its_defaults_hold_where_they_differ():
    """Stage and method have defaults, too."""
    read = recipe({key: value for key, value in PLAIN.items() if key not in ("stage", "finetuning_type")})
    assert read == recipe(PLAIN)
    assert (read.tuning, read.lora_r, read.lora_alpha) == ("lora", 8, 16)
    assert read.lora_target_modules == ["all-linear"]
    assert (read.learning_rate, read.num_epochs, read.lr_scheduler) == (5e-5, 3.0, "linear")
    assert (read.warmup_ratio, read.micro_batch_size, read.precision) == (0.0, 8, "fp32")


def test_rows_with_images_are_not_trained_without_them():
    with pytest.raises(RecipeError) as caught:
        recipe(PLAIN, image_max_pixels=262144, never_seen=1)
    assert caught.value.hint == "rows of text alone, without the settings of images and sounds"


@pytest.mark.parametrize("key", ["do_predict", "do_eval"])
def test_a_recipe_that_trains_nothing_is_not_trained(key):
    with pytest.raises(
        RecipeError, match=f"{key}: True would change the result: a recipe that trains nothing"
    ) as caught:
        recipe(PLAIN, **{key: True, "do_train": False})
    assert caught.value.hint == "fitune score, chat or export with what was trained"
    assert recipe(PLAIN, **{key: True}).tuning == "lora"


def test_texts_without_questions_are_learned_whole(tmp_path):
    """The stage pt packs unless told not to, and cuts what is longer than a block."""
    registered(tmp_path, "file_name: wiki.json, columns: {prompt: body}", name="wiki")
    read = recipe(PLAIN, folder=tmp_path, stage="pt", dataset="wiki")
    assert (read.data[0].format, read.data[0].columns) == ("columns", {"text": "body"})
    assert (read.packing, read.on_long_row) == (True, "split")
    apart = recipe(PLAIN, stage="pt", dataset="org/texts", packing=False)
    assert (apart.data[0].format, apart.packing, apart.on_long_row) == ("text", False, "truncate")


def test_a_registry_that_cannot_be_read_leaves_room_for_other_rows(tmp_path):
    (tmp_path / "dataset_info.json").write_text('{"a": {}, "a": {}}')
    with pytest.raises(
        RecipeError, match="dataset_info.json: cannot be read: the key 'a' is there twice"
    ) as caught:
        read_keys(PLAIN, folder=tmp_path)
    assert "--data FILE" in caught.value.hint
    assert read_keys(PLAIN, folder=tmp_path, data="org/rows").data[0].path == "org/rows"


def test_names_of_a_registry_that_is_not_here_are_said_and_the_plan_goes_on():
    notes = []
    assert read_keys(PLAIN, on_note=notes.append).data == []
    read_keys(PLAIN | {"max_samples": 50}, on_note=notes.append)
    said = " ".join(line.strip() for line in notes)
    assert "so many rows of a file are data: FILE#50" in said
    assert "identity, alpaca_en: names in a dataset_info.json that is not here; name files as data" in said
    assert recipe(PLAIN, dataset="org/rows").data[0].path == "org/rows"


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ("bf16: true, finetuning_type: full", "precision", "bf16-master"),
        ("pure_bf16: true, finetuning_type: full", "precision", "bf16"),
        ("quantization_bit: 4", "quantization", "nf4"),
        ("quantization_method: bnb, double_quantization: true", "tuning", "lora"),
        ("quantization_bit: 8", "quantization_bits", 8),
        ("quantization_bit: 4, double_quantization: false", "double_quantization", False),
        ("neat_packing: true", "packing", True),
        ("max_steps: 10, val_size: 0.1, eval_strategy: steps, eval_steps: 5", "eval_steps", 5),
        ("template: chatml", "chat_template", "chatml"),
        ("val_size: 50", "val_fraction", 50),
        ("add_tokens: '<a>,<b>', resize_vocab: true", "added_tokens", ["<a>", "<b>"]),
        ("disable_gradient_checkpointing: true", "gradient_checkpointing", False),
        ("use_kt: true, kt_config: {kt_expert_weight_format: bf16}", "tuning", "lora"),
    ],
)
def test_a_key_becomes_the_setting_that_means_it(changes, setting, value):
    assert getattr(recipe(PLAIN, **typed(changes)), setting) == value


@pytest.mark.parametrize(
    "changes",
    [
        "stage: dpo",
        "finetuning_type: freeze",
        "use_galore: true",
        "image_max_pixels: 262144",
        "default_system: Be brief.",
        "disable_shuffling: true",
        "mix_strategy: interleave_over",
        "resume_from_checkpoint: saves/checkpoint-100",
        "model_revision: a1b2c3",
    ],
)
def test_what_would_change_the_result_is_refused(changes):
    with pytest.raises(RecipeError, match=f"{next(iter(typed(changes)))}: .* would change the result"):
        recipe(PLAIN, **typed(changes))


def test_dataset_info_says_where_rows_are_and_how_they_are_called(tmp_path):
    """It is found beside the recipe, or in its folder of data."""
    info = typed(
        "identity: {file_name: identity.json}, alpaca_en: {hf_hub_url: org/alpaca, columns: {prompt: q, response: a}}"
    )
    (tmp_path / "data").mkdir()
    for above in (tmp_path, tmp_path / "data"):
        (above / "dataset_info.json").write_text(json.dumps(info))
        first, second = recipe(PLAIN, folder=tmp_path / "examples", max_samples=20).data
        assert (first.path, first.format, first.sample) == (str(above / "identity.json"), "alpaca", 20)
        assert (second.path, second.columns) == ("org/alpaca", {"prompt": "q", "completion": "a"})
        (above / "dataset_info.json").unlink()


@pytest.mark.parametrize(
    ("columns", "is_said"),
    [("prompt: instruction, query: input", True), ("query: input, system: system, history: history", False)],
)
def test_columns_that_are_read_here_alone_are_said(tmp_path, columns, is_said):
    info = typed(f"a: {{file_name: a.json, columns: {{{columns}}}}}")
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    lines = read_foreign(PLAIN | {"dataset": "a"}, where="theirs.yaml", folder=tmp_path).lines
    (said,) = (line.said for line in lines if line.settings == ("data",))
    assert ("called system and history" in said) == is_said


@pytest.mark.parametrize(
    ("entry", "format", "columns"),
    [
        ("columns: {prompt: instruction, query: input, response: output, system: system}", "alpaca", {}),
        (
            "columns: {prompt: instruction, response: output, system: sys}", "columns",
            {"prompt": "instruction", "completion": "output", "system": "sys"},
        ),
        # without query a column called input is not read there
        (
            "columns: {prompt: instruction, response: output}", "columns",
            {"prompt": "instruction", "completion": "output"},
        ),
        (
            "formatting: sharegpt, columns: {messages: messages, system: system}", "columns",
            {"messages": "messages", "system": "system"},
        ),
        ("formatting: sharegpt, columns: {messages: conversations, system: system}", "auto", {}),
        (
            "formatting: sharegpt, columns: {messages: conversations, system: sys, tools: api}", "columns",
            {"messages": "conversations", "system": "sys", "tools": "api"},
        ),
        (
            "formatting: sharegpt, columns: {tools: api}", "columns",
            {"messages": "conversations", "tools": "api"},
        ),
    ],
)  # fmt: skip
def test_a_column_of_another_name_is_never_left_out(tmp_path, entry, format, columns):
    """A system prompt, tools or a question in a column of its own name was once not read, without a word."""
    source = registered(tmp_path, f"file_name: a.json, {entry}")
    assert (source.format, source.columns) == (format, columns)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("{prompt: instruction, query: q, response: output}", "query: q, beside"),
        ("{prompt: question, query: input, response: output}", "query: input, beside"),
        ("{prompt: question, response: answer, history: history}", "history: history, beside"),
    ],
)
def test_a_part_of_the_prompt_that_no_mapping_has_is_refused(tmp_path, columns, named):
    with pytest.raises(RecipeError, match=rf"dataset\[a\] would change the result: {named}"):
        registered(tmp_path, f"file_name: a.json, columns: {columns}")


def test_a_deepspeed_object_in_the_recipe_is_read_as_its_file(tmp_path):
    place = {"device": "nvme", "nvme_path": "/mnt/nvme", "pin_memory": True}
    config = typed(
        "bf16: {enabled: auto}, optimizer: {type: adamw, params: {lr: auto}}, train_batch_size: auto"
    )
    config |= {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}}
    (tmp_path / "mine.json").write_text(json.dumps(config))
    for value in (config, "mine.json"):
        read = recipe(PLAIN, folder=tmp_path, gpus=2, deepspeed=value)
        assert (read.zero, read.offload_parameters, read.offload_optimizer) == (3, "nvme", "nvme")
        assert (read.nvme_path, read.backend) == ("/mnt/nvme", None)
        assert recipe(PLAIN, folder=tmp_path, deepspeed=value).nvme_path == ""
    with pytest.raises(RecipeError, match="optimizer.type Lamb"):
        recipe(PLAIN, gpus=2, deepspeed=config | {"optimizer": {"type": "Lamb"}})
    assert recipe(PLAIN, gpus=2, deepspeed="ds/ds_z3_offload_config.json").offload_parameters == "cpu"
    with pytest.raises(RecipeError, match="no file ds/other.json"):
        recipe(PLAIN, gpus=2, deepspeed="ds/other.json")


def test_version_1_says_the_same_in_groups(tmp_path):
    read = recipe(SECOND, gpus=2)
    assert (read.tuning, read.lora_r, read.lora_alpha, read.zero, read.seq_len) == ("lora", 16, 32, 3, 512)
    assert (read.learning_rate, read.precision) == (1e-4, "bf16-master")
    deepspeed = {"name": "deepspeed", "config_file": "ds_z2_offload.json"}
    assert recipe(SECOND, gpus=2, dist_config=deepspeed).offload_optimizer == "cpu"
    with pytest.raises(RecipeError, match="no file other.json"):
        recipe(SECOND, gpus=2, dist_config=deepspeed | {"config_file": "other.json"})
    quantised = recipe(SECOND, quant_config={"name": "bnb", "quantization_bit": 4})
    assert (quantised.tuning, quantised.quantization) == ("qlora", "nf4")
    (tmp_path / "sets.yaml").write_text("a: {path: org/a, size: 50}")
    source = recipe(SECOND, folder=tmp_path, train_dataset="sets.yaml").data[0]
    assert (source.path, source.sample) == ("org/a", 50)


def test_version_1_has_defaults_of_its_own():
    """Its rate stays constant, torch's AdamW decays by 0.01, and its adapters are not those of version 0.9."""
    read = recipe(SECOND, peft_config={"name": "lora"})
    assert (read.lr_scheduler, read.warmup_ratio, read.weight_decay) == ("constant", 0.0, 0.01)
    assert (read.lora_r, read.lora_alpha, read.lora_dropout) == (8, 16, 0.05)
    assert recipe(SECOND, weight_decay=0.1).weight_decay == 0.1


@pytest.mark.parametrize(("strategy", "told"), [("dynamic_batching", True), ("normal", False)])
def test_version_1_filling_steps_by_tokens_is_told(strategy, told):
    read = read_foreign({**SECOND, "batching_strategy": strategy}, where="", folder=Path("nowhere"))
    [line] = [line for line in read.lines if line.key == "batching_strategy"]
    assert ("by their tokens" in line.said) is told


@pytest.mark.parametrize(
    ("changes", "learned"),
    [
        ("template: qwen3", True),
        ("template: qwen3, enable_thinking: false", False),
        ("template: qwen3_nothink", False),
        ("template: llama3", False),
    ],
)
def test_its_reasoning_templates_learn_the_empty_thought(changes, learned):
    assert recipe(PLAIN, **typed(changes)).train_on_empty_thinking is learned


def test_every_key_of_a_group_is_read_or_named(tmp_path):
    adapter = SECOND["peft_config"] | {"use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head"]}
    read = recipe(SECOND, peft_config=adapter)
    assert (read.dora, read.rslora, read.lora_modules_to_save) == (True, True, ["lm_head"])
    on_host = recipe(SECOND, gpus=2, dist_config={"name": "fsdp2", "offload_params": True})
    assert (on_host.offload_parameters, on_host.offload_optimizer) == ("cpu", "cpu")
    (tmp_path / "sets.yaml").write_text("{a: {path: org/a, weight: 2.0, source: hf_hub}, b: {path: org/b}}")
    sources = recipe(SECOND, folder=tmp_path, train_dataset="sets.yaml").data
    assert [(each.path, each.weight) for each in sources] == [("org/a", 2.0), ("org/b", 1.0)]
    (tmp_path / "typo.yaml").write_text("a: {path: org/a, wieght: 2.0}")
    with pytest.raises(
        RecipeError, match=r"unknown key 'train_dataset\[a\].wieght' \(did you mean 'weight'\?\)"
    ):
        recipe(SECOND, folder=tmp_path, train_dataset="typo.yaml")
    with pytest.raises(RecipeError, match="unknown key 'peft_config.layers_to_transform'"):
        recipe(SECOND, peft_config=adapter | {"layers_to_transform": [0]})


def test_every_key_of_a_dataset_info_is_read_or_named(tmp_path):
    read = registered(tmp_path, "file_name: a.json, num_samples: 7")
    assert (read.path, read.sample) == (str(tmp_path / "data" / "a.json"), 7)
    tags = "formatting: sharegpt, tags: {role_tag: role, content_tag: content}"
    assert registered(tmp_path, f"file_name: a.json, {tags}").path.endswith("a.json")
    for more, named in (
        ("ranking: true", "good and bad answers"),
        ("tags: {role_tag: speaker}", "role_tag: speaker"),
        ("columns: {images: pictures}", "images or sounds"),
        ("columns: {history: before}", "history: before"),
        ("split_: x", r"unknown key 'dataset\[a\].split_' \(did you mean 'split'\?\)"),
    ):
        with pytest.raises(RecipeError, match=named):
            registered(tmp_path, f"file_name: a.json, {more}")
