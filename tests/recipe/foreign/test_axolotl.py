"""Laws of axolotl's recipes: what a key means there is what the setting says here."""

from pathlib import Path

import pytest

from data.tiny_tokenizers import byte_tokenizer
from fitune.data.conversations.formats import to_example
from fitune.data.conversations.templates import load_template
from fitune.data.reading.rows import Row
from fitune.errors import RecipeError
from fitune.recipe.foreign import read_foreign
from fitune.values.named_templates import CHATML_MARKS
from recipe.foreign.examples import read_keys, typed

PLAIN = typed(
    "base_model: org/llama, datasets: [{path: org/chat, type: chat_template}], sequence_len: 1024, "
    "micro_batch_size: 2, learning_rate: 2e-4, adapter: qlora, load_in_4bit: true, lora_r: 8, lora_alpha: 16, "
    "bf16: auto, optimizer: adamw_bnb_8bit"
)


def recipe(**changes):
    keys = {key: value for key, value in {**PLAIN, **changes}.items() if value != "absent"}
    return read_keys(keys)


def reading(**changes):
    return read_foreign({**PLAIN, **changes}, where="theirs.yaml", folder=Path("nowhere"))


def test_a_qlora_recipe_says_the_same_here():
    read = recipe()
    assert (read.model, read.tuning, read.quantization) == ("org/llama", "qlora", "nf4")
    assert (read.seq_len, read.micro_batch_size, read.gradient_accumulation_steps) == (1024, 2, 1)
    assert (read.learning_rate, read.optimizer, read.lr_scheduler) == (2e-4, "adamw-8bit", "cosine")
    assert (read.precision, read.on_long_row) == ("bf16-master", "drop")
    assert [(source.path, source.format) for source in read.data] == [("org/chat", "messages")]


@pytest.mark.parametrize(
    ("changes", "setting", "value"),
    [
        ("adapter: null, load_in_4bit: false", "precision", "bf16"),
        ("adapter: null, load_in_4bit: false, bf16: false", "precision", "fp32"),
        ("adapter: lora, load_in_4bit: false, load_in_8bit: true", "quantization_bits", 8),
        ("lora_target_linear: true", "lora_target_modules", ["all-linear"]),
        (
            "lora_target_linear: true, lora_target_modules: [q_proj, lm_head]",
            "lora_target_modules",
            ["all-linear", "lm_head"],
        ),
        ("", "lora_target_modules", ["q_proj", "v_proj"]),
        (
            "lora_target_linear: true, lora_target_parameters: [_checkpoint_wrapped_module.mlp.experts.down_proj]",
            "lora_target_modules",
            ["all-linear", "mlp.experts.down_proj"],
        ),
        (
            "lora_target_modules: q_proj, lora_target_parameters: experts.gate_up_proj",
            "lora_target_modules",
            ["q_proj", "experts.gate_up_proj"],
        ),
        ("warmup_steps: 0.1", "warmup_ratio", 0.1),
        ("warmup_steps: 10, warmup_ratio: 0.5", "warmup_steps", 10),
        ("lr_scheduler: constant, warmup_ratio: 0.1", "warmup_ratio", 0.0),
        ("cosine_min_lr_ratio: 0.1", "min_lr_ratio", 0.1),
        ("cosine_min_lr_ratio: 1.0", "lr_scheduler", "constant"),
        (
            "lr_scheduler: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 2.0e-05}",
            "min_lr_ratio",
            pytest.approx(0.1),
        ),
        ("batch_size: 8", "gradient_accumulation_steps", 4),
        ("gradient_checkpointing: offload", "gradient_checkpointing", True),
        ("excess_length_strategy: truncate", "on_long_row", "truncate"),
        ("tokens: [<think>]", "added_tokens", ["<think>"]),
        ("tokens: {pad_token: <pad>}", "added_tokens", []),
        ("gpu: '4090'", "gpu", "4090"),
        ("chat_template: chatml", "chat_template", "chatml"),
        ("chat_template: chatml, datasets: [{path: d, type: alpaca}]", "chat_template", "chatml"),
        ("chat_template: chatml, datasets: [{path: d, type: completion}]", "chat_template", ""),
        ("datasets: [{path: d, type: completion}]", "on_long_row", "split"),
        ("special_tokens: {eos_token: <|im_end|>}, tokens: [<|im_start|>]", "added_tokens", [*CHATML_MARKS]),
        ("chat_template: jinja, chat_template_jinja: '{{ messages }}'", "chat_template", "{{ messages }}"),
        ("bnb_config_kwargs: {bnb_4bit_use_double_quant: true}", "double_quantization", True),
        ("bnb_config_kwargs: {bnb_4bit_use_double_quant: false}", "double_quantization", False),
        ("logging_steps: 0.2", "log_steps", 1),
        ("val_set_size: 32", "val_fraction", 32),
        ("freeze_mm_modules: true", "tuning", "qlora"),
    ],
)
def test_a_key_becomes_the_setting_that_means_it(changes, setting, value):
    assert getattr(recipe(**typed(changes)), setting) == value


