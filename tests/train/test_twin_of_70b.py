"""The small twin of Llama-2-70B, QLoRA by two processes: killed, resumed, merged as docs/engines.md says."""

import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from faults import faulty_ranks
from models.tiny_models import beside_tokenizer
from runs import losses, same_weights

pytest.importorskip("bitsandbytes")

RECIPE = """
model: {twin}
data: {data}
tuning: qlora
quantization: nf4
target_modules: [q_proj, v_proj]
precision: bf16
gpus: 2
zero: 3
backend: fsdp
gradient_checkpointing: true
seq_len: 64
micro_batch_size: 1
gradient_accumulation_steps: 4
learning_rate: 2.0e-3
max_steps: 8
save_steps: 2
samples: 0
output_dir: {output}
"""


@pytest.fixture
def twin(model_folder, tmp_path):
    """Eight heads to one key head, as 70B has 64 to 8, and its proportions."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=256, intermediate_size=896, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=1, initializer_range=0.05, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return beside_tokenizer(LlamaForCausalLM(config), model_folder, tmp_path / "twin")


def fitune(*words):
    """The exit code of the program."""
    return subprocess.run([sys.executable, "-m", "fitune", *words], stdout=subprocess.DEVNULL).returncode


def killed_in_step(step, *words, go):
    """The exit code of the program whose second rank is killed in the second of the four batches of that step."""
    call = 4 * (step - 1) + 2
    program = [sys.executable, faulty_ranks.__file__, "1", str(call), "kill", *words]
    return subprocess.run(program, env={**os.environ, "GO": str(go)}, stdout=subprocess.DEVNULL).returncode


@pytest.mark.weekly
def test_the_twin_is_killed_resumed_merged_and_reloaded(twin, data_file, tmp_path):
    for name in ("straight", "killed"):
        text = RECIPE.format(twin=twin, data=data_file, output=tmp_path / name)
        (tmp_path / f"{name}.yaml").write_text(text)
    assert fitune("train", str(tmp_path / "straight.yaml")) == 0
    assert killed_in_step(6, "train", str(tmp_path / "killed.yaml"), go=tmp_path / "go") == 1
    assert fitune("train", str(tmp_path / "killed.yaml"), "--resume") == 0
    assert fitune("export", str(tmp_path / "killed")) == 0
    straight, killed = (tmp_path / name for name in ("straight", "killed"))
    assert len(losses(straight)) == 8
    assert losses(straight) == losses(killed)
    assert same_weights(straight / "adapter", killed / "adapter")
    assert largest_logit_difference(twin, tmp_path / "killed") < 1e-4


@torch.no_grad()
def largest_logit_difference(base, run):
    """Of the merged model and its base under the adapter; a run in bf16 merges into the base in bf16."""
    ids = torch.arange(3, 30)[None]
    merged = AutoModelForCausalLM.from_pretrained(run / "merged", dtype=torch.float32)
    rounded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float()
    adapted = PeftModel.from_pretrained(rounded, str(run / "adapter"))
    return float((merged(ids).logits - adapted(ids).logits).abs().max())
