"""The process that vLLM runs in: how it is found, dies and ends. test_vllm_answers.py runs vLLM itself."""

import sys
import time
from contextlib import closing
from types import SimpleNamespace

import psutil
import pytest

from fitune.errors import MissingExtra, ModelError, ScoringFailed
from fitune.models.adapter_file import AdapterConfig
from fitune.score.asking import Asker
from fitune.score.engines import engine_vllm
from fitune.score.engines.engine import EngineDied, Request, Sampling
from fitune.score.engines.engine_vllm import VllmEngine, python_of_vllm, rounded_rank
from fitune.score.engines.opening import why_merged_first
from fitune.score.plan import ScorePlan
from fitune.score.questions import Question
from fitune.score.tasks import Task


def vllm(tokenizer="m"):
    return VllmEngine(model="m", tokenizer=tokenizer, stop_ids=frozenset())


@pytest.fixture
def run_as_worker(tmp_path, monkeypatch):
    """Makes engines start a real process that runs the given lines in the place of the worker."""

    def use(lines):
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


@pytest.mark.parametrize(("rank", "taken"), [(1, 1), (2, 8), (8, 8), (300, 320), (513, 0)])
def test_ranks_are_rounded_up_to_what_vllm_takes(rank, taken):
    assert rounded_rank(rank) == taken


def test_without_vllm_the_error_names_the_python_and_the_extra(monkeypatch):
    monkeypatch.setenv("FITUNE_VLLM_PYTHON", "/no/such/python")
    with pytest.raises(MissingExtra, match=r"vLLM \(none in /no/such/python") as caught:
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
        ({"target_parameters": ["mlp.up_proj"]}, "adapters on stacked experts (mlp.up_proj)"),
        ({"modules_to_save": ["lm_head"]}, "modules trained whole (lm_head)"),
        ({"rank_pattern": {"q_proj": 2}}, "ranks or alphas that differ between modules"),
        ({"r": 600}, "rank 600, at most 512"),
    ],
)
def test_adapters_that_vllm_would_answer_wrongly_with_are_refused(settings, why):
    config = AdapterConfig(**{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], **settings})
    assert why_merged_first(config).startswith(why) if why else not why_merged_first(config)


def request(id, tokens, token=1):
    return Request(id=id, prompt_ids=(token,) * tokens, sampling=Sampling(max_new_tokens=4))


def test_a_process_that_dies_says_its_last_words(run_as_worker):
    run_as_worker(OPEN + "sys.stdin.readline()\nsys.exit('out of blocks')\n")
    with closing(vllm()) as engine:
        answers = engine.answer([request("long", 61), request("fits", 60)])
        assert next(answers).error == "prompt 61 + max_new_tokens 4 = 65 tokens, the model has room for 64"
        with pytest.raises(EngineDied, match="out of blocks"):
            next(answers)


def test_a_start_that_fails_says_the_error_without_its_traceback(run_as_worker):
    run_as_worker("def load():\n    raise ValueError('less memory than desired')\nload()\n")
    with pytest.raises(
        ScoringFailed, match=r"vLLM did not start: .* ended with 1: ValueError: less memory than desired\n"
    ):
        vllm()


def test_tokens_that_the_model_does_not_have_are_refused(run_as_worker):
    run_as_worker(OPEN + "sys.stdin.readline()\n")
    said = r"the folder: .* ids up to 100, and the embedding has 100 rows"
    with closing(vllm(tokenizer="the folder")) as engine, pytest.raises(ModelError, match=said):
        next(engine.answer([request("far", 3, token=100)]))


