"""Seconds of a scoring that are not the engine's: reading, ids, prompts, shards with fsync, grades, output, page.

    python bench/score_share.py --model demo/base/model [--rows 2000] [--new 32] [--rounds 3]

One process scores the rows of the demo's task with the transformers engine on one thread, as ``fitune score`` does, and
adds up the time inside of the engine and inside of the parts around it, by the clock and by the processor. Then the
same engine answers the same requests in the same groups with nothing around it, and without the counter of tensors
that a scoring puts around some passes. Loading libraries and the model counts on neither side.
"""

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fitune.demo.files import SHAPE, pretraining_texts, training_exercises, write_base_model
from fitune.recipe.score_recipe import score_recipe
from fitune.score import run as score_run
from fitune.score.engines.continuous import unwatched
from fitune.score.engines.engine import Completion, Request
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.score.shards import Shards
from fitune.session.events import ignore_event
from fitune.session.score import scoring
from fitune.session.score.scoring import ScoreMemory
from fitune.values.answering import ROWS_AT_ONCE

PARTS = (
    ("reading and ids", score_run, "index_input"),
    ("prompts", score_run, "to_tasks"),
    ("shards", Shards, "write"),
    ("grades", score_run, "grade_shards"),
    ("output", score_run, "_write_outputs"),
    ("page", scoring, "write_score_page"),
    ("predicted memory", ScoreMemory, "added_to"),
    ("loading", scoring, "open_engine"),
    ("loading", score_run, "open_texts"),
)


class Clock:
    """Seconds by the clock and of the processor, by name. What runs inside of another part counts in both."""

    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        began, used = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            clock, core = self.seconds.get(name, (0.0, 0.0))
            self.seconds[name] = clock + time.perf_counter() - began, core + time.process_time() - used

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*words: Any, **more: Any) -> Any:
            with self.running(name):
                return call(*words, **more)

        return timed


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--model", help="a folder; default: a random model of the demo's shape")
    for name, default in (("rows", 2000), ("new", 32), ("batch", ROWS_AT_ONCE), ("rounds", 3)):
        words.add_argument(f"--{name}", type=int, default=default)
    asked = words.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        os.environ["FITUNE_CACHE"] = str(work / "cache")
        if not asked.model:
            write_base_model(work / "model", list(pretraining_texts(500, seed=0)), shape=SHAPE, seed=0)
        model = asked.model or str(work / "model")
        rows = enumerate(training_exercises(asked.rows + 20, seed=0))
        written = [
            {"id": f"row-{n}", "prompt": row["prompt"], "completion": row["completion"]} for n, row in rows
        ]
        for name, some in (("few", written[asked.rows :]), ("all", written[: asked.rows])):
            (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        _scored(work, "few", model, asked, Clock())  # imports, and what is made at a first call
        found = [_scored(work, "all", model, asked, Clock()) for _ in range(asked.rounds)]
    print(f"{asked.rows} rows, batches of {asked.batch}, answers of at most {asked.new} tokens, one thread")
    print("medians of the rounds, share of the whole without loading: clock and processor")
    for name in found[0]:
        clock, core = (statistics.median(each[name][kind] for each in found) for kind in (0, 1))
        whole = [statistics.median(each["whole"][kind] for each in found) for kind in (0, 1)]
        print(f"{name:>22} {clock:9.3f} s {clock / whole[0]:7.2%} {core:9.3f} s {core / whole[1]:7.2%}")


def _scored(
    work: Path, data: str, model: str, asked: argparse.Namespace, clock: Clock
) -> dict[str, tuple[float, float]]:
    """One scoring and the engine alone; seconds by name, of which ``whole`` and ``around`` are without loading."""
    asked_of: list[tuple[TransformersEngine, list[Request]]] = []
    answer = TransformersEngine.answer

    def timed_answer(engine: TransformersEngine, requests: Sequence[Request]) -> Iterator[Completion]:
        asked_of.append((engine, list(requests)))
        answers = answer(engine, requests)
        while True:
            with clock.running("engine"):
                found = next(answers, None)
            if found is None:
                return
            yield found

    timed = [(room, name, clock.around(part, getattr(room, name))) for part, room, name in PARTS]
    timed.append((TransformersEngine, "answer", timed_answer))
    kept = [(room, name, getattr(room, name)) for room, name, _ in timed]
    with tempfile.TemporaryDirectory(dir=work) as out:
        try:
            for room, name, call in timed:
                setattr(room, name, call)
            with clock.running("whole"):
                scoring.score_dataset(
                    score_recipe(
                        model=model,
                        data=str(work / f"{data}.jsonl"),
                        out=Path(out) / "scores",
                        max_new_tokens=asked.new,
                        batch_size=asked.batch,
                        engine="transformers",
                    ),
                    emit=ignore_event,
                )
        finally:
            for room, name, call in kept:
                setattr(room, name, call)
    for engine, requests in asked_of:
        plain = replace(engine, watch=unwatched)
        with clock.running("engine alone"):
            list(plain.answer(requests))
    seconds = dict(clock.seconds)
    loading = seconds.pop("loading")
    seconds["whole"] = _less(seconds["whole"], loading)
    seconds["around the engine"] = _less(seconds["whole"], seconds["engine"])
    seconds["whole less alone"] = _less(seconds["whole"], seconds["engine alone"])
    return seconds


def _less(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return one[0] - other[0], one[1] - other[1]


if __name__ == "__main__":
    main()
