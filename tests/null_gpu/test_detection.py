"""What fitune finds, plans and refuses on cards that are told by NVML, CUDA and torch: none of it needs a kernel."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.null_gpu

TRAIN = ("tuning=lora", "max_steps=2", "micro_batch_size=1", "gradient_accumulation_steps=2", "seq_len=64")
NO_NVML = {"FITUNE_TEST_NO_NVML": "1"}


def plan(on_null_gpu, *words: str, cards: list[str], **environment: object):
    command = ["fitune", "plan", "--model", "llama-3.1-8b", "--seq-len", "512", *words, "--json"]
    ran = on_null_gpu(command, cards=cards, environment=environment)
    return json.loads(ran.out)


def hardware_of(planned) -> dict:
    return planned["chosen"]["plan"]["hardware"] if "chosen" in planned else planned["plan"]["hardware"]