FAKE_VLLM = """
import os, time

class LLM:
    def __init__(self, **settings):
        self.llm_engine = Engine()

class Engine:
    \"\"\"Three rows at once, each writes its prompt's first token as many times as that says.\"\"\"
    def __init__(self):
        self.waiting, self.running = [], []
        self.model_config = self
        self.max_model_len = 64
        self.to_come, self.until = int(os.environ["ROWS"]), time.monotonic() + 120
    def get_vocab_size(self):
        return 100
    def add_request(self, id, prompt, parameters, lora_request):
        self.to_come -= 1
        self.waiting.append([id, prompt["prompt_token_ids"][0], 0])
    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)
    def step(self):
        while self.waiting and len(self.running) < 3:
            self.running.append(self.waiting.pop(0))
        if len(self.running) < 3 and self.to_come > 0 and time.monotonic() < self.until:
            return []  # the sender may be slow, but it must not wait for this answer
        with open(os.environ["FULL"], "a") as file:
            file.write(f"{len(self.running)}\\n")
        for row in self.running:
            row[2] += str(row[1]) != os.environ["STUCK"]
        done = [row for row in self.running if row[1] == row[2]]
        self.running = [row for row in self.running if row[1] != row[2]]
        return [Output(*row) for row in done]

class Output:
    finished = True
    def __init__(self, id, token, count):
        self.request_id, self.outputs = id, [self]
        self.token_ids, self.finish_reason = [token] * count, "stop"
        self.logprobs = [{token: self}] * count
        self.logprob = -1.0

class SamplingParams:
    def __init__(self, **settings):
        pass
"""
FAKE_MODULES = {
    "__init__": FAKE_VLLM, "lora/__init__": "", "lora/request": "LoRARequest = None",
    "sampling_params": "class RequestOutputKind: FINAL_ONLY = 2",
}  # fmt: skip


@pytest.fixture
def fake_vllm(tmp_path, monkeypatch):
    """A package in the place of vLLM, for the worker itself; a file with the rows of each of its steps."""
    for name, lines in FAKE_MODULES.items():
        file = tmp_path / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines)
    monkeypatch.setattr(engine_vllm, "python_of_vllm", lambda: sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("FULL", str(tmp_path / "full"))
    monkeypatch.setenv("ROWS", "0")
    monkeypatch.setenv("STUCK", "")
    return tmp_path / "full"


def test_vllm_is_full_between_two_shards_and_each_row_is_answered_once(fake_vllm, monkeypatch):
    """Rows of the next shard enter where those of this one end; only behind the last shard it runs dry."""
    shards = [
        [request(f"{shard} {row}", 2, token=1 + (shard + row) * 3 % 5) for row in range(6)]
        for shard in range(4)
    ]
    monkeypatch.setenv("ROWS", "24")
    with closing(vllm()) as engine:
        for shard, after in zip(shards, [*shards[1:], []], strict=True):
            answers = list(engine.answer(shard, ahead=after))
            assert sorted(answer.id for answer in answers) == sorted(one.id for one in shard)
            tokens = {one.id: one.prompt_ids[0] for one in shard}
            for answer in answers:
                token = tokens[answer.id]
                assert (answer.token_ids, answer.logprobs) == ((token,) * token, (-1.0,) * token)
    running = [int(line) for line in fake_vllm.read_text().split()]
    assert running[:-5] == [3] * (len(running) - 5)
    assert sum(running) == sum(one.prompt_ids[0] for shard in shards for one in shard)


def test_rows_that_were_sent_ahead_are_asked_again_of_a_new_process(fake_vllm, monkeypatch):
    """What a dead process knew is lost with it, and no row twice."""
    first, second = [request("a", 2, token=3)], [request("b", 2, token=4), request("long", 62)]
    opened = []
    monkeypatch.setenv("STUCK", "4")

    def open_engine():
        opened.append(vllm())
        return opened[-1]

    plan = ScorePlan(model="nowhere", output_dir="", sampling=Sampling(max_new_tokens=4))
    words = SimpleNamespace(decode=str, stop_ids=frozenset())
    asker = Asker(plan, None, words, opens=lambda *_: open_engine())
    try:
        (a,) = asker.ask(_tasks(first), on_answer=lambda: None, ahead=_tasks(second))
        monkeypatch.setenv("STUCK", "")
        opened[0]._process.kill()
        b, long = asker.ask(_tasks(second), on_answer=lambda: None)
    finally:
        asker.close()
    assert (a.token_ids, b.token_ids) == ((3,) * 3, (4,) * 4)
    assert long.code == "prompt_too_long"
    assert len(opened) == 2


def _tasks(requests):
    return [Task(question=Question(id=one.id, where=""), prompt_ids=one.prompt_ids) for one in requests]


@pytest.mark.parametrize("last", ["sys.stdin.readline()", "sys.stdin.readline()\nsys.stdin.readline()"])
def test_children_of_the_process_end_with_it(run_as_worker, tmp_path, last):
    """One that is idle, and one that is asked something when it is closed."""
    run_as_worker(
        f"{OPEN}import subprocess\n"
        f"child = subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'pid')!r}, 'w').write(f'{{child.pid}}\\n')\n"
        f"{last}\n"
    )
    engine = vllm()
    if "\n" in last:
        engine._send({"what": "answer", "entries": []})
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        time.sleep(0.01)
    engine.close()
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 60
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
