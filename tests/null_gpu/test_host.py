"""What is on the host beside the device: how torch's allocators are set, how much is pinned, who waits for whom."""

import pytest

from null_gpu.conftest import has

pytestmark = pytest.mark.null_gpu

MIB = 1 << 20
SEGMENTS = """
import json
{before}
import fitune, torch
from fitune.measure.memory import has_expandable_segments
room = torch.empty(300 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps(has_expandable_segments(torch.device("cuda", 0))))
"""


@pytest.mark.parametrize(
    ("before", "own", "grow"),
    [
        ("import torch", {}, True),
        ("import torch; torch.empty(1, device='cuda')", {}, False),
        ("", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, False),
    ],
)
def test_segments_grow_unless_a_gpu_was_used_before_or_the_user_says_otherwise(
    on_null_gpu, monkeypatch, before, own, grow
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):  # these tests import fitune, too
        monkeypatch.delenv(name, raising=False)
    assert on_null_gpu(SEGMENTS.format(before=before), environment=own).value is grow


PINNED = """
import json, nullcuda, torch
from fitune.errors import NoPinnedMemory, OutOfMemory, is_out_of_memory
from fitune.engine.host import HostMemory
host = HostMemory(torch.device("cuda", 0))
def pinned(): return nullcuda.counts()["host_bytes"] >> 20
before = pinned()
rooms = [host.room(104 << 20) for _ in range(2)]
rooms += [host.room(3 << 20) for _ in range(5)]
taken = pinned() - before
asked = nullcuda.counts()["host_allocs"]
rooms[0].fill_(7)
moved, arrival = host.give([rooms[0]])
arrival.wait()
there = [moved[0].is_cuda, bool(rooms[0].is_pinned()), int(moved[0][-1].cpu())]
del rooms[:2]
rooms.append(host.room(100 << 20))
again = nullcuda.counts()["host_allocs"] - asked
try:
    host.room(500 << 20)
except NoPinnedMemory as error:
    refused = [str(error), isinstance(error, OutOfMemory), is_out_of_memory(error), error.exit_code]
after = int(torch.ones(4, device="cuda").sum())
print(json.dumps({"taken": taken, "there": there, "again": again, "refused": refused, "after": after}))
"""


def test_what_is_pinned_is_what_is_held(on_null_gpu):
    """torch's pinned allocator would take 2 × 128 + 5 × 4 MiB."""
    found = on_null_gpu(PINNED, compute="all", environment={"NULLCUDA_PINNED_MIB": 600}).value
    assert 2 * 104 + 5 * 3 <= found["taken"] <= 2 * 104 + 16
    assert found["there"] == [True, True, 7]
    assert found["again"] == 0  # a room that was given back is cut again
    words, is_retried, is_memory, status = found["refused"]
    assert "would not pin 500.0 MiB" in words
    assert "has pinned 120.0 MiB" in words  # an idle room went to make room
    assert (is_retried, is_memory, status) == (False, False, 3)
    assert found["after"] == 4  # no later kernel is blamed for what was refused


DIRECTIONS = """
import json, threading, torch
from fitune.engine.host import HostMemory
host, streams, threads = HostMemory(torch.device("cuda", 0)), [], []
entered = torch.cuda.stream
torch.cuda.stream = lambda stream: (streams.append(stream.cuda_stream), entered(stream))[1]
rooms, _ = host.take([torch.ones(1000, device="cuda")])
host.give(rooms)
host.beside(lambda: threads.append(threading.current_thread().name))()
compute = torch.cuda.current_stream().cuda_stream
print(json.dumps({"streams": len({*streams, compute}), "apart": threads != [threading.current_thread().name]}))
"""


def test_each_direction_has_a_stream_and_the_hosts_sums_a_thread(on_null_gpu):
    assert on_null_gpu(DIRECTIONS).value == {"streams": 3, "apart": True}


METER = """
import json, torch
from fitune.measure.memory import CudaMeter
from fitune.values.predictions import Phase
torch.cuda.init()
meter = CudaMeter(torch.device("cuda", 0))
try:
    with meter.measuring(lambda: []):
        meter.enter(Phase.FORWARD)
        kept = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
print(json.dumps({phase.value: size >> 20 for phase, size in meter.take_peaks().items()}))
"""


def test_the_peak_of_the_phase_that_ran_out_of_memory_is_kept(on_null_gpu):
    assert on_null_gpu(METER).value == {"idle": 0, "forward": 30}


