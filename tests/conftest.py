"""A tiny model folder, a small dataset and a recipe over them: what every training test starts from."""

import gc
import os
import shutil
import sys
from collections import Counter
from functools import partial
from itertools import count
from typing import NamedTuple

import pytest

# No torch here: pytest's own process, which only gives tests to the workers, would import it for nothing.
import fitune
from data.s3_server import make_bucket, running_server, use_server
from fitune.cli import main
from fitune.errors import MissingExtra
from fitune.report import methods_page, run_page, score_pages
from fitune.stores import opening
from fitune.values.model import tracer
from jsonl import write_lines

_NUMBERS = count()
gc.disable()  # until all tests are collected: millions of objects would be looked through again and again

QUESTIONS = [
    {"question": f"What is {a} plus {b}?", "answer": f"{a} plus {b} is {a + b}, and that is all."}
    for a in range(2, 9)
    for b in range(3, 11)
]


@pytest.hookimpl(tryfirst=True)  # before `-m` decides what is left out
def pytest_collection_modifyitems(config, items):
    """Of a grid marked ``thinned(n)`` every n-th case runs always, the others are slow. Of any test's slow cases every
    fourth is slow, the others are weekly, but for goldens, which cost little.

    Tests marked ``first`` begin: what they wait for is started by one worker only, and does not end last.
    With ``--last-failed`` all that failed runs: of a grid only those cases are collected, so their place says nothing.
    """
    if getattr(config.option, "lf", False) and config.cache.get("cache/lastfailed", {}):
        config.option.markexpr = ""
    seen, slow = Counter(), Counter()
    for item in items:
        grid = item.nodeid.partition("[")[0]
        thinned = item.get_closest_marker("thinned")
        if thinned is not None and not item.get_closest_marker("slow"):
            if seen[grid] % thinned.args[0]:
                item.add_marker(pytest.mark.slow)
            seen[grid] += 1
        if item.get_closest_marker("slow") and not grid.startswith("tests/golden/"):
            if slow[grid] % 4:
                item.add_marker(pytest.mark.weekly)
            slow[grid] += 1
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish():
    """Leave out of garbage collection the million objects of the libraries and of the tests that are waiting."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    """Leave out of garbage collection, too, what has outlived a full one: libraries that tests have loaded, and what
    they remember of each operation. It took up to a seventh of the processor's time."""
    before = gc.get_stats()[2]["collections"]
    ran = yield
    if gc.get_stats()[2]["collections"] > before:
        gc.freeze()
    return ran


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A random two-block Llama with its own byte-level BPE tokenizer."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    texts = folder / "texts.txt"
    texts.write_text("\n".join(f"{row['question']} {row['answer']}" for row in QUESTIONS))
    bpe = ByteLevelBPETokenizer()
    bpe.train([str(texts)], vocab_size=384, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    write_lines(file, QUESTIONS)
    return file


def settings_of(model_folder, data_file, folder, **others):
    """Two steps of LoRA on a processor, in ``folder``, as a recipe says them."""
    return {
        "model": str(model_folder), "data": str(data_file), "tuning": "lora", "lora_r": 4, "precision": "fp32",
        "gpu": "cpu", "seq_len": 64, "micro_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2,
        "max_steps": 2, "save_steps": 0, "samples": 0, "output_dir": str(folder), **others,
    }  # fmt: skip


@pytest.fixture
def settings(model_folder, data_file, tmp_path):
    return settings_of(model_folder, data_file, tmp_path / "run")


@pytest.fixture(scope="session")
def shop(model_folder, data_file, tmp_path_factory):
    """The directory of a complete run of one step, whose adapter has a rank that vLLM rounds up."""
    folder = tmp_path_factory.mktemp("finished") / "shop"
    fitune.train(**settings_of(model_folder, data_file, folder, lora_r=5, max_steps=1, micro_batch_size=16))
    return folder


@pytest.fixture
def quick_demo(monkeypatch):
    """The whole demo with hardly any work: a small model, a few texts and rows, two steps a run, two tokens an
    answer."""
    from fitune.demo import files as demo_files
    from fitune.session import demo
    from fitune.session.train import training

    monkeypatch.setattr(training, "_SAMPLE_TOKENS", 2)
    monkeypatch.setattr(
        demo_files,
        "SHAPE",
        demo_files.SHAPE | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1},
    )

    for name in ("PRETRAINING_TEXTS", "TRAINING_ROWS"):
        monkeypatch.setattr(demo_files, name, 60)
    monkeypatch.setattr(demo_files, "HELD_OUT_ROWS", 2)
    for name in ("PRETRAIN", "LORA", "FULL"):
        monkeypatch.setitem(getattr(demo_files, name), "max_steps", 2)
    monkeypatch.setattr(demo, "MAX_NEW_TOKENS", 2)


@pytest.fixture
def make_plan(model_folder, data_file, tmp_path):
    """A plan from recipe settings, on this machine's CPU whatever else it has."""
    return partial(plan_of, model_folder, data_file, tmp_path / "run")


