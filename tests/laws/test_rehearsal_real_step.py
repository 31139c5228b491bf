"""Estimate, rehearsal and a real step of one plan agree: every live tensor counted on the CPU, phase by phase.

The rehearsal is the same model, engine and rows on fake tensors: within 1 % of the peak and of every phase. The
estimate is within 1 % of the peak and 2 % of the phases.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaConfig

from fitune.estimate.parameters import weights_bytes
from fitune.measure.memory import LiveTensors
from fitune.rehearse.step import record_step
from fitune.rehearse.trace import peaks_by_kind
from fitune.values.plan import AdamW8bit, Hqq, Nf4, Offload, Sgd
from fitune.values.predictions import Phase
from laws import test_memory_prediction
from laws.test_memory_prediction import ROWS, bench, measured_peaks
from laws.test_rehearsal_estimate import (
    ADALOMO,
    ADALOMO_BY_NORM,
    IN_BACKWARD,
    IN_BACKWARD_BY_NORM,
    LOMO,
    LOMO_BY_NORM,
)

TOLERANCE = 0.01
ALL = 4
HALF, LAST = ALL // 2, ALL - 1


@pytest.fixture(scope="module")
def model():
    """bench's with fewer blocks: most of a rehearsal's time goes by blocks."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(bench.CONFIG, "num_hidden_layers", ALL)
        yield bench.small_model()


def check(plan, measured=None):
    """The rehearsal within 1 % of the real step."""
    rows = bench.random_rows(ROWS, vocab_size=plan.model.vocab_size)
    measured = measured or measured_peaks(plan)
    config = LlamaConfig(**{key: value for key, value in bench.CONFIG.items() if key != "model_type"})
    trace = record_step(plan, config, rows=ROWS, labels=rows.supervised_tokens)
    rehearsed = {phase: sum(kinds.values()) for phase, kinds in peaks_by_kind(trace, on_cuda=False).items()}
    table = {phase.value: (rehearsed[phase], measured[phase]) for phase in Phase}
    assert max(rehearsed.values()) == pytest.approx(max(measured.values()), rel=TOLERANCE), table
    for phase in Phase:
        assert rehearsed[phase] == pytest.approx(measured[phase], rel=TOLERANCE), table


def plan_of(
    model,
    tuning,
    precision,
    recompute,
    *,
    chunked=True,
    accumulation=1,
    optimizer=None,
    offload=None,
    **adapters,
):
    """``tuning``: full, lora or a method of its own."""
    kind = "lora" if tuning == "lora" else "full"
    plan = bench.plan_of(
        model, tuning=kind, precision=precision, recompute=recompute, chunked=chunked, accumulation=accumulation
    )  # fmt: skip
    method = replace(plan.tuning, **adapters) if isinstance(tuning, str) else tuning
    return replace(
        plan, tuning=method, optimizer=optimizer or plan.optimizer, offload=offload or plan.offload
    )


SGD, EIGHT_BIT = {"optimizer": Sgd()}, {"optimizer": AdamW8bit()}
QV = ("q_proj", "v_proj")
TABLES = ("embed_tokens", "lm_head")
ACTIVATIONS, OPTIMIZER, WEIGHTS = (
    {"offload": Offload(**{place: "cpu"})} for place in ("activations", "optimizer", "parameters")
)
STATES = {"offload": Offload(parameters="cpu", optimizer="cpu")}
ALL_THREE = {"offload": Offload(parameters="cpu", optimizer="cpu", activations="cpu")}
# Packed pieces of a block on the host lie at multiples of 16 bytes, which is not counted. Of backward with all blocks
# recomputed, the peak of this model, 1.06 % too much is predicted (30 KB).
PACKED_AWAY = {**WEIGHTS, "base": Nf4(), "peak": 0.012}