STEPS = """
import json
from dataclasses import replace
import nullcuda, torch
from transformers import LlamaConfig, LlamaForCausalLM
from cpu_memory import CONFIG, plan_of, random_rows, small_model
from fitune.models.weights import compute_dtype
from fitune.values.plan import Offload, PlainLoss
from fitune.train.prepare import prepare_loaded

def trained(offload, tuning, precision):
    plan = plan_of(small_model(), tuning=tuning, precision=precision, recompute=0, chunked=False, accumulation=2)
    plan = replace(plan, offload=Offload(**offload))
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
    model = model.to(compute_dtype(plan.precision))
    if plan.offload.parameters == "device":
        model = model.to("cuda")
    ready = prepare_loaded(model, plan, device=torch.device("cuda", 0))
    torch.manual_seed(1)
    rows = [random_rows((40, 24), vocab_size=plan.model.vocab_size) for _ in range(2)]
    losses, spent = [], []
    for _ in range(3):
        before = nullcuda.counts()
        for micro in rows:
            loss = ready.engine.forward_backward(micro, divisor=60, enter_phase=lambda phase: None)
            losses.append(loss.item())
        between = nullcuda.counts()
        ready.engine.update(learning_rate=1e-3, enter_phase=lambda phase: None)
        spent.append((nullcuda.since(between), {name: n - before[name] for name, n in between.items()}))
    update, backward = spent[-1]
    return losses, {"update": update, "backward": backward}

print(json.dumps([trained(*case) for case in CASES]))
"""
AWAY = {"parameters": "cpu", "optimizer": "cpu", "activations": "cpu"}
BLOCKS = 6


def test_with_everything_on_the_host_losses_are_the_same_and_events_go_by_blocks(on_null_gpu):
    """Before there was an event for each tensor: 656 a micro-batch, where it is 60 now."""
    cases = [({}, "full", "fp32"), (AWAY, "full", "fp32"), ({"optimizer": "cpu"}, "full", "fp32")]
    (here, _), (away, spent), (stepped, optimizer) = on_null_gpu(
        f"CASES = {cases}\n{STEPS}", compute="all"
    ).value
    assert here == away == stepped
    assert spent["backward"]["events"] <= 2 * 10 * BLOCKS  # both micro-batches; two for each set of copies
    assert spent["backward"]["waits"] <= 2 * 10 * BLOCKS
    assert optimizer["backward"]["events"] <= 2 * 3 * (BLOCKS + 1)
    assert optimizer["update"]["events"] <= 2 * (BLOCKS + 1)
    for counts in (*spent.values(), *optimizer.values()):
        assert counts["host_allocs"] == counts["mallocs"] == 0  # nothing is pinned in a step


SHARED = """
import json
from dataclasses import replace
import nullcuda, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from cpu_memory import CONFIG, plan_of, random_rows, small_model
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Offload, Zero
from fitune.engine.fsdp import mesh_of
from fitune.train.prepare import prepare_loaded

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
plan = plan_of(small_model(), tuning="lora", precision="fp32", recompute=0, chunked=True, accumulation=3)
hardware = hardware_for(gpu=find_gpu("h100"), gpus=2, host_memory_bytes=100 << 30, cpu_cores=2)
plan = replace(
    plan, hardware=hardware, sharding=Zero(stage=3, backend="fsdp"), offload=Offload(parameters="cpu", optimizer="cpu")
)
model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}))
device = torch.device("cuda", 0)
ready = prepare_loaded(model, plan, device=device, mesh=mesh_of(plan.sharding, plan.hardware, device="cuda"))
rows = random_rows((40, 24), vocab_size=plan.model.vocab_size)
spent = []
for _ in range(2):
    for _ in range(3):
        before = nullcuda.counts()
        ready.engine.forward_backward(rows, divisor=60, enter_phase=lambda phase: None)
        spent.append(nullcuda.since(before))
    ready.engine.optimizer.drop_gradients()
left = [p for p in ready.model.whole.parameters() if p.grad is not None]
print(json.dumps({"spent": spent, "left": len(left), "trained": len(ready.model.trained)}))
"""


def test_fsdp_copies_the_gradients_of_every_micro_batch_alike(on_null_gpu):
    """A gradient that waits on a share makes FSDP2 copy the next one blocking: a synchronisation for each."""
    found = on_null_gpu(SHARED, compute=400_000).value
    _, second, third = found["spent"][3:]
    first = found["spent"][3]
    assert found["left"] == 0
    assert second["syncs"] == third["syncs"] == first["syncs"], [s["syncs"] for s in found["spent"]]
    assert second["copies"] == first["copies"]


AWAY_OVER_TWO = """
import json
from dataclasses import replace
import nullcuda, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from cpu_memory import CONFIG, plan_of, random_rows, small_model
from fitune.engine.fsdp import mesh_of
from fitune.errors import NoPinnedMemory, is_out_of_memory
from fitune.estimate.predict import predict
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Offload, Zero
from fitune.train.prepare import prepare_loaded

CONFIG.update(hidden_size=320, intermediate_size=864, vocab_size=20000)
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
plan = plan_of(small_model(), tuning="full", precision="bf16-master", recompute=0, chunked=True, accumulation=2)
hardware = hardware_for(gpu=find_gpu("h100"), gpus=2, host_memory_bytes=100 << 30, cpu_cores=2)
plan = replace(
    plan, hardware=hardware, sharding=Zero(stage=3, backend="fsdp"), offload=Offload(parameters="cpu", optimizer="cpu")
)
model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})).to(torch.bfloat16)
device, mesh = torch.device("cuda", 0), mesh_of(plan.sharding, plan.hardware, device="cuda")
try:
    ready = prepare_loaded(model, plan, device=device, mesh=mesh)
except NoPinnedMemory as error:
    print(json.dumps([type(error.__cause__).__name__, is_out_of_memory(error), error.message]))
    raise SystemExit
rows = random_rows((40, 24), vocab_size=plan.model.vocab_size)
for last in (False, True):
    ready.engine.forward_backward(rows, divisor=60, enter_phase=lambda phase: None, last=last)
by_torch = torch.cuda.host_memory_stats()["allocated_bytes.current"]
planned = {name: size // 2 for name, size in predict(plan).host.items()}
print(json.dumps({"torch": by_torch, "own": nullcuda.counts()["host_bytes"] - by_torch, "planned": planned}))
"""


