"""Predicted bytes of answering against live tensors: within 5 %, engine and estimate meeting nowhere but here. Rows
answered together: what is said, else as many as fit, at most 32. And the cache they share."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fitune.estimate.answering import memory_of_answering
from fitune.measure.memory import LiveTensors
from fitune.models.attention import use_cached_attention
from fitune.models.headers import adapter_size
from fitune.recipe.score_recipe import score_recipe
from fitune.report.score_rows import read_score
from fitune.score.engines import opening
from fitune.score.engines.continuous import RoomyCache, answer_continuously
from fitune.score.engines.engine import Continuation, Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.engines.opening import room_for
from fitune.score.plan import ScorePlan
from fitune.session.results import text_of
from fitune.session.score.scoring import score_dataset
from fitune.values.answering import NO_ADAPTER, Answering, Questions, answering_precision
from fitune.values.model.model_config import load_model_spec, spec_from_config
from fitune.values.plan import Precision
from jsonl import write_lines
from models.tiny_models import tiny_model
from plans import CPU, gpu

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


def small(family, **different):
    model = tiny_model(family, **{**WIDE, **different}).eval()
    use_cached_attention(model)
    return model, spec_from_config(model.config.to_dict(), name="tiny")


def require_predicted(model, spec, *, batch, prompt, new, adapter=NO_ADAPTER, within=0.05):
    """``batch`` rows of about ``prompt`` tokens are answered by ``new`` tokens each."""
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
        engine="transformers", model=spec, hardware=CPU, precision=Precision.FP32, batch_size=batch,
        adapter=adapter,
    )  # fmt: skip
    asked = Questions(rows=batch, prompt_tokens=batch * prompt, longest_prompt=prompt, new_tokens=new)
    predicted = memory_of_answering(answering, asked).tensor_peak_bytes
    assert predicted == pytest.approx(max(spy.peaks.values()), rel=within)


OTHERS = [pytest.param(f, marks=pytest.mark.slow) for f in ("qwen3", "gemma3_text", "mixtral", "gpt2", "phi")]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("batch", "prompt", "new"), [(1, 30, 8), (8, 60, 6), (8, 8, 34)])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "falcon", "qwen3_moe", *OTHERS])
def test_live_tensors_are_predicted(family, batch, prompt, new):
    require_predicted(*small(family), batch=batch, prompt=prompt, new=new)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("family", ["gemma2", "falcon"])
@pytest.mark.parametrize(("batch", "prompt", "new"), [(16, 30, 12), (4, 300, 2), (8, 60, 6)])
def test_scores_that_a_block_returns_count_beside_its_mlp_and_norms(family, batch, prompt, new):
    """Attention that is written out, in a model wide enough that its scores are not all that counts."""
    wide = small(family, hidden_size=128, num_hidden_layers=6)
    require_predicted(*wide, batch=batch, prompt=prompt, new=new, within=0.02)


@pytest.mark.parametrize("batch", [1, 8])
def test_live_tensors_with_an_adapter_are_predicted(tmp_path, batch):
    base, spec = small("llama")
    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear")).eval()
    model.save_pretrained(tmp_path)
    size = adapter_size(str(tmp_path))
    assert size.on_mlp
    assert size.elements == sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    require_predicted(model, spec, batch=batch, prompt=60, new=4, adapter=size)


def test_large_vocabularies_are_logits():
    require_predicted(*small("llama", vocab_size=20_000), batch=8, prompt=20, new=4, within=0.01)


LONG = Questions(rows=1_000, prompt_tokens=3_000_000, longest_prompt=3_000, new_tokens=256)


def plan(batch_size=0, model="llama-3.1-8b"):
    return ScorePlan(model=model, output_dir="", batch_size=batch_size)


def test_as_many_rows_as_fit_and_not_one_more_but_one_at_least_and_32_at_most(monkeypatch):
    card = gpu("rtx-4090")
    monkeypatch.setattr(opening, "resolve_hardware", lambda *, gpus: card)
    rows = room_for(plan())(LONG)
    asked = Answering(
        engine="transformers", model=load_model_spec("llama-3.1-8b"), hardware=card,
        precision=answering_precision(card), batch_size=rows,
    )  # fmt: skip
    assert 1 < rows < 32
    assert memory_of_answering(asked, LONG).fits
    assert not memory_of_answering(replace(asked, batch_size=rows + 1), LONG).fits
    short, endless = (replace(LONG, longest_prompt=tokens) for tokens in (100, 10**6))
    assert (room_for(plan())(short), room_for(plan())(endless)) == (32, 1)
    assert plan(400).rows_at_once == 400
    assert room_for(plan(400))(endless) >= 400


def test_a_model_of_which_no_plan_knows_or_whose_state_does_not_grow_is_asked_by_32(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    for model in (str(tmp_path), "state-spaces/mamba-2.8b-hf"):
        assert room_for(plan(model=model))(LONG) == 32


def test_the_engine_takes_no_more_than_fit_together(tiny):
    """It asks by rows and lengths: of prompts with the tokens of an answer, of given texts without."""
    asked, rows = [], []

    def room(questions):
        asked.append(questions)
        return 3

    engine = TransformersEngine(model=tiny.model, tokenizer=tiny.tokenizer, template=tiny.template, room=room)
    requests = [
        Request(id=str(place), prompt_ids=(5,) * (3 + place), sampling=Sampling(max_new_tokens=4))
        for place in range(8)
    ]
    with tiny.model.get_input_embeddings().register_forward_hook(lambda _, ids, __: rows.append(len(ids[0]))):
        assert len(list(engine.answer(requests))) == 8
    list(engine.loglikelihoods([Continuation(id="0", prompt_ids=(5, 6), token_ids=(7, 8, 9))]))
    assert max(rows) == 3
    assert asked == [
        Questions(rows=8, prompt_tokens=52, longest_prompt=10, new_tokens=4),
        Questions(rows=1, prompt_tokens=4, longest_prompt=4, new_tokens=1),
    ]


HEADS, SIZE = 2, 3


def states(rows, columns):
    return torch.randn(rows, HEADS, columns, SIZE)


def test_rows_that_come_and_go_keep_their_keys_and_values():
    """A cache with room holds what one that copies for every token would: beside lists of what each row was given,
    through 200 random passes."""
    draw = random.Random(0)
    torch.manual_seed(0)
    cache = RoomyCache()
    held = states(3, 5)
    cache.update(held, -held, 0)
    rows = list(held.clone())
    widths = [5, 5, 5]
    for _ in range(200):
        what = draw.choice(["write", "write", "join", "leave"])
        if what == "write":
            cache.growth.room = draw.randint(1, 4)
            new = states(len(rows), 1)
            cache.update(new, -new, 0)
            rows = [torch.cat([row, one], 1) for row, one in zip(rows, new, strict=True)]
            widths = [width + 1 for width in widths]
        elif what == "join" and len(rows) < 6:
            entering, new = RoomyCache(), states(draw.randint(1, 2), draw.randint(1, 30))
            entering.update(new, -new, 0)
            cache.join(entering)
            rows += list(new)
            widths += [new.shape[2]] * len(new)
        elif what == "leave" and len(rows) > 2:
            gone = draw.randrange(len(rows))
            last = len(rows) - 1
            unused = max(widths) - max(widths[:gone] + widths[gone + 1 :])
            rows[gone], widths[gone] = rows[last], widths[last]
            del rows[last], widths[last]
            cache.keep([(last, gone)] if gone != last else [], len(rows), unused)
        keys, values = cache.layers[0].keys, cache.layers[0].values
        assert keys.shape == (len(rows), HEADS, max(widths), SIZE)
        assert torch.equal(keys, -values)
        for kept, row, width in zip(keys, rows, widths, strict=True):
            assert torch.equal(kept[:, -width:], row)
        assert keys.isfinite().all()  # padding that is no number would spoil the sum that it is left out of


def test_what_is_there_is_copied_once_for_every_growth():
    """Sixty-four tokens behind a prompt, 32 columns at a time: two buffers after the prompt's own."""
    cache = RoomyCache()
    cache.growth.room = 32
    new = states(4, 10)
    cache.update(new, new, 0)
    buffers = set()
    for _ in range(64):
        new = states(4, 1)
        keys, _ = cache.update(new, new, 0)
        buffers.add(keys.untyped_storage().data_ptr())
    assert len(buffers) == 2
    assert cache.columns == 10 + 64


def test_a_cache_that_nobody_holds_is_gone_at_once():
    """Not when garbage is searched: the next batch needs its memory."""
    cache = RoomyCache()
    cache.update(states(2, 5), states(2, 5), 0)
    watched = weakref.ref(cache.layers[0].stores[0])
    gc.disable()
    try:
        del cache
        assert watched() is None
    finally:
        gc.enable()
