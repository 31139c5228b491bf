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
from typing import Any


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.pop(0)  # this file's folder: vLLM's imports must not find the files beside it
    # By default vLLM computes in a child: slower to start, and it stays in memory when this process is killed.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # GiB of keys and values on a CPU, where vLLM would ask for 92 % of all memory; a GPU does not look at it.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    opened = json.loads(sys.stdin.readline())
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind

    settings = dict(opened["settings"])
    adapter = opened["adapter"]
    if adapter:
        settings.update(enable_lora=True, max_loras=1, max_lora_rank=opened["max_lora_rank"])
    llm = LLM(model=opened["model"], tokenizer=opened["tokenizer"], **settings)
    lora = LoRARequest("adapter", 1, adapter) if adapter else None

    def say(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    def run(entries: Any, parameters: Any, lora_request: Any = lora) -> Any:
        prompts = [{"prompt_token_ids": entry["ids"]} for entry in entries]
        return llm.generate(prompts, parameters, lora_request=lora_request, use_tqdm=False)

    def step() -> None:
        """One step of vLLM; answers go out as they end: ``generate`` would keep the first until the last has ended."""
        for output in llm.llm_engine.step():
            if output.finished:
                written = output.outputs[0]
                say({
                    "answer": int(output.request_id), "token_ids": list(written.token_ids),
                    "reason": written.finish_reason, "logprobs": _chosen(written.token_ids, written.logprobs),
                })  # fmt: skip

    if lora is not None:
        try:
            llm.llm_engine.add_lora(lora)
        except Exception as error:  # which class depends on vLLM's version
            say({"refused": f"{error}"})
            return
    loaded = llm.llm_engine.model_config
    say({"context": loaded.max_model_len, "vocabulary": loaded.get_vocab_size()})
    lines = _lines_of_input()
    while True:
        if lines.empty() and llm.llm_engine.has_unfinished_requests():
            step()
            continue
        text = lines.get()
        if not text:
            return
        asked = json.loads(text)
        entries = asked["entries"]
        if asked["what"] == "answer":  # these rows join those that are being answered
            for e in entries:
                parameters = SamplingParams(
                    temperature=e["temperature"], top_p=e["top_p"], seed=e["seed"], max_tokens=e["max_new_tokens"],
                    stop_token_ids=opened["stop_ids"], logprobs=0, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )  # fmt: skip
                prompt = {"prompt_token_ids": e["ids"]}
                llm.llm_engine.add_request(str(e["number"]), prompt, parameters, lora_request=lora)
            continue
        while llm.llm_engine.has_unfinished_requests():  # ``generate`` would take their answers
            step()
        if asked["what"] == "weigh":
            one = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
            for entry, output in zip(entries, run(entries, one), strict=True):
                ids, told = entry["ids"][entry["prompt"] :], output.prompt_logprobs[entry["prompt"] :]
                greedy = all(max(t, key=lambda i: t[i].logprob) == i for i, t in zip(ids, told, strict=True))
                say({"id": entry["id"], "logprobs": _chosen(ids, told), "is_greedy": greedy})
        else:  # the canary: log-probabilities of a prompt with the adapter and without it
            one = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
            sides = [run(entries, one, lora_request=side)[0].prompt_logprobs[1:] for side in (lora, None)]
            say(
                {
                    "differs": _chosen(entries[0]["ids"][1:], sides[0])
                    != _chosen(entries[0]["ids"][1:], sides[1])
                }
            )
        say({"done": True})


def _lines_of_input() -> "queue.SimpleQueue[bytes]":
    """Lines as they come, read beside the computing; after the last one an empty text.

    Not by sys.stdin: Python aborts where it ends and a thread still waits there.
    """
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
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