ALWAYS = {
    "full": ("full", "fp32", 0, {"chunked": False}),
    "full with masters": ("full", "bf16-master", HALF, {}),
    "full, accumulated": ("full", "fp16", ALL, {"accumulation": 2}),
    "full, SGD": ("full", "fp32", 3, {"optimizer": Sgd(momentum=0.9), "accumulation": 2}),
    "full, 8-bit AdamW": ("full", "bf16-master", 0, EIGHT_BIT),
    "AdamW in backward": (IN_BACKWARD, "fp32", 0, {}),
    "AdamW in backward, clipped": (IN_BACKWARD_BY_NORM, "bf16", 3, {"chunked": False}),
    "LOMO": (LOMO, "fp32", 0, SGD),
    "AdaLomo": (ADALOMO, "fp16", ALL, SGD),
    "AdaLomo by norm": (ADALOMO_BY_NORM, "bf16", HALF, {**SGD, "chunked": False}),
    "LoRA": ("lora", "fp32", 0, {}),
    "LoRA with masters": ("lora", "bf16-master", HALF, {"accumulation": 2}),
    "dropout": ("lora", "fp32", ALL, {"dropout": 0.1}),
    "dropout on NF4": ("lora", "bf16", 0, {"dropout": 0.1, "base": Nf4(), "targets": QV}),
    "DoRA": ("lora", "fp32", 0, {"dora": True}),
    "DoRA on NF4": ("lora", "bf16-master", ALL, {"dora": True, "base": Nf4()}),
    "HQQ": ("lora", "bf16", 3, {"base": Hqq(bits=4), "chunked": False}),
    "adapters in the last block": ("lora", "fp32", 0, {"layers": (LAST,), "chunked": False}),
    "adapters in two blocks": ("lora", "bf16-master", HALF, {"layers": (1, LAST)}),
    "adapters in two blocks on NF4": ("lora", "bf16", ALL, {"layers": (2, LAST), "base": Nf4()}),
    "trained tables": ("lora", "fp32", 0, {"modules_to_save": TABLES}),
    "a trained table, few blocks": (
        "lora", "bf16-master", ALL, {"modules_to_save": TABLES[:1], "layers": (2, LAST)}
    ),
    "activations away": ("full", "bf16", HALF, {**ACTIVATIONS, "accumulation": 2}),
    "optimizer away": ("lora", "fp32", ALL, OPTIMIZER),
    "all away": ("full", "bf16", ALL, ALL_THREE),
    "NF4 away": ("lora", "bf16", ALL, PACKED_AWAY),
    "all away, few adapters": ("lora", "bf16", 3, {**ALL_THREE, "layers": (1, 2)}),
}  # fmt: skip
SOMETIMES = [
    *(
        (tuning, precision, recompute, {"chunked": chunked})
        for tuning, precision, recompute, chunked in product(
            ("full", "lora"), ("fp32", "bf16", "bf16-master"), (0, HALF, ALL), (False, True)
        )
    ),
    (IN_BACKWARD, "bf16-master", 0, {**EIGHT_BIT, "chunked": False}),
    (LOMO_BY_NORM, "bf16", 3, {**SGD, "chunked": False}),
    ("lora", "bf16", 3, {"dropout": 0.1, "dora": True, "base": Nf4()}),
    ("lora", "bf16", 0, {"dora": True}),
    ("lora", "bf16-master", 3, {"base": Hqq(bits=3), "accumulation": 2}),
    ("lora", "fp32", 0, {"layers": (1, LAST), "base": Nf4()}),
    ("lora", "bf16-master", ALL, {"modules_to_save": TABLES, "base": Nf4()}),
    ("lora", "bf16", 0, {"modules_to_save": TABLES[1:], "layers": (2, LAST)}),
    ("full", "fp32", 0, ACTIVATIONS),
    ("full", "bf16-master", HALF, {**OPTIMIZER, "accumulation": 2}),
    ("full", "bf16", HALF, {**STATES, "accumulation": 2}),
    ("lora", "bf16", 0, PACKED_AWAY),
    ("lora", "bf16-master", 0, {**WEIGHTS, "accumulation": 2}),
]


@pytest.mark.parametrize(
    ("tuning", "precision", "recompute", "choice"),
    [pytest.param(*row, id=name) for name, row in ALWAYS.items()]
    + [pytest.param(*row, id=f"{number}", marks=pytest.mark.slow) for number, row in enumerate(SOMETIMES)],
)
def test_estimate_rehearsal_and_real_step_agree(model, tuning, precision, recompute, choice):
    needs = {Nf4: "bitsandbytes", AdamW8bit: "bitsandbytes", Hqq: "hqq.core.quantize"}
    for value in choice.values():
        if library := needs.get(type(value)):
            pytest.importorskip(library)
    choice = dict(choice)
    peak = choice.pop("peak", TOLERANCE)
    plan = plan_of(model, tuning, precision, recompute, **choice)
    measured = measured_peaks(plan)
    test_memory_prediction.check(plan, measured, peak=peak)
    check(plan, measured)


def test_the_device_holds_neither_states_nor_all_gradients(model):
    """Full in fp32: 16 bytes a parameter become 4, and the gradients of two blocks."""
    kept, stepped = (measured_peaks(plan_of(model, "full", "fp32", ALL, **away)) for away in ({}, OPTIMIZER))
    assert stepped[Phase.UPDATE] == pytest.approx(kept[Phase.UPDATE] / 4, rel=0.01)


def test_activations_on_the_host_are_gone_from_the_device(model):
    """All blocks keep what they keep; on the device are those of two."""
    kept, gone = (
        max(measured_peaks(plan_of(model, "lora", "fp32", 0, **away)).values()) for away in ({}, ACTIVATIONS)
    )
    # t · e · (norms, attention's ends, gate, its activation, up)
    block = 112 * 4 * (2 * 129 + 2 * 128 + 3 * 352)
    assert kept - gone > (ALL - 2) * block


class Budget(LiveTensors):
    """A device with so many bytes and no more."""

    budget_bytes = 0

    def _note_peak(self):
        super()._note_peak()
        if self.current_bytes > self.budget_bytes:
            raise MemoryError(f"{self.current_bytes} bytes on a device that has {self.budget_bytes}")


@pytest.mark.parametrize(
    ("tuning", "choice"),
    [("full", ALL_THREE), ("lora", {**WEIGHTS, "base": Nf4(), "rank": 1, "targets": QV[:1]})],
    ids=["full", "qlora"],
)
def test_a_model_of_four_times_the_budget_trains(tuning, choice, monkeypatch):
    """32 blocks; the device is given a quarter of what the model's weights alone take."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setitem(bench.CONFIG, "num_hidden_layers", 32)
    monkeypatch.setitem(bench.CONFIG, "vocab_size", 200)
    plan = plan_of(bench.small_model(), tuning, "bf16", 32, **choice)
    monkeypatch.setattr(Budget, "budget_bytes", weights_bytes(plan) // 4)
    monkeypatch.setattr(bench, "LiveTensors", Budget)
    rows = bench.random_rows((8, 8), vocab_size=plan.model.vocab_size)
    peaks = bench.measured_peaks(plan, rows)
    assert max(peaks.values()) <= weights_bytes(plan) // 4
    with pytest.raises(MemoryError):
        Budget([torch.empty(weights_bytes(plan), dtype=torch.uint8)])
