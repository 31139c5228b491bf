"""A rank of a divided model keeps its rows as it reads: bit for bit those of a model that was whole, in their room."""

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from faults.budgets import Budget
from fitune.engine.host import HostMemory
from fitune.engine.kept_rows import divided
from fitune.engine.ranks import local_part
from fitune.recipe.targets import resolve_targets
from fitune.train.prepare import prepare
from fitune.values.model.model_config import load_model_spec
from fitune.values.plan import Dense, Hqq, Lora, Nf4, Offload, Zero
from models.tiny_models import tiny_model
from plans import CPU, plan_for

pytest.importorskip("bitsandbytes")
pytest.importorskip("hqq.core.quantize")

DENSE = Dense()


@contextmanager
def one_of(world, rank):
    """A group in which this process is ``rank`` and the others are silent."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def plan_on(folder, *, world, tuning="lora", base=DENSE):
    spec = load_model_spec(str(folder))
    sharding = Zero(stage=3, backend="fsdp")
    hardware = replace(CPU, gpus_per_node=world)
    plan = plan_for(spec, hardware=hardware, sharding=sharding, tuning=tuning, precision="bf16", rows=1)
    plan = replace(plan, model_path=str(folder))
    if tuning == "full":
        return plan
    lora = Lora(rank=8, alpha=8, dropout=0.0, targets=resolve_targets(spec, ("all-linear",)), base=base)
    return replace(plan, tuning=lora)


def tensors_of(prepared):
    whole = prepared.model.whole
    return {**dict(whole.named_parameters()), **dict(whole.named_buffers())}


def divided_later(plan, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("fitune.engine.kept_rows.KeptRows", lambda *_, **__: None)
        return prepare(plan)


@pytest.mark.parametrize(
    ("family", "tuning", "base", "world", "rank"),
    [
        ("llama", "lora", Nf4(), 2, 1),
        ("llama", "full", Dense(), 3, 2),
        ("qwen2", "lora", Hqq(bits=4, group_size=16), 2, 0),
        ("qwen3", "full", Dense(), 2, 1),
        ("gpt2", "lora", Nf4(), 3, 1),
        ("qwen3_moe", "lora", Nf4(double_quant=False), 8, 7),
    ],
    ids=["llama-nf4", "llama-full", "qwen2-hqq", "tied-full", "gpt2-nf4", "experts-nf4"],
)
def test_shares_kept_while_reading_are_those_divided_later(
    tmp_path, monkeypatch, family, tuning, base, world,
    rank,
) :  # fmt: skip
    tiny_model(family).save_pretrained(tmp_path)
    plan = plan_on(tmp_path, world=world, tuning=tuning, base=base)
    with one_of(world, rank):
        ours, theirs = tensors_of(prepare(plan)), tensors_of(divided_later(plan, monkeypatch))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        other = theirs[name]
        assert (tensor.shape, tensor.dtype, tensor.requires_grad) == (
            other.shape,
            other.dtype,
            other.requires_grad,
        )
        assert local_part(tensor).reshape(-1).view(torch.uint8).equal(
            local_part(other).reshape(-1).view(torch.uint8)
        ), name  # fmt: skip


class OfThisRank(Budget):
    """A divided tensor says that it has all its bytes; only the part that is here counts."""

    def _add(self, tensor):
        if not isinstance(tensor, DTensor):
            super()._add(tensor)


def peak_of(make):
    """Bytes at the worst moment of loading, and of what is there in the end."""
    tracker = OfThisRank()
    with tracker:
        prepared = make()
    storages = {s._cdata: s.nbytes() for s in (t.untyped_storage() for t in prepared.resident_tensors())}
    return max(tracker.peaks.values()), sum(storages.values())


@pytest.mark.parametrize(("tuning", "base"), [("full", Dense()), ("lora", Nf4())], ids=["full", "nf4"])
def test_loading_takes_the_share_and_one_tensor(tmp_path, monkeypatch, tuning, base):
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")  # other threads are not counted
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 500}
    tiny_model(**sizes).save_pretrained(tmp_path, max_shard_size="1MB")
    plan = plan_on(tmp_path, world=4, tuning=tuning, base=base)
    one = 4 * 512 * 256  # the largest matrix as it is stored
    with one_of(4, 0):
        peak, share = peak_of(lambda: prepare(plan))
        before, _ = peak_of(lambda: divided_later(plan, monkeypatch))
    assert peak < 1.05 * share + 3 * one
    assert before > 2 * peak


def test_rows_on_the_host_stay_there_whatever_device_the_mesh_is_of(monkeypatch):
    """torch moves a share to the mesh's device, and FSDP2 then refuses parameters that are to be on the host.

    A mesh of "meta" devices stands for one of GPUs: a share that was moved there has lost its content.
    """
    with one_of(world=2, rank=0):
        mesh = init_device_mesh("cpu", (2,))
        monkeypatch.setattr(DeviceMesh, "device_type", property(lambda self: "meta"))
        own = torch.arange(6.0).view(2, 3)
        moved = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        assert moved.to_local().is_meta, "torch does not move it any more: kept_rows.divided can go"
        kept = divided(own, mesh, [Shard(0)], shape=torch.Size((4, 3)), stride=(3, 1))
        assert kept.shape == (4, 3)
        assert kept.to_local().data_ptr() == own.data_ptr()


@pytest.mark.parametrize("rank", [0, 2])
def test_every_parameter_waits_in_the_hosts_own_rooms(tmp_path, rank):
    """Also those that nobody kept while reading, as adapters; but not rows that FSDP2 will pad: 33 of 34, 2 of 3."""
    tiny_model(vocab_size=101, hidden_size=48, intermediate_size=96).save_pretrained(tmp_path)
    away = Offload(parameters="cpu", optimizer="cpu")
    made = []
    with one_of(3, rank), pytest.MonkeyPatch.context() as patched:
        empty_like = HostMemory.empty_like
        patched.setattr(
            HostMemory, "empty_like", lambda *a, **k: made.append(empty_like(*a, **k)) or made[-1]
        )
        plan = replace(plan_on(tmp_path, world=3), offload=away)
        # a CPU has no other memory, so no recipe says this there
        patched.setattr(import_module("fitune.train.prepare"), "require_rules", lambda *_: None)
        prepared = prepare(plan)
        parameters = dict(prepared.model.whole.named_parameters())
    rooms = {room.data_ptr() for room in made}
    outside = {name for name, p in parameters.items() if local_part(p).data_ptr() not in rooms}
    short = {name for name, p in parameters.items() if 3 * local_part(p).numel() < p.numel()}
    assert outside == short
    assert any("embed_tokens" in name for name in short) == (rank == 2)
    assert sum("lora_A" in name for name in parameters.keys() - short) == (0 if rank == 2 else 21)
