"""A loss over pairs of rows is one class: a toy one trains, whatever the micro-batch, and is evaluated."""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from fitune.data.loader import Loader, LoaderState
from fitune.data.preparing import prepare_data
from fitune.measure.memory import CpuMeter
from fitune.models.language_model import LanguageModel
from fitune.models.tokens import planned_tokenizer
from fitune.train.evaluate import evaluate
from fitune.train.loop import train
from fitune.train.prepare import prepare


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferring(LanguageModel):
    """The first row of each pair is to be likelier than the second: −log σ(log p(first) − log p(second))."""

    def divisor(self, *, rows, supervised_tokens):
        return rows // 2

    def loss_and_gradient(self, hidden_TD, batch, *, scale):
        rows = list(
            zip(*(each.split(batch.sequence_lengths) for each in (hidden_TD, batch.labels_T)), strict=True)
        )
        margin_P = self.margins(rows)
        slope_P = torch.sigmoid(-margin_P) * scale
        slopes = torch.stack([slope_P, -slope_P], dim=1).flatten().tolist()
        gradients = [
            self.head.losses_and_gradient(*row, scale=slope)[1]
            for row, slope in zip(rows, slopes, strict=True)
        ]
        return -functional.logsigmoid(margin_P).sum(), torch.cat(gradients)

    @torch.no_grad()
    def loss(self, batch):
        return self.loss_and_gradient(self.hidden_states(batch), batch, scale=0.0)[0]

    def margins(self, rows):
        first, second = torch.stack([-self.head.losses(*row).sum() for row in rows]).view(-1, 2).unbind(dim=1)
        return first - second


@pytest.fixture
def trained(make_plan):
    """(steps, held-out loss before them, data) of a run by pairs, with micro-batches of so many."""

    def run(micro, accumulation):
        plan = make_plan(micro_batch_size=micro, gradient_accumulation_steps=accumulation, learning_rate=3e-2)
        plan = replace(plan, batch=replace(plan.batch, example_rows=2))
        tokenizer = planned_tokenizer(plan)
        data = prepare_data(
            plan.data, tokenizer=tokenizer, tokenizer_path=plan.model_path, seq_len=64, seed=1
        ).train
        prepared = prepare(plan)
        parts = prepared.model
        prepared.engine.model = Preferring(**{each.name: getattr(parts, each.name) for each in fields(parts)})
        before = evaluate(prepared.engine.model, data, plan.batch)
        return (
            list(train(plan, prepared, Loader(data, plan.batch, seed=1), meter=CpuMeter())),
            before,
            data,
            plan,
        )

    return run


def test_a_loss_over_pairs_is_the_same_however_a_step_is_cut(trained):
    (wide, before, data, plan), (narrow, *_) = trained(4, 1), trained(1, 4)
    assert [step.loss for step in wide] == pytest.approx([step.loss for step in narrow], abs=1e-5)
    assert wide[-1].loss < wide[0].loss / 2
    assert before == pytest.approx(by_hand(data, plan, range(len(data))), abs=1e-4)
    first = Loader(data, plan.batch, seed=1).batch_at(LoaderState()).micro_batches[0].row_ids
    assert len(first) == 8
    assert wide[0].loss == pytest.approx(by_hand(data, plan, first), abs=1e-4)


def by_hand(data, plan, rows):
    """The mean over pairs, from transformers' logits of the untrained model."""
    model, likely = AutoModelForCausalLM.from_pretrained(plan.model_path, dtype=torch.float32), []
    for row in rows:
        ids, learned = map(torch.tensor, data.row(row))
        with torch.no_grad():
            logs = model(input_ids=ids.long()[None]).logits[0, :-1].log_softmax(dim=1)
        likely.append(logs.gather(1, ids.long()[1:, None])[:, 0][learned[1:]].sum())
    margins = torch.stack(likely).view(-1, 2)
    return -functional.logsigmoid(margins[:, 0] - margins[:, 1]).mean().item()
