"""``fitune rehearse`` as a user types it, and what a rehearsal answers."""

import json
import sys

import pytest

from fitune.cli import main
from fitune.errors import ModelError
from fitune.models.readers import model_config
from fitune.rehearse import step
from fitune.rehearse.step import record_step, rehearse
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.plan import Sgd
from fitune.values.predictions import Phase, Rehearsal
from plans import gpu, known, plan_for
from rehearse.tiny_configs import tiny

QWEN = ["--model", "Qwen/Qwen3-0.6B", "--gpu", "rtx-4090", "--seq-len", "512", "--tuning"]


def fitune(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["fitune", *words])
    with pytest.raises(SystemExit) as exit_:
        main()
    printed = capsys.readouterr()
    return exit_.value.code or 0, printed.out, printed.err


def test_json_is_the_plan_with_a_rehearsal(capsys, monkeypatch):
    code, out, err = fitune(capsys, monkeypatch, "rehearse", *QWEN, "lora", "--json")
    content = json.loads(out)
    rehearsal = content["rehearsal"]
    assert (code, err) == (0, "")
    assert content["model"]["num_layers"] == 28
    assert set(rehearsal["phases"]) == {phase.value for phase in Phase}
    peak = max(sum(kinds.values()) for kinds in rehearsal["phases"].values())
    assert rehearsal["peak_bytes"] == peak + sum(rehearsal["outside"].values())
    assert rehearsal["peak_bytes"] == pytest.approx(content["estimate"]["peak_bytes"], rel=0.02)
    assert rehearsal["reserved_bytes"] >= rehearsal["tensor_peak_bytes"]
    assert rehearsal["layers_traced"] < 28


def test_text_is_a_table_of_phases(capsys, monkeypatch):
    found = Rehearsal(
        phases={phase: {"weights": 2**30} for phase in Phase}, outside={"context": 1}, reserved_bytes=2**31,
        layers_traced=4,
    )  # fmt: skip
    monkeypatch.setattr(step, "rehearse", lambda plan, **_: found)
    code, out, err = fitune(capsys, monkeypatch, "rehearse", *QWEN, "full")
    assert (code, err) == (0, "")
    for words in (
        "estimated",
        "rehearsed",
        "peak of tensors",
        "4 of 28 blocks traced",
        "would reserve 2.00 GiB",
    ):
        assert words in out
    for phase in Phase:
        assert phase.value in out


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
