"""Rows answered in a second by ``generate`` called row by row, fitune's engine, lm-evaluation-harness and vLLM.

All sides answer the same prompts greedily with the same model folder in fp32, in turn, three times; the medians count.
Prints seconds to start, rows/s, seconds of the processor, the ratios, and how many answers have the same tokens.

    fitune demo --out demo
    python bench/score_rows.py --model demo/base/model [--rows 200] [--batch 32] [--new 64] [--threads 1]

Prompts are texts of the demo, cut somewhere, and up to three whole ones before them; or a field of a JSONL file
(``--data test.jsonl --field question``). Without --model it is a random one of the demo's shape, whose answers seldom
end before --new. A side whose library is not installed is left out and named: lm_eval here, and vLLM in the environment
of FITUNE_VLLM_PYTHON. ``--json`` adds the run to a file, in the place of one with the same model and settings.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch

from fitune.data.conversations.templates import load_template
from fitune.demo.files import SHAPE, pretraining_texts, write_base_model
from fitune.errors import MissingExtra
from fitune.models.tokens import load_tokenizer
from fitune.models.weights import load_model
from fitune.score.engines.engine import Engine, Request, Sampling
from fitune.score.engines.engine_transformers import TransformersEngine
from fitune.values.answering import ROWS_AT_ONCE

ROUNDS = 3
Answers = dict[str, list[int]]


@dataclass(slots=True, kw_only=True)
class Side:
    name: str
    answer: Callable[[Sequence[Request]], Answers]
    start_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    core_seconds: list[float] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)

    def ask(self, requests: Sequence[Request]) -> None:
        began, used = time.perf_counter(), _core_seconds()
        self.answers = self.answer(requests)
        self.seconds.append(time.perf_counter() - began)
        self.core_seconds.append(_core_seconds() - used)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--model", help="a folder; default: a random model of the demo's shape")
    words.add_argument("--data", type=Path, help="JSONL of prompts")
    words.add_argument("--field", default="question")
    for name, default in (("rows", 200), ("batch", ROWS_AT_ONCE), ("new", 64), ("threads", 1)):
        words.add_argument(f"--{name}", type=int, default=default)
    words.add_argument("--hidden", type=int, help="hidden size of the random model")
    words.add_argument("--json", type=Path)
    asked = words.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(asked.threads)}
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else as many threads as cores
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    torch.set_num_threads(asked.threads)
    with ExitStack() as stack:
        folder = asked.model or _random_model(
            stack.enter_context(tempfile.TemporaryDirectory()), asked.hidden
        )
        tokenizer = load_tokenizer(folder)
        texts = _texts_of(asked.data, asked.field) if asked.data else _texts()
        requests = list(_requests(texts, tokenizer, rows=asked.rows, new=asked.new))
        sides = _opened(folder, tokenizer, requests, batch=asked.batch, stack=stack)
        for side in sides:
            side.answer(requests[: 2 * asked.batch])  # what is made at the first call
        for _ in range(ROUNDS):
            for side in sides:
                side.ask(requests)
        _show(sides, requests, asked)


def _core_seconds() -> float:
    """User and system time of this process and those that it started."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _random_model(directory: str, hidden: int | None) -> str:
    shape = replace(SHAPE, hidden_size=hidden, intermediate_size=2 * hidden) if hidden else SHAPE
    write_base_model(Path(directory), list(pretraining_texts(500, seed=0)), shape=shape, seed=0)
    return directory


