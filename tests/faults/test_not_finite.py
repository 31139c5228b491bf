"""A loss or a gradient that is no number stops the run before it is used: nothing it would have spoiled is spoiled
(row 17), and nothing hides it (famous bug 12)."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fitune.checkpoint.resume import newest_checkpoint
from fitune.models.language_model import LanguageModel
from fitune.spec.reports import RunReport
from fitune.spec.serial import from_json
from fitune.track.jsonl import read_metrics

Call = Callable[..., tuple[int, str, str]]
LOMO = {"tuning": "lomo", "micro_batch_size": 8, "gradient_accumulation_steps": 1}


def spoiled(monkeypatch: pytest.MonkeyPatch, *, after: int, loss: bool, value: float) -> None:
    """From call ``after`` + 1 on the loss, or the gradient alone, is ``value``."""
    real, calls = LanguageModel.loss_and_gradient, [0]

    def spoil(model: LanguageModel, hidden_TD: Tensor, batch: Any, *, scale: float) -> tuple[Tensor, Tensor]:
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
    train: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, object],
    loss: bool,
    value: float,
) -> None:
    run, common = tmp_path / "run", {"save_steps": 1, "max_steps": 3, "learning_rate": 1e-3, **settings}
    with monkeypatch.context() as broken:  # two calls a step: micro-batches, or both passes of LOMO
        spoiled(broken, after=4, loss=loss, value=value)
        code, _, err = train(**common)
    assert code == 1
    assert "nothing was updated" in err
    assert "Rows of this step" in err
    report = from_json(RunReport, (run / "report.json").read_text())
    assert (report.status, report.steps, report.exported) == ("failed", 2, "")
    assert "Rows of this step" in report.reason
    found = newest_checkpoint(run)
    assert found.path is not None
    assert (found.path.name, found.warnings) == ("step-2", ())
    assert train("--resume", **common)[0] == 0
    straight = tmp_path / "straight"
    assert train(**{**common, "output_dir": straight})[0] == 0
    assert losses(run) == losses(straight)


@pytest.mark.parametrize("settings", [{}, {"tuning": "qlora"}, LOMO], ids=["lora", "qlora", "lomo"])
def test_weights_that_were_no_numbers_before_are_not_blamed_on_the_data(
    train: Call, tmp_path: Path, model_folder: Path, settings: dict[str, Any]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    code, _, err = train(**{**settings, "model": broken})
    assert code == 1
    assert "weights are NaN or infinite: " in err
    assert "layers.1.mlp.up_proj" in err
    assert "Rows of this step" not in err


def losses(run: Path) -> list[float]:
    return [step.loss for step in read_metrics(run / "metrics.jsonl")]


def test_lomo_that_clips_by_value_says_that_the_gradient_was_used(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot look first: the weights are lost, and the checkpoint before is not."""
    with monkeypatch.context() as broken:
        spoiled(broken, after=2, loss=False, value=float("nan"))
        code, _, err = train(**LOMO, save_steps=1, max_steps=3)
    assert code == 1
    assert "used them already" in err
    assert "Rows of this step" in err
    assert newest_checkpoint(tmp_path / "run").warnings == ()
    assert train("--resume", **LOMO, save_steps=1, max_steps=3)[0] == 0
