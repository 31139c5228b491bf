"""A program of its own, in the environment that has vLLM: requests as lines of JSON in, answers as such lines out.

It imports nothing of fitune, so that environment needs vLLM alone. The first line read says what to load; the first
line written says how many positions and tokens the model has, or why vLLM refuses the adapter. Answers go to a copy of
standard output that libraries cannot reach: what they print goes to standard error.
"""

import json
import os
import queue
import sys
import threading
from typing import Any, TextIO


def main() -> None:
    """Loads what the first line of input says, then answers, compares and tells log-likelihoods until the input
    ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.pop(0)  # this file's folder: vLLM's imports must not find the files beside it
    # By default vLLM computes in a child: slower to start, and it stays in memory when this process is killed.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # GiB of keys and values on a CPU, where vLLM would ask for 92 % of all memory; a GPU does not look at it.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    worker = _Worker(json.loads(sys.stdin.readline()), answers)
    if worker.has_begun():
        worker.serve(_lines_of_input())


class _Worker:
    """vLLM with one model, and with one adapter or none."""

    def __init__(self, opened: dict[str, Any], answers: TextIO) -> None:
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        settings, adapter = dict(opened["settings"]), opened["adapter"]
        if adapter:
            settings.update(enable_lora=True, max_loras=1, max_lora_rank=opened["max_lora_rank"])
        self.llm = LLM(model=opened["model"], tokenizer=opened["tokenizer"], **settings)
        self.engine = self.llm.llm_engine
        self.lora = LoRARequest("adapter", 1, adapter) if adapter else None
        self.stop_ids = opened["stop_ids"]
        self.answers = answers

    def has_begun(self) -> bool:
        """Say the positions and tokens of the model; False when vLLM refuses the adapter, which is said, too."""
        if self.lora is not None:
            try:
                self.engine.add_lora(self.lora)
            except Exception as error:  # which class depends on vLLM's version
                self._say({"refused": f"{error}"})
                return False
        loaded = self.engine.model_config
        self._say({"context": loaded.max_model_len, "vocabulary": loaded.get_vocab_size()})
        return True

    def serve(self, lines: "queue.SimpleQueue[bytes]") -> None:
        """Do what each line asks for until an empty one comes; rows are answered while none waits."""
        while True:
            if lines.empty() and self.engine.has_unfinished_requests():
                self._step()
                continue
            text = lines.get()
            if not text:
                return
            asked = json.loads(text)
            if asked["what"] == "answer":
                self._add(asked["entries"])
                continue
            while self.engine.has_unfinished_requests():  # ``generate`` would take their answers
                self._step()
            if asked["what"] == "loglikelihoods":
                self._tell_loglikelihoods(asked["entries"])
            else:
                self._compare(asked["entries"])
            self._say({"done": True})

    def _add(self, entries: list[dict[str, Any]]) -> None:
        """These rows join those that are being answered."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for e in entries:
            parameters = SamplingParams(
                temperature=e["temperature"], top_p=e["top_p"], seed=e["seed"], max_tokens=e["max_new_tokens"],
                stop_token_ids=self.stop_ids, logprobs=0, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )  # fmt: skip
            prompt = {"prompt_token_ids": e["ids"]}
            self.engine.add_request(str(e["number"]), prompt, parameters, lora_request=self.lora)

    def _step(self) -> None:
        """One step of vLLM; answers go out as they end: ``generate`` would keep the first until the last has ended."""
        for output in self.engine.step():
            if output.finished:
                written = output.outputs[0]
                self._say({
                    "answer": int(output.request_id), "token_ids": list(written.token_ids),
                    "reason": written.finish_reason, "logprobs": _chosen(written.token_ids, written.logprobs),
                })  # fmt: skip

    def _tell_loglikelihoods(self, entries: list[dict[str, Any]]) -> None:
        """Log-probabilities of given tokens behind their prompts."""
        for entry, told in zip(entries, self._told(entries, self.lora, logprobs=1), strict=True):
            ids, told = entry["ids"][entry["prompt"] :], told[entry["prompt"] :]
            greedy = all(max(t, key=lambda i: t[i].logprob) == i for i, t in zip(ids, told, strict=True))
            self._say({"id": entry["id"], "logprobs": _chosen(ids, told), "is_greedy": greedy})

    def _compare(self, entries: list[dict[str, Any]]) -> None:
        """The canary: True if the log-probabilities of a prompt differ with the adapter and without it."""
        ids = entries[0]["ids"][1:]
        with_it, without = (
            _chosen(ids, self._told(entries, side, logprobs=0)[0][1:]) for side in (self.lora, None)
        )
        self._say({"differs": with_it != without})

    def _told(self, entries: list[dict[str, Any]], lora: Any, *, logprobs: int) -> list[Any]:
        """Log-probabilities of every prompt's tokens, and of so many likelier ones in each place."""
        from vllm import SamplingParams

        one = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=logprobs, detokenize=False)
        prompts = [{"prompt_token_ids": entry["ids"]} for entry in entries]
        outputs = self.llm.generate(prompts, one, lora_request=lora, use_tqdm=False)
        return [output.prompt_logprobs for output in outputs]

    def _say(self, line: dict[str, Any]) -> None:
        self.answers.write(json.dumps(line) + "\n")
        self.answers.flush()


def _lines_of_input() -> "queue.SimpleQueue[bytes]":
    """Lines as they come, read beside the computing; after the last one an empty text.

    Not by sys.stdin: Python aborts where it ends and a thread still waits there.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        """Cuts the bytes of input into lines until it ends."""
        begun: list[bytes] = []
        while chunk := os.read(0, 2**16):
            first, *others = chunk.split(b"\n")
            begun.append(first)
            for other in others:
                lines.put(b"".join(begun))
                begun = [other]
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def _chosen(ids: Any, told: Any) -> list[float]:
    return [found[token].logprob for token, found in zip(ids, told, strict=True)]


if __name__ == "__main__":
    main()
