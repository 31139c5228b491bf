"""Seconds of `fitune plan` from the start of the process, of one method and of every method over eight devices, next to
starting Python alone and importing torch.

python bench/plan_start.py
"""

import statistics
import subprocess
import sys
import time

REPEATS = 7
PLAN = ["-m", "fitune", "plan", "--model", "meta-llama/Llama-3.1-8B", "--gpu", "rtx-4090", "--tuning", "lora"]
EVERY_METHOD = [
    "-m",
    "fitune",
    "plan",
    "--model",
    "meta-llama/Llama-2-70b-hf",
    "--gpu",
    "a100-80gb",
    "--gpus",
    "8",
]
CASES = {
    "python": ["-c", "pass"],
    "fitune plan": PLAN,
    "70 B on 8 GPUs": EVERY_METHOD,
    "import torch": ["-c", "import torch"],
}


def seconds(arguments: list[str]) -> float:
    """Median wall time of a fresh process; the first one warms the disk cache and does not count."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def main() -> None:
    found = {name: seconds(arguments) for name, arguments in CASES.items()}
    for name, value in found.items():
        print(f"{name:14} {value:6.3f} s")
    ratio = found["fitune plan"] / found["import torch"]
    print(f"a plan takes {ratio:.2f} of the time that importing torch alone takes")


if __name__ == "__main__":
    main()