@pytest.mark.parametrize(
    ("source", "format", "columns"),
    [
        ("type: sharegpt", "sharegpt", {}),
        ("type: sharegpt, field_messages: messages", "messages", {}),
        ("type: chat_template, field_messages: turns", "columns", {"messages": "turns"}),
        ("type: alpaca:chat", "alpaca", {}),
        ("type: alpaca_chat.load_qa", "columns", {"prompt": "question", "completion": "answer"}),
        ("type: completion, field: body", "columns", {"text": "body"}),
        (
            "type: {field_instruction: q, field_output: a}",
            "columns",
            {"prompt": "q", "completion": "a", "system": "input"},
        ),
    ],
)
def test_the_type_of_a_dataset_is_its_format(source, format, columns):
    """An older key of a split names it, too."""
    for split in ("split", "train_on_split"):
        read = recipe(datasets=[{"path": "d", split: "train[:5%]", **typed(source)}]).data[0]
        assert (read.format, read.columns, read.split) == (format, columns, "train[:5%]")


QUESTION = {"q": "what {is} it?", "input": 'a "fish"\n', "system": "Be kind.", "a": "it swims"}


@pytest.mark.parametrize("row", [QUESTION, QUESTION | {"input": ""}, {"q": "so", "a": "no"}])
@pytest.mark.parametrize(
    ("format", "without", "system_prompt", "system_format"),
    [
        ("[INST] {input}\n{instruction} [/INST]", None, "", None),
        (
            "{{C}}: {input}\tQ: '{instruction}'\\n",
            "PROMPT {instruction} %}}",
            "USUAL PROMPT",
            "<<{system}>>\n",
        ),
        (None, None, "Be brief.", None),
        ("Q: {instruction} A:", "Q: {instruction} A:", "", None),
        ("Q: {instruction}", "Q: {instruction}", "Be brief: é", "S: {system}\n"),
    ],
)
def test_a_prompt_format_of_its_own_gives_the_same_tokens(row, format, without, system_prompt, system_format):
    """As axolotl's user_defined prompts are made: system, then the format with the input if there is one."""
    theirs = {"format": format, "no_input_format": without, "system_format": system_format}
    kind = {name: value for name, value in theirs.items() if value is not None}
    kind |= {"system_prompt": system_prompt, "field_instruction": "q", "field_output": "a"}
    read = recipe(datasets=[{"path": "d", "type": kind}])
    format, without = format or "{instruction} {input} ", without or "{instruction} "
    with_input = "{input}" in format
    system = system_prompt if with_input else row.get("system", system_prompt)
    more = (row.get("input") or "") if with_input else ""
    prompt = (system_format or "{system}").format(system=system) if system else ""
    prompt += (format if more else without).format(instruction=row["q"], input=more)
    tokenizer = byte_tokenizer()
    row = {name: value for name, value in row.items() if name != "system" or not with_input}
    example = to_example(Row("row 1", row), format="columns", columns=tuple(read.data[0].columns.items()))
    encoded = load_template(tokenizer, read.chat_template).encode(example)
    asked, answer = ([*tokenizer(text)["input_ids"]] for text in (f"<s>{prompt}", f"{row['a']}</s>"))
    assert encoded.ids == asked + answer
    assert encoded.supervised == [False] * len(asked) + [True] * len(answer)


@pytest.mark.parametrize(
    ("type", "said"),
    [
        ("jeopardy", "without the category and the words what is"),
        ("alpaca_chat.load_qa", "without Alpaca's headings"),
    ],
)
def test_what_is_left_out_of_a_row_is_said(type, said):
    lines = reading(datasets=[{"path": "d", "type": type}]).lines
    assert [said in line.said for line in lines if line.settings == ("data",)] == [True]


def test_prompts_of_two_formats_have_no_one_template():
    rows = [{"path": "a", "type": "alpaca"}, {"path": "b", "type": {"field_output": "a"}}]
    with pytest.raises(RecipeError, match="prompts of several formats; one chat_template renders all"):
        recipe(datasets=rows)