def plan_of(model_folder, data_file, folder, **settings):
    from fitune.planner.search import find_plan
    from fitune.recipe.recipe import canonical_keys, parse_recipe
    from fitune.units import GIB
    from fitune.values.machines.gpus import cpu_gpu, hardware_for
    from fitune.values.model.model_config import load_model_spec

    wanted = settings_of(model_folder, data_file, folder, **{"max_steps": 6, **settings})
    recipe = parse_recipe(canonical_keys(wanted, where="test"))
    hardware = hardware_for(
        gpu=cpu_gpu(memory_bytes=4 * GIB, cores=2), gpus=1, nodes=1, host_memory_bytes=4 * GIB
    )
    return find_plan(recipe, model=load_model_spec(recipe.model), hardware=hardware).chosen.plan


@pytest.fixture(scope="module")
def browser():
    """Chromium, opened once a module. It is a Debian package, which .ci/run installs: without it tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def look(browser):
    """Opens a page; at the end no script of any may have failed, and nothing been asked of another place."""
    failures, contexts = [], []

    def opened(address, *, place, **settings):
        contexts.append(browser.new_context(**settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: failures.append(str(error)))
        # refusals of the page's policy are errors there
        page.on("console", lambda said: said.type == "error" and failures.append(said.text))
        page.on("request", lambda asked: asked.url.startswith(place) or failures.append(asked.url))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert failures == []


@pytest.fixture(scope="session")
def wire():
    """The way to an S3 server of this process; ``use_server`` makes it whole again."""
    with running_server() as wire:
        yield wire


@pytest.fixture
def bucket(wire, monkeypatch, tmp_path):
    """An empty bucket of the test's own, on a server that is asked again only by fitune."""
    use_server(wire, monkeypatch)
    monkeypatch.setitem(opening.OPTIONS["s3fs"]["config_kwargs"], "retries", {"max_attempts": 0})
    name = f"b{abs(hash(tmp_path))}"
    make_bucket(name)
    wire.requests.clear()
    return name


os.environ["FITUNE_CALIBRATE"] = "0"  # also for fixtures that outlive a test, and for new processes


class Ended(NamedTuple):
    """How a command of this process ended."""

    code: int
    out: str
    err: str

    def ends(self, code, *said):
        """With this exit code and these words, on stdout where all went well, else on stderr: returns that text."""
        assert self.code == code, self
        text = self.err if code else self.out
        for words in said:
            assert words in text
        return text


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs the command line in the test's process."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["fitune", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        ended = Ended(code, *capsys.readouterr())
        assert "Traceback" not in ended.err + ended.out
        return ended

    return run


@pytest.fixture(name="fitune")
def status_and_error(call):
    """The exit status and stderr alone."""
    return lambda *words: call(*words)[::2]


DRAWN = (
    (run_page, "draw_pictures"),
    (methods_page, "_pictures"),
    (score_pages, "_score_pictures"),
    (score_pages, "_difference_pictures"),
)


def _no_pictures(*drawn):
    raise MissingExtra("pictures", extra="plots")


@pytest.fixture(autouse=True)
def own_cache(request, tmp_path_factory):
    """A cache and a tracer of the test's own, and pages without pictures, which take longer than the runs that they
    show, but for tests marked ``pictures``. One fixture, no folder: an empty test takes half the time."""
    before = tracer.current_tracer()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FITUNE_CACHE", str(tmp_path_factory.getbasetemp() / f"cache-{next(_NUMBERS)}"))
        if not request.node.get_closest_marker("pictures"):
            for page, name in DRAWN:
                patched.setattr(page, name, _no_pictures)
        yield
    tracer.trace_with(before)


@pytest.fixture
def traces(own_cache, monkeypatch, tmp_path_factory):
    """Blocks without formulas are traced, as by ``fitune plan``. A trace takes seconds: all workers keep it in one
    folder."""
    from fitune.rehearse.profile import TransformersTracer

    own = tmp_path_factory.getbasetemp()
    of_all = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    monkeypatch.setenv("FITUNE_CACHE", str(of_all / "traces"))
    tracer.trace_with(TransformersTracer)


@pytest.fixture
def untraced(own_cache, monkeypatch):
    """Blocks without formulas are planned with another model's profile, where a test is not about bytes and seconds."""
    from fitune.rehearse.profile import TransformersTracer
    from plans import borrowed_profile

    monkeypatch.setattr(TransformersTracer, "profile", lambda tracer, way: borrowed_profile(way))


@pytest.fixture(autouse=True, scope="session")
def one_process(tmp_path_factory):
    """One thread: in tiny models those that wait for one another cost ten times what they bring. Where the program
    would begin anew in the place of this process, it does so inside it: tests go on. A cache for the fixtures that
    outlive a test, which begin before ``own_cache``: never the user's."""
    import torch

    torch.set_num_threads(1)

    def begin(executable, command):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(sys, "argv", ["fitune", *command[command.index("go-on") :]])
            main()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "execv", begin)
        patched.setenv("FITUNE_CACHE", str(tmp_path_factory.mktemp("cache-of-fixtures")))
        yield
