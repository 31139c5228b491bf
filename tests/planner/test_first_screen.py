"""The first screen: a verdict in at most 20 lines of at most 80 columns, and other ways that are what they say."""

import json
import shlex
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from fitune.cli.terminal import print_coloured
from fitune.errors import HardwareError, NothingFits
from fitune.planner.first_screen import changed_recipe, first_screen, other_ways, screen_of_nothing
from fitune.planner.study import plan_with_change
from fitune.session.planning import first_screen_of, plan_on_data, wanted_hardware
from fitune.session.recipes.reading import recipe_from
from fitune.values.model.model_config import load_model_spec

LLAMA = "--model meta-llama/Llama-3.1-8B --gpu rtx-4090"
QUICK = "--model openai-community/gpt2 --gpu rtx-4090 --tuning lora"
OFTEN = {
    "tuning": ("full", "lora", "qlora", "lomo"), "seq-len": (512, 1024, 8192), "host-memory": ("32GiB", "256GiB"),
    "global-batch-size": (4, 64), "micro-batch-size": (1, 2, 8), "packing": ("true",), "mean-row-tokens": (100, 300),
    "kernels": ("liger",), "gradient-checkpointing": ("true", "false"), "loss": ("plain", "chunked"), "zero": (0, 2, 3),
    "offload-parameters": ("device", "cpu"), "offload-optimizer": ("device", "cpu"), "backend": ("fsdp", "deepspeed"),
}  # fmt: skip


SEEDS = (0, 1, 2, 3, 5, 6, 7, 8, 10, 11)  # settings of 4 contradict one another, and nothing fits those of 9


def drawn(seed):
    """A recipe drawn at random, as it is typed."""
    random = Random(seed)
    model = random.choice(("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen2.5-14B"))
    card, gpus = random.choice(("t4", "rtx-4090", "v100-32gb", "a100-80gb")), random.choice((1, 1, 2, 4))
    more = {key: random.choice(values) for key, values in OFTEN.items() if random.random() < 0.2}
    options = {"model": model, "gpu": card, "gpus": gpus, **more}
    return " ".join(f"--{key} {value}" for key, value in options.items())


LARGER_GRID = (
    "--model google/gemma-3-27b-it --gpu 4090",
    "--model openai/gpt-oss-20b --gpu 4090",
    "--model meta-llama/Llama-3.1-8B --gpu t4",
    "--model Qwen/Qwen2.5-32B --gpu 4090",
    "--model Qwen/Qwen2.5-14B --tuning lora --gpu 4090 --gpus 2",
    "--model meta-llama/Llama-3.1-405B --gpu h100 --gpus 8 --nodes 2",
    "--model meta-llama/Llama-3.1-8B --gpu 3060",
    "--model Qwen/Qwen3-30B-A3B --gpu 4090",
    "--model meta-llama/Llama-3.1-70B --gpu h100 --gpus 8 --tuning full --host-memory 2TiB",
)
SITUATIONS = (
    LLAMA,
    "--model meta-llama/Llama-2-70b-hf --gpu 3090 --gpus 2",
    # on two cards the fastest plan is only planned: activations of several processes do not leave their devices yet
    "--model meta-llama/Llama-3.1-8B --gpu rtx-3090 --host-memory 64GiB",
    "--model meta-llama/Llama-3.1-8B --gpu h100 --seq-len 131072",
    "--model demo --gpu 4090",
    "--model demo --gpu cpu",
    "--model meta-llama/Llama-3.1-8B --gpu 3060 --tuning qlora --quantization nf4",
    "--model openai-community/gpt2 --gpu rtx-4090 --tuning qlora --quantization-bits 8 --lora-layers 2-5",
    *(pytest.param(words, marks=pytest.mark.slow) for words in (*LARGER_GRID, *map(drawn, SEEDS))),
)
NOTHING = (
    "--model meta-llama/Llama-3.1-8B --gpu rtx-3060 --tuning full",
    *(
        pytest.param(f"--model meta-llama/{name} --tuning full", marks=pytest.mark.slow)
        for name in ("Llama-3.1-8B --gpu rtx-4090", "Llama-3.1-70B --gpu t4")
    ),
    "--model meta-llama/Llama-3.1-405B --gpu rtx-3090 --tuning qlora",
    "--model meta-llama/Llama-3.1-8B --gpu rtx-4090 --tuning lora --seq-len 16384 --micro-batch-size 4 "
    "--gradient-checkpointing false",
    *(pytest.param(drawn(seed), marks=pytest.mark.slow) for seed in (9, 12, 157)),
)


