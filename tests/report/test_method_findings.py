"""What a comparison says of its runs is computed from them, and left unsaid where they do not bear it."""

from dataclasses import replace

import pytest

from fitune.report.methods_page import MethodRun, best_of, comparison_rows, final_loss, findings
from fitune.report.run_files import read_run
from fitune.values.plan import Full, Lora, Nf4


@pytest.fixture
def adapters(run_directory):
    return read_run(run_directory)


def by(run, tuning, *, loss=0.0, seconds=1.0):
    """The same run by another method: ``loss`` higher from its second step on, every other step so much longer."""
    steps = tuple(
        replace(
            step,
            loss=step.loss + (loss if step.step > 1 else 0),
            tokens_per_second=step.tokens_per_second / (seconds if step.step % 2 else 1),
        )
        for step in run.steps
    )
    return replace(run, plan=replace(run.plan, tuning=tuning), steps=steps)


def test_methods_are_ranked_by_the_mean_of_their_last_steps(adapters):
    said = list(findings({"lora": adapters, "full": by(adapters, Full(), loss=-0.2)}))
    best = final_loss(adapters) - 0.2
    assert said[0] == f"Training loss at the end: full {best:.2f} < lora {final_loss(adapters):.2f}."
    assert any(sentence.startswith("Fastest here: ") for sentence in said)


def test_a_packed_base_is_said_to_begin_elsewhere(adapters):
    assert isinstance(adapters.plan.tuning, Lora)
    packed = by(adapters, replace(adapters.plan.tuning, base=Nf4()))
    said = list(findings({"lora": adapters, "qlora": packed}))
    assert any(s.startswith("A packed base is another model from the first step on: qlora 4.") for s in said)


def test_on_a_busy_machine_nobody_is_called_the_fastest(adapters):
    said = list(findings({"lora": adapters, "full": by(adapters, Full(), seconds=5.0)}))
    assert any(s.startswith("Speeds cannot be compared: the steps of full alone went from ") for s in said)
    assert not any("Fastest" in sentence for sentence in said)


def test_the_best_of_each_kind_is_marked(adapters):
    def better(run, **figures):
        return replace(run, run=replace(run.run, **figures))

    full = better(by(adapters, Full()), best_eval_loss=adapters.run.best_eval_loss / 2)
    fast = better(adapters, tokens_per_second=adapters.run.tokens_per_second * 2)
    held_out = {"full": ["lowest held-out loss"]}
    assert best_of({"lora": fast, "full": full}) == held_out | {"lora": ["fastest"]}
    assert best_of({"lora": fast, "full": by(full, Full(), seconds=5.0)}) == held_out


def test_of_one_method_nothing_is_compared(adapters):
    assert list(findings({"lora": adapters})) == []
    assert best_of({"lora": adapters}) == {}


def test_the_best_loss_on_held_out_rows_is_a_cell_of_the_table_and_empty_where_none_was_held_out(adapters):
    without = replace(adapters, run=replace(adapters.run, best_eval_loss=None))
    for run, cell in ((adapters, "1.330"), (without, "")):
        _, row = comparison_rows([MethodRun(name="lora", run=run)], None)
        assert row[:4] == ("lora", "0.002", "4.098 → 1.242", cell)
