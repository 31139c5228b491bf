"""Memory and time of tokenising many short rows, against ``datasets.map`` doing the same work on the same rows.

    python bench/tokenise_rows.py                                    # 100,000 rows
    python bench/tokenise_rows.py --rows 2000000 --json results/tokenise_rows.json

Each side is a process of its own: a file of questions and answers in, token ids and the mask of the answers on disk
out. The peer is ``load_dataset("json").map(apply_chat_template, batched=True, num_proc=<cores>)`` with
``return_assistant_tokens_mask``, which needs a template that marks the answers; fitune gets the same template. Both
must come to the same tokens. Seconds of the clock depend on what else the machine does; CPU seconds (user and system,
children included) much less, so both are given. Memory is that of the process and its children: resident, and the part
of it that is not a mapped file, which the system can drop at any time.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from fitune.units import text_table

TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- '<|assistant|>\\n' -}}{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- '<|user|>\\n' + message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}
"""
SEQ_LEN = 512
SIDES = ("fitune", "datasets")


def write_rows(file: Path, count: int) -> None:
    with file.open("w") as out:
        for i in range(count):
            question = f"What is {i} plus {i * 7}? Please explain it in a sentence or two."
            answer = (
                f"{i} plus {i * 7} is {i * 8}: add the ones, then the tens, and that is all there is to it."
            )
            out.write(json.dumps({"question": question, "answer": answer}) + "\n")


def write_tokenizer(folder: Path, rows: Path) -> None:
    """A byte-level BPE of 4,000 tokens."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    with rows.open() as lines:
        texts = [" ".join(json.loads(next(lines)).values()) for _ in range(5_000)]
    bpe = ByteLevelBPETokenizer()
    specials = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    bpe.train_from_iterator(texts, vocab_size=4_000, special_tokens=specials, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


def by_fitune(work: Path, tokenizer: Any) -> dict[str, int]:
    from fitune.cli.terminal import ReadingBar
    from fitune.data.preparing import prepare_data
    from fitune.values.plan import DataPlan, DataSource

    data = DataPlan(sources=(DataSource(path=str(work / "rows.jsonl")),), cache_dir=str(work / "fitune"))
    bar = ReadingBar()
    try:
        prepared = prepare_data(
            data, tokenizer=tokenizer, tokenizer_path="bench", seq_len=SEQ_LEN, seed=0, watch=bar.show
        )
    finally:
        bar.close()
    ledger = prepared.train_ledger
    ids, marks = prepared.train.row(len(prepared.train) - 1)
    return {
        "rows": ledger.rows_kept, "tokens": ledger.tokens_kept, "learned": ledger.tokens_supervised,
        "last_row": hash((*ids.tolist(), *marks.tolist())),
    }  # fmt: skip


def by_datasets(work: Path, tokenizer: Any) -> dict[str, int]:
    import datasets

    def encode(rows: dict[str, list[str]]) -> dict[str, Any]:
        pairs = zip(rows["question"], rows["answer"], strict=True)
        turns = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
        made = tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            truncation=True, max_length=SEQ_LEN,
        )  # fmt: skip
        ids = made["input_ids"]
        marks = made["assistant_masks"]
        return {
            "ids": ids, "marks": marks, "tokens": [len(row) for row in ids], "learned": [sum(row) for row in marks],
        }  # fmt: skip

    rows = datasets.load_dataset(
        "json", data_files=str(work / "rows.jsonl"), cache_dir=str(work / "datasets")
    )
    cores = len(os.sched_getaffinity(0))
    made = rows["train"].map(encode, batched=True, num_proc=cores, remove_columns=["question", "answer"])
    column = made.data.column
    last = made[len(made) - 1]
    return {
        "rows": len(made), "tokens": _sum(column("tokens")), "learned": _sum(column("learned")),
        "last_row": hash((*last["ids"], *map(bool, last["marks"]))),
    }  # fmt: skip


def _sum(column: Any) -> int:
    import pyarrow.compute

    return int(pyarrow.compute.sum(column).as_py())


def run_side(side: str, work: Path) -> dict[str, float]:
    """One side in a process of its own, watched from outside."""
    environment = os.environ | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    command = [sys.executable, __file__, "--side", side, "--work", str(work)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    resident = private = 0
    while process.poll() is None:
        sizes = [memory(each) for each in family(process.pid)]
        resident = max(resident, sum(rss for rss, _ in sizes))
        private = max(private, sum(rss - shared for rss, shared in sizes))
        time.sleep(0.25)
    seconds = time.perf_counter() - began
    if process.returncode or process.stdout is None:
        raise SystemExit(f"{side} ended with exit code {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(process.stdout.read().splitlines()[-1])
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        **found, "seconds": seconds, "cpu_seconds": cpu, "rows_per_second": found["rows"] / seconds,
        "resident_bytes": resident, "private_bytes": private,
    }  # fmt: skip


def family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def memory(process: psutil.Process) -> tuple[int, int]:
    """Resident bytes, and those of them that are mapped files or shared."""
    with suppress(psutil.Error):
        info = process.memory_info()
        return info.rss, info.shared
    return 0, 0


def print_table(results: dict[str, dict[str, float]]) -> None:
    rows = [
        [
            side, f"{r['rows']:,.0f}", f"{r['tokens']:,.0f}", f"{r['seconds']:.0f}", f"{r['cpu_seconds']:.0f}",
            f"{r['rows_per_second']:,.0f}", f"{r['resident_bytes'] / 2**20:,.0f}", f"{r['private_bytes'] / 2**20:,.0f}",
        ]
        for side, r in results.items()
    ]  # fmt: skip
    head = ["", "rows", "tokens", "seconds", "CPU s", "rows/s", "resident MiB", "private MiB"]
    print(text_table([head, *rows]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.work / "tokenizer")
        side = by_fitune if options.side == "fitune" else by_datasets
        print(json.dumps(side(options.work, tokenizer)))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_rows(work / "rows.jsonl", max(options.rows, 5_000))
        write_tokenizer(work / "tokenizer", work / "rows.jsonl")
        results = {side: run_side(side, work) for side in SIDES}
    ours, theirs = (results[side] for side in SIDES)
    same = all(ours[key] == theirs[key] for key in ("rows", "tokens", "learned", "last_row"))
    if not same:
        print(results)
        raise SystemExit("the two sides made other tokens")
    print_table(results)
    ratios = {
        key: ours[key] / theirs[key] for key in ("seconds", "cpu_seconds", "resident_bytes", "private_bytes")
    }
    print("fitune / datasets:", ", ".join(f"{key} {value:.2f}" for key, value in ratios.items()))
    if options.json:
        content = {
            "date": datetime.date.today().isoformat(), "processor": platform.machine(), "cores": os.cpu_count(),
            "versions": {
                name: version(name) for name in ("datasets", "tokenizers", "transformers", "pyarrow", "numpy")
            },
            "load_before": os.getloadavg(), "sides": results, "fitune_per_datasets": ratios,
        }  # fmt: skip
        options.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
