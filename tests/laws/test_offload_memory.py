"""What leaves the device: predicted, rehearsed and measured on the CPU, every tensor that the host does not own."""

from dataclasses import replace

import pytest
import torch

from fitune.estimate.parameters import weights_bytes
from fitune.measure.memory import LiveTensors
from fitune.values.plan import Nf4, Offload
from fitune.values.predictions import Phase
from laws import test_rehearsal_real_step
from laws.test_memory_prediction import ROWS, bench, measured_peaks
from laws.test_rehearsal_estimate import check, hidden_states_off
from plans import gpu, plan_for
from rehearse.tiny_configs import tiny

ALL = bench.LAYERS
ACTIVATIONS = Offload(activations="cpu")
OPTIMIZER = Offload(optimizer="cpu")
FROZEN = Offload(parameters="cpu")
STATES = Offload(parameters="cpu", optimizer="cpu")
ALL_THREE = Offload(parameters="cpu", optimizer="cpu", activations="cpu")


def plan_of(model, offload, *, tuning, precision, recompute, accumulation=1):
    plan = bench.plan_of(
        model, tuning=tuning, precision=precision, recompute=recompute, chunked=True, accumulation=accumulation
    )  # fmt: skip
    return replace(plan, offload=offload)


def measured_peak(plan):
    return max(measured_peaks(plan).values())


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("offload", "tuning", "precision", "recompute", "accumulation"),
    [
        (ACTIVATIONS, "full", "bf16", ALL // 2, 2), (ACTIVATIONS, "full", "fp32", 0, 1),
        (ACTIVATIONS, "lora", "bf16", ALL, 1), (ACTIVATIONS, "lora", "fp32", 0, 1),
        (OPTIMIZER, "full", "bf16-master", ALL // 2, 2), (OPTIMIZER, "full", "fp16", ALL, 1),
        (OPTIMIZER, "lora", "fp32", ALL, 1), (OPTIMIZER, "lora", "bf16-master", 0, 2),
        (STATES, "full", "fp32", 0, 1), (STATES, "full", "bf16", ALL // 2, 2), (ALL_THREE, "full", "bf16", ALL, 1),
        (FROZEN, "lora", "fp32", ALL // 2, 1), (ALL_THREE, "lora", "fp32", 0, 1), (FROZEN, "lora", "bf16", ALL, 1),
        (FROZEN, "lora", "bf16-master", 0, 2),
    ],
)  # fmt: skip
def test_what_is_on_the_host_is_the_real_step(model, offload, tuning, precision, recompute, accumulation):
    """Estimated and rehearsed: of every sixth row always."""
    plan = plan_of(
        model, offload, tuning=tuning, precision=precision, recompute=recompute, accumulation=accumulation
    )  # fmt: skip
    test_rehearsal_real_step.check_all(plan)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recompute", [0, ALL])
def test_packed_weights_on_the_host_are_the_real_step(model, recompute):
    """The pieces of a packed block lie at multiples of 16 bytes, which is not counted. Of backward with all blocks
    recomputed, the peak of this model, 1.06 % too much is predicted (30 KB)."""
    pytest.importorskip("bitsandbytes")
    plan = plan_of(model, FROZEN, tuning="lora", precision="bf16", recompute=recompute)
    plan = replace(plan, tuning=replace(plan.tuning, base=Nf4()))
    test_rehearsal_real_step.check_all(plan, peak=0.012 if recompute else 0.01)


class Budget(LiveTensors):
    """A device with so many bytes and no more."""

    budget_bytes = 0

    def _note_peak(self):
        super()._note_peak()
        if self.current_bytes > self.budget_bytes:
            raise MemoryError(f"{self.current_bytes} bytes on a device that has {self.budget_bytes}")


@pytest.mark.parametrize(
    ("tuning", "offload"), [("full", ALL_THREE), ("lora", FROZEN)], ids=["full", "qlora"]
)
def test_a_model_of_four_times_the_budget_trains(tuning, offload, monkeypatch):
    """32 blocks; the device is given a quarter of what the model's weights alone take."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(bench.CONFIG, "num_hidden_layers", 32)
    monkeypatch.setitem(bench.CONFIG, "vocab_size", 200)
    plan = plan_of(bench.small_model(), offload, tuning=tuning, precision="bf16", recompute=32)
    if tuning == "lora":
        plan = replace(plan, tuning=replace(plan.tuning, base=Nf4(), rank=1, targets=("q_proj",)))
    monkeypatch.setattr(Budget, "budget_bytes", weights_bytes(plan) // 4)
    monkeypatch.setattr(bench, "LiveTensors", Budget)
    rows = bench.random_rows((8, 8), vocab_size=plan.model.vocab_size)
    peaks = bench.measured_peaks(plan, rows)
    assert max(peaks.values()) <= weights_bytes(plan) // 4
    with pytest.raises(MemoryError):
        Budget([torch.empty(weights_bytes(plan), dtype=torch.uint8)])


def test_the_device_holds_neither_states_nor_all_gradients(model):
    """Full in fp32: 16 bytes a parameter become 4, and the gradients of two blocks."""
    kept = plan_of(model, Offload(), tuning="full", precision="fp32", recompute=ALL)
    rows = bench.random_rows(ROWS, vocab_size=model.vocab_size)
    update = bench.measured_peaks(replace(kept, offload=OPTIMIZER), rows)[Phase.UPDATE]
    assert update == pytest.approx(bench.measured_peaks(kept, rows)[Phase.UPDATE] / 4, rel=0.01)


def test_activations_on_the_host_are_gone_from_the_device(model):
    """Six blocks keep what they keep; on the device are those of two."""
    kept = plan_of(model, Offload(), tuning="lora", precision="fp32", recompute=0)
    gone = replace(kept, offload=ACTIVATIONS)
    block = (
        112 * 4 * (2 * 129 + 2 * 128 + 3 * 352)
    )  # t · e · (norms, attention's ends, gate, its activation, up)
    assert measured_peak(kept) - measured_peak(gone) > (ALL - 2) * block


@pytest.mark.thinned(5)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral"])
@pytest.mark.parametrize(("offload", "tuning"), [(ACTIVATIONS, "lora"), (FROZEN, "lora"), (STATES, "full")])
def test_estimate_and_rehearsal_agree(family, offload, tuning):
    config, spec = tiny(family)
    plan = plan_for(
        spec, hardware=gpu("h100"), tuning=tuning, precision="bf16", recompute=1, seq_len=128, rows=2, chunk=64,
        offload=offload,
    )  # fmt: skip
    check(plan, config)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("offload", [ALL_THREE, ACTIVATIONS, OPTIMIZER, FROZEN], ids=str)
def test_with_adapters_in_some_blocks_it_is_the_real_step_too(model, offload):
    plan = plan_of(model, offload, tuning="lora", precision="bf16", recompute=3)
    plan = replace(plan, tuning=replace(plan.tuning, layers=(2, 4)))
    test_rehearsal_real_step.check_all(plan)


def test_a_block_at_work_is_counted_beside_the_activations_that_leave():
    """DoRA's norms on a packed base: forward was planned 47 hidden states too low. Half of these were the identity
    matrices that DoRA multiplies, held to the end of the block although autograd had let go of them."""
    config, spec = tiny(
        "llama", hidden_size=2048, num_attention_heads=16, num_key_value_heads=4, intermediate_size=5632,
        num_hidden_layers=3,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), seq_len=1024, rows=1, precision="bf16", chunk=256, tuning="lora",
        offload=ACTIVATIONS, attention="flash",
    )  # fmt: skip
    plan = replace(plan, tuning=replace(plan.tuning, base=Nf4(), dora=True))
    assert 0 <= hidden_states_off(plan, config)[Phase.FORWARD] < 1


FOUR_TIMES = {"phi": {"intermediate_size": 2048, "num_key_value_heads": 8}}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi"])
@pytest.mark.parametrize(("tuning", "recompute"), [("lora", 0), ("full", 3)])
def test_forward_is_the_rehearsed_one_where_activations_leave(family, tuning, recompute):
    """A block ends beside the one before: its input, which the body holds too, and what parallel blocks and GPT-2 still
    hold of attention; Gemma-2's last norm scales an fp32 copy twice. Forward was up to four hidden states too low."""
    config, spec = tiny(
        family, hidden_size=512, num_attention_heads=8, vocab_size=600, **FOUR_TIMES.get(family, {})
    )
    plan = plan_for(
        spec, hardware=gpu("h100"), precision="bf16", seq_len=256, rows=2, chunk=64, tuning=tuning, attention="flash",
        recompute=0 if family == "gemma2" else recompute, offload=ACTIVATIONS,
    )  # fmt: skip
    off = hidden_states_off(plan, config)
    assert abs(off[Phase.FORWARD]) < 0.1, off
