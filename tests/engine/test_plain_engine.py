"""The engine against torch written out by hand."""

import copy
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from fitune.engine.fused_rules import rule_for
from fitune.engine.gradient_scale import clip_factor, clip_on_device, global_norm
from fitune.engine.optimizers import DirectOptimizer, MasterOptimizer, set_learning_rate, takes_decay
from fitune.engine.plain import PlainEngine
from fitune.errors import TrainingFailed
from fitune.values.plan import AdamW, ClipByValue, Full, Lomo, Precision, Sgd
from fitune.values.predictions import Phase
from models.streams import forward_backward, optimizer_step
from train.test_traced_walks import bench

UNCLIPPED = ClipByValue(value=math.inf)


class Regression(nn.Module):
    """The smallest thing with a hidden state and a loss: squares of a linear map."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4, dtype=dtype)

    def hidden_states(self, batch):
        return self.linear(batch.to(self.linear.weight.dtype))

    def loss_and_gradient(self, hidden_TD, batch, *, scale):
        wide = hidden_TD.float()
        return (wide**2).sum(), (2 * wide * scale).to(hidden_TD.dtype)


def batches(count=4):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(5, 6, generator=generator) for _ in range(count)]


def engine_for(model, optimizer, *, precision=Precision.FP32, clip=0.0):
    return PlainEngine(
        model, dict(model.named_parameters()), optimizer=optimizer, precision=precision, max_grad_norm=clip
    )


def run(engine, data, *, rate=0.1):
    for batch in data:
        forward_backward(engine, batch, 5)
        optimizer_step(engine, rate)


class Lookout(Regression):
    """Looks, while its first operation goes back, which of the last hidden states and their gradient are alive."""

    def hidden_states(self, batch):
        first = super().hidden_states(batch)
        first.register_hook(self._look)
        hidden_TD = first * 2
        self.seen = [weakref.ref(hidden_TD)]
        return hidden_TD

    def loss_and_gradient(self, hidden_TD, batch, *, scale):
        loss, gradient_TD = super().loss_and_gradient(hidden_TD, batch, scale=scale)
        self.seen.append(weakref.ref(gradient_TD))
        return loss, gradient_TD

    def _look(self, _):
        self.alive = [tensor() is not None for tensor in self.seen]


def test_backward_holds_neither_hidden_states_nor_their_gradient():
    """Each is tokens × hidden size; the blocks need neither."""
    model = Lookout()
    run(engine_for(model, Sgd()), batches(1))
    assert model.alive == [False, False]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Sgd(), lambda p: torch.optim.SGD(p, lr=0.1)),
        (Sgd(momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (AdamW(), lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.0)),
    ],
)
def test_equals_torch_written_out(ours, theirs):
    model, reference = Regression(), Regression()
    run(engine_for(model, ours), batches())
    optimizer = theirs(reference.parameters())
    for batch in batches():
        ((reference.linear(batch) ** 2).sum() / 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, dict(reference.named_parameters())[name], rtol=1e-5, atol=1e-6)


def test_accumulation_equals_one_large_batch():
    whole, parts = Regression(), Regression()
    big = torch.cat(batches(2))
    one, two = engine_for(whole, AdamW()), engine_for(parts, AdamW())
    forward_backward(one, big, 10)
    for micro in batches(2):
        forward_backward(two, micro, 10)
    norms = [optimizer_step(e, 0.1).grad_norm for e in (one, two)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    torch.testing.assert_close(whole.linear.weight, parts.linear.weight)


def test_clipping_bounds_the_step_and_reports_the_norm_before():
    model = Regression()
    before = copy.deepcopy(model.linear.weight.data), copy.deepcopy(model.linear.bias.data)
    engine = engine_for(model, Sgd(), clip=0.5)
    forward_backward(engine, batches()[0] * 10, 1)
    update = optimizer_step(engine, 1.0)
    moved = torch.cat([(model.linear.weight - before[0]).flatten(), model.linear.bias - before[1]])
    assert update.grad_norm > 0.5
    assert moved.norm().item() == pytest.approx(0.5, rel=1e-4)


def test_bf16_master_keeps_steps_that_bf16_alone_would_lose():
    """A weight near 1 in bf16 moves in steps of 2⁻⁷ or so; a hundred updates of 1e-4 add up only in the master."""
    lost, kept = Regression(torch.bfloat16), Regression(torch.bfloat16)
    for model in (lost, kept):
        nn.init.ones_(model.linear.weight)
    data = [torch.ones(5, 6)] * 100
    run(engine_for(lost, Sgd(), precision=Precision.BF16), data, rate=1e-5)
    run(engine_for(kept, Sgd(), precision=Precision.BF16_MASTER), data, rate=1e-5)
    assert torch.all(lost.linear.weight == 1)
    assert torch.all(kept.linear.weight < 1)


def test_fp16_overflow_skips_the_update_and_halves_the_scale():
    model = Regression(torch.float16)
    engine = engine_for(model, Sgd(), precision=Precision.FP16)
    before = copy.deepcopy(model.linear.weight.data)
    forward_backward(engine, batches()[0] * 1000, 1)
    update = optimizer_step(engine, 0.1)
    assert update.skipped
    assert engine.loss_scale is not None
    assert engine.loss_scale.value == update.loss_scale / 2
    assert torch.equal(model.linear.weight, before)


def test_fp16_unscales_before_clipping():
    model, reference = Regression(torch.float16), Regression()
    reference.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    norms = []
    for m, precision in ((model, Precision.FP16), (reference, Precision.FP32)):
        engine = engine_for(m, Sgd(), precision=precision, clip=0.1)
        if engine.loss_scale is not None:
            engine.loss_scale.value = 128.0
        forward_backward(engine, batches()[0], 5)
        norms.append(optimizer_step(engine, 0.1).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=5e-3)
    torch.testing.assert_close(model.linear.weight.float(), reference.linear.weight, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MASTER, Precision.FP16])
@pytest.mark.parametrize("optimizer", [AdamW(weight_decay=0.1), Sgd(momentum=0.9), Sgd()])
def test_state_restores_bit_for_bit(precision, optimizer):
    dtype = {Precision.FP32: torch.float32, Precision.FP16: torch.float16}.get(precision, torch.bfloat16)
    straight, resumed = Regression(dtype), Regression(dtype)
    first, second = batches(6)[:3], batches(6)[3:]
    engine = engine_for(straight, optimizer, precision=precision)
    run(engine, first, rate=1e-2)
    resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
    other = engine_for(resumed, optimizer, precision=precision)
    other.restore(copy.deepcopy(engine.state()))
    run(engine, second, rate=1e-2)
    run(other, second, rate=1e-2)
    assert torch.equal(straight.linear.weight, resumed.linear.weight)
    assert torch.equal(straight.linear.bias, resumed.linear.bias)


def test_phases_come_in_order():
    engine = engine_for(Regression(), Sgd())
    seen = []
    engine.forward_backward(batches()[0], divisor=5, enter_phase=seen.append)
    engine.update(learning_rate=0.1, enter_phase=seen.append)
    assert seen == [Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.UPDATE]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("optimizer", [Sgd(), Sgd(momentum=0.9)], ids=str)
def test_every_weight_moves_in_16_bit(optimizer, dtype):
    """torch's fused SGD passes over whole vectors of them on a CPU."""
    weight = nn.Parameter(torch.ones(100, 3, dtype=dtype))
    direct = DirectOptimizer({"weight": weight}, optimizer)
    weight.grad = torch.ones_like(weight)
    direct.step(learning_rate=0.25, gradient_factor=1.0)
    assert (weight < 0.8).all()


