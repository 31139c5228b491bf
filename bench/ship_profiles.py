"""Trace the names of models.json that have no formula, and pack what plans of them need into the package.

    python bench/ship_profiles.py                 all of them; writes src/fitune/values/model/traced_profiles.zip
    python bench/ship_profiles.py pythia olmo2    traces those with such a part in their name, and writes nothing
    python bench/ship_profiles.py --kept          packs what the cache has, and traces nothing
    python bench/ship_profiles.py --table         prints how many names of models.json are planned in which way
    python bench/ship_profiles.py --names         prints for each of them how it is planned and whether it is trained

Each way of training takes 2 to 10 seconds of a core. What was traced is kept in fitune's cache, and what is in the
file already and of the installed versions is not traced again. For each config: full, LoRA and NF4 LoRA of rank 16 as
the search compares them on a card of compute capability 8.0 or newer, for one row and for several.
"""

import argparse
import gc
import json
import time
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

from fitune.errors import FituneError
from fitune.planner.candidates import Placement, Request, draft
from fitune.planner.methods import methods
from fitune.recipe.recipe import parse_recipe
from fitune.rehearse.profile import TransformersTracer
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.model.architectures import ADAPTED_IN_ATTENTION, EQUAL_TO_TRANSFORMERS
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.known_models import (
    configs_to_trace,
    find_known_model,
    known_model_names,
    names_with_formulas,
)
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.model_spec import ModelSpec
from fitune.values.model.tracer import by_installed_libraries, trace_with
from fitune.values.model.tracing import (
    LIBRARIES,
    NOT_SHIPPED,
    SHAPES,
    SHIPPED,
    config_digest,
    installed_libraries,
    is_shipped,
    profile_for,
    way_of,
)
from fitune.values.plan import Offload, Plan, Single, updates_in_backward
from fitune.values.serial import to_data

CARDS = ("rtx-4090",)
TUNINGS = ("full", "lora", "qlora")


def ways_of(model: ModelSpec) -> Iterator[tuple[Plan, BatchShape]]:
    """A plan and a micro-batch for each way of training that is shipped, each way once."""
    seen = set()
    for plan in _plans(model):
        for shape in _shapes(model):
            digest = way_of(plan, shape).digest
            if digest not in seen:
                seen.add(digest)
                yield plan, shape


def _plans(model: ModelSpec) -> Iterator[Plan]:
    on_device = Placement(sharding=Single(), offload=Offload())
    for card in CARDS:
        for tuning in TUNINGS:
            recipe = parse_recipe({"model": model.name, "tuning": tuning})
            request = Request.of(recipe, model, hardware_for(gpu=find_gpu(card)))
            for method in methods(request):
                if not updates_in_backward(method.tuning):
                    yield draft(request, method, on_device)


def _shapes(model: ModelSpec) -> Iterator[BatchShape]:
    """One row and two, where rows of one stream do not see each other; shorter and longer than a window."""
    lengths = (model.sliding_window, 2 * model.sliding_window) if model.sliding_window else (2048,)
    for length in lengths:
        for rows in (1, 2) if model.separates_rows else (1,):
            yield BatchShape(tokens=rows * length, supervised_tokens=rows * length, rows=rows)


def shipped_of(model: ModelSpec) -> dict[str, Any]:
    """Shapes and profiles of a model, traced or from the cache."""
    profiles = {
        way_of(plan, shape).digest: to_data(profile_for(plan, shape)) for plan, shape in ways_of(model)
    }
    return {SHAPES: to_data(model), **profiles}


def write(entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Pack the entries; the same entries are the same bytes."""
    libraries = to_data(installed_libraries().public)
    with zipfile.ZipFile(SHIPPED, "w") as archive:
        for name, value in {LIBRARIES: libraries, **dict(sorted(entries.items()))}.items():
            info = zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0))
            data = json.dumps(value, separators=(",", ":"), sort_keys=True)
            archive.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED, compresslevel=9)


def packed(parts: list[str]) -> dict[str, Mapping[str, Any]]:
    """Shapes and profiles of all configs with such a part in their name, by digest; prints a line for each."""
    entries: dict[str, Mapping[str, Any]] = {}
    for name in configs_to_trace():
        if parts and not any(part.lower() in name.lower() for part in parts):
            continue
        started = time.process_time()
        try:
            model = load_model_spec(name, offline=True)
            entries[model.config_digest] = found = shipped_of(model)
        except FituneError as error:
            print(f"{name:44} {error.message}", flush=True)
            continue
        print(f"{name:44} {len(found) - 1:2} ways {time.process_time() - started:6.1f} s", flush=True)
    return entries


def names() -> str:
    """Each config's first name, architecture, how it is planned and whether it may be trained."""
    formula = names_with_formulas()
    lines = ["| model | names | model_type | planned by | trained |", "|---|---:|---|---|---|"]
    together: dict[str, list[str]] = {}
    for name in known_model_names():
        together.setdefault(config_digest(find_known_model(name).config), []).append(name)
    for digest, (first, *others) in together.items():
        how = "formula" if first in formula else "shipped profile" if is_shipped(digest) else "neither"
        kind = find_known_model(first).config["model_type"]
        trained = "yes" if first in formula or kind in EQUAL_TO_TRANSFORMERS else "no"
        trained = "full, or adapters on attention" if kind in ADAPTED_IN_ATTENTION else trained
        lines.append(f"| {first} | {1 + len(others)} | {kind} | {how} | {trained} |")
    return "\n".join(lines)


def table() -> str:
    """How many names and configs are planned by formula, by a shipped profile, or by a trace at their first plan."""
    formula = names_with_formulas()
    names: dict[str, int] = dict.fromkeys(("formula", "shipped profile", "neither"), 0)
    configs: dict[str, set[str]] = {how: set() for how in names}
    for name in known_model_names():
        digest = config_digest(find_known_model(name).config)
        how = "formula" if name in formula else "shipped profile" if is_shipped(digest) else "neither"
        names[how] += 1
        configs[how].add(digest)
    lines = ["| planned by | names | configs |", "|---|---:|---:|"]
    lines += [f"| {how} | {count} | {len(configs[how])} |" for how, count in names.items()]
    lines += ["", *(f"{name}: {why}" for name, why in NOT_SHIPPED.items())]
    return "\n".join([*lines, f"{SHIPPED.name}: {SHIPPED.stat().st_size:,} bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--kept", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--names", action="store_true")
    asked = parser.parse_args()
    if asked.table or asked.names:
        print(table() if asked.table else names())
        return
    trace_with(None if asked.kept else TransformersTracer)
    gc.freeze()  # a quarter of the time would go into looking through what the libraries imported
    with by_installed_libraries():
        entries = packed(asked.parts)
    if not asked.parts:
        write(entries)
        print(f"{len(entries)} configs, {SHIPPED.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
