"""A loss or a gradient that is no number stops the run before it is used: nothing it would have spoiled is spoiled
(row 17), and nothing hides it (famous bug 12)."""

import shutil
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fitune.checkpoint.resume import newest_checkpoint
from fitune.engine.plain import PlainEngine
from fitune.models.language_model import LanguageModel
from fitune.train import loop
from runs import losses, report_of

LOMO = {"tuning": "lomo", "micro_batch_size": 8, "gradient_accumulation_steps": 1}


def spoiled(monkeypatch, *, after, loss, value):
    """From call ``after`` + 1 on the loss, or the gradient alone, is ``value``."""
    real, calls = LanguageModel.loss_and_gradient, [0]

    def spoil(model, hidden_TD, batch, *, scale):
        calls[0] += 1
        found, gradient_TD = real(model, hidden_TD, batch, scale=scale)
        if calls[0] <= after:
            return found, gradient_TD
        return (
            (torch.full_like(found, value), gradient_TD)
            if loss
            else (found, torch.full_like(gradient_TD, value))
        )

    monkeypatch.setattr(LanguageModel, "loss_and_gradient", spoil)


def assert_intact(run, name):
    found = newest_checkpoint(run)
    assert (found.path.name, found.warnings) == (name, ())


@pytest.mark.parametrize(
    ("settings", "loss", "value"),
    [
        ({}, True, float("nan")),
        ({"tuning": "full", "precision": "bf16-master"}, False, float("inf")),
        ({**LOMO, "max_grad_norm": 1.0}, False, float("nan")),
    ],
    ids=["lora", "full", "lomo"],
)
def test_the_last_good_checkpoint_is_intact_and_the_run_goes_on_from_it(
    train, tmp_path, monkeypatch, settings, loss, value
):
    run, common = tmp_path / "run", {"save_steps": 1, "learning_rate": 1e-3, **settings}
    with monkeypatch.context() as broken:  # two calls a step: micro-batches, or both passes of LOMO
        spoiled(broken, after=2, loss=loss, value=value)
        train(**common).ends(1, "nothing was updated", "Rows of this step")
    report = report_of(run)
    assert (report.status, report.steps, report.exported) == ("failed", 1, "")
    assert "Rows of this step" in report.reason
    assert_intact(run, "step-1")
    train("--resume", **common).ends(0)
    straight = tmp_path / "straight"
    train(**common, output_dir=straight).ends(0)
    assert losses(run) == losses(straight)


@pytest.mark.parametrize("settings", [{}, {"tuning": "qlora"}, LOMO], ids=["lora", "qlora", "lomo"])
def test_weights_that_were_no_numbers_before_are_not_blamed_on_the_data(
    train, tmp_path, model_folder, settings
):
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    err = train(**{**settings, "model": broken}).ends(
        1, "weights are NaN or infinite: ", "layers.1.mlp.up_proj"
    )
    assert "Rows of this step" not in err


def test_lomo_that_clips_by_value_says_that_the_gradient_was_used(train, tmp_path, monkeypatch):
    """It cannot look first: the weights are lost, and the checkpoint before is not."""
    with monkeypatch.context() as broken:
        spoiled(broken, after=1, loss=False, value=float("nan"))
        train(**LOMO, save_steps=1).ends(1, "used them already", "Rows of this step")
    assert_intact(tmp_path / "run", "step-1")
    train("--resume", **LOMO, save_steps=1).ends(0)


OVERFLOWS = {"learning_rate": 1e38, "warmup_steps": 0, "lr_scheduler": "constant", "max_grad_norm": 0}
FULL = {"tuning": "full"}


def explode(monkeypatch, *, after):
    """From step ``after`` + 1 on every update ends in weights that are no numbers, whatever engine made it."""
    real = loop.train

    def train(plan, prepared, *args, **kwargs):
        for report in real(plan, prepared, *args, **kwargs):
            if report.step > after:
                _name, weight = next(iter(prepared.model.trained.items()))
                with torch.no_grad():
                    weight.view(-1)[-1] = float("inf")
            yield report

    monkeypatch.setattr(sys.modules["fitune.train.run"], "train", train)


@pytest.mark.parametrize(
    "settings",
    [{}, {**FULL, "precision": "bf16-master"}, LOMO, {**LOMO, "tuning": "adalomo"}],
    ids=["lora", "masters", "lomo", "adalomo"],
)
def test_new_weights_that_are_no_numbers_are_never_saved(train, tmp_path, monkeypatch, settings):
    explode(monkeypatch, after=1)
    train(**{"save_steps": 1, "learning_rate": 1e-3, **settings}).ends(
        1, "after step 2 these are NaN or infinite: ", "neither saved nor exported"
    )
    assert_intact(tmp_path / "run", "step-1")


@pytest.mark.parametrize(("settings", "save_steps"), [({}, 1), (FULL, 0)], ids=["lora", "full"])
def test_a_learning_rate_beyond_all_numbers_leaves_neither_checkpoint_nor_export(
    train, tmp_path, settings, save_steps
):
    """The loss and the gradients of its one step are fine; what comes of them is not."""
    train(**{**OVERFLOWS, **settings, "max_steps": 1, "save_steps": save_steps}).ends(
        1, "after step 1 these are NaN or infinite"
    )
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert not left & {"adapter", "model"}
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    report = report_of(tmp_path / "run")
    assert (report.status, report.steps, report.exported) == ("failed", 1, "")


def test_optimizer_states_that_are_no_numbers_are_not_saved_either(train, tmp_path, monkeypatch):
    real = PlainEngine.state

    def state(engine):
        found = real(engine)
        squares = {n: torch.full_like(t, torch.inf) for n, t in found.tensors.items() if "exp_avg_sq" in n}
        return replace(found, tensors={**found.tensors, **squares})

    monkeypatch.setattr(PlainEngine, "state", state)
    train(save_steps=1, max_steps=1, optimizer="adamw").ends(1, "NaN or infinite: exp_avg_sq/")
    assert newest_checkpoint(tmp_path / "run").path is None
