"""``fitune rehearse`` as a user types it, what a rehearsal answers, and which plan is one that can be rehearsed."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import UnsupportedOperatorException

from fitune.errors import ModelError, RecipeError
from fitune.models.readers import model_config
from fitune.planner.search import find_plan
from fitune.rehearse import step
from fitune.rehearse.recorder import fake_ranks
from fitune.rehearse.step import record_step, rehearse
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.plan import Sgd, Zero
from fitune.values.predictions import Phase
from plans import gpu, known, plan_for, recipe_of
from rehearse.tiny_configs import tiny

QWEN = ("--model", "Qwen/Qwen3-0.6B", "--gpu", "rtx-4090", "--seq-len", "512", "--tuning", "lora")


def test_json_is_the_plan_with_a_rehearsal_and_text_its_table(call, monkeypatch):
    found = []

    def once(plan, **words):
        found.append(found[0] if found else rehearse(plan, **words))
        return found[0]

    monkeypatch.setattr(step, "rehearse", once)
    ended = call("rehearse", *QWEN, "--json")
    content = json.loads(ended.ends(0))
    rehearsal = content["rehearsal"]
    assert ended.err == ""
    assert content["model"]["num_layers"] == 28
    assert set(rehearsal["phases"]) == {phase.value for phase in Phase}
    peak = max(sum(kinds.values()) for kinds in rehearsal["phases"].values())
    assert rehearsal["peak_bytes"] == peak + sum(rehearsal["outside"].values())
    assert rehearsal["peak_bytes"] == pytest.approx(content["estimate"]["peak_bytes"], rel=0.02)
    assert rehearsal["reserved_bytes"] >= rehearsal["tensor_peak_bytes"]
    assert rehearsal["layers_traced"] < 28
    traced = f"{rehearsal['layers_traced']} of 28 blocks traced"
    call("rehearse", *QWEN).ends(0, "estimated", "rehearsed", traced, *(phase.value for phase in Phase))


def test_weights_and_states_are_counted_to_the_byte():
    """Qwen3-0.6B: 596,049,920 parameters; SGD with momentum keeps one state."""
    plan = plan_for(known("qwen3-0.6b"), precision="bf16", optimizer=Sgd(momentum=0.9), seq_len=64, rows=1)
    idle = rehearse(plan).phases[Phase.IDLE]
    buffers = 2 * 4 * 64  # the rotary frequencies, kept twice
    assert idle == {"weights": 2 * 596_049_920 + buffers, "optimizer": 2 * 596_049_920}


def test_a_gpu_before_ampere_repeats_the_key_heads():
    """FlashAttention reads grouped heads; the memory-efficient kernel keeps them repeated."""
    config, spec = tiny("llama", num_hidden_layers=2)
    peaks = {}
    for name in ("v100-32gb", "a100-40gb"):
        plan = plan_for(spec, tuning="lora", precision="fp16", seq_len=512, chunk=64, hardware=gpu(name))
        peaks[name] = peaks_by_kind(record_step(plan, config), on_cuda=True)[Phase.LOSS]["activations"]
    repeated = plan.model.num_layers * 2 * 2 * (plan.model.q_dim - plan.model.kv_dim) * 4 * 512
    assert peaks["v100-32gb"] - peaks["a100-40gb"] == pytest.approx(repeated, rel=0.01)


def test_an_unknown_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="config cannot be read"):
        model_config(str(tmp_path))


def test_the_plan_to_rehearse_is_one_that_can_be():
    """Not DeepSpeed's, which is faster there. What is refused: laws/test_rehearsal_sharded.py."""
    report = find_plan(
        recipe_of("llama-2-70b", seq_len=1024), model=known("llama-2-70b"), hardware=gpu("v100-32gb", gpus=8),
        purposes=("plan", "rehearse"),
    )  # fmt: skip
    assert report.chosen.plan.sharding == Zero(stage=3, backend="fsdp")


def test_a_torch_without_fake_collectives_is_named():
    """torch 2.9 has no allreduce for fake tensors; what another operation lacks is no matter of ranks."""
    plan = plan_for(
        known("qwen3-0.6b"), hardware=gpu("a100-40gb", gpus=4), sharding=Zero(stage=3, backend="fsdp")
    )
    with pytest.raises(RecipeError, match="no c10d.allreduce_.default for fake tensors"), fake_ranks(plan):
        raise UnsupportedOperatorException(torch.ops.c10d.allreduce_.default)
    with pytest.raises(UnsupportedOperatorException), fake_ranks(plan):
        raise UnsupportedOperatorException(torch.ops.aten.nonzero.default)
