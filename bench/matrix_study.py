"""What the optimisation matrix says about one study's findings; every word of ours is computed from the cells.

    python bench/matrix_study.py        prints each finding and ours; draws docs/matrix_8x_v100.svg

The study: "A Study of Optimizations for Fine-tuning Large Language Models" (arXiv 2406.02290), on 8 V100 of 32 GB,
Falcon-180B on 16.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from fitune.estimate.memory import memory_of
from fitune.planner.candidates import Request
from fitune.planner.defaults import with_host_memory
from fitune.planner.fit import tokens_per_second
from fitune.planner.matrix import Cell, Matrix, compared, matrix, method_words, short_name
from fitune.planner.method_search import MethodSearch
from fitune.recipe.recipe import Recipe, parse_recipe
from fitune.units import format_percent, wrapped
from fitune.values.counts import count_parameters
from fitune.values.machines.gpus import find_gpu, hardware_for
from fitune.values.model.model_config import load_model_spec
from fitune.values.model.model_spec import ModelSpec
from fitune.values.words import method_name

MODELS = ("llama-2-7b", "llama-2-13b", "llama-2-70b")
LENGTHS = (256, 512, 1024, 2048, 4096)
PICTURE = Path(__file__).parents[1] / "docs" / "matrix_8x_v100.svg"

_SEVEN_BILLION = 6_500_000_000
_STUDY_OPENED = (range(12_000_000_000, 15_000_000_000), range(65_000_000_000, 75_000_000_000))
"""Parameters of what the study calls 13B and 70B."""
_STUDY_DEVICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """``verdict``: ``agrees``, ``differs``, each for some methods, or ``beside it`` where no such word would do."""

    study: str
    ours: str
    verdict: str


def findings(recipe: Recipe, matrix: Matrix) -> tuple[Finding, ...]:
    """Of the study's findings those that this matrix has something to say about."""
    if matrix.hardware.num_gpus == 1 or not matrix.methods:
        return ()
    found = (
        _data_parallelism_alone(matrix),
        _higher_stages(matrix),
        _what_recompute_opens(matrix),
        _balanced_default(recipe, matrix),
        _seventy_billion(recipe, matrix),
    )
    return tuple(finding for finding in found if finding is not None)


def _data_parallelism_alone(matrix: Matrix) -> Finding | None:
    """DDP: every device holds everything."""
    large = [model for model in matrix.models if count_parameters(model).total >= _SEVEN_BILLION]
    methods = [method for method in ("full", "lora") if method in matrix.methods]
    if "DDP" not in matrix.shardings or not methods or not large:
        return None
    reach = {
        method: {
            model: longest
            for model in large
            if (longest := _longest(matrix, model, method=method, sharding="DDP", offload=False))
        }
        for method in methods
    }
    words = [f"{method_words(method)}: {_reach_words(found)}" for method, found in reach.items()]
    return Finding(
        study="without quantisation data parallelism alone is not enough from 7B on",
        ours=f"with DDP alone {'; '.join(words)}",
        verdict=_verdict_by_method({method: not found for method, found in reach.items()}),
    )


def _reach_words(found: dict[ModelSpec, int]) -> str:
    words = [
        f"{short_name(model)} to {longest} tokens ({2 * count_parameters(model).total / 1e9:.1f} GB of weights)"
        for model, longest in found.items()
    ]
    return ", ".join(words) or "no model"


def _verdict_by_method(agrees: dict[str, bool]) -> str:
    if len(set(agrees.values())) == 1:
        return "agrees" if all(agrees.values()) else "differs"
    return ", ".join(
        f"{'agrees' if yes else 'differs'} for {method_words(method)}" for method, yes in agrees.items()
    )


