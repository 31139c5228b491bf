"""vLLM in its own process: the same greedy tokens as transformers, and what happens without it."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from fitune.demo.text import training_exercises
from fitune.errors import MissingExtra
from fitune.score.engine import EngineDied, Request, Sampling
from fitune.score.engine_transformers import TransformersEngine
from fitune.score.engine_vllm import VllmEngine, python_of_vllm, rounded_rank

has_vllm = bool(os.environ.get("FITUNE_VLLM_PYTHON")) or importlib.util.find_spec("vllm") is not None


@pytest.mark.parametrize(
    ("rank", "taken"), [(1, 1), (2, 8), (8, 8), (9, 16), (200, 256), (300, 320), (513, 0)]
)
def test_ranks_are_rounded_up_to_what_vllm_takes(rank: int, taken: int) -> None:
    assert rounded_rank(rank) == taken


def test_without_vllm_the_error_names_the_python_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITUNE_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(MissingExtra, match="no vLLM in /no/such/python") as caught:
        python_of_vllm()
    assert caught.value.hint == "pip install 'fitune[vllm]'"


def test_a_process_that_dies_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real process that starts as the worker does, answers one line and ends."""
    from fitune.score import engine_vllm

    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys\nsys.stdin.readline()\nprint('{\"context\": 64}', flush=True)\nsys.stdin.readline()\n"
        "sys.exit('out of blocks')\n"
    )
    monkeypatch.setattr(engine_vllm, "python_of_vllm", lambda: sys.executable)
    monkeypatch.setattr(engine_vllm.vllm_worker, "__file__", str(worker))
    engine = VllmEngine(model="m", tokenizer="m", stop_ids=frozenset())
    try:
        long, fits = (
            Request(id=name, prompt_ids=(1,) * n, sampling=Sampling(max_new_tokens=4))
            for name, n in (("l", 61), ("f", 3))
        )
        answers = engine.answer([long, fits])
        assert next(answers).error == "prompt 61 + max_new_tokens 4 = 65 tokens, the model has room for 64"
        with pytest.raises(EngineDied, match="out of blocks"):
            next(answers)
    finally:
        engine.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(not has_vllm, reason="no vLLM here; FITUNE_VLLM_PYTHON names a python that has it")
def test_vllm_writes_the_greedy_tokens_of_transformers(tiny) -> None:
    requests = [
        Request(
            id=str(place),
            prompt_ids=tuple(tiny.tokenizer(row.prompt)["input_ids"]),
            sampling=Sampling(max_new_tokens=12),
        )
        for place, row in enumerate(training_exercises(200, seed=1))
    ]
    ours = TransformersEngine(model=tiny.model, tokenizer=tiny.tokenizer, template=tiny.template)
    expected = {completion.id: completion.token_ids for completion in ours.answer(requests)}
    engine = VllmEngine(
        model=str(tiny.folder), tokenizer=str(tiny.folder), stop_ids=tiny.template.stop_ids,
        settings={"dtype": "float32", "enforce_eager": True},
    )  # fmt: skip
    try:
        found = {completion.id: completion.token_ids for completion in engine.answer(requests)}
    finally:
        engine.close()
    assert sum(found[key] == ids for key, ids in expected.items()) >= 0.95 * len(expected)
