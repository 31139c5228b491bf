"""Predicted bytes of answering against live tensors: within 5 %, engine and estimate meeting nowhere but here."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fitune.estimate.answering import memory_of_answering
from fitune.measure.memory import LiveTensors
from fitune.models.attention import use_cached_attention
from fitune.models.headers import adapter_size
from fitune.recipe.score_recipe import score_recipe
from fitune.report.score_rows import read_score
from fitune.score.engines.continuous import BatchPass, answer_continuously
from fitune.score.engines.engine import Request, Sampling
from fitune.score.plan import ScorePlan
from fitune.session.results import text_of
from fitune.session.score import scoring
from fitune.session.score.scoring import ScoreMemory, score_dataset
from fitune.values.answering import NO_ADAPTER, Answering, Questions
from fitune.values.model.model_config import spec_from_config
from fitune.values.plan import Precision
from jsonl import write_lines
from models.tiny_models import tiny_model
from plans import CPU

WIDE = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 500, "max_position_embeddings": 2048}
"""Tiny, but wide enough that weights, keys and values and activations all count."""


def test_a_scoring_reports_both(tiny, tmp_path):
    """On the disk and on the page; the batch of 8 is the first of three."""
    asked = ({"question": f"What is {row} plus {row * 77}?", "answer": f"{row * 78}"} for row in range(20))
    rows = write_lines(tmp_path / "rows.jsonl", asked)
    report = score_dataset(
        score_recipe(
            model=str(tiny.folder), data=str(rows), out=tmp_path / "out", batch_size=8, max_new_tokens=40
        ),
        emit=lambda event: None,
    )
    assert report.predicted_bytes == pytest.approx(report.measured_bytes, rel=0.05)
    assert report.measured_bytes > sum(p.numel() * 4 for p in tiny.model.parameters())
    assert read_score(tmp_path / "out") == report
    assert "Peak of tensors" in (tmp_path / "out" / "score.html").read_text()
    assert "of tensors predicted" in text_of(report)


def test_a_pass_is_measured_only_where_it_may_be_the_largest(monkeypatch):
    meter = SimpleNamespace(measuring=lambda alive: nullcontext(), take_peaks=lambda: {"answering": 1})
    opened = []
    memory = ScoreMemory(ScorePlan(model="m", output_dir="out"))
    passes = [
        BatchPass(8, 30, 30), BatchPass(8, 30, 31), BatchPass(8, 30, 30), BatchPass(4, 20, 30), BatchPass(8, 31, 31),
        BatchPass(8, 30, 40),
    ]  # fmt: skip
    for moment in passes:
        monkeypatch.setattr(
            scoring, "memory_meter", lambda device, moment=moment: opened.append(moment) or meter
        )
        with memory.watch(moment, lambda: [torch.zeros(1)]):
            pass
    assert opened == [passes[0], passes[1], passes[4], passes[5]]


def small(family, **different):
    model = tiny_model(family, **{**WIDE, **different}).eval()
    use_cached_attention(model)
    return model, spec_from_config(model.config.to_dict(), name="tiny")


def measured_and_predicted(model, spec, *, batch, prompt, new, adapter=NO_ADAPTER):
    requests = [
        Request(
            id=str(row), prompt_ids=(5,) * max(3, prompt - row % 7), sampling=Sampling(max_new_tokens=new)
        )
        for row in range(batch)
    ]
    spy = LiveTensors([*model.parameters(), *model.buffers()])
    with spy:
        list(answer_continuously(model, requests, stop_ids=frozenset(), batch_size=batch))
    answering = Answering(
        engine="transformers",
        model=spec,
        hardware=CPU,
        precision=Precision.FP32,
        batch_size=batch,
        adapter=adapter,
    )
    asked = Questions(rows=batch, prompt_tokens=batch * prompt, longest_prompt=prompt, new_tokens=new)
    return max(spy.peaks.values()), memory_of_answering(answering, asked).tensor_peak_bytes


OTHERS = [pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3_text", "mixtral", "gpt2", "phi")]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, 30, 8), (8, 60, 6), (8, 8, 40)])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "falcon", "qwen3_moe", *OTHERS])
def test_live_tensors_are_predicted(family, batch, prompt, new):
    measured, predicted = measured_and_predicted(*small(family), batch=batch, prompt=prompt, new=new)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("family", ["gemma2", "falcon"])
@pytest.mark.parametrize(("batch", "prompt", "new"), [(16, 30, 60), (4, 300, 2), (8, 60, 6)])
def test_scores_that_a_block_returns_count_beside_its_mlp_and_norms(family, batch, prompt, new):
    """Attention that is written out, in a model wide enough that its scores are not all that counts."""
    wide = small(family, hidden_size=128, num_hidden_layers=6)
    measured, predicted = measured_and_predicted(*wide, batch=batch, prompt=prompt, new=new)
    assert predicted == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("batch", [1, 8])
def test_live_tensors_with_an_adapter_are_predicted(tmp_path, batch):
    base, spec = small("llama")
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).eval()
    model.save_pretrained(tmp_path)
    size = adapter_size(str(tmp_path))
    assert size.on_mlp
    assert size.elements == sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    measured, predicted = measured_and_predicted(model, spec, batch=batch, prompt=60, new=4, adapter=size)
    assert predicted == pytest.approx(measured, rel=0.05)


def test_large_vocabularies_are_logits():
    measured, predicted = measured_and_predicted(
        *small("llama", vocab_size=20_000), batch=8, prompt=20, new=4
    )
    assert predicted == pytest.approx(measured, rel=0.01)
