"""Training on a template that marks its answers gives the losses of a plain loop with the mask of transformers."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jsonl import write_lines
from runs import (
    losses,
    trained,
)

TEMPLATE = """\
{%- for message in messages -%}
{{- bos_token ~ message.role ~ '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content ~ eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- bos_token ~ 'assistant\\n' -}}{%- endif -%}
"""
"""The end stands inside of the block, and right behind it a special token opens the next turn."""

TALKS = [
    [
        {"role": role, "content": f"What is {number} plus {turn}?"}
        for turn in range(3)
        for role in (["system", "user", "assistant"] if number % 2 and not turn else ["user", "assistant"])
    ]
    for number in range(4)
]
RATE, STEPS = 1e-2, 3


def test_losses_equal_those_of_a_plain_loop(make_plan, model_folder, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    data = write_lines(tmp_path / "talks.jsonl", ({"messages": talk} for talk in TALKS))
    plan = make_plan(
        tuning="full", optimizer="adamw", data=[str(data)], chat_template=str(tmp_path / "mine.jinja"), max_steps=STEPS,
        micro_batch_size=2, gradient_accumulation_steps=2, learning_rate=RATE, lr_scheduler="constant",
        warmup_steps=0, weight_decay=0.0, max_grad_norm=1e9, seq_len=256,
    )  # fmt: skip
    trained(plan)
    assert plain_losses(model_folder) == pytest.approx(losses(plan), rel=2e-6)


def plain_losses(folder):
    """Every step sees all talks, one by one."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    found = []
    for _ in range(STEPS):
        total, count = torch.zeros(()), 0
        for talk in TALKS:
            row = tokenizer.apply_chat_template(
                talk, return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt"
            )
            labels = row["input_ids"].masked_fill(row["assistant_masks"] == 0, -100)
            loss = torch.nn.functional.cross_entropy(
                model(row["input_ids"]).logits[0, :-1], labels[0, 1:], reduction="sum"
            )
            total, count = total + loss, count + int((labels[0, 1:] >= 0).sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        found.append(float(total.detach() / count))
    return found