@pytest.mark.parametrize(
    ("source", "paths"),
    [
        ("path: json, data_files: [a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("path: folder, data_files: part-*.jsonl", ["folder/part-*.jsonl"]),
        ("path: rows.jsonl.gz, ds_type: json", ["rows.jsonl.gz"]),
        ("path: owner/name, name: en", ["owner/name:en"]),
        ("path: json, name: mine, data_files: a.jsonl", ["a.jsonl"]),
        ("path: owner/name, name: en, data_files: a.jsonl", ["owner/name/a.jsonl"]),
    ],
)
def test_every_file_of_a_dataset_is_a_source(source, paths):
    """None may be left out in silence."""
    assert [each.path for each in recipe(datasets=[{"type": "alpaca", **typed(source)}]).data] == paths


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("rl: dpo", "rl"),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "plugins"),
        ("eta_min: 1.0e-06", "eta_min"),
        ("trl: {beta: 0.1}", "trl"),
        ("optimizer: muon", "optimizer"),
        ("datasets: [{path: d, type: chat_template, roles_to_train: [user]}]", "datasets[0]"),
        ("unfrozen_parameters: ['model.layers.4[4-9]+']", "unfrozen_parameters"),
        ("attn_implementation: eager, flash_attention: true, relora: true", "relora"),
        ("lr_scheduler: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr_rate: a}", "lr_scheduler"),
        ("lr_scheduler: cosine_with_min_lr", "lr_scheduler"),
        ("lora_target_parameters: [7.mlp.experts.down_proj]", "lora_target_parameters"),
        ("tokenizer_config: org/other", "tokenizer_config"),
        ("dataset_shard_num: 4, dataset_shard_idx: 0", "dataset_shard_num"),
        (
            "adapter: qlora, load_in_4bit: true, bnb_config_kwargs: {bnb_4bit_quant_type: fp4}",
            "bnb_config_kwargs",
        ),
    ],
)
def test_what_would_change_the_result_is_refused_by_its_key(changes, key):
    assert [line.key for line in reading(**typed(changes)).of("refused")] == [key]
    with pytest.raises(RecipeError, match="would change the result"):
        recipe(**typed(changes))


def test_all_unknown_keys_are_listed_with_what_they_may_mean():
    with pytest.raises(RecipeError) as refused:
        recipe(lora_aplha=3, sample_pakcing=True, wandb_project="x")
    text = str(refused.value)
    assert "'lora_aplha' (did you mean 'lora_alpha'?)" in text
    assert "'sample_pakcing' (did you mean 'sample_packing'?)" in text
    assert "wandb" not in text


def test_devices_that_share_a_row_are_not_passed_over_as_speed():
    """Eight devices with context_parallel_size: 8 take one row at a time there, and eight here."""
    read = reading(context_parallel_size=8, tensor_parallel_size=1, sequence_parallel_degree="4")
    said = {line.key: line.said for line in read.lines}
    assert "more rows" in said["context_parallel_size"]
    assert said["tensor_parallel_size"] == ""
    assert "4 devices share" in said["sequence_parallel_degree"]


def test_off_empty_and_bookkeeping_keys_take_one_line():
    keys = {
        **PLAIN, "strict": False, "hub_strategy": "end", "load_best_model_at_end": True, "never_seen": None,
        "special_tokens": {}, "early_stopping_patience": 3,
    }  # fmt: skip
    notes = []
    read_keys(keys, on_note=notes.append)
    assert "passed over" in notes[-1]
    assert all(key in notes[-1] for key in ("strict", "hub_strategy", "never_seen", "special_tokens"))
    said = " ".join(notes)
    assert "load_best_model_at_end: the weights of the last step" in said
    assert "early_stopping_patience: training goes on to its last step" in said


def test_sharding_is_left_to_the_plan_on_one_device():
    keys = {**PLAIN, "fsdp_config": {"fsdp_offload_params": True, "reshard_after_forward": True}}
    notes = []
    one = read_keys(keys, on_note=notes.append)
    two = read_keys(keys, gpus=2)
    assert (one.zero, one.offload_parameters) == (None, None)
    assert (two.zero, two.offload_parameters) == (3, "cpu")
    assert "on one device" in notes[-1]
    found = reading(**keys)
    assert [line.fate for line in found.lines if line.key == "fsdp_config"] == ["translated"] * 3


