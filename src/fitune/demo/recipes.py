"""The recipes the demo runs, as a user would write them: they lie beside the data and can be run again."""

from fitune.demo.settings import LORA_RANK, Training

_RECIPE = """\
# {purpose}
# Run it again with: fitune train {path} --overwrite
model: {model}
tuning: {tuning}
{rank}data: {data}
{held_out}output_dir: {output_dir}

seq_len: {seq_len}
packing: true
micro_batch_size: {micro_batch_size}
gradient_accumulation_steps: 1
max_steps: {max_steps}

precision: fp32
optimizer: adamw
learning_rate: {learning_rate}
lr_scheduler: cosine
warmup_ratio: 0.05
"""


def recipe_text(
    training: Training,
    *,
    purpose: str,
    path: str,
    model: str,
    data: str,
    output_dir: str,
    eval_data: str = "",
) -> str:
    """YAML of one run. ``path`` is where the recipe itself will lie."""
    return _RECIPE.format(
        purpose=purpose,
        path=path,
        model=_quoted(model),
        tuning=training.tuning,
        rank=f"lora_r: {LORA_RANK}\n" if training.tuning == "lora" else "",
        data=_quoted(data),
        held_out=f"eval_data: {_quoted(eval_data)}\n" if eval_data else "",
        output_dir=_quoted(output_dir),
        seq_len=training.seq_len,
        micro_batch_size=training.micro_batch_size,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate,
    )


def _quoted(text: str) -> str:
    """As a YAML text, whatever a folder is called."""
    return "'" + text.replace("'", "''") + "'"
