"""The pictures of docs/memory-model.md: the bytes of a plan by phase, and those of its rehearsed step event by event.

    python bench/memory_pictures.py        writes docs/memory_by_phase.svg and docs/memory_of_a_step.svg

The plan is `fitune plan --model meta-llama/Llama-3.1-8B --gpu rtx-4090 --tuning lora`; the step runs on fake tensors.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from drawing import document, line, polygon, rectangle, text

from fitune.models.readers import model_config
from fitune.recipe.recipe import parse_recipe
from fitune.rehearse.step import trace_plan
from fitune.rehearse.trace import Allocated, Entered, Freed, Trace, kinds_of, rounded
from fitune.report.run_plots import fold_small_terms
from fitune.session.planning import plan_for
from fitune.units import GIB
from fitune.values.predictions import Estimate, Phase

DOCS = Path(__file__).parents[1] / "docs"
RECIPE = {"model": "meta-llama/Llama-3.1-8B", "gpu": "rtx-4090", "tuning": "lora"}
KINDS = ("weights", "optimizer", "gradients", "activations", "loss", "temporaries")
"""From the ones that stay to the ones that come and go; the batch is too small to see."""
LEFT, WIDTH, COLUMNS = 104, 640, 640

Moment = tuple[Phase, Counter[str]]


def main() -> None:
    chosen = plan_for(parse_recipe(RECIPE)).chosen
    (DOCS / "memory_by_phase.svg").write_text(by_phase(chosen.estimate), encoding="utf-8")
    trace, _ = trace_plan(chosen.plan, model_config(chosen.plan.model_path), exact=False)
    (DOCS / "memory_of_a_step.svg").write_text(of_a_step(trace), encoding="utf-8")


def by_phase(estimate: Estimate) -> str:
    """A bar for each phase, stacked by term; the dashed line is the memory that may be used."""
    phases = fold_small_terms(estimate.memory.phases)
    colours = _colours(list(dict.fromkeys(name for terms in phases.values() for name in terms)))
    scale = WIDTH / estimate.usable_bytes
    elements = [text(12, 26, "Llama-3.1-8B, LoRA, one RTX 4090: estimated bytes by phase", style="large")]
    for place, (phase, terms) in enumerate(phases.items()):
        y, x = 46 + 40 * place, float(LEFT)
        total = sum(terms.values())
        elements.append(text(LEFT - 8, y + 18, f"{phase.value} {total / GIB:.2f}", style="end"))
        for name, size in terms.items():
            elements.append(rectangle(x, y, size * scale, 26, fill=colours[name]))
            x += size * scale
    bottom = 46 + 40 * len(phases)
    elements.append(line(LEFT + WIDTH, 40, LEFT + WIDTH, bottom, stroke="bad", dashed=True))
    limit = f"usable {estimate.usable_bytes / GIB:.2f} GiB"
    elements.append(text(LEFT + WIDTH, bottom + 14, limit, fill="bad", style="small end"))
    elements += _legend(colours, y=bottom + 36)
    return document(elements, width=LEFT + WIDTH + 20, height=bottom + 84, label="Estimated bytes by phase")


def of_a_step(trace: Trace) -> str:
    """What is alive, stacked by kind, over the allocations and frees of the step's last micro-batch."""
    moments = list(_moments(trace))
    columns = _columns(moments[_last_micro_batch(moments) :])
    colours = _colours(list(KINDS))
    bottom, height = 270.0, 224.0
    largest = max(sum(alive[kind] for kind in KINDS) for _, alive in columns)
    scale, step = height / largest, WIDTH / len(columns)
    elements = [
        text(12, 26, "The last micro-batch of that plan's step, rehearsed: what is alive", style="large")
    ]
    below = [0] * len(columns)
    for kind in KINDS:
        above = [under + alive[kind] for under, (_, alive) in zip(below, columns, strict=True)]
        edge = [(LEFT + place * step, bottom - size * scale) for place, size in enumerate(above)]
        back = [(LEFT + place * step, bottom - size * scale) for place, size in enumerate(below)]
        elements.append(polygon([*edge, *reversed(back)], fill=colours[kind]))
        below = above
    for gib in range(0, int(largest / GIB) + 1, 5):
        y = bottom - gib * GIB * scale
        elements += [
            line(LEFT - 4, y, LEFT, y),
            text(LEFT - 8, y + 4, f"{gib} GiB", fill="muted", style="small end"),
        ]
    elements += _phase_marks([phase for phase, _ in columns], step=step, bottom=bottom)
    elements += _legend(colours, y=bottom + 58)
    return document(
        elements, width=LEFT + WIDTH + 20, height=bottom + 92 + 14, label="Bytes alive in a rehearsed step"
    )


def _moments(trace: Trace) -> Iterator[Moment]:
    """After every allocation and free: the phase, and the bytes alive by kind."""
    kinds = kinds_of(trace)
    sizes = {storage: rounded(size, on_cuda=True) for storage, (_, size) in trace.resident.items()}
    alive: Counter[str] = Counter()
    for storage, size in sizes.items():
        alive[kinds[storage]] += size
    phase = Phase.IDLE
    for event in trace.events:
        match event:
            case Entered(phase=phase):
                continue
            case Allocated(storage=storage, size=asked):
                sizes[storage] = rounded(asked, on_cuda=True)
                alive[kinds[storage]] += sizes[storage]
            case Freed(storage=storage):
                alive[kinds[storage]] -= sizes.pop(storage)
            case _:
                continue
        yield phase, alive.copy()


def _last_micro_batch(moments: list[Moment]) -> int:
    """Where the last forward pass begins."""
    phases = [phase for phase, _ in moments]
    return max(
        place
        for place, phase in enumerate(phases)
        if phase is Phase.FORWARD and phases[place - 1] is not phase
    )


def _columns(moments: list[Moment]) -> list[Moment]:
    """One a pixel: the moment of its stretch with most alive."""
    size = -(-len(moments) // COLUMNS)
    stretches = [moments[start : start + size] for start in range(0, len(moments), size)]
    return [max(stretch, key=lambda moment: moment[1].total()) for stretch in stretches]


def _phase_marks(phases: list[Phase], *, step: float, bottom: float) -> Iterator[str]:
    for phase in dict.fromkeys(phases):
        start = LEFT + phases.index(phase) * step
        end = LEFT + (len(phases) - phases[::-1].index(phase)) * step
        yield line(start, bottom, start, bottom + 6)
        y = bottom + (18 if end - start > 40 else 32)  # a short phase is named a line below
        yield text((start + end) / 2, y, phase.value, fill="muted", style="small middle")


def _colours(names: list[str]) -> dict[str, str]:
    return {name: f"series-{number}" for number, name in enumerate(names, start=1)}


def _legend(colours: dict[str, str], *, y: float) -> Iterator[str]:
    for place, (name, colour) in enumerate(colours.items()):
        x, row = LEFT + place % 4 * 160, y + place // 4 * 20
        yield rectangle(x, row - 10, 12, 12, fill=colour, radius=2)
        yield text(x + 18, row, name, fill="muted", style="small")


if __name__ == "__main__":
    main()