def test_every_weight_over_sharded_devices_keeps_fp32_masters():
    full = {**PLAIN, "adapter": None, "load_in_4bit": False, "deepspeed": "configs/zero3_bf16.json"}
    read = read_keys(full, gpus=8)
    assert (read.precision, read.zero) == ("bf16-master", 3)


def test_the_trackers_of_a_recipe_track_here():
    read = recipe(**typed(
        "wandb_project: mine, wandb_entity: team, wandb_name: first, wandb_run_id: abc, wandb_mode: offline, "
        "wandb_watch: gradients, wandb_log_model: checkpoint"
    ))  # fmt: skip
    assert (read.report_to, read.track_project, read.track_team) == (["wandb"], "mine", "team")
    assert (read.run_name, read.track_id, read.track_offline) == ("first", "abc", True)
    both = recipe(**typed(
        "use_mlflow: true, mlflow_tracking_uri: 'http://host:5000', mlflow_experiment_name: mine, use_comet: true, "
        "comet_project_name: other"
    ))  # fmt: skip
    assert (both.report_to, both.track_server) == (["mlflow", "comet"], "http://host:5000")
    assert both.track_project == "mine"
    twice = typed("use_mlflow: true, mlflow_experiment_name: a, use_comet: true, comet_project_name: b")
    (line,) = [one for one in reading(**twice).lines if one.key == "comet_project_name"]
    assert line.said == "track_project is a already: it is one for all trackers"


@pytest.mark.parametrize(
    "changes",
    [
        "wandb_project: mine, wandb_mode: disabled",
        "use_wandb: false, mlflow_experiment_name: mine",
    ],
)
def test_a_tracker_that_is_off_there_is_off_here(changes):
    assert recipe(**typed(changes)).report_to == []


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("shards: 10, shards_idx: 0", r"datasets\[0\].shards: 10 would change the result: a part of the rows"),
        ("max_rows: 100", r"unknown key 'datasets\[0\].max_rows'"),
        ("splitt: test", r"unknown key 'datasets\[0\].splitt' \(did you mean 'split'\?\)"),
        ("train_on_eos: all", "train_on_eos: all; here it is turn"),
        ("message_property_mappings: {role: speaker, content: said}", "messages of speaker and said"),
        ("message_property_mappings: {name: n}", r"unknown key 'datasets\[0\].message_property_mappings.name'"),
        ("roles: {assistant: [gpt, bot]}", "roles: .* for assistant; fitune knows assistant, gpt"),
        ("type: {field_instruction: q, field_output: a, format: 'Q: {instruction}'}",
         r"rows without an input are '{instruction} ' there, whatever format says; name it as no_input_format"),
        ("type: {format: 'Q: {instruction} {output}'}", r"its format cannot be filled in: {output} stands in"),
        ("type: {field_system: s, format: '{instruction} {input}'}", "prompts of a system prompt and an input"),
        ("type: input_output", "type: input_output: segments that each say whether they are learned"),
        ("type: gpteacher", "type: gpteacher is a prompt format of its own; write it out, as type: {field_instr"),
        ("type: sharegpt, field_human: speaker", "field_human: speaker; fitune knows human, user"),
    ],
)  # fmt: skip
def test_a_key_inside_a_dataset_is_never_left_out_in_silence(source, named):
    with pytest.raises(RecipeError, match=named):
        recipe(datasets=[{"path": "d", "type": "chat_template", **typed(source)}])


@pytest.mark.parametrize(
    "source",
    [
        "type: sharegpt, field_human: user, field_model: assistant, conversation: chatml",
        "type: sharegpt, roles: {input: [human], output: [gpt]}",
        "train_on_eos: turn, preprocess_shards: 4, trust_remote_code: false, shards: null",
        "message_property_mappings: {role: from, content: value}, field_messages: conversations",
        "roles: {assistant: [gpt], user: [human]}, ds_type: json",
        "type: {field_instruction: q, field_output: a, format: '{instruction}', no_input_format: '{instruction}'}",
        "type: oasst",
    ],
)
def test_keys_of_a_dataset_that_say_what_fitune_does_are_read(source):
    assert recipe(datasets=[{"path": "d", "type": "chat_template", **typed(source)}]).data[0].path == "d"


def test_evaluations_without_rows_held_out_are_passed_over():
    """axolotl's own examples write val_set_size: 0 beside eval_steps."""
    assert recipe(val_set_size=0, eval_steps=50).eval_steps == 0
    assert recipe(val_set_size=0.1, eval_steps=50).eval_steps == 50
    assert "no rows are held out" in {line.said for line in reading(val_set_size=0, eval_steps=50).lines}
