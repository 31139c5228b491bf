"""Memory of tokenising rows that are read from a store: it must not grow with their number.

    python bench/rows_from_s3.py                                     # 10,000 to 1,000,000 rows
    python bench/rows_from_s3.py --rows 10000 --json results/rows_from_s3.json

A local S3 server (moto's, a process of its own) holds the rows as four shards of .jsonl.zst. fitune reads them as a
stream, tokenises them and writes ids and marks to disk. Memory is that of its process and its children: resident, and
the private part of it, which is no mapped file.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenise_rows import SEQ_LEN, family, memory, write_rows, write_tokenizer

from fitune.units import text_table

SHARDS = 4
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


@contextmanager
def s3_server(*, niceness: int = 0) -> Iterator[str]:
    """The address of a server that runs inside the block. ``niceness`` 19: it takes only cores that nobody else
    wants, as if it were on another machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.setpriority(os.PRIO_PROCESS, process.pid, niceness)
    try:
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def put_rows(folder: str, file: Path, count: int) -> int:
    """Bytes of the shards that hold the rows of ``file``."""
    import pyarrow
    import s3fs

    store = s3fs.S3FileSystem()
    store.makedirs(folder, exist_ok=True)
    size = 0
    with file.open("rb") as lines:
        for shard in range(SHARDS):
            rows = b"".join(next(lines) for _ in range(shard, count, SHARDS))
            packed = pyarrow.compress(rows, codec="zstd", asbytes=True)
            store.pipe_file(f"{folder}/part-{shard}.jsonl.zst", packed)
            size += len(packed)
    return size


def prepare(url: str, work: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from fitune.data.preparing import prepare_data
    from fitune.values.plan import DataPlan, DataSource

    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    data = DataPlan(sources=(DataSource(path=url),), cache_dir=str(work / "cache"))
    prepared = prepare_data(data, tokenizer=tokenizer, tokenizer_path="bench", seq_len=SEQ_LEN, seed=0)
    print(json.dumps({"rows": prepared.train_ledger.rows_kept, "tokens": prepared.train_ledger.tokens_kept}))


def measured(url: str, work: Path) -> dict[str, float]:
    """Rows, tokens, seconds and peak memory of one preparation, watched from outside."""
    began = time.perf_counter()
    command = [sys.executable, __file__, "--url", url, "--work", str(work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    resident = private = 0
    while process.poll() is None:
        sizes = [memory(each) for each in family(process.pid)]
        resident = max(resident, sum(rss for rss, _ in sizes))
        private = max(private, sum(rss - shared for rss, shared in sizes))
        time.sleep(0.1)
    if process.returncode or process.stdout is None:
        raise SystemExit(f"{url} ended with exit code {process.returncode}")
    found = json.loads(process.stdout.read().splitlines()[-1])
    seconds = time.perf_counter() - began
    return {**found, "seconds": seconds, "resident_bytes": resident, "private_bytes": private}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.url:
        prepare(options.url, options.work)
        return
    results = []
    with s3_server() as address, tempfile.TemporaryDirectory() as folder:
        os.environ.update(ENVIRONMENT, AWS_ENDPOINT_URL=address)
        work = Path(folder)
        for count in options.rows:
            write_rows(work / "rows.jsonl", max(count, 5_000))
            if not (work / "tokenizer").exists():
                write_tokenizer(work / "tokenizer", work / "rows.jsonl")
            packed = put_rows(f"bench/rows-{count}", work / "rows.jsonl", count)
            results.append({**measured(f"s3://bench/rows-{count}", work), "packed_bytes": packed})
    head = ["rows", "tokens", "in the store", "seconds", "resident MiB", "private MiB"]
    lines = [
        [
            f"{r['rows']:,.0f}", f"{r['tokens']:,.0f}", f"{r['packed_bytes'] / 2**20:,.1f} MiB", f"{r['seconds']:.0f}",
            f"{r['resident_bytes'] / 2**20:,.0f}", f"{r['private_bytes'] / 2**20:,.0f}",
        ]
        for r in results
    ]  # fmt: skip
    print(text_table([head, *lines]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