def recipe_typed(words):
    return recipe_from(shlex.split(words), [])


@cache
def planned(words):
    """The plan and other ways, searched once for all tests."""
    recipe = recipe_typed(words)
    report, model = plan_on_data(recipe), load_model_spec(recipe.model)
    return report, other_ways(recipe, report.taken, model=model, machine=wanted_hardware)


def typed_in(words):
    """Option by option: what a later one changes is replaced."""
    return dict(zip(*[iter(shlex.split(words))] * 2, strict=True))


def estimate_typed(options):
    recipe = recipe_from([word for pair in options.items() for word in pair], [])
    return plan_on_data(recipe).taken.estimate


def assert_one_screen(lines):
    assert len(lines) <= 20
    assert [line for line in lines if len(line) > 80] == []


@pytest.fixture(scope="module")
def demo_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 300, "max_position_embeddings": 128,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module", params=SITUATIONS)
def situation(request, demo_config, tmp_path_factory):
    """This machine's processor may be calibrated, a test's is not."""
    words = request.param.replace("demo", demo_config)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FITUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return words, *planned(words)


def test_the_verdict_comes_first_and_all_is_one_screen(situation):
    words, report, ways = situation
    train = f"fitune train {words} --data 'MY ROWS.jsonl'"
    lines = first_screen(report, ways, train=train).splitlines()
    assert lines[0].startswith("✔ FITS   ")
    assert_one_screen(lines)
    typed = "\n".join(lines[:-1]).split("  Train it   ")[1]
    assert shlex.split(typed.replace("\\\n", "")) == shlex.split(train)


def test_notes_without_room_are_counted():
    """Nine notes of two lines, the one on speed last: it is shown first, and the count is of those that are not."""
    report, ways = planned(LLAMA)
    long = [f"note on word {number}: " + "word " * 20 for number in range(8)]
    report = replace(report, decisions=(*long, "note on speed: " + "fast " * 20))
    lines = first_screen(report, ways, train="fitune train").splitlines()
    assert_one_screen(lines)
    notes = [line for line in lines if line.startswith("  note on ")]
    assert notes[0].startswith("  note on speed: ")
    assert lines[-1].startswith(f"  {9 - len(notes)} notes in --details  --why ")


def test_the_change_that_the_last_line_asks_about_is_taken(situation):
    words, report, ways = situation
    last = shlex.split(first_screen(report, ways, train="").splitlines()[-1])
    change = last[last.index("--why") + 1]
    changed = changed_recipe(recipe_typed(words), change)
    hardware = report.chosen.plan.hardware
    plan_with_change(
        changed, change, taken=report.chosen, model=load_model_spec(changed.model), hardware=hardware
    )


def test_a_way_typed_is_the_plan_that_was_shown(situation):
    """Its bytes and its speed, where the words of the command say no other number of cards, card or method."""
    words, report, ways = situation
    for change, priced in ways.items():
        assert priced.plan != report.taken.plan
        again, shown = estimate_typed(typed_in(words) | typed_in(change)), priced.estimate
        assert (again.peak_bytes, again.tokens_per_second) == (shown.peak_bytes, shown.tokens_per_second), (
            change
        )


@pytest.fixture(scope="module", params=NOTHING)
def nothing(request):
    with pytest.raises(NothingFits) as raised:
        planned(request.param)
    return request.param, raised.value