def _higher_stages(matrix: Matrix) -> Finding | None:
    """The lowest stage that fits by itself must not fall towards longer rows or larger models."""
    stages = matrix.shardings
    methods = [method for method in ("full", "lora") if method in matrix.methods]
    if len(stages) < 2 or not methods:
        return None
    models = sorted(matrix.models, key=lambda model: count_parameters(model).total)
    words, rising = [], True
    for method in methods:
        table = [[_lowest(cell, method, stages) for cell in matrix.row(model)] for model in models]
        rising &= all(
            first <= second
            for line in (*table, *zip(*table, strict=True))
            for first, second in pairwise(line)
        )
        rows = [
            f"{short_name(model)} {_ranges(matrix, row)}" for model, row in zip(models, table, strict=True)
        ]
        words.append(f"{method_words(method)}: {', '.join(rows)}")
    return Finding(
        study="higher ZeRO stages towards longer context and larger models",
        ours=f"lowest stage that fits, nothing recomputed or offloaded: {'; '.join(words)}",
        verdict="agrees" if rising else "differs",
    )


def _lowest(cell: Cell, method: str, stages: Sequence[str]) -> int:
    """Its place among the stages; their number where none fits or the model takes no rows of that length."""
    for place, stage in enumerate(stages):
        if cell.needs(method, stage) == ():
            return place
    return len(stages)


def _ranges(matrix: Matrix, places: Sequence[int]) -> str:
    """``DDP to 2048, ZeRO-3 to 4096``; what comes after fits with none."""
    words = []
    for place, cells in groupby(zip(places, matrix.seq_lens, strict=True), key=lambda item: item[0]):
        if place < len(matrix.shardings):
            words.append(f"{matrix.shardings[place]} to {max(length for _, length in cells)}")
    return ", ".join(words) or "none"


def _what_recompute_opens(matrix: Matrix) -> Finding | None:
    """At the lowest stage that takes the model's longest rows once blocks are recomputed."""
    if "lora" not in matrix.methods:
        return None
    words, meant = [], []
    for model in matrix.models:
        reach = {
            sharding: _longest(matrix, model, method="lora", sharding=sharding, offload=False)
            for sharding in matrix.shardings
        }
        stage = max(reach, key=lambda sharding: reach[sharding])
        before = _longest(matrix, model, method="lora", sharding=stage, recompute=False, offload=False)
        gain = f"by {stage} from {before or 'none'} to {reach[stage]} tokens" if reach[stage] else "none"
        words.append(f"{short_name(model)} {gain}")
        if any(count_parameters(model).total in size for size in _STUDY_OPENED):
            meant.append(reach[stage] > before)
    return Finding(
        study="recomputing is what opens 512 to 4096 tokens for 13B and 70B",
        ours=f"longest rows with LoRA, without recomputing and with it: {', '.join(words)}",
        verdict="beside it" if not meant else "agrees" if all(meant) else "differs",
    )


def _longest(matrix: Matrix, model: ModelSpec, **wanted: str | bool) -> int:
    """0 when no length fits."""
    return max((cell.seq_len for cell in matrix.row(model) if _some_fits(cell, **wanted)), default=0)


def _some_fits(cell: Cell, **wanted: str | bool) -> bool:
    """True if a setting of the cell with these facts fits."""
    fitting = (setting for setting in cell.settings if setting.fits)
    return any(all(getattr(one, name) == value for name, value in wanted.items()) for one in fitting)


def _balanced_default(recipe: Recipe, matrix: Matrix) -> Finding | None:
    """ZeRO-2 + LoRA against the fastest LoRA of the cell, nothing offloaded on either side."""
    if "lora" not in matrix.methods or "ZeRO-2" not in matrix.shardings:
        return None
    fitting = [
        cell for cell in matrix.cells if _some_fits(cell, method="lora", sharding="ZeRO-2", offload=False)
    ]
    shares = [share for cell in fitting if (share := share_of_fastest(recipe, cell, matrix))]
    ours = f"ZeRO-2 + LoRA fits in {len(fitting)} of {len(matrix.cells)} cells with nothing offloaded"
    if shares:
        ours += f", with {format_percent(min(shares))} to {format_percent(max(shares))} of the fastest LoRA's speed"
    return Finding(
        study="ZeRO-2 + LoRA is the default that balances memory and time", ours=ours, verdict="beside it"
    )


