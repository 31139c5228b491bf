"""Rows answered in a second: continuous batching beside transformers' ``generate`` called row by row.

Both sides answer the same prompts greedily with the same model, in turn, three times; the medians count. Prints both,
the ratio, and how many answers have the same tokens.

    python bench/score_rows.py [--rows 200] [--hidden 256] [--batch 32] [--new 32]
"""

import argparse
import random
import statistics
import time
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.score.engines.engine import Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine


def main() -> None:
    words = argparse.ArgumentParser()
    for name, default in (("rows", 200), ("hidden", 256), ("layers", 4), ("batch", 32), ("new", 32)):
        words.add_argument(f"--{name}", type=int, default=default)
    asked = words.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192, hidden_size=asked.hidden, intermediate_size=3 * asked.hidden,
            num_hidden_layers=asked.layers, num_attention_heads=8, max_position_embeddings=1024, eos_token_id=2,
            initializer_range=0.2,
        )
    ).eval()  # fmt: skip
    model.generation_config.pad_token_id = 0
    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(3, 8192) for _ in range(draw.randint(20, 160))) for _ in range(asked.rows)
    ]
    limits = [draw.randint(asked.new // 4, asked.new) for _ in prompts]
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=2, bos_token_id=1)
    template = SimpleNamespace(stop_ids=frozenset({2}))
    engine = TransformersEngine(model=model, tokenizer=tokenizer, template=template, batch_size=asked.batch)
    requests = [
        Request(id=str(place), prompt_ids=prompt, sampling=Sampling(max_new_tokens=limit))
        for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]

    def ours() -> dict[str, list[int]]:
        return {completion.id: list(completion.token_ids) for completion in engine.answer(requests)}

    def theirs() -> dict[str, list[int]]:
        found = {}
        for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            ids = torch.tensor([prompt])
            whole = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
            )
            found[str(place)] = whole[0, len(prompt) :].tolist()
        return found

    sides = {"row by row": theirs, "continuous": ours}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    answers: dict[str, dict[str, list[int]]] = {}
    for _ in range(3):
        for name, side in sides.items():
            started = time.perf_counter()
            answers[name] = side()
            seconds[name].append(time.perf_counter() - started)
    rates = {name: asked.rows / statistics.median(taken) for name, taken in seconds.items()}
    same = sum(answers["continuous"][key] == ids for key, ids in answers["row by row"].items())
    threads, parameters = torch.get_num_threads(), sum(p.numel() for p in model.parameters())
    print(
        f"{parameters:,} parameters in fp32, {asked.rows} rows, up to {asked.new} new tokens, {threads} threads"
    )
    for name, rate in rates.items():
        print(f"{name:>12}: {rate:8.1f} rows/s")
    ratio = rates["continuous"] / rates["row by row"]
    print(f"ratio {ratio:.2f}, the same greedy tokens in {same} of {asked.rows} rows")


if __name__ == "__main__":
    main()
