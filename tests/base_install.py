"""Every command in an environment without the libraries of training, where fitune alone is installed (`make base`).

Those that plan answer; the others say what to install. Prints a line for each command and ends with 1 when one does
otherwise.
"""

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "--model meta-llama/Llama-3.1-8B --gpu rtx-4090"
RECIPE = ROOT / "recipes" / "llama-3.1-8b_lora_1x24gb.yaml"
PLANNING = (
    "--version",
    f"plan {MODEL}",
    f"plan {MODEL} --details",
    f"plan {MODEL} --json",
    f"plan {MODEL} --html plan.html",
    f"plan {MODEL} --data rows.jsonl",
    f"plan {MODEL} --largest seq_len",
    "plan --model Qwen/Qwen2.5-1.5B",
    f"plan {RECIPE} --rows 20000 --fleet {ROOT / 'examples' / 'fleet.yaml'}",
    f"why loss=plain {MODEL}",
    "matrix --models llama-2-7b,13b --context 512,1024 --gpu rtx-4090",
    f"launch {RECIPE} --on slurm",
    f"launch {RECIPE} --on kubernetes --set job.image=fitune:1 --set job.claim=data",
    f"launch {RECIPE} --on kuberay --set job.image=fitune:1 --set job.claim=data",
    f"init new.yaml {MODEL} --data rows.jsonl --tuning lora --output-dir out",
    "convert axolotl.yaml",
    "doctor",
    "score --model Qwen/Qwen3-8B --data rows.jsonl --gpu h100 --plan --out answers",
    "train --help",
)
TRAINING = (
    "train new.yaml",
    "rehearse new.yaml",
    "data new.yaml",
    "demo",
    "compare new.yaml",
    "score --model Qwen/Qwen3-8B --data rows.jsonl --out answers",
    "chat Qwen/Qwen3-8B",
    "export out",
)
AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002
datasets:
  - path: rows.jsonl
    type: alpaca
"""


def run(words, folder):
    command = [str(Path(sys.executable).with_name("fitune")), *words.split()]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def main():
    assert find_spec("torch") is None, "torch is installed here"
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "rows.jsonl").write_text('{"question": "What is 2 plus 3?", "answer": "5"}\n' * 40)
        (folder / "axolotl.yaml").write_text(AXOLOTL)
        for words in (*PLANNING, *TRAINING):
            ended = run(words, folder)
            if words in PLANNING:
                is_right = ended.returncode == 0 and "Traceback" not in ended.stderr
            else:
                is_right = ended.returncode == 2 and "pip install 'fitune[train]'" in ended.stderr
            failed += not is_right
            says = ((ended.stdout + ended.stderr).strip().splitlines() or [""])[0 if is_right else -1]
            print(
                f"{'ok    ' if is_right else 'WRONG '} fitune {words.replace(str(ROOT) + '/', '')}: {says[:90]}"
            )
    print(f"{len(PLANNING) + len(TRAINING) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
