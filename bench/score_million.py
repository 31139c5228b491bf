"""Memory and rows/s of ``fitune score`` from a thousand rows to a million, start to finish, as a user starts it.

    python bench/score_million.py --json results/score_million.json --picture results/score_million.svg

The log-likelihood of short references under a tiny Llama, so that reading, ids, shards, grades, statistics and pages
are most of the work. Of the largest number of rows also: a start in the same folder after the data grew by one row in
a hundred, and a comparison with a copy whose grades were lowered by 0 to 0.6 nats in turn (the copy is written by this
script, not by a model). Resident memory is that of the process, and of it with the processes it started, every half
second.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

import psutil
from drawing import document, line, text

from fitune.demo.files import Shape, training_exercises, write_base_model

SHAPE = Shape(
    vocab_size=384, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
    max_position_embeddings=192,
)  # fmt: skip
BATCH, SHARD_ROWS = 64, 16 * 64
POINTS = 200
"""Samples of a run that the JSON keeps."""
MIB = 2**20


@dataclass(slots=True)
class Sample:
    seconds: float
    mib: float
    """Of the process."""
    all_mib: float
    """With its children."""
    rows: int
    """In shards on the disk."""
    stage: str


@dataclass(slots=True)
class Run:
    """One start of the command."""

    what: str
    rows: int
    seconds: float = 0.0
    processor_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    @property
    def peak(self) -> float:
        return max(sample.mib for sample in self.samples)

    @property
    def rate(self) -> float:
        """Rows in a second while shards are written."""
        weighing = [sample for sample in self.samples if sample.stage == "rows"]
        if len(weighing) < 2:
            return 0.0
        return (weighing[-1].rows - weighing[0].rows) / (weighing[-1].seconds - weighing[0].seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 30_000, 1_000_000])
    parser.add_argument("--work", type=Path, help="a folder for data and outputs; else a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=wanted.work) as place:
        work = Path(place)
        os.environ |= {"FITUNE_CACHE": str(work / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        exercises = training_exercises(2_000, seed=0)
        write_base_model(work / "model", [row["prompt"] for row in exercises[:200]], shape=SHAPE, seed=0)
        words = sorted({word for row in exercises for word in f"{row['prompt']} {row['completion']}".split()})
        runs: list[Run] = []

        def tell(run: Run) -> None:
            runs.append(run)
            _show(run)
            if wanted.json:
                wanted.json.write_text(json.dumps(_told(runs), indent=1) + "\n", encoding="utf-8")
            if wanted.picture:
                longest = max(runs, key=lambda run: run.seconds)
                wanted.picture.write_text(_picture(longest), encoding="utf-8")

        for rows in wanted.rows:
            tell(_scored(work, rows, rows, words, f"{rows:,} rows"))
            if rows == max(wanted.rows):
                tell(_compared(work, rows))
                grown = rows + rows // 100
                tell(_scored(work, rows, grown, words, f"grown to {grown:,}, started again"))
            shutil.rmtree(work / f"out{rows}")


def _scored(work: Path, out: int, rows: int, words: Sequence[str], what: str) -> Run:
    draw = random.Random(0)
    data = work / f"rows{out}.jsonl"
    with data.open("w", encoding="utf-8") as file:
        for number in range(rows):
            row = {
                "id": f"row-{number:07d}",
                "prompt": " ".join(draw.choices(words, k=draw.randint(3, 10))),
                "completion": " ".join(draw.choices(words, k=draw.randint(1, 4))),
            }
            file.write(json.dumps(row) + "\n")
    return _watched(
        Run(what, rows), work / f"out{out}", "--model", str(work / "model"), "--data", str(data),
        "--grader", "loglikelihood", "--batch-size", str(BATCH), "--out", str(work / f"out{out}"),
    )  # fmt: skip


def _compared(work: Path, rows: int) -> Run:
    """The finished folder compared with its changed copy. Nothing is left to be answered: the start reads it all."""
    out, other = work / f"out{rows}", work / "other"
    other.mkdir()
    for name in ("answers.parquet", "report.json"):
        shutil.copy(out / name, other / name)
    with (out / "grades.jsonl").open() as grades, (other / "grades.jsonl").open("w") as changed:
        for number, line in enumerate(grades):
            row = json.loads(line)
            row["grades"]["loglikelihood"] -= 0.1 * (number % 7)
            changed.write(json.dumps(row) + "\n")
    run = Run("compared", rows)
    compare = (
        "from pathlib import Path; from fitune.session.score.scoring import compare_scores as c; import sys"
    )
    program = f"{compare}; print(c(Path(sys.argv[1]), Path(sys.argv[2])))"
    return _watched(run, out, str(out), str(other), program=("-c", program))


def _watched(run: Run, out: Path, *words: str, program: Sequence[str] = ("-m", "fitune", "score")) -> Run:
    log = out.with_name("log.txt")
    started = time.monotonic()
    with log.open("w") as said:
        process = psutil.Popen([sys.executable, *program, *words], stdout=said, stderr=subprocess.STDOUT)
        shards = 0
        while process.poll() is None:
            while (out / "shards" / f"{shards:05d}.json").exists():
                shards += 1
            try:
                sizes = [process.memory_info().rss]
                sizes += [child.memory_info().rss for child in process.children(recursive=True)]
                used = process.cpu_times()
                run.processor_seconds = used.user + used.system + used.children_user + used.children_system
            except psutil.NoSuchProcess:
                continue
            stage = "start" if not shards else "rows" if shards * SHARD_ROWS < run.rows else "files"
            run.samples.append(
                Sample(
                    round(time.monotonic() - started, 2), round(sizes[0] / MIB, 1), round(sum(sizes) / MIB, 1),
                    min(shards * SHARD_ROWS, run.rows), "compared" if program[0] == "-c" else stage,
                )
            )  # fmt: skip
            time.sleep(0.5)
    run.seconds = round(time.monotonic() - started, 1)
    if process.returncode:
        raise SystemExit(log.read_text()[-4_000:])
    return run


def _show(run: Run) -> None:
    stages = {
        stage: max(sample.mib for sample in run.samples if sample.stage == stage)
        for stage in dict.fromkeys(sample.stage for sample in run.samples)
    }
    peaks = ", ".join(f"{stage} {mib:,.0f}" for stage, mib in stages.items())
    print(
        f"{run.what:>34}: {run.seconds:8,.1f} s ({run.processor_seconds:,.1f} of the processor), "
        f"{run.rate:7,.0f} rows/s, peak {run.peak:6,.1f} MiB ({peaks})",
        flush=True,
    )


def _told(runs: Sequence[Run]) -> dict[str, object]:
    return {
        "date": date.today().isoformat(), "python": sys.version.split()[0], "batch_size": BATCH,
        "runs": [
            {
                "what": run.what, "rows": run.rows, "seconds": run.seconds,
                "processor_seconds": round(run.processor_seconds, 1), "rows_per_s": round(run.rate),
                "peak_mib": run.peak,
                "samples": [list(asdict(sample).values()) for sample in _thinned(run.samples)],
            }
            for run in runs
        ],
    }  # fmt: skip


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """At most POINTS: of each stretch the one with the most memory."""
    step = -(-len(samples) // POINTS)
    return [
        max(samples[start : start + step], key=lambda sample: sample.mib)
        for start in range(0, len(samples), step)
    ]


LEFT, WIDTH, HEIGHT = 84, 620, 150


def _picture(run: Run) -> str:
    """Memory and rows/s over the minutes of one start."""
    seconds = run.samples[-1].seconds
    rates = [
        (after.seconds, (after.rows - before.rows) / (after.seconds - before.seconds))
        for before, after in _apart(run.samples, seconds / 40)
    ]
    points = _thinned(run.samples)
    title = f"fitune score over {run.rows:,} rows: {seconds / 60:,.1f} minutes, at most {run.peak:,.0f} MiB"
    elements = [text(12, 26, title, style="large")]
    elements += _curve("MiB resident", [(p.seconds, p.mib) for p in points], seconds, top=60)
    elements += _curve("rows/s in shards", rates, seconds, top=60 + HEIGHT + 50)
    bottom = 60 + 2 * HEIGHT + 50
    for stage in dict.fromkeys(sample.stage for sample in run.samples):
        begins = next(sample.seconds for sample in run.samples if sample.stage == stage)
        x = LEFT + WIDTH * begins / seconds
        elements += [line(x, 50, x, bottom, dashed=True), text(x + 4, bottom + 30, stage, style="small")]
    for minute in range(0, int(seconds // 60) + 1, max(1, round(seconds / 600))):
        elements.append(
            text(LEFT + WIDTH * 60 * minute / seconds, bottom + 15, f"{minute} min", style="small middle")
        )
    return document(elements, width=LEFT + WIDTH + 30, height=bottom + 44, label=title)


def _apart(samples: Sequence[Sample], seconds: float) -> list[tuple[Sample, Sample]]:
    """Pairs of samples that lie ``seconds`` apart."""
    kept = [samples[0]]
    for sample in samples:
        if sample.seconds - kept[-1].seconds >= seconds:
            kept.append(sample)
    return list(pairwise(kept))


def _curve(name: str, points: Sequence[tuple[float, float]], seconds: float, *, top: float) -> list[str]:
    most = max(value for _, value in points) or 1.0
    places = [(LEFT + WIDTH * x / seconds, top + HEIGHT * (1 - value / most)) for x, value in points]
    return [
        line(LEFT, top + HEIGHT, LEFT + WIDTH, top + HEIGHT),
        line(LEFT, top, LEFT + WIDTH, top),
        text(LEFT - 8, top + 4, f"{most:,.0f}", style="small end"),
        text(LEFT - 8, top + HEIGHT + 4, "0", style="small end"),
        text(LEFT, top - 6, name, style="small"),
        *(line(*here, *there, stroke="series-1") for here, there in pairwise(places)),
    ]


if __name__ == "__main__":
    main()
