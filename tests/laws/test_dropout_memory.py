"""What dropout in front of adapters keeps: predicted, rehearsed and measured, every live tensor counted."""

from dataclasses import replace

import pytest

from fitune.estimate.predict import predict_memory
from fitune.rehearse.step import trace_plan
from fitune.values.plan import Dense, Nf4, Offload
from fitune.values.predictions import Phase
from laws.test_memory_prediction import bench
from laws.test_rehearsal_estimate import hidden_states_off
from laws.test_rehearsal_real_step import check_all
from plans import gpu, plan_for
from rehearse.tiny_configs import tiny

QV = ("q_proj", "v_proj")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("precision", "recompute", "targets", "base", "dora"),
    [
        ("fp32", 0, (), Dense(), False),
        ("fp32", bench.LAYERS, (), Dense(), False),
        ("bf16", bench.LAYERS, (), Dense(), False),
        ("bf16", 0, QV, Nf4(), False),
        ("bf16-master", bench.LAYERS, (), Dense(), True),
        ("bf16", 3, (), Nf4(), True),
    ],
)
def test_estimate_rehearsal_and_real_step_agree(model, precision, recompute, targets, base, dora):
    if base != Dense():
        pytest.importorskip("bitsandbytes")
    plan = bench.plan_of(model, tuning="lora", precision=precision, recompute=recompute, chunked=True)
    chosen = targets or plan.tuning.targets
    plan = replace(plan, tuning=replace(plan.tuning, dropout=0.1, targets=chosen, base=base, dora=dora))
    check_all(plan)


def test_by_hand_a_kept_block_holds_a_dropped_input_and_a_mask_for_each_linear(model):
    """On a GPU, 16 bit, seven linears: 3 bytes for each element of their inputs. Without dropout 2 bytes for each of
    four inputs: q, k and v share one, gate and up another, and rows are joined for o."""
    without, dropping = (
        plan_for(model, hardware=gpu("rtx-4090"), tuning="lora", precision="bf16", dropout=p)
        for p in (0.0, 0.1)
    )
    kept = [predict_memory(plan).phases["loss"]["activations"] for plan in (without, dropping)]
    tokens, h, f = 4 * 64, 128, 352
    more = 3 * (6 * h + f) - 2 * (3 * h + f)
    masks_of_the_first_block = 3 * h  # no gradient goes into it
    assert kept[1] - kept[0] == tokens * (model.num_layers * more - masks_of_the_first_block)


def test_a_gpu_plan_that_drops_out_and_recomputes_is_rehearsed():
    """The block runs again in backward with the same masks as in forward."""
    config, spec = tiny("llama", num_hidden_layers=3)
    plan = plan_for(
        spec, hardware=gpu("rtx-4090"), tuning="lora", precision="bf16", dropout=0.1, recompute=3, rows=1
    )
    trace, layers = trace_plan(plan, config, exact=True)
    assert layers == 3
    assert trace.events


@pytest.mark.thinned(2)
@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "phi"])
@pytest.mark.parametrize(("recompute", "activations"), [(0, "cpu"), (3, "device")])
def test_an_adapter_that_drops_out_leaves_the_product_to_its_callers(family, recompute, activations):
    """Nobody keeps the MLP's product, nor its input, and both live until base, low rank and scaled output are there:
    forward beside activations that leave was three hidden states too low, GPT-2 and Phi that run again one."""
    config, spec = tiny(
        family, hidden_size=512, num_attention_heads=8, num_key_value_heads=8, intermediate_size=2048,
        num_hidden_layers=3, vocab_size=600,
    )  # fmt: skip
    plan = plan_for(
        spec, hardware=gpu("h100"), tuning="lora", precision="bf16", dropout=0.1, recompute=recompute, seq_len=256,
        rows=2, chunk=64, attention="flash", offload=Offload(activations=activations),
    )  # fmt: skip
    off = hidden_states_off(plan, config)
    assert max(abs(off[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD)) < 0.05, off
