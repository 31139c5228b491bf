"""The whole account of 200 plans: what was chosen, every term of every phase, every stage of every kind of block.

    python tests/golden/accounts.py    # writes accounts.jsonl again

A change that moves a number on purpose writes the file again, and its commit says which numbers moved and why.
"""

import json
import sys
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

from fitune.errors import FituneError
from fitune.estimate.model_profile import memory_of_blocks, model_profile
from fitune.estimate.predict import largest_batch
from fitune.recipe.recipe import parse_recipe
from fitune.session.planning import plan_for, wanted_hardware
from fitune.values.machines.gpus import cpu_gpu
from fitune.values.model.tracer import trace_with
from fitune.values.serial import to_data

FILE = Path(__file__).with_suffix(".jsonl")
COUNT = 200

MODELS = (
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-2-70b-hf", "Qwen/Qwen2.5-14B",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-9b", "google/gemma-3-27b-it",
    "mistralai/Mistral-7B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b", "microsoft/phi-2",
    "openai-community/gpt2", "tiiuae/falcon-7b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "ibm-granite/granite-4.0-h-350m",
    "google/gemma-3-1b-it", "deepseek-ai/DeepSeek-V2-Lite",
)  # fmt: skip
MACHINES = (
    {"gpu": "rtx-4090"}, {"gpu": "t4"}, {"gpu": "rtx-3090", "gpus": 2}, {"gpu": "v100-32gb", "gpus": 8},
    {"gpu": "a100-80gb", "gpus": 8, "zero": 3}, {"gpu": "h100", "gpus": 8, "nodes": 2}, {"gpu": "rtx-5090"},
    {"gpu": "l4", "gpus": 4, "host_memory": "256GiB"}, {"gpu": "cpu", "host_memory": "16GiB"},
)  # fmt: skip
WAYS = (
    {}, {"tuning": "full"}, {"tuning": "lora"}, {"tuning": "qlora"}, {"tuning": "lomo"},
    {"tuning": "lora", "dora": True, "seq_len": 1024}, {"tuning": "full", "optimizer": "sgd", "seq_len": 1024},
    {"tuning": "lora", "micro_batch_size": 1, "gradient_accumulation_steps": 8, "gradient_checkpointing": False},
    {"tuning": "full", "optimizer": "adamw-8bit", "seq_len": 1024, "micro_batch_size": 2},
    {"tuning": "qlora", "quantization": "hqq"}, {"tuning": "adalomo", "seq_len": 512},
    {"tuning": "lora", "packing": True, "seq_len": 1024},
    {"tuning": "lora", "offload_parameters": "cpu", "packing": False},
)  # fmt: skip


def recipes():
    """Every model meets every machine and every way: their numbers have no common factor."""
    for model, machine, way in islice(zip(cycle(MODELS), cycle(MACHINES), cycle(WAYS), strict=False), COUNT):
        yield {"model": model, **machine, **way, "data": ["rows.jsonl"]}


@patch("fitune.estimate.memory.torch_release", lambda: (2, 13))
@patch("fitune.values.model.traits.torch_release", lambda: (2, 13))
def account(recipe):
    """What fitune says of one recipe where torch 2.13 is installed; the kind of refusal where it refuses. Nothing is
    traced."""
    trace_with(None)
    wanted = parse_recipe(recipe)
    try:
        report = plan_for(wanted, hardware=_machine(wanted))
    except FituneError as error:
        return {"recipe": recipe, "refused": type(error).__name__}
    return {"recipe": recipe, **_priced(report.chosen), "trained": report.trained is None}


def _machine(recipe):
    """Hardware of the recipe; a processor always has two cores and multiplies bf16, whatever this machine has."""
    found = wanted_hardware(recipe)
    if not found.gpu.is_cpu:
        return found
    two = cpu_gpu(memory_bytes=found.gpu.memory_bytes, cores=2, has_bf16_products=True)
    return replace(found, gpu=two, cpu_cores=2)


def _priced(priced):
    plan, estimate = priced.plan, priced.estimate
    choices = to_data(plan)
    for given in ("model", "model_path", "hardware", "data", "run", "schedule"):
        choices.pop(given, None)
    blocks = memory_of_blocks(model_profile(plan, largest_batch(plan)), plan.batch.accumulation > 1)
    kinds = list({id(block): block for block in blocks}.values())
    return {
        "plan": choices,
        "phases": {phase.value: terms for phase, terms in estimate.memory.phases.items()},
        "outside": estimate.memory.outside,
        "host": estimate.host,
        "checkpoint": estimate.checkpoint_bytes,
        "sent": estimate.communication_bytes,
        "seconds": {phase.value: seconds for phase, seconds in estimate.time.phases.items()},
        "kinds": [asdict(block) for block in kinds],
        "kind_of": "".join(chr(ord("a") + kinds.index(block)) for block in blocks),
    }


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FILE
    target.write_text("".join(json.dumps(account(recipe)) + "\n" for recipe in recipes()))
