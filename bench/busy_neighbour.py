"""Milliseconds of a training step on a processor that others use as well: how threads wait decides.

python bench/busy_neighbour.py [WIDTH...]

Every case is a fresh process that trains a Llama of 4 layers for SECONDS; neighbours are processes that spin. OpenMP's
threads spin, too, while they wait for one another, unless OMP_WAIT_POLICY is PASSIVE, which `fitune` sets.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

SECONDS = 6.0
WIDTHS = (64, 256, 1024)
CASES = ((1, "ACTIVE"), (2, "ACTIVE"), (2, "PASSIVE"))
"""Threads, and how they wait."""
NEIGHBOURS = (0, 1, 2)


def step_times(width: int, threads: int) -> list[float]:
    """Seconds of each step after the first two."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    heads = width // 64
    config = LlamaConfig(
        vocab_size=512, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4,
        num_attention_heads=heads, num_key_value_heads=heads,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids_BT = torch.randint(0, 512, (16 if width <= 256 else 4, 64))
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(times) < 3:
        start = time.perf_counter()
        model(input_ids=ids_BT, labels=ids_BT).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    return times[2:]


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Processes that use a core each."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def measured(width: int, threads: int, policy: str) -> list[float]:
    """Step times of a fresh process."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    words = [sys.executable, __file__, "--alone", str(width), str(threads)]
    answer = subprocess.run(
        words, env={**environment, "OMP_WAIT_POLICY": policy}, check=True, capture_output=True, text=True
    )
    times: list[float] = json.loads(answer.stdout)
    return times


def main() -> None:
    if sys.argv[1:2] == ["--alone"]:
        print(json.dumps(step_times(int(sys.argv[2]), int(sys.argv[3]))))
        return
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f} before; median and least ms of a step")
    print(f"{'width':>6}{'threads':>9} {'waiting':<9}" + "".join(f"{n:>9} beside" for n in NEIGHBOURS))
    for width in map(int, sys.argv[1:] or WIDTHS):
        for threads, policy in CASES:
            cells = ""
            for count in NEIGHBOURS:
                with neighbours(count):
                    times = measured(width, threads, policy)
                cells += f"{statistics.median(times) * 1e3:>9.0f} {min(times) * 1e3:>6.0f}"
            print(f"{width:>6}{threads:>9} {policy.lower():<9}{cells}", flush=True)


if __name__ == "__main__":
    main()