SGD = Lomo(adaptive=False, clip=UNCLIPPED)


@pytest.mark.parametrize(
    ("tuning", "dtype"),
    [
        (Full(), torch.float32),
        (Lomo(adaptive=True, clip=UNCLIPPED), torch.float32),
        (SGD, torch.float32),
        (SGD, torch.float16),  # it decays in another place there
    ],
)
def test_biases_of_two_axes_take_no_weight_decay(tuning, dtype):
    """gpt-oss has one bias for each expert: ``gate_up_proj_bias``. Without a gradient only decay moves a weight."""
    names = ("experts.gate_up_proj", "experts.gate_up_proj_bias", "linear.bias", "norm.weight")
    shapes = ((2, 3), (2, 3), (3,), (3,))
    weights = {
        name: nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in zip(names, shapes, strict=True)
    }
    if isinstance(tuning, Full):
        optimizer = DirectOptimizer(weights, AdamW(weight_decay=0.5))
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        set_learning_rate(optimizer.torch_optimizer, 0.1)
        optimizer.torch_optimizer.step()
    else:
        rule = rule_for(weights, tuning=tuning, optimizer=Sgd(weight_decay=0.5), precision=Precision.FP32)
        rule.begin()
        for name, weight in weights.items():
            rule.use(name, torch.zeros_like(weight), learning_rate=0.1, factor=1.0)
    assert [name for name, weight in weights.items() if (weight != 1).any()] == ["experts.gate_up_proj"]
    assert weights["experts.gate_up_proj"].mean().item() == pytest.approx(1 - 0.1 * 0.5, rel=1e-3)


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next", "jamba"])
def test_of_matrices_those_decay_that_decay_in_trainer(model_type):
    from transformers import (
        Trainer,  # with the clients of all trackers: a second, in one worker instead of each
    )

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(bench().small_config(model_type))
    theirs = Trainer.get_decay_parameter_names(None, model)
    matrices = {name: p for name, p in model.named_parameters() if p.ndim >= 2}
    assert {n for n, p in matrices.items() if takes_decay(n, p)} == matrices.keys() & set(theirs)
    assert "experts.gate_up_proj_bias" not in " ".join(theirs)


