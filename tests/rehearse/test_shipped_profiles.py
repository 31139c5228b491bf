"""Profiles that come with fitune: what is traced here, enough to plan every public name without torch, and said."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product

import pytest

from fitune.errors import FituneError, NothingFits
from fitune.estimate.predict import predict_memory
from fitune.planner.search import find_plan
from fitune.recipe.recipe import parse_recipe
from fitune.rehearse.profile import TransformersTracer
from fitune.values.model import tracing
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.known_models import configs_to_trace, find_known_model, known_model_names
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.tracer import by_installed_libraries, current_tracer, trace_with
from fitune.values.model.tracing import (
    NOT_SHIPPED,
    SHIPPED,
    Libraries,
    is_shipped,
    shipped_libraries,
    shipped_profile,
)
from plans import gpu, plan_for

SHIPPED_CONFIGS = [name for name in configs_to_trace() if name not in NOT_SHIPPED]


@pytest.fixture(autouse=True)
def nobody_traces(tmp_path, monkeypatch):
    """No tracer and an empty cache: whatever is planned comes from the file."""
    monkeypatch.setenv("FITUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tracing, "_known", {})
    monkeypatch.setattr(tracing, "_of_other_versions", set())
    trace_with(None)


@pytest.mark.parametrize(
    ("name", "tuning", "rows"),
    [
        pytest.param("EleutherAI/pythia-70m", "full", 1, marks=pytest.mark.slow),
        pytest.param("HuggingFaceTB/SmolLM3-3B", "full", 2, marks=pytest.mark.slow),
        ("EleutherAI/pythia-70m", "lora", 2),
    ],
)
def test_a_shipped_profile_is_what_is_traced_here(name, tuning, rows, monkeypatch):
    """Equal where the versions are; else the peak of a step is, to 0.5 %."""
    model = load_model_spec(name)
    plan = plan_for(
        model, hardware=gpu("rtx-4090"), tuning=tuning, rank=16, precision="bf16-master", attention="flash",
        rows=rows, accumulation=2, seq_len=1536, chunk=512,
    )  # fmt: skip
    way = tracing.way_of(plan, BatchShape(tokens=1536 * rows, supervised_tokens=1536 * rows, rows=rows))
    shipped = shipped_profile(model.config_digest, way.digest)
    assert shipped is not None
    traced = TransformersTracer().profile(way)
    if tracing.installed_libraries().public == shipped_libraries():
        assert traced == shipped
        return
    peaks = []
    for step in (shipped, traced):
        monkeypatch.setattr(tracing, "profile_for", lambda plan, shape, step=step: step)
        peaks.append(predict_memory(plan).tensor_peak_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.005)


@pytest.mark.thinned(16)
@pytest.mark.parametrize("name", SHIPPED_CONFIGS)
def test_every_public_name_is_planned_without_a_trace(name):
    """The open search on eight H200, and QLoRA on one 4090, where what does not fit is refused by its bytes."""
    model = load_model_spec(name, offline=True)
    for settings, hardware in (({}, gpu("h200", gpus=8)), ({"tuning": "qlora"}, gpu("rtx-4090"))):
        recipe = parse_recipe({"model": name, **settings, **_needed(model.separates_rows)})
        with suppress(NothingFits):
            assert find_plan(recipe, model=model, hardware=hardware).chosen.estimate.peak_bytes > 0


def shipped_ways(name):
    """For full and LoRA, rows and lengths: the ways of training by each attention, those that the file has."""
    model = load_model_spec(name, offline=True)
    lengths = (model.sliding_window, 2 * model.sliding_window) if model.sliding_window else (2048,)
    for tuning, rows, length in product(("full", "lora"), (1, 2) if model.separates_rows else (1,), lengths):
        shape = BatchShape(tokens=rows * length, supervised_tokens=rows * length, rows=rows)
        plans = (
            plan_for(
                model, hardware=gpu("rtx-4090"), tuning=tuning, rank=16, precision="bf16-master", attention=attention,
                rows=rows, accumulation=2, seq_len=length,
            )
            for attention in ("flash", "sdpa", "eager")
        )  # fmt: skip
        ways = [tracing.way_of(plan, shape) for plan in plans]
        yield [way for way in ways if shipped_profile(model.config_digest, way.digest)]


def test_every_shipped_profile_is_found_by_its_way_of_training():
    """A digest that changed would leave profiles in the file that no plan asks for."""
    assert [name for name in SHIPPED_CONFIGS if not all(shipped_ways(name))] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if "gpt-neo-1" in name else pytest.mark.weekly)
        for name in SHIPPED_CONFIGS
    ],
)
def test_every_config_is_shipped_as_it_is_traced(name):
    """In one way of training. What a change of code does to few architectures left their profiles old once."""
    if tracing.installed_libraries().public != shipped_libraries():
        pytest.skip("other versions than those that traced what is shipped")
    way = next(shipped_ways(name))[0]
    assert TransformersTracer().profile(way) == shipped_profile(way.plan.model.config_digest, way.digest)


def _needed(separates_rows):
    return {} if separates_rows else {"packing": False, "micro_batch_size": 1}


def test_every_config_has_a_profile_or_a_reason():
    shipped = {
        name: is_shipped(tracing.config_digest(find_known_model(name).config)) for name in configs_to_trace()
    }
    assert {name for name, is_there in shipped.items() if not is_there} == set(NOT_SHIPPED)
    assert sum(shipped.values()) >= 85
    assert len(known_model_names()) >= 330
    assert SHIPPED.stat().st_size < 3 * 2**20


def test_a_plan_of_a_shipped_name_imports_no_torch(tmp_path):
    code = (
        "import sys, fitune; fitune.plan(model='EleutherAI/pythia-410m', gpu='rtx-4090', tuning='qlora'); "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=120)
    assert not list((tmp_path / "cache").rglob("*.json"))


def test_profiles_of_other_versions_plan_and_are_named(monkeypatch):
    """What trains or rehearses does not take them."""
    older = Libraries(torch="2.0.1", transformers="5.0.0")
    monkeypatch.setattr(tracing, "shipped_libraries", lambda: older)
    name = "EleutherAI/pythia-410m"
    recipe = parse_recipe({"model": name, "tuning": "qlora"})
    plan = find_plan(recipe, model=load_model_spec(name), hardware=gpu("rtx-4090"))
    assert any("traced with torch 2.0.1 and transformers 5.0.0" in line for line in plan.decisions)
    with by_installed_libraries(), pytest.raises(FituneError, match="not known here yet"):
        load_model_spec(name)
    with by_installed_libraries(), pytest.raises(FituneError, match="has not been traced"):
        find_plan(recipe, model=plan.chosen.plan.model, hardware=gpu("rtx-4090"))


def test_every_thread_of_a_program_asks_its_tracer():
    """A pool's threads begin with no context variable set: their plans said that no shapes were known."""
    trace_with(TransformersTracer)
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(current_tracer).result() is TransformersTracer
