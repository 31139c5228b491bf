"""What FSDP2 really allocates, on a fake process group of eight: gathered weights, gradients, buffers of their sums.

Every storage alive is counted after every operation, because FSDP2 frees unsharded weights by resizing their
storages. Tokens are few, so that weights and gradients are what is compared; tolerance 2 % of the peak.
"""

import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from estimate.tiny_plans import plan_for
from fitune.estimate.memory import predict_memory
from fitune.spec.gpus import cpu_gpu, hardware_for
from fitune.spec.model_config import spec_from_config
from fitune.spec.plan import Zero
from fitune.spec.reports import Phase
from fitune.units import GIB

RANKS, TOKENS = 8, 8
TOLERANCE = 0.02
CONFIG = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip


class Storages(TorchDispatchMode):
    """Peak bytes of all storages alive in each phase, at the size they have at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.READY
        self.peaks: dict[Phase, int] = {}
        self._alive: dict[int, weakref.ref] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage)
            weakref.finalize(storage, self._alive.pop, key, None)

    def total(self) -> int:
        alive = (reference() for reference in list(self._alive.values()))
        return sum(storage.nbytes() for storage in alive if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, result)):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.total())
        return result


@pytest.fixture(autouse=True, scope="module")
def ranks() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def measured(stage: int, vocab_size: int, dtype: torch.dtype) -> tuple[int, dict[Phase, int]]:
    """Bytes of the shares of weights, and peaks of forward and backward beyond nothing but them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=vocab_size)).to(dtype)
    mesh = init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=stage == 3)
    ids = torch.randint(0, vocab_size, (1, TOKENS))
    model(input_ids=ids, labels=ids).loss.backward()  # FSDP2 sets itself up on the first pass
    model.zero_grad()
    storages = Storages()
    for parameter in model.parameters():
        storages.add(parameter)
    shares = storages.total()
    with storages:
        storages.phase = Phase.FORWARD
        loss = model(input_ids=ids, labels=ids).loss
        storages.phase = Phase.BACKWARD
        loss.backward()
    return shares, storages.peaks


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("vocab_size", [160, 4000], ids=["blocks", "embeddings"])
@pytest.mark.parametrize("precision", ["fp32", "bf16-master"])
def test_forward_and_backward_take_what_the_estimate_says(stage, vocab_size, precision):
    model = spec_from_config({"model_type": "llama", "vocab_size": vocab_size, **CONFIG}, name="tiny")
    hardware = hardware_for(gpu=cpu_gpu(memory_bytes=8 * GIB, cores=1), gpus=RANKS)
    sharding = Zero(stage=stage, backend="fsdp")
    plan = plan_for(model, hardware=hardware, precision=precision, sharding=sharding, rows=1, seq_len=TOKENS)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    shares, peaks = measured(stage, vocab_size, dtype)
    phases = predict_memory(plan).phases
    assert phases[Phase.READY]["weights"] == shares
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        states = phases[Phase.READY].get("masters", 0) + phases[Phase.READY]["optimizer"]
        predicted = sum(phases[phase].values()) - states
        assert predicted == pytest.approx(peaks[phase], rel=TOLERANCE), (phase, phases[phase])
