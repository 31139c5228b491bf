"""What fitune finds, plans, trains on and refuses, by cards that NVML, CUDA and torch tell of."""

import json

import pytest

from null_gpu.conftest import CARDS

pytestmark = pytest.mark.null_gpu

PLAN = ("fitune", "plan", "--model", "llama-3.1-8b", "--tuning", "lora", "--seq-len", "512", "--json")
WITHOUT_NVML = """
import sys
import pynvml
def missing():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
pynvml.nvmlInit = missing
from fitune.cli import main
sys.argv = ["fitune", *{words!r}]
main()
"""


def hardware(on_null_gpu, *words, cards, **environment):
    """The hardware that ``fitune plan`` plans for."""
    ran = on_null_gpu([*PLAN, *words], cards=cards, environment=environment)
    found = json.loads(ran.out)["plan"]["hardware"]
    return found


def training(model, data, out, *settings):
    return [
        "fitune", "train", "--model", model, "--data", data, "--output-dir", out, "--tuning", "lora",
        "--max-steps", "2", "--seq-len", "64", "--micro-batch-size", "2", "--gradient-accumulation-steps", "1",
        "--export", "adapter", *settings,
    ]  # fmt: skip


def test_of_two_kinds_the_larger_is_planned_with_and_what_others_hold_is_left(on_null_gpu):
    found = hardware(on_null_gpu, cards=["3090", "h100", "h100"], NULLCUDA_TAKEN_MIB=1_500)
    assert (found["gpu"]["name"], found["gpus_per_node"]) == ("h100", 2)
    assert found["taken_bytes"] == 1_536 * 2**20
    assert found["left_out"] == "1 × NVIDIA GeForce RTX 3090"


def test_without_nvml_torch_is_asked(on_null_gpu):
    """Never the processor: the card that CUDA_VISIBLE_DEVICES leaves."""
    script = WITHOUT_NVML.format(words=list(PLAN[1:]))
    ran = on_null_gpu(script, cards=["3090", "4090"], environment={"CUDA_VISIBLE_DEVICES": "1"})
    assert json.loads(ran.out)["plan"]["hardware"]["gpu"]["name"] == "rtx-4090"


def test_the_larger_card_is_trained_on_wherever_it_stands(on_null_gpu, model_folder, data_file, tmp_path):
    """CUDA's first card is the smaller one, and the process is shown the other alone."""
    command = training(model_folder, data_file, tmp_path / "run")
    on_null_gpu(command, cards=["3090", "h100"], compute="all")
    plan = json.loads((tmp_path / "run/plan.json").read_text())
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert (plan["hardware"]["gpu"]["name"], plan["hardware"]["left_out"]) == (
        "h100",
        "1 × NVIDIA GeForce RTX 3090",
    )
    assert (report["status"], report["memory"]["kind"]) == ("complete", "cuda allocated")
    assert report["memory"]["expandable_segments"] is True


@pytest.mark.parametrize(
    ("card", "settings", "environment", "words"),
    [
        ("v100", (), {}, "no kernels for Tesla V100-SXM2-32GB: its compute capability is 7.0"),
        ("3090", ("--gpu", "h100"), {}, "cuda:0 is NVIDIA GeForce RTX 3090"),
        ("4090", ("--gpu", "rtx-4090"), {"NULLCUDA_TAKEN_MIB": 24_000}, "other programs hold 23.44 GiB"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_by_its_reason(
    on_null_gpu, model_folder, data_file, tmp_path, card, settings, environment, words
):
    command = training(model_folder, data_file, tmp_path / "run", *settings)
    ran = on_null_gpu(command, cards=[card], environment=environment, check=False)
    assert ran.status in (2, 3), ran.err
    assert words in " ".join((ran.out + ran.err).split())


def test_doctor_says_which_wheel_a_card_needs(on_null_gpu):
    assert "cu126" in json.loads(on_null_gpu(["fitune", "doctor", "--json"], cards=["v100"]).out)["problem"]


CAN_TRAIN = """
import json, os, torch
from multiprocessing import get_context
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
def flash(heads, dropout):
    q = torch.empty(1, 2, 8, heads, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, q, q, is_causal=True, dropout_p=dropout)
        return True
    except RuntimeError:
        return False
from fitune.measure.nvml import gpu_of_torch
from fitune.values.model.traits import flash_refused
from fitune.measure.hardware import describe_found
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.model_spec import Dropout
from fitune.values.plan import Precision
from dataclasses import replace
model = load_model_spec("llama-3.2-1b", offline=True)
cases = [(heads, dropout) for heads in (64, 128, 192, 200, 224, 256, 264) for dropout in (0.0, 0.1)]
def on(card):
    os.environ["NULLCUDA_CARDS"] = card
    gpu = describe_found(gpu_of_torch(0))
    def ours(heads, dropout):
        asked = replace(model, head_dim=heads, dropout=Dropout(attention=dropout))
        return flash_refused(asked, gpu, Precision.BF16) is None
    return [torch.cuda.get_device_name(), [[*case, flash(*case), ours(*case)] for case in cases]]
with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    print(json.dumps(pool.map(on, CARDS, chunksize=1)))
"""


def test_flash_attention_is_planned_where_torch_takes_it(on_null_gpu):
    """torch's own decision, which looks at the card, for every size of heads, with and without dropout.

    A process sees the cards that it began with: each is looked at in one that is forked before any was.
    """
    names = ("t4", "a100", "3090", "4090", "h100", "5090")
    cards = [*(CARDS[name] for name in names), "Orin|87|29.9", "NVIDIA GB10|121|100"]
    found = on_null_gpu(f"CARDS = {cards}\n{CAN_TRAIN}").value
    assert [name for name, _ in found] == [card.partition("|")[0] for card in cards]
    for name, cases in found:
        wrong = [(heads, dropout) for heads, dropout, torchs, ours in cases if torchs != ours]
        assert wrong == [], name
