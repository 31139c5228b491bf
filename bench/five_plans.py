"""Five plans that people ask for, with data, as they print: writes docs/five-plans.md.

python bench/five_plans.py [PAGE.md]
"""

import contextlib
import io
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from fitune.cli import main as fitune

ROWS = 50_000
CASES = (
    ("8 B on a gaming card", "--model meta-llama/Llama-3.1-8B --gpu rtx-4090"),
    ("70 B on two of the last generation", "--model meta-llama/Llama-2-70b-hf --gpu rtx-3090 --gpus 2"),
    (
        "Every weight of 70 B on a node",
        "--model meta-llama/Llama-3.1-70B --gpu h100 --gpus 8 --tuning full --host-memory 2TiB",
    ),
    ("1.5 B on a MacBook: refused", '--model Qwen/Qwen2.5-1.5B --gpu "M3 Max"'),
    (
        "1.5 B on a processor with a MacBook's memory",
        "--model Qwen/Qwen2.5-1.5B --gpu cpu --host-memory 36GiB --tuning lora",
    ),
)
INTRODUCTION = f"""# Five plans: what does the answer look like?

What people ask for most, as it prints, with {ROWS:,} questions and answers as data (`bench/five_plans.py`). Times of
GPUs come from datasheets; the processor has two cores that multiply bf16, and its rates are assumed ones.
"""


def write_rows(path: Path) -> None:
    """Questions of 46 to 245 words with answers of 65 to 363, the same in every run."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(ROWS):
            prompt = "Explain this in a few words: " + "word " * (number % 200 + 40)
            completion = "It is a thing that " + "does things " * (number % 150 + 30)
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def printed(words: str) -> str:
    """What the command prints, an error included."""
    sys.argv = ["fitune", "plan", *shlex.split(words), "--data", "train.jsonl"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
        fitune()
    return text.getvalue().strip()


def main() -> None:
    page = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/five-plans.md").absolute()
    parts = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["FITUNE_CACHE"] = str(Path(folder, "cache"))  # without what was measured on this machine
        write_rows(Path("train.jsonl"))
        for title, words in CASES:
            parts.append(
                f"## {title}\n```\n$ fitune plan {words} --data train.jsonl\n\n{printed(words)}\n```\n"
            )
    page.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
