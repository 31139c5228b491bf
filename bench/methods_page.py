"""docs/measured-memory.md: what cpu_methods.py saw, as tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from fitune.units import format_bytes

_HEAD = """\
# Memory of every method: predicted | rehearsed | measured

Peak of tensors of one training step of a small Llama (6 blocks of width 128, four rows of 64 to 128 tokens) on a CPU,
where every tensor storage alive can be counted. None of it is a figure of a GPU. Written on {date} by

    python bench/cpu_methods.py --json results/cpu_methods.json --page docs/measured-memory.md

with {versions}.

**{plans} plans. Worst error of the prediction {predicted:.2%}, of the rehearsal {rehearsed:.2%}** of what was measured.
"""
_TABLE = """\
| setting | predicted | rehearsed | measured | prediction off | rehearsal off |
|---|---:|---:|---:|---:|---:|
"""


def page(figures: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    head = _HEAD.format(
        date=figures["date"], versions=versions, plans=figures["plans"],
        predicted=figures["worst_abs_error_predicted"], rehearsed=figures["worst_abs_error_rehearsed"],
    )  # fmt: skip
    tables = groupby(figures["rows"], key=lambda row: str(row["method"]))
    parts = [head, _worst(figures["rows"]), *(_method(name, list(rows)) for name, rows in tables)]
    return "\n".join([*parts, _gradients(figures["lomo_gradients"]), _streamed(figures["streamed"])])


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest misses by name: the page must not make anyone look for them."""
    worst = sorted(rows, key=lambda row: -max(map(abs, _errors(row))))[:3]
    named = (f"* {r['method']}, {r['setting']}: {_errors(r)[0]:+.2%} and {_errors(r)[1]:+.2%}" for r in worst)
    return "\n".join(["The three largest misses, of prediction and rehearsal:\n", *named, ""])


def _method(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    lines = (
        f"| {row['setting']} | {_sizes(row['predicted'], row['rehearsed'], row['measured'])} "
        f"| {_errors(row)[0]:+.2%} | {_errors(row)[1]:+.2%} |\n"
        for row in rows
    )
    return f"## {name}\n\n{_TABLE}{''.join(lines)}"


def _errors(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["predicted"] / row["measured"] - 1, row["rehearsed"] / row["measured"] - 1


def _gradients(rows: Iterable[Mapping[str, Any]]) -> str:
    keys = ("gradients_bytes", "largest_parameter_bytes", "weights_bytes")
    lines = (f"| {row['method']} | {_sizes(*(row[key] for key in keys))} |\n" for row in rows)
    return (
        "## Gradients alive together\n\nbf16, all blocks recomputed. LOMO holds at most the largest parameter's.\n\n"
        f"| | gradients, most | largest parameter | all weights |\n|---|---:|---:|---:|\n{''.join(lines)}"
    )


def _streamed(rows: Iterable[Mapping[str, Any]]) -> str:
    lines = (
        f"| {row['method']} | {_sizes(row['weights_bytes'], row['device_peak_bytes'])} | {row['times']:.1f} |\n"
        for row in rows
    )
    return (
        "## A model of more than four times its device\n\nThe same with 32 blocks, all recomputed, bf16, two rows of "
        "eight tokens. The peak is of everything on the device: weights, adapters, gradients, activations.\n\n"
        f"| | weights of the model | peak on the device | times |\n|---|---:|---:|---:|\n{''.join(lines)}"
    )


def _sizes(*sizes: int) -> str:
    return " | ".join(format_bytes(size) for size in sizes)
