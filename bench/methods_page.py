"""A page of tables: what cpu_methods.py saw, as tables."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from fitune.units import format_bytes

_HEAD = """\
# Memory of every method: predicted | rehearsed | measured

Peak of tensors in one training step of a small Llama (6 blocks of width 128, four rows of 64 to 128 tokens) on a CPU,
where every live tensor can be counted. None of it is a figure of a GPU. Written on {date} by

    python bench/cpu_methods.py --json results/cpu_methods.json --page cpu_methods.md

with {versions}.

**{plans} plans. Worst error of the prediction {predicted:.2%}, of the rehearsal {rehearsed:.2%}** of what was measured.

A cell has the measured MiB, then how far off the prediction and the rehearsal are, in percent.
The columns are the precision, how many of the 6 blocks are recomputed, and the loss.
"""


def page(figures: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    head = _HEAD.format(
        date=figures["date"], versions=versions, plans=figures["plans"],
        predicted=figures["worst_abs_error_predicted"], rehearsed=figures["worst_abs_error_rehearsed"],
    )  # fmt: skip
    parts = [head, _methods(figures["rows"]), _worst(figures["rows"])]
    return "\n".join([*parts, _gradients(figures["lomo_gradients"]), _streamed(figures["streamed"])])


def _worst(rows: Sequence[Mapping[str, Any]]) -> str:
    """The largest misses by name: the page must not make anyone look for them."""
    worst = sorted(rows, key=lambda row: -max(map(abs, _errors(row))))[:3]
    named = (f"* {r['method']}, {r['setting']}: {_errors(r)[0]:+.2%} and {_errors(r)[1]:+.2%}" for r in worst)
    return "\n".join(["The three largest misses, of prediction and rehearsal:\n", *named, ""])


def _methods(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each method, a column for each setting."""
    settings = list(dict.fromkeys(str(row["setting"]) for row in rows))
    titles = [setting.replace(" recomputed", "").replace(" loss", "") for setting in settings]
    lines = [f"| method | {' | '.join(titles)} |", f"|---|{'---:|' * len(settings)}"]
    for method, its_rows in groupby(rows, key=lambda row: str(row["method"])):
        cells = {row["setting"]: _cell(row) for row in its_rows}
        lines.append(f"| {method} | {' | '.join(cells.get(setting, '–') for setting in settings)} |")
    return "\n".join([*lines, ""])


def _cell(row: Mapping[str, Any]) -> str:
    predicted, rehearsed = _errors(row)
    return f"{row['measured'] / 2**20:.1f}: {predicted * 100:+.2f}, {rehearsed * 100:+.2f}"


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
