"""The whole idea in one flat file: predict, train, measure. No fitune inside; `fitune train` gives the same losses.

    python examples/loop.py MODEL_FOLDER DATA.jsonl        # rows of {"question", "answer"}

LoRA in fp32 on one device, rows as one stream without padding, answer-only loss in chunks, AdamW, cosine.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoTokenizer

RANK, RATE, ROWS_PER_STEP, STEPS, WARMUP, CLIP, SEED, CHUNK = 4, 1e-2, 8, 6, 1, 1.0, 42, 16


def attend_by_rows(module, query, key, value, mask, *, sequence_lengths, scaling=None, **_):
    """Each row of the stream attends to itself: no mask of T × T, no padding."""
    rows = zip(*(x.split(sequence_lengths, dim=2) for x in (query, key, value)), strict=True)
    out = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in rows
    ]
    return torch.cat([o.transpose(1, 2) for o in out], dim=1), None


AttentionInterface.register("by_rows", attend_by_rows)
AttentionMaskInterface.register("by_rows", lambda *_, **__: None)


def read_rows(tokenizer, path: str) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) per row; labels are shifted, and -100 wherever the model is not the one who speaks."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        prompt = f"{tokenizer.bos_token}### User\n{fields['question']}\n\n### Assistant\n"
        asked = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answered = tokenizer(fields["answer"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        rows.append((asked + answered, [-100] * (len(asked) - 1) + answered + [-100]))
    return rows


def loss_and_gradient(hidden, labels, head, scale):
    """Cross-entropy over CHUNK supervised tokens at a time: the logits of the whole stream never exist."""
    supervised = (labels >= 0).nonzero().squeeze(1)
    gradient, total = torch.zeros_like(hidden), 0.0
    for part in supervised.split(CHUNK):
        leaf = hidden[part].detach().requires_grad_()
        loss = F.cross_entropy(head(leaf).float(), labels[part], reduction="sum")
        (loss * scale).backward()
        gradient[part] = leaf.grad
        total += loss.item()
    return total, gradient


def rate_at(step: int) -> float:
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def main(folder: str, data: str) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = read_rows(tokenizer, data)

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.set_attn_implementation("by_rows")
    torch.manual_seed(SEED)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen_bytes = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    trained_bytes = sum(p.nbytes for p in trained)
    print(
        f"between steps: weights {frozen_bytes:,} + adapters and two Adam states {3 * trained_bytes:,} bytes"
    )
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)

    losses = []
    steps_per_epoch = -(-len(rows) // ROWS_PER_STEP)
    for step in range(STEPS):
        epoch, position = divmod(step, steps_per_epoch)
        order = np.random.default_rng([SEED, epoch]).permutation(len(rows))
        batch = [rows[i] for i in order[position * ROWS_PER_STEP : (position + 1) * ROWS_PER_STEP]]
        ids = torch.tensor([i for row, _ in batch for i in row])
        labels = torch.tensor([i for _, row in batch for i in row])
        positions = torch.cat([torch.arange(len(row)) for row, _ in batch])
        count = int((labels >= 0).sum())

        hidden = base.model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False,
            sequence_lengths=[len(row) for row, _ in batch],
        ).last_hidden_state[0]  # fmt: skip
        loss, gradient = loss_and_gradient(hidden.detach(), labels, base.lm_head, scale=1 / count)
        hidden.backward(gradient)

        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.param_groups[0]["lr"] = rate_at(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss / count)
        print(f"step {step + 1}/{STEPS}  loss {losses[-1]:.4f}  {len(ids)} tokens, {count} supervised")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3])
