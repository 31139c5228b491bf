"""The process that vLLM runs in: how it is found, dies and ends. test_vllm_answers.py runs vLLM itself."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from fitune.errors import MissingExtra, ModelError, ScoringFailed
from fitune.models.adapter_config import AdapterConfig
from fitune.score.engines import engine_vllm
from fitune.score.engines.engine import EngineDied, Request, Sampling
from fitune.score.engines.engine_vllm import VllmEngine, python_of_vllm, rounded_rank
from fitune.score.engines.opening import why_merged_first


@pytest.fixture
def run_as_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes engines start a real process that runs the given lines in the place of the worker."""

    def use(lines: str) -> None:
        worker = tmp_path / "worker.py"
        worker.write_text(lines)
        monkeypatch.setattr(engine_vllm, "python_of_vllm", lambda: sys.executable)
        monkeypatch.setattr(engine_vllm.vllm_worker, "__file__", str(worker))

    return use


OPEN = """
import sys
sys.stdin.readline()
print('{"context": 64, "vocabulary": 100}', flush=True)
"""


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


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"use_rslora": True}, ""),
        ({"init_lora_weights": "gaussian"}, ""),
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "biases of the adapter"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4"),
        (
            {"target_parameters": ["mlp.experts.down_proj"]},
            "adapters on stacked experts (mlp.experts.down_proj)",
        ),
        ({"r": 600}, "rank 600, at most 512"),
    ],
)
def test_adapters_that_vllm_would_answer_wrongly_with_are_refused(settings: dict, why: str) -> None:
    config = AdapterConfig(**{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **settings})
    assert why_merged_first(config).startswith(why) if why else not why_merged_first(config)


def request(id: str, tokens: int, token: int = 1) -> Request:
    return Request(id=id, prompt_ids=(token,) * tokens, sampling=Sampling(max_new_tokens=4))


def test_a_process_that_dies_says_its_last_words(run_as_worker) -> None:
    run_as_worker(OPEN + "sys.stdin.readline()\nsys.exit('out of blocks')\n")
    engine = VllmEngine(model="m", tokenizer="m", stop_ids=frozenset())
    try:
        answers = engine.answer([request("long", 61), request("fits", 3)])
        assert next(answers).error == "prompt 61 + max_new_tokens 4 = 65 tokens, the model has room for 64"
        with pytest.raises(EngineDied, match="out of blocks"):
            next(answers)
    finally:
        engine.close()


def test_a_start_that_fails_says_the_error_without_its_traceback(run_as_worker) -> None:
    run_as_worker("def load():\n    raise ValueError('less memory than desired')\nload()\n")
    with pytest.raises(
        ScoringFailed, match=r"vLLM did not start: .* ended with 1: ValueError: less memory than desired\n"
    ):
        VllmEngine(model="m", tokenizer="m", stop_ids=frozenset())


def test_tokens_that_the_model_does_not_have_are_refused(run_as_worker) -> None:
    run_as_worker(OPEN + "sys.stdin.readline()\n")
    engine = VllmEngine(model="m", tokenizer="the folder", stop_ids=frozenset())
    try:
        with pytest.raises(ModelError, match=r"the folder: .* ids up to 100, and the embedding has 100 rows"):
            next(engine.answer([request("far", 3, token=100)]))
    finally:
        engine.close()


@pytest.mark.parametrize("last", ["sys.stdin.readline()", "sys.stdin.readline()\nsys.stdin.readline()"])
def test_children_of_the_process_end_with_it(run_as_worker, tmp_path: Path, last: str) -> None:
    """One that is idle, and one that is asked something when it is closed."""
    run_as_worker(
        f"{OPEN}import subprocess\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{child.pid}}\\n')\n"
        f"{last}\n"
    )
    engine = VllmEngine(model="m", tokenizer="m", stop_ids=frozenset())
    if "\n" in last:
        engine._send({"what": "answer", "entries": []})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        time.sleep(0.01)
    engine.close()
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