def test_where_nothing_fits_need_and_limit_are_said(nothing):
    words, error = nothing
    screen = screen_of_nothing(error, as_options=True)
    lines, asked = screen.splitlines(), typed_in(words)
    verdict = " ".join(screen.split("\n  needed   ")[0].split())
    cards = f"{asked.get('--gpus', 1)} × {asked['--gpu']}"
    assert verdict.startswith(f"✘ DOES NOT FIT {asked['--model']} · ")
    assert verdict.rsplit(" (", 1)[0].endswith(f" · {asked['--tuning']} · {cards}")
    assert any(line.startswith("  usable   ") and line.endswith(" short") for line in lines)
    assert error.facts["needed_bytes"] > error.facts["usable_bytes"] > 0
    assert_one_screen(lines)


def test_the_changes_are_of_different_kinds_and_name_a_machine(nothing):
    words, error = nothing
    settings = [one["settings"] for one in error.facts["changes"]]
    kinds = [one.get("tuning", next(iter(one))) for one in settings]
    assert 2 <= len(set(kinds)) == len(kinds) <= 5
    if "--tuning full" in words:
        assert {"gpu", "gpus"} & {*kinds}


def test_a_change_typed_is_the_plan_that_was_shown(nothing):
    words, error = nothing
    table = screen_of_nothing(error, as_options=True).split("Changes that work")[1].splitlines()[1:-1]
    for line, one in zip(table, error.facts["changes"], strict=True):
        asked = typed_in(words)
        for first, second in typed_in(line.strip().split("  ")[0]).items():
            if first == "without":
                del asked[second]
            else:
                asked[first] = second
        estimate = estimate_typed(asked)
        assert estimate.fits
        assert estimate.peak_bytes == one["peak_bytes"] <= estimate.usable_bytes, line
        assert estimate.tokens_per_second == one["tokens_per_second"], line


def test_a_recipe_is_answered_in_its_keys(nothing):
    _, error = nothing
    screen = screen_of_nothing(error, as_options=False)
    assert "--" not in screen.rsplit("\n", 1)[0]
    assert all(one["change"] in screen for one in error.facts["changes"])


@pytest.mark.parametrize(
    ("words", "unit", "size"), [(QUICK, "GiB", 2**30), ("--model demo --gpu cpu", "MiB", 2**20)]
)
def test_the_peak_adds_up_in_the_line_below_the_bar(words, unit, size, demo_config):
    recipe = recipe_typed(words.replace("demo", demo_config))
    report = plan_on_data(recipe)
    screen = " ".join(first_screen_of(recipe, report, train="t").split())
    terms = screen.split(" to spare peak ")[1].split(": ", 1)[1].split(f" {unit};")[0]
    sizes = [float(part.rsplit(" ", 1)[1]) for part in terms.split(" · ")]
    assert sum(sizes) == pytest.approx(report.chosen.estimate.peak_bytes / size, abs=0.05 * len(sizes))


@pytest.mark.parametrize(("words", "assumed"), [("", True), ("--host-memory 200GiB", False)])
def test_host_memory_that_nobody_said_is_called_assumed(words, assumed):
    """The note on it is left out of the screen for the line that says so."""
    offloaded = f"--model llama-3.2-1b --gpu rtx-4090 --tuning full --offload-optimizer cpu {words}"
    screen = first_screen(plan_on_data(recipe_typed(offloaded)), {}, train="fitune train")
    (line,) = (line for line in screen.splitlines() if line.startswith("  RAM "))
    assert line.endswith("a node (assumed; --host-memory)") is assumed


