"""vLLM's offline engine, in a process and an environment of its own: it pins another torch and another transformers.

``FITUNE_VLLM_PYTHON`` names that environment's python; without it the python of this process is tried. The process
speaks lines of JSON (vllm_worker.py); when it dies, the rows that it did not answer are asked of a new one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from fitune.errors import CheckpointError, MissingExtra, ScoringFailed
from fitune.models.adapter_file import WEIGHTS
from fitune.models.tokens import require_rows
from fitune.score.engines import vllm_worker
from fitune.score.engines.engine import (
    Asked,
    Completion,
    Continuation,
    EngineDied,
    Likelihood,
    Request,
    sorted_out,
)
from fitune.values.machines.environment import without_expandable_segments

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM sets buffers aside (MaxLoRARanks in its vllm/config/lora.py)."""
_TAIL_LINES = 20
_CANARY_TOKENS = 64
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) |\[rank\d+\]: ?)+")
_LAST_WORDS = re.compile(r"([\w.]+\.)?\w*(Error|Exception|Exit)\b")


def python_of_vllm() -> str:
    """The python of an environment with vLLM. Raises MissingExtra when it has none."""
    python = os.environ.get("FITUNE_VLLM_PYTHON") or sys.executable
    test = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        missing = subprocess.run(
            [python, "-c", test], capture_output=True, timeout=60, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        missing = 1
    if missing:
        raise MissingExtra(f"vLLM (none in {python}; FITUNE_VLLM_PYTHON names another)", extra="vllm")
    return python


def rounded_rank(rank: int) -> int:
    """The smallest rank of vLLM's that holds ``rank``; 0 when there is none, and the adapter has to be merged."""
    return next((taken for taken in LORA_RANKS if taken >= rank), 0)


class VllmEngine:
    """``settings`` are keywords of vLLM's ``LLM`` (dtype, tensor_parallel_size, gpu_memory_utilization, …)."""

    def __init__(
        self, *, model: str, tokenizer: str, stop_ids: frozenset[int], adapter: str = "", rank: int = 0,
        settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._python = python_of_vllm()
        self._tokenizer = tokenizer
        self._adapter = adapter
        # an adapter without any, or whose B are all zero, cannot change an answer
        factors = load_file(Path(adapter) / WEIGHTS) if adapter else {}
        self._is_checked = not any(factor.any() for key, factor in factors.items() if ".lora_B" in key)
        del factors
        self._rows: dict[int, Request] = {}
        """Requests that vLLM has not answered yet, by the number that each was sent with."""
        self._found: dict[Request, Completion | None] = {}
        """Answers of the rows that were sent and are not yielded yet; None for those that are not answered."""
        self._sent = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._process = subprocess.Popen(
            [self._python, str(Path(vllm_worker.__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, encoding="utf-8", start_new_session=True,
            env=without_expandable_segments(),
        )  # fmt: skip
        asked = {
            "model": model, "tokenizer": tokenizer, "adapter": adapter, "max_lora_rank": rounded_rank(rank),
            "stop_ids": sorted(stop_ids), "settings": settings or {},
        }  # fmt: skip
        try:
            opened = self._opened(asked)
        except BaseException:  # Ctrl-C too: nobody else knows of the process
            self.close()
            raise
        self._context, self._vocabulary = int(opened["context"]), int(opened["vocabulary"])

    def answer(self, requests: Sequence[Request], ahead: Sequence[Request] = ()) -> Iterator[Completion]:
        """Yields the completions of ``requests`` as vLLM ends them.

        The requests ``ahead`` are sent at once too, so that vLLM always has work; a later call for them sends nothing.
        Raises CheckpointError for an adapter without effect.
        """
        fitting, refused = self._sorted_out(requests)
        yield from refused
        self._require_effect(fitting)
        self._begin(fitting)
        if self._is_checked:  # else the canary comes first
            self._begin(self._sorted_out(ahead)[0])
        left = set(fitting)
        for request in fitting:
            if (answered := self._found[request]) is not None:
                left.remove(request)
                del self._found[request]
                yield answered
        while left:
            request = self._keep(self._line())
            if request in left:
                left.remove(request)
                answered = self._found.pop(request)
                assert answered is not None, "it was just kept"
                yield answered

    def _sorted_out(self, asked: Sequence[Asked]) -> tuple[list[Asked], list[Any]]:
        """Returns what vLLM can read, and the failed results of the rest.

        Raises ModelError for ids of another model's tokenizer."""
        fitting, refused, largest = sorted_out(asked, context=self._context, engine="vllm")
        require_rows(self._tokenizer, largest_id=largest, rows=self._vocabulary)
        return fitting, refused

    def _begin(self, requests: Sequence[Request]) -> None:
        """Send the rows that were not sent yet; vLLM takes them in this order, as it has room."""
        entries = []
        for request in requests:
            if request not in self._found:
                self._sent += 1
                self._found[request] = None
                self._rows[self._sent] = request
                sampling = request.sampling
                entries.append(
                    {
                        "number": self._sent, "ids": request.prompt_ids, "temperature": sampling.temperature,
                        "top_p": sampling.top_p or 1e-9, "seed": request.seed if sampling.temperature else None,
                        "max_new_tokens": sampling.max_new_tokens,
                    }
                )  # fmt: skip
        if entries:
            self._send({"what": "answer", "entries": entries})

    def _keep(self, line: dict[str, Any]) -> Request:
        """The row that is answered in this line."""
        request = self._rows.pop(line["answer"])
        self._found[request] = Completion(
            id=request.id,
            token_ids=tuple(line["token_ids"]),
            logprobs=tuple(line["logprobs"]),
            finish_reason="stop" if line["reason"] == "stop" else "length",
            tokens=len(line["token_ids"]),
        )
        return request

    def loglikelihoods(self, continuations: Sequence[Continuation]) -> Iterator[Likelihood]:
        """vLLM writes a token behind each continuation, so the longest has one token less than the context."""
        fitting, refused = self._sorted_out(continuations)
        yield from refused
        entries = [{"id": one.id, "ids": one.ids, "prompt": len(one.prompt_ids)} for one in fitting]
        for line in self._ask("loglikelihoods", entries):
            yield Likelihood(id=line["id"], logprobs=tuple(line["logprobs"]), is_greedy=line["is_greedy"])

    def close(self) -> None:
        """Kill the process and all that it started: asked to end, it takes about eight seconds."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with suppress(BrokenPipeError):  # the rest of a line that nobody read
                    stream.close()

    def _opened(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Positions and tokens of the model, when it is loaded."""
        try:
            self._send(asked)
            opened = self._line()
        except EngineDied as death:
            raise ScoringFailed(
                f"vLLM did not start: {death}", hint="--engine transformers runs the same model"
            ) from None
        if "refused" in opened:
            raise CheckpointError(
                f"{self._adapter}: vLLM refuses the adapter: {opened['refused']}",
                hint="merge it: fitune export RUN --as merged, and score that folder",
            )
        return opened

    def _require_effect(self, requests: Sequence[Request]) -> None:
        """The canary: vLLM loads an adapter for modules it does not adapt without a word, and answers as the base."""
        sample = next((r for r in requests if len(r.prompt_ids) > 1), None)
        if self._is_checked or sample is None:
            return
        self._is_checked = True
        (found,) = self._ask("canary", [{"ids": sample.prompt_ids[:_CANARY_TOKENS]}])
        if not found["differs"]:
            raise CheckpointError(
                f"{self._adapter}: the adapter changes nothing, although its B matrices are not zero: vLLM does not "
                "adapt its modules, or its weights are below the rounding of the model's",
                hint="merge it: fitune export RUN --as merged, and score that folder",
            )

    def _ask(self, what: str, entries: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        if entries:
            self._send({"what": what, "entries": entries})
            while not (line := self._line()).get("done"):
                if "answer" in line:
                    self._keep(line)
                else:
                    yield line

    def _send(self, line: dict[str, Any]) -> None:
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(line) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._death() from None

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text.endswith("\n"):
            raise self._death()
        found: dict[str, Any] = json.loads(text)
        return found

    def _death(self) -> EngineDied:
        code = self._process.wait()
        self._errors.seek(0)
        said = (_PREFIX.sub("", line.decode("utf-8", "replace").rstrip()) for line in self._errors)
        lines = list(deque(said, maxlen=_TAIL_LINES))
        # the message of the last exception and what follows it; all of them when there is none
        start = max((number for number, line in enumerate(lines) if _LAST_WORDS.match(line)), default=0)
        words = "\n".join(lines[start:])[-2000:]
        return EngineDied(f"vLLM's process ended with {code}: {words}")