def _seventy_billion(recipe: Recipe, matrix: Matrix) -> Finding | None:
    """ZeRO-3 + LoRA of a 70B model at its smallest, beside its share of the 16-bit weights alone."""
    found = [model for model in matrix.models if count_parameters(model).total in _STUDY_OPENED[1]]
    devices = matrix.hardware.num_gpus
    if (
        "lora" not in matrix.methods
        or "ZeRO-3" not in matrix.shardings
        or devices != _STUDY_DEVICES
        or not found
    ):
        return None
    model, count = found[0], count_parameters(found[0]).total
    kept = _peaks(recipe, matrix, model, offload="device")
    waiting = _peaks(recipe, matrix, model, offload="cpu")
    return Finding(
        study="70B takes about 15.5 GB of each 32 with ZeRO-3 + LoRA",
        ours=(
            f"the 16-bit weights of {short_name(model)} alone are {count:,} × 2 / {devices} = "
            f"{2 * count / devices / 1e9:.1f} GB a device; with ZeRO-3 + LoRA at its smallest a device takes {kept}; "
            f"with the weights on the host {waiting}"
        ),
        verdict="beside it",
    )


def _peaks(recipe: Recipe, matrix: Matrix, model: ModelSpec, *, offload: str) -> str:
    """``21.5 GB at 256, 29.0 GB at 4096 tokens``: the first and the last length."""
    cells = [cell for cell in matrix.row(model) if cell.settings]
    sizes = [
        f"{size / 1e9:.1f} GB at {cell.seq_len}"
        for cell in (cells[:1] if len(cells) == 1 else [cells[0], cells[-1]])
        if (size := least_bytes(recipe, cell, matrix, zero=3, offload_parameters=offload)) is not None
    ]
    return f"{', '.join(sizes)} tokens" if sizes else "nothing: a pin forbids it"


def explain_findings(found: Sequence[Finding]) -> str:
    """The study's word, then ours."""
    lines = []
    for finding in found:
        lines.append(wrapped(f"the study: {finding.study}", hanging=2))
        lines.append(wrapped(f"{finding.verdict}: {finding.ours}", indent=4, hanging=2))
    return "\n".join(lines)


def share_of_fastest(recipe: Recipe, cell: Cell, matrix: Matrix) -> float | None:
    """Speed of ZeRO-2 + LoRA as a share of the fastest LoRA's, both with all states on the devices."""
    on_device = {"offload_parameters": "device", "offload_optimizer": "device"}
    two = _best_speed(recipe, cell, matrix, zero=2, **on_device)
    fastest = _best_speed(recipe, cell, matrix, **on_device)
    return two / fastest if two and fastest else None


def _best_speed(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> float:
    """Tokens per second; 0 when nothing fits."""
    found = (step for one in _lora(recipe, cell, matrix, **pins) for step in one.fastest())
    return max(map(tokens_per_second, found), default=0.0)


def least_bytes(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> int | None:
    """The smallest peak of a device, whether it fits or not; None when the pins leave no way."""
    steps = [step for one in _lora(recipe, cell, matrix, **pins) if (step := one.smallest()) is not None]
    return min((memory_of(step).peak_bytes for step in steps), default=None)


def _lora(recipe: Recipe, cell: Cell, matrix: Matrix, **pins: object) -> Iterator[MethodSearch]:
    """Searches of LoRA on a 16-bit base with activations on the device and other pins than the cell's own."""
    wanted = {"model": cell.model.name, "seq_len": cell.seq_len, "offload_activations": "device", **pins}
    request = Request(recipe=recipe.model_copy(update=wanted), model=cell.model, hardware=matrix.hardware)
    for method in compared(request):
        if method_name(method.tuning) == "lora":
            yield MethodSearch(request, method)


def main() -> None:
    recipe = parse_recipe({"model": MODELS[0]})
    hardware = with_host_memory(hardware_for(gpu=find_gpu("v100-32gb"), gpus=8))
    models = [load_model_spec(name) for name in MODELS]
    print(
        explain_findings(findings(recipe, matrix(recipe, models=models, seq_lens=LENGTHS, hardware=hardware)))
    )
    words = ["matrix", "--gpu", "v100-32gb", "--gpus", "8", "--models", ",".join(MODELS)]
    words += ["--context", ",".join(map(str, LENGTHS)), "--picture", str(PICTURE)]
    subprocess.run([sys.executable, "-m", "fitune", *words], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