def _texts() -> Iterator[str]:
    draw = random.Random(0)
    written = iter(list(pretraining_texts(4_000, seed=1)))
    for last in written:
        begun = last.split()
        cut = " ".join(begun[: draw.randint(3, max(4, len(begun) // 2))])
        yield " ".join([*(next(written, "") for _ in range(draw.randint(0, 3))), cut])


def _texts_of(data: Path, name: str) -> Iterator[str]:
    with data.open(encoding="utf-8") as lines:
        yield from (json.loads(line)[name] for line in lines)


def _requests(texts: Iterator[str], tokenizer: Any, *, rows: int, new: int) -> Iterator[Request]:
    """Named by their texts, each once, so that every library is given the text or its ids."""
    for text in list(dict.fromkeys(texts))[:rows]:
        ids = tuple(tokenizer(text)["input_ids"])
        yield Request(id=text, prompt_ids=ids, sampling=Sampling(max_new_tokens=new))


def _opened(
    folder: str, tokenizer: Any, requests: Sequence[Request], *, batch: int, stack: ExitStack
) -> list[Side]:
    began = time.perf_counter()
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    loaded = time.perf_counter() - began
    template = load_template(tokenizer)
    engine = TransformersEngine(model=model, tokenizer=tokenizer, template=template, batch_size=batch)
    stops = engine.stop_ids
    sides = [
        Side(name="generate, row by row", answer=lambda some: _row_by_row(model, some), start_s=loaded),
        Side(name="fitune, transformers", answer=lambda some: _by_engine(engine, some), start_s=loaded),
    ]
    try:
        sides.append(_lm_eval_side(model, tokenizer, stops, batch=batch, loaded=loaded))
    except ImportError as error:
        print(f"left out: lm-evaluation-harness ({error})")
    try:
        from fitune.score.engines.engine_vllm import VllmEngine

        began = time.perf_counter()
        vllm = VllmEngine(
            model=folder, tokenizer=folder, stop_ids=stops,
            settings={
                "dtype": "float32", "enforce_eager": True, "max_num_seqs": batch,
                "enable_prefix_caching": False,  # else it has read all prompts in the first round
            },
        )  # fmt: skip
        stack.enter_context(closing(vllm))
        started = time.perf_counter() - began
        sides.append(Side(name="fitune, vLLM", answer=lambda some: _by_engine(vllm, some), start_s=started))
    except MissingExtra as error:
        print(f"left out: vLLM ({error.message})")
    return sides


def _row_by_row(model: Any, requests: Sequence[Request]) -> Answers:
    found = {}
    for request in requests:
        ids = torch.tensor([request.prompt_ids])
        whole = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.sampling.max_new_tokens,
            do_sample=False,
        )  # fmt: skip
        found[request.id] = whole[0, len(request.prompt_ids) :].tolist()
    return found


def _by_engine(engine: Engine, requests: Sequence[Request]) -> Answers:
    return {completion.id: list(completion.token_ids) for completion in engine.answer(requests)}


def _lm_eval_side(model: Any, tokenizer: Any, stops: frozenset[int], *, batch: int, loaded: float) -> Side:
    """lm-evaluation-harness's ``hf`` model and its ``generate_until``; the ids are taken where it has written them."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    found: dict[tuple[int, ...], list[int]] = {}

    class Written(HFLM):
        def _model_generate(self, context: Any, max_length: int, stop: list[str], **more: Any) -> Any:
            whole = super()._model_generate(context, max_length, stop, **more)
            width = context.shape[1]
            for row, mask in zip(whole.tolist(), more["attention_mask"].tolist(), strict=True):
                prompt = tuple(id_ for id_, is_read in zip(row, mask, strict=False) if is_read)
                ends = [place for place, id_ in enumerate(row[width:]) if id_ in stops]
                found[prompt] = row[width:][: ends[0] + 1 if ends else None]
            return whole

    began = time.perf_counter()
    theirs = Written(pretrained=model, tokenizer=tokenizer, batch_size=batch, add_bos_token=True)

    def answer(requests: Sequence[Request]) -> Answers:
        found.clear()
        told: dict[str, Any] = {"until": [], "do_sample": False}
        theirs.generate_until(
            [
                Instance(
                    request_type="generate_until", doc={}, idx=place,
                    arguments=(request.id, told | {"max_gen_toks": request.sampling.max_new_tokens}),
                )
                for place, request in enumerate(requests)
            ],
            disable_tqdm=True,
        )  # fmt: skip
        return {request.id: found[request.prompt_ids] for request in requests}

    return Side(name="lm-eval, hf", answer=answer, start_s=loaded + time.perf_counter() - began)


def _show(sides: Sequence[Side], requests: Sequence[Request], asked: argparse.Namespace) -> None:
    first = sides[0]
    prompts = [len(request.prompt_ids) for request in requests]
    lengths = [len(ids) for ids in first.answers.values()]
    print(
        f"{len(requests)} rows, prompts of {min(prompts)} to {max(prompts)} tokens, answers of {min(lengths)} to "
        f"{max(lengths)} (mean {statistics.mean(lengths):.1f}), batches of {asked.batch}, {asked.threads} thread(s)"
    )
    print(f"{'':>22} {'start s':>8} {'rows/s':>8} {'rows/core s':>12} {'ratio':>6}  same tokens")
    told = []
    for side in sides:
        rate, by_core = (
            len(requests) / statistics.median(taken) for taken in (side.seconds, side.core_seconds)
        )
        ratio = statistics.median(first.seconds) / statistics.median(side.seconds)
        same = sum(side.answers[id_] == ids for id_, ids in first.answers.items())
        print(
            f"{side.name:>22} {side.start_s:8.1f} {rate:8.2f} {by_core:12.2f} {ratio:6.2f}  {same} of {len(requests)}"
        )
        told.append(
            {
                "side": side.name, "start_s": round(side.start_s, 2), "rows_per_s": round(rate, 3),
                "rows_per_core_s": round(by_core, 3), "ratio": round(ratio, 3), "same_tokens": same,
                "seconds": [round(taken, 3) for taken in side.seconds],
            }
        )  # fmt: skip
    if asked.json:
        versions = {name: version(name) for name in ("torch", "transformers", "lm_eval")}
        run = {
            "model": asked.model or "random", "rows": len(requests), "batch": asked.batch, "threads": asked.threads,
            "new": asked.new, "date": date.today().isoformat(), "versions": versions,
            "prompt_tokens": [min(prompts), max(prompts)],
            "answer_tokens": [min(lengths), statistics.mean(lengths), max(lengths)], "sides": told,
        }  # fmt: skip
        _add(run, asked.json)


def _add(run: dict[str, Any], file: Path) -> None:
    """Runs that differ in model or settings stay."""
    known = json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []
    same = ("model", "rows", "batch", "threads", "new")
    kept = [one for one in known if any(one[name] != run[name] for name in same)]
    file.write_text(json.dumps({"runs": [*kept, run]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
