"""Does reading weights with several threads, or telling the system which files come next, make loading faster?

    python bench/weight_loading.py
    python bench/weight_loading.py --layers 16 --json results/weight_loading_cpu.json

A random Llama in bf16, in files of 256 MB, is loaded by ``fitune.models.weights.load_model`` in three ways, in turn
and in the same run: one tensor after another; with transformers' four reading threads (which it uses for dense models
alone); one after another after ``posix_fadvise(WILLNEED)`` on every file. Cold: the system's copies of the files are
dropped before (``DONTNEED``). The least of the repeats counts.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fitune.models.weights import load_model
from fitune.units import text_table
from fitune.values.plan import Dense, Nf4

CASES = {
    "dense, as stored": (torch.bfloat16, Dense()),
    "dense, cast to fp32": (torch.float32, Dense()),
    "packed to NF4": (torch.bfloat16, Nf4()),
}
ALONE, THREADS, ANNOUNCED = "one after another", "four threads", "announced"
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"


def write_model(folder: Path, *, layers: int) -> int:
    """Bytes of the files."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=32000, dtype="bfloat16",
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="256MB")
    os.sync()
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def advise(folder: Path, advice: int) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, advice)
        finally:
            os.close(handle)


@contextmanager
def reading(way: str, folder: Path) -> Iterator[None]:
    if way != THREADS:
        os.environ[_ONE_BY_ONE] = "1"
    try:
        if way == ANNOUNCED:
            advise(folder, os.POSIX_FADV_WILLNEED)
        yield
    finally:
        os.environ.pop(_ONE_BY_ONE, None)


def seconds(folder: Path, case: str, way: str, *, cold: bool) -> float:
    """From the first byte to a model whose every weight was touched: mapped files are read when they are used."""
    dtype, base = CASES[case]
    if cold:
        advise(folder, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter()
    with reading(way, folder):
        model = load_model(str(folder), dtype=dtype, device=torch.device("cpu"), base=base)
        for parameter in model.parameters():
            parameter.data.view(-1)[:: 4096 // parameter.element_size()].sum()
    return time.perf_counter() - started


def measure(folder: Path, *, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        for cold in (True, False):
            ways = [ALONE, THREADS, ANNOUNCED] if case != "packed to NF4" else [ALONE, ANNOUNCED]
            found: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(repeats):
                for way in ways:
                    found[way].append(seconds(folder, case, way, cold=cold))
            least = {way: min(times) for way, times in found.items()}
            ratios = {way: least[ALONE] / least[way] for way in ways[1:]}
            rows.append(
                {"case": case, "files": "cold" if cold else "warm", "seconds": least, "speedup": ratios}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        size = write_model(Path(place), layers=words.layers)
        rows = measure(Path(place), repeats=words.repeats)
    head = ("", "files", f"{ALONE}, s", f"{THREADS}, s", "ratio", f"{ANNOUNCED}, s", "ratio")
    print(text_table([head, *map(_cells, rows)]))
    if words.json:
        facts = {
            "date": datetime.date.today().isoformat(), "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(), "threads": torch.get_num_threads(), "file_bytes": size, "rows": rows,
        }  # fmt: skip
        words.json.write_text(json.dumps(facts, indent=2) + "\n")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    taken, ratios = row["seconds"], row["speedup"]
    others = [
        text
        for way in (THREADS, ANNOUNCED)
        for text in ((f"{taken[way]:.2f}", f"{ratios[way]:.2f}") if way in ratios else ("–", "–"))
    ]
    return row["case"], row["files"], f"{taken[ALONE]:.2f}", *others


if __name__ == "__main__":
    main()
