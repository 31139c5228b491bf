"""Predicted, rehearsed and measured peak of live tensors for every single-device method, on the CPU.

    python bench/cpu_methods.py                        every method by its settings
    python bench/cpu_methods.py --methods QLoRA LOMO   those whose name has one of these words; with --json the others
                                                       stay as they were seen the same day
    python bench/cpu_methods.py --json results/cpu_methods.json --page cpu_methods.md

The same small Llama, rows and meter as in cpu_memory.py. Measured is a real step, rehearsed the same step on fake
tensors, predicted is arithmetic on the shapes. Then two promises in figures (methods_promises.py): what LOMO holds of
gradients, and models whose weights are four times what the device ever holds.
"""

import argparse
import importlib.metadata
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from cpu_memory import (
    CONFIG,
    ROW_LENGTHS,
    RowStream,
    measured_peaks,
    predicted_peaks,
    random_rows,
    small_model,
)
from methods_grid import METHODS, Case, cases
from methods_promises import gradients_of_lomo, streamed_models
from transformers import LlamaConfig

from fitune.rehearse.step import record_step
from fitune.rehearse.trace import peaks_by_kind
from fitune.units import format_bytes
from fitune.values.plan import Plan

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "hqq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Peaks of one plan, bytes."""

    method: str
    setting: str
    predicted: int
    rehearsed: int
    measured: int

    @property
    def errors(self) -> tuple[float, float]:
        """Of the prediction and of the rehearsal, as shares of what was measured."""
        return self.predicted / self.measured - 1, self.rehearsed / self.measured - 1

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors))


def look_at(case: Case, rows: RowStream) -> Found:
    return Found(
        method=case.method,
        setting=case.words,
        predicted=max(predicted_peaks(case.plan, rows).values()),
        rehearsed=rehearsed_peak(case.plan, rows),
        measured=max(measured_peaks(case.plan, rows).values()),
    )


def rehearsed_peak(plan: Plan, rows: RowStream) -> int:
    config = LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    trace = record_step(plan, config, rows=rows.sequence_lengths, labels=rows.supervised_tokens)
    return max(sum(kinds.values()) for kinds in peaks_by_kind(trace, on_cuda=False).values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tolerance", type=float, default=0.03, help="largest |error| that is not a failure")
    parser.add_argument("--methods", nargs="+", default=[""], help="words of the methods' names")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--page", type=Path, help="write them as a page of Markdown here")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = small_model()
    rows = random_rows(ROW_LENGTHS, vocab_size=model.vocab_size)
    found = []
    for case in cases(model):
        if any(word in case.method for word in options.methods):
            found.append(look_at(case, rows))
            print(line_of(found[-1]), flush=True)
    worst = max(one.worst for one in found)
    print(f"{len(found)} plans: worst |error| {worst:.2%}, tolerance {options.tolerance:.0%}\n")
    figures = record(found, earlier=options.json)
    print(*figures["lomo_gradients"], *figures["streamed"], sep="\n")
    write(options, figures)
    return 0 if worst <= options.tolerance else 1


def line_of(found: Found) -> str:
    sizes = "".join(f" {format_bytes(n):>11}" for n in (found.predicted, found.rehearsed, found.measured))
    off = found.errors
    return f"{found.method:40} {found.setting:44}{sizes} {off[0]:>+8.2%} {off[1]:>+7.2%}"


def record(found: Sequence[Found], *, earlier: Path | None) -> dict[str, Any]:
    """Everything that was seen, as results/ keeps it; methods that were not run now as they were seen ``earlier``."""
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    found = [*found, *_others(earlier, versions, but={one.method for one in found})]
    found.sort(key=lambda one: list(METHODS).index(one.method))
    return {
        "benchmark": "bench/cpu_methods.py",
        "date": date.today().isoformat(),
        "versions": versions,
        "plans": len(found),
        "worst_abs_error_predicted": max(abs(one.errors[0]) for one in found),
        "worst_abs_error_rehearsed": max(abs(one.errors[1]) for one in found),
        "rows": [asdict(one) for one in found],
        "lomo_gradients": gradients_of_lomo(),
        "streamed": streamed_models(),
    }


def _others(earlier: Path | None, versions: dict[str, str], *, but: set[str]) -> list[Found]:
    """Rows of a file of the same day and libraries: figures of others do not go into one table."""
    if earlier is None or not earlier.is_file():
        return []
    content = json.loads(earlier.read_text(encoding="utf-8"))
    if content["versions"] != versions or content["date"] != date.today().isoformat():
        return []
    rows = [Found(**row) for row in content["rows"] if row["method"] in METHODS]
    return [row for row in rows if row.method not in but]


def write(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if options.page is not None:
        from methods_page import page

        options.page.write_text(page(figures), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