def test_decay_in_fp16_does_not_overflow_beside_a_scaled_gradient():
    weight = nn.Parameter(torch.full((2, 2), 200.0, dtype=torch.float16))
    rule = rule_for(
        {"w": weight}, tuning=Lomo(adaptive=False, clip=UNCLIPPED), optimizer=Sgd(weight_decay=0.01),
        precision=Precision.FP16,
    )  # fmt: skip
    rule.use("w", torch.full((2, 2), 65536.0 / 4).half(), learning_rate=0.1, factor=1 / 65536)
    torch.testing.assert_close(weight.data, torch.full((2, 2), 200 * 0.999 - 0.025).half())


def one_by_one(model, masters, optimizer, limit):
    """The update of fp32 masters as it is written down: every tensor by itself, and the norm is read first."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients.values()])
    ).item()
    factor = 1.0 if norm <= limit else limit / norm
    for name, gradient in gradients.items():
        masters[name].grad = gradient.float().mul_(factor)
    optimizer.step()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(masters[name].data)
        parameter.grad = None


@pytest.mark.parametrize("limit", [0.05, 1e6])
@pytest.mark.parametrize("tensors", [1, 7])
def test_masters_stepped_together_are_bit_for_bit_those_stepped_one_by_one(limit, tensors):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(5, 5, dtype=torch.bfloat16) for _ in range(tensors)))

    ours, theirs = made(), made()
    together = MasterOptimizer(dict(ours.named_parameters()), AdamW())
    masters = {name: nn.Parameter(p.detach().float()) for name, p in theirs.named_parameters()}
    reference = torch.optim.AdamW(masters.values(), lr=0.1, weight_decay=0.0, fused=True)
    for seed in range(4):
        for model in (ours, theirs):
            torch.manual_seed(seed)
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
        factor = clip_on_device(global_norm(together.gradients()), max_norm=limit, scale=1.0)
        together.step(learning_rate=0.1, gradient_factor=factor)
        one_by_one(theirs, masters, reference, limit)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, dict(theirs.named_parameters())[name])
        assert torch.equal(together.masters[name], masters[name])
        assert parameter.grad is None


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16_MASTER], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing_though_nobody_has_read_it(precision):
    model = Regression(torch.bfloat16 if precision.has_master else torch.float32)
    engine = engine_for(model, AdamW(), precision=precision)
    run(engine, batches())
    before = {name: tensor.clone() for name, tensor in engine.optimizer.tensors().items()}
    weights = copy.deepcopy(model.state_dict())
    forward_backward(engine, batches()[0] * math.inf, 5)
    with pytest.raises(TrainingFailed, match="not finite.*nothing was updated"):
        optimizer_step(engine, 0.1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.optimizer.tensors().items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("norm", [0.0, 0.3, 1.0, 7.3, 2.0**40, math.inf, math.nan])
@pytest.mark.parametrize("limit", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_clip_factor_on_the_device_is_the_one_of_the_host(norm, limit, scale):
    found = clip_on_device(torch.tensor(norm), max_norm=limit, scale=scale)
    if not math.isfinite(norm):
        assert found.isnan()
        return
    on_host = clip_factor(torch.tensor(norm).item() / scale, max_norm=limit) / scale
    assert found.item() == torch.tensor(on_host, dtype=torch.float32).item()


class Calls(TorchDispatchMode):
    """The names of operations, in order; of backward's too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("precision", [Precision.BF16_MASTER, Precision.FP16], ids=str)
def test_the_host_reads_no_value_before_the_masters_are_stepped(precision, clip):
    """A GPU would have nothing to do from the reading on until the step is launched."""
    model = Regression(torch.float16 if precision is Precision.FP16 else torch.bfloat16)
    engine = engine_for(model, AdamW(), precision=precision, clip=clip)
    run(engine, batches(2))
    with Calls() as calls:
        run(engine, batches(1))
    read = [place for place, name in enumerate(calls.names) if name == "_local_scalar_dense"]
    stepped = [place for place, name in enumerate(calls.names) if name.startswith("_fused_adamw")]
    assert len(read) == 1, "the norm, for the report of the step"
    assert stepped
    assert max(stepped) < read[0]
