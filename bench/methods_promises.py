"""Two promises about memory, measured on real steps on the CPU.

LOMO holds at most the largest parameter's gradient. A model streamed from the host never has more on the device than a
quarter of its own weights: 32 blocks of the small Llama, two rows of eight tokens.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from cpu_memory import CONFIG, ROW_LENGTHS, RowStream, measured_peaks, plan_of, random_rows, small_model
from methods_grid import AWAY, BF16_ALL, BY_NORM, BY_VALUE
from torch.nn import Parameter
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.estimate.parameters import weights_bytes
from fitune.models.weights import compute_dtype
from fitune.train.prepare import Prepared, prepare_loaded
from fitune.values.plan import Lomo, Lora, Nf4, Plan, Sgd

MANY_BLOCKS = {"num_hidden_layers": 32, "vocab_size": 200}


def gradients_of_lomo() -> list[dict[str, Any]]:
    """The most bytes of gradients that are alive together, per method, beside the largest parameter's."""
    model = small_model()
    rows = random_rows(ROW_LENGTHS, vocab_size=model.vocab_size)
    full = plan_of(model, tuning="full", **BF16_ALL)
    plans = {
        "LOMO, clipped by value": _lomo(full, Lomo(adaptive=False, clip=BY_VALUE)),
        "LOMO, clipped by norm": _lomo(full, Lomo(adaptive=False, clip=BY_NORM)),
        "AdaLomo": _lomo(full, Lomo(adaptive=True, clip=BY_VALUE)),
        "full, for comparison": full,
    }
    return [{"method": name, **_gradients(plan, rows)} for name, plan in plans.items()]


def _lomo(plan: Plan, lomo: Lomo) -> Plan:
    return replace(plan, tuning=lomo, optimizer=Sgd())


def _gradients(plan: Plan, rows: RowStream) -> dict[str, int]:
    watched = _Gradients()
    prepared = _prepared(plan, watched)
    prepared.engine.forward_backward(
        rows, divisor=rows.supervised_tokens, enter_phase=lambda phase: watched.look()
    )
    prepared.engine.update(learning_rate=1e-4, enter_phase=lambda phase: watched.look())
    return {
        "gradients_bytes": watched.most_bytes,
        "largest_parameter_bytes": max(p.nbytes for p in watched.parameters),
        "weights_bytes": sum(p.nbytes for p in watched.parameters),
    }


class _Gradients:
    """Adds up what lies on the parameters whenever one gradient is complete, before the engine takes it."""

    def __init__(self) -> None:
        self.parameters: list[Parameter] = []
        self.most_bytes = 0

    def watch(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = list(parameters)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: self.look())

    def look(self) -> None:
        alive = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.most_bytes = max(self.most_bytes, alive)


def _prepared(plan: Plan, watched: _Gradients) -> Prepared:
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = LlamaForCausalLM(config).to(compute_dtype(plan.precision))
    watched.watch(model.parameters())  # hooks run in the order they were registered: before the engine's
    return prepare_loaded(model, plan)


def streamed_models() -> list[dict[str, Any]]:
    """Weights of the model, and the most the device held of everything in a training step."""
    with _config(MANY_BLOCKS):
        model = small_model()
        rows = random_rows((8, 8), vocab_size=model.vocab_size)
        setting = {**BF16_ALL, "recompute": MANY_BLOCKS["num_hidden_layers"]}
        full, lora = (plan_of(model, tuning=tuning, **setting) for tuning in ("full", "lora"))
        assert isinstance(lora.tuning, Lora)
        lora = replace(
            lora, tuning=replace(lora.tuning, rank=1, targets=("q_proj",)), offload=AWAY["weights"]
        )
        plans = {
            "full, all three on the host": replace(full, offload=AWAY["all three"]),
            "LoRA r1, weights on the host": lora,
            "QLoRA r1, weights on the host": replace(lora, tuning=replace(lora.tuning, base=Nf4())),
        }
        return [{"method": name, **_streamed(plan, rows)} for name, plan in plans.items()]


def _streamed(plan: Plan, rows: RowStream) -> dict[str, Any]:
    weights, peak = weights_bytes(plan), max(measured_peaks(plan, rows).values())
    return {"weights_bytes": weights, "device_peak_bytes": peak, "times": weights / peak}


@contextmanager
def _config(changes: dict[str, Any]) -> Iterator[None]:
    before = dict(CONFIG)
    CONFIG.update(changes)
    try:
        yield
    finally:
        CONFIG.update(before)
