"""Plans for one device that break no rule are trained: two steps of a tiny model, from the same loss.

Every method with every precision, optimizer and offload is in one of the two larger samples. A rule that is missing
shows here as a step that fails, a plan that a rule forbids without need is not seen.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch

from fitune.models.weights import compute_dtype
from fitune.train.prepare import prepare_loaded
from fitune.values.model.model_config import spec_from_config
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    ChunkedLoss,
    ClipByNorm,
    ClipByValue,
    Dense,
    Full,
    Hqq,
    InBackward,
    Lomo,
    Lora,
    Nf4,
    Offload,
    PlainLoss,
    Precision,
    Recompute,
    Sgd,
    Tuning,
)
from fitune.values.rules import keeps_rules
from models.streams import forward_backward, make_rows, optimizer_step, stream_of
from models.tiny_models import tiny_model
from optional_libraries import NEEDS_BITSANDBYTES
from plans import plan_for

DENSE = Dense()
SIZES = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""HQQ packs groups of 64 weights, eight at once at most."""


def adapters(base=DENSE, *, dora=False):
    return Lora(rank=2, alpha=4, dropout=0.0, targets=("q_proj", "down_proj"), base=base, dora=dora)


TUNINGS: dict[str, Tuning] = {
    "full": Full(),
    "in backward, by value": Full(update=InBackward(clip=ClipByValue(value=1.0))),
    "in backward, by norm": Full(update=InBackward(clip=ClipByNorm(max_norm=1.0))),
    "in backward, unclipped": Full(update=InBackward(clip=ClipByNorm(max_norm=0.0))),
    "lomo by value": Lomo(adaptive=False, clip=ClipByValue(value=1.0)),
    "lomo by norm": Lomo(adaptive=False, clip=ClipByNorm(max_norm=1.0)),
    "adalomo by value": Lomo(adaptive=True, clip=ClipByValue(value=1.0)),
    "adalomo by norm": Lomo(adaptive=True, clip=ClipByNorm(max_norm=1.0)),
    "lora": adapters(),
    "qlora": adapters(Nf4()),
    "hqq": adapters(Hqq(bits=4)),
    "dora": adapters(dora=True),
}
OPTIMIZERS = (AdamW(), AdamW8bit(), Sgd(), Sgd(momentum=0.9))
OFFLOADS = tuple(
    Offload(parameters=parameters, optimizer=optimizer, activations=activations)
    for parameters, optimizer, activations in product(("device", "cpu"), repeat=3)
)
LOSSES = (PlainLoss(), ChunkedLoss(chunk_tokens=8))


@cache
def every_plan():
    """All of the tiny model, with the words that tell each apart."""
    config = tiny_model("llama", **SIZES).config.to_dict()
    whole = plan_for(spec_from_config(config, name="tiny"), rows=2, seq_len=16)
    found = []
    for (name, tuning), precision, optimizer, offload, loss, blocks, steps in product(
        TUNINGS.items(), Precision, OPTIMIZERS, OFFLOADS, LOSSES, (0, 2), (1, 2)
    ):
        batch = replace(whole.batch, accumulation=steps)
        plan = replace(
            whole, tuning=tuning, precision=precision, optimizer=optimizer, offload=offload, loss=loss,
            recompute=Recompute(blocks=blocks), batch=batch,
        )  # fmt: skip
        if keeps_rules(plan, "train"):
            found.append(
                (f"{name}, {precision}, {optimizer}, {offload.places}, {loss}, {blocks}, {steps}", plan)
            )
    return found


def combinations(plans):
    return {(plan.tuning, plan.precision, plan.optimizer, plan.offload) for _, plan in plans}


def first_losses(plan):
    """Loss a supervised token in the first and in the second step."""
    model = tiny_model("llama", **SIZES).to(compute_dtype(plan.precision))
    torch.manual_seed(1)  # adapters
    prepared = prepare_loaded(model, plan)
    batch = stream_of(make_rows((9, 7)))
    losses = []
    for _ in range(2):
        total = batch.supervised_tokens * plan.batch.accumulation
        parts = [forward_backward(prepared.engine, batch, total) for _ in range(plan.batch.accumulation)]
        losses.append(sum(part.item() for part in parts) / total)
        optimizer_step(prepared.engine, 1e-3)
    return losses[0], losses[1]


@cache
def untrained_loss(base, precision):
    tuning = Full() if isinstance(base, Dense) else adapters(base)
    plain = replace(every_plan()[0][1], tuning=tuning, precision=precision, optimizer=AdamW())
    return first_losses(plain)[0]


def trains(plan):
    base = plan.tuning.base if isinstance(plan.tuning, Lora) else Dense()
    first, second = first_losses(plan)
    tolerance = 1e-5 if plan.precision is Precision.FP32 else 2e-2
    assert first == pytest.approx(untrained_loss(base, plan.precision), rel=tolerance)
    assert second == second  # a number
    assert abs(second) < 1e3


@NEEDS_BITSANDBYTES
@pytest.mark.parametrize(
    ("first", "every"),
    [(0, 193), pytest.param(0, 7, marks=pytest.mark.slow), pytest.param(3, 7, marks=pytest.mark.weekly)],
)
def test_a_sample_of_all_plans_trains(first, every):
    """Sevens divide none of the choices: two samples by them have all that each method can be combined with."""
    assert len(every_plan()) > 3000
    sevens = (*every_plan()[::7], *every_plan()[3::7])
    assert combinations(sevens) == combinations(every_plan())
    failures = []
    for words, plan in every_plan()[first::every]:
        try:
            trains(plan)
        except Exception as error:
            failures.append(f"{words}: {type(error).__name__}: {str(error)[:200]}")
    assert not failures, f"{len(failures)}: " + "\n".join(failures[:20])