def test_less_than_a_thousandth_to_spare_is_called_tight():
    report, ways = planned(LLAMA)
    peak = report.chosen.estimate.peak_bytes
    for usable, tight in ((peak * 1002 // 1000, False), (peak * 10009 // 10000, True)):
        estimate = replace(report.chosen.estimate, usable_bytes=usable)
        report = replace(report, chosen=replace(report.chosen, estimate=estimate))
        assert (" GiB, tight: " in first_screen(report, ways, train="fitune train")) == tight


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"{QUICK} --learning-rate 0.1", "learning_rate: 0.1 is 500 × the usual 0.0002"),
        (f"{QUICK} --learning-rate 1e-8", "learning_rate: 1e-08 is 1/20,000 of the usual 0.0002"),
        (f"{QUICK} --data few.jsonl", "data: 20 rows are few"),
        (f"{QUICK} --data few.jsonl --max-steps 1", "your job about 20 rows × 0.5 epochs, "),
        (f"{QUICK} --data few.jsonl#1", "your job about 1 row, "),
        ("--model openai-community/gpt2", "no GPU was found here: planned for the processor; --gpu rtx-4090"),
    ],
)
def test_what_is_most_often_a_slip_is_said(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"question": f"q {row}", "answer": f"a {row}"}) for row in range(20)]
    (tmp_path / "few.jsonl").write_text("\n".join(rows))
    report, ways = planned(words)
    screen = first_screen(report, ways, train="fitune train")
    assert said in " ".join(screen.split())
    assert_one_screen(screen.splitlines())


@pytest.mark.parametrize(
    "words", [f"{QUICK} --learning-rate 1e-3", "--model openai-community/gpt2 --gpu cpu"]
)
def test_what_is_usual_is_not_remarked_on(words):
    report, ways = planned(words)
    screen = first_screen(report, ways, train="fitune train")
    assert "learning_rate:" not in screen
    assert "no GPU" not in screen


@pytest.mark.parametrize(
    ("words", "said", "hinted"),
    [
        ("--gpu 24GB", "is a size, not a card", "rtx-4090"),
        ("--gpu 4060ti", "4060TI comes with 8 GB or 16 GB", "rtx-4060-ti (8 GB), rtx-4060-ti-16gb (16 GB)"),
        ("--gpu rtx-3090 --gpus 16", "gpus = 16 is the number in one node, and machines with rtx-3090 have 8", ""),
        ("--gpu v100-32gb --gpus 24", "machines with v100-32gb have 16 at most", ""),
        ("--gpu tesla-v100-32gb --gpus 24", "machines with tesla-v100-32gb have 16 at most", ""),
        ("--gpu jetson-thor --gpus 2", "machines with jetson-thor have 1 at most", ""),
    ],
)  # fmt: skip
def test_a_machine_that_is_none_is_refused_with_what_to_type(words, said, hinted):
    with pytest.raises(HardwareError) as refused:
        wanted_hardware(recipe_typed(f"--model gpt2 {words}"))
    hint = refused.value.hint
    assert said in refused.value.message
    assert hinted in hint
    assert "h100" not in hint
    if not hinted:
        options = [word for word in hint.split(";")[0].split() if not word.startswith("try")]
        typed = recipe_typed(f"--model gpt2 {words.split(' --gpus')[0]} {' '.join(options)}")
        assert wanted_hardware(typed).num_gpus >= int(words.split()[-1])


def test_a_board_whose_memory_is_the_hosts_is_alone_in_its_machine():
    _, ways = planned("--model Qwen/Qwen2.5-1.5B --gpu jetson-thor")
    assert ways
    assert not any("--gpus" in change and "--gpu " not in change for change in ways)
    with pytest.raises(NothingFits) as raised:
        planned("--model meta-llama/Llama-3.1-8B --gpu jetson-agx-orin-32gb --tuning full")
    assert not [one for one in raised.value.facts["changes"] if {"gpus"} == one["settings"].keys()]


def test_one_node_that_was_said_is_one_node():
    recipe = recipe_typed("--model gpt2 --gpu rtx-3090 --gpus 10 --nodes 1")
    assert wanted_hardware(recipe).gpus_per_node == 10


def test_a_pipe_gets_plain_text(capsys):
    print_coloured("✔ FITS   [bold] a model")
    assert capsys.readouterr().out == "✔ FITS   [bold] a model\n"