def test_what_fsdp_keeps_on_the_host_is_what_is_planned(on_null_gpu):
    """torch would pin 28.2 MB for the weights' 19.3: powers of two. It does so for the gradients, and that is planned.

    Moments are not pinned; of the optimizer's 12 bytes a parameter 4 are.
    """
    found = on_null_gpu(AWAY_OVER_TWO, compute=400_000).value
    planned = found["planned"]
    assert 0 <= found["torch"] - planned["gradient copies"] < MIB // 2  # the rest is what a batch is sent by
    kept = planned["weights"] + planned["optimizer"] // 3 + planned["gradients"]
    assert 0 <= found["own"] - kept < 16 * MIB


BY_DEEPSPEED = """
import json
from dataclasses import replace
import nullcuda, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
import fitune.engine.host
from cpu_memory import CONFIG, plan_of, random_rows, small_model
from fitune.errors import NoPinnedMemory
from fitune.estimate.predict import predict
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.plan import Offload, Zero
from fitune.train.prepare import prepare_loaded

CONFIG.update(hidden_size=320, intermediate_size=864, vocab_size=20000)
fitune.engine.host._REGION_BYTES = 1 << 16
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
plan = plan_of(small_model(), tuning=tuning, precision="bf16", recompute=0, chunked=True, accumulation=2)
hardware = hardware_for(gpu=find_gpu("h100"), gpus=2, host_memory_bytes=100 << 30, cpu_cores=2)
sharding, away = Zero(stage=stage, backend="deepspeed"), Offload(**dict.fromkeys(away, "cpu"))
plan = replace(plan, hardware=hardware, sharding=sharding, offload=away)
model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})).to(torch.bfloat16)
try:
    engine = prepare_loaded(model, plan, device=torch.device("cuda", 0)).engine
except NoPinnedMemory as error:
    print(json.dumps(error.message))
    raise SystemExit
rows = random_rows((40, 24), vocab_size=plan.model.vocab_size)
for last in (False, True):
    engine.forward_backward(rows, divisor=60, enter_phase=lambda phase: None, last=last)
host = {name: size // 2 for name, size in predict(plan).host.items()}
masters = host.get("optimizer", 0) // 3 if stage == 2 else 0  # of stage 3 they are not pinned
by_torch = torch.cuda.host_memory_stats()["allocated_bytes.current"]
kept = sum(host.get(name, 0) for name in ("weights", "gradients", "second copies")) + masters
print(json.dumps({"own": nullcuda.counts()["host_bytes"] - by_torch, "planned": kept, "torch": by_torch}))
"""


@pytest.mark.parametrize(
    ("stage", "away", "tuning"),
    [
        (2, ["optimizer"], "full"),
        (3, ["parameters", "optimizer"], "full"),
        (3, ["parameters"], "full"),
        (3, ["parameters"], "lora"),
    ],
)
def test_what_deepspeed_keeps_on_the_host_is_what_is_planned(on_null_gpu, stage, away, tuning):
    """torch would pin powers of two, and keep the rooms of weights that are in one buffer by then."""
    if not has("deepspeed"):
        pytest.skip("no deepspeed in the environment of the null GPU (make null-env)")
    choice = f"stage, away, tuning = {stage}, {away}, {tuning!r}\n"
    found = on_null_gpu(choice + BY_DEEPSPEED, compute=400_000).value
    assert found["torch"] < MIB // 2  # what a batch is sent by
    assert found["own"] == pytest.approx(found["planned"], rel=0.004)


def test_deepspeed_that_cannot_pin_is_no_full_gpu(on_null_gpu):
    if not has("deepspeed"):
        pytest.skip("no deepspeed in the environment of the null GPU (make null-env)")
    choice = "stage, away, tuning = 3, ['parameters', 'optimizer'], 'full'\n"
    words = on_null_gpu(choice + BY_DEEPSPEED, environment={"NULLCUDA_PINNED_MIB": 30}).value
    assert "the host would not pin" in words


def test_fsdps_copies_that_cannot_be_pinned_are_no_full_gpu(on_null_gpu):
    """Found before the first step: smaller micro-batches would change nothing."""
    cause, is_memory, words = on_null_gpu(AWAY_OVER_TWO, environment={"NULLCUDA_PINNED_MIB": 45}).value
    assert (cause, is_memory) == ("AcceleratorError", False)
    assert "the host would not pin" in words
