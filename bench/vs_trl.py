"""fitune against TRL's SFTTrainer: same model, tokens, batches, order, precision; supervised tokens/s and peak memory.

    python bench/vs_trl.py --data gsm8k_train.jsonl            # any dataset fitune reads
    python bench/vs_trl.py --data gsm8k_train.jsonl --methods lora --steps 40 --repeats 3

Needs the `bench` extra. Each side runs in a process of its own, the sides take turns, and the first turn of each
is a warm-up that does not count. Time runs from the end of step 4 to the end of the last; step 2 is the one whose
live tensors are counted (fitune.measure.memory, the same counter on both sides), so it is not timed.
Speed by core time counts only the seconds in which the process had a core: with OMP_NUM_THREADS=1 a busy machine does
not change it. Recompute is off on both sides, fp32, AdamW, no warm-up, constant rate, clipping by norm 1.0 on both.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

SEQ_LEN = 512
BATCH = 8
FIRST_TIMED_STEP = 4
MEASURED_STEP = 2
RATES = {"lora": 2e-4, "qlora": 2e-4, "full": 2e-5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", nargs="+", default=[*RATES], choices=[*RATES])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--side", choices=["fitune", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is not None:
        worker = {"fitune": run_fitune, "trl": run_trl}[options.side]
        print(json.dumps(worker(options.folder, options.data, options.methods[0], options.steps)))
        return
    compare(options)


def compare(options: argparse.Namespace) -> None:
    """Take turns, then print one row per method: both sides and their ratio."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", options.data)
        rows = [compare_method(folder, options, method) for method in options.methods]
    if options.json is not None:
        options.json.write_text(json.dumps(record(options, rows), indent=1) + "\n", encoding="utf-8")


def record(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What was seen, as results/ keeps it."""
    libraries = ("torch", "transformers", "trl", "peft", "bitsandbytes")
    return {
        "benchmark": "bench/vs_trl.py",
        "date": date.today().isoformat(),
        "hardware": f"{os.cpu_count()} CPU cores, {os.environ.get('OMP_NUM_THREADS', 'all')} threads",
        "versions": {name: importlib.metadata.version(name) for name in libraries},
        "data": Path(options.data).name,
        "settings": f"10.4 M parameter Llama, fp32, {BATCH} rows a step, seq_len {SEQ_LEN}, {options.steps} steps, "
        f"median of {options.repeats} after a warm-up",
        "rows": rows,
    }


def compare_method(folder: Path, options: argparse.Namespace, method: str) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"fitune": [], "trl": []}
    for turn in range(options.repeats + 1):
        for side, results in runs.items():
            found = run_side(side, folder, options, method)
            if turn > 0:
                results.append(found)
    ours, theirs = runs["fitune"], runs["trl"]
    row = {
        "method": method,
        "fitune": summary(ours),
        "trl": summary(theirs),
        "speed_ratio": median(ours, "speed") / median(theirs, "speed"),
        "cpu_speed_ratio": median(ours, "cpu_speed") / median(theirs, "cpu_speed"),
        "memory_ratio": median(ours, "peak_bytes") / median(theirs, "peak_bytes"),
        "losses_differ_by": largest_difference(ours[-1]["losses"], theirs[-1]["losses"]),
    }
    print_row(row)
    return row


def run_side(side: str, folder: Path, options: argparse.Namespace, method: str) -> dict[str, Any]:
    """One side's training, in a process of its own."""
    words = ["--side", side, "--folder", str(folder), "--data", options.data]
    words += ["--methods", method, "--steps", str(options.steps)]
    finished = subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    return found


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("speed", "cpu_speed", "peak_bytes", "process_bytes", "first_loss", "last_losses")
    return {key: median(runs, key) for key in keys}


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Of any step's loss, as a share of it."""
    return max(abs(one - other) / abs(other) for one, other in zip(ours, theirs, strict=True))


def print_row(row: dict[str, Any]) -> None:
    print(f"{row['method']}")
    for side in ("fitune", "trl"):
        found = row[side]
        print(
            f"  {side:7} {found['speed']:8,.0f} supervised tokens/s, {found['cpu_speed']:,.0f} a second of a core"
            f"   peak of tensors {found['peak_bytes'] / 2**20:7.1f} MiB"
            f"   process {found['process_bytes'] / 2**20:6.0f} MiB"
            f"   loss {found['first_loss']:.4f} → {found['last_losses']:.4f} (mean of the last 5)"
        )
    ratios = f"speed {row['speed_ratio']:.2f}, by core time {row['cpu_speed_ratio']:.2f}"
    ratios += f"   memory {row['memory_ratio']:.2f}"
    print(f"  ratio   {ratios}   losses differ by at most {row['losses_differ_by']:.1e} of themselves")


def write_model(folder: Path, data: str) -> None:
    """A random Llama of about 10 M parameters with a byte-level BPE tokenizer trained on the data itself."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train([data], vocab_size=4096, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    # rows of whole blocks of 64: of others NF4's kernel on a CPU, which TRL runs, takes wrong scales
    config = LlamaConfig(
        vocab_size=4096, hidden_size=320, intermediate_size=896, num_hidden_layers=6, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plan_of(folder: Path, data: str, method: str, steps: int) -> Any:
    """The planner's own choice for everything but what the comparison holds equal."""
    from fitune.recipe.recipe import parse_recipe
    from fitune.session.planning import plan_for

    recipe = parse_recipe(
        {
            "model": str(folder / "model"), "tuning": method, "precision": "fp32", "data": [data], "seq_len": SEQ_LEN,
            "micro_batch_size": BATCH, "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
            "learning_rate": RATES[method], "lr_scheduler": "constant", "warmup_steps": 0, "max_steps": steps,
            "output_dir": str(folder / "run"),
        }
    )  # fmt: skip
    return plan_for(recipe).chosen.plan


def read_data(plan: Any) -> Any:
    """Tokens and the order of batches: fitune's, for both sides."""
    from fitune.data.loader import Loader
    from fitune.data.preparing import prepare_data
    from fitune.models.tokens import load_tokenizer

    tokenizer = load_tokenizer(plan.model_path)
    data = prepare_data(
        plan.data, tokenizer=tokenizer, tokenizer_path=plan.model_path, seq_len=SEQ_LEN, seed=plan.run.seed
    )
    return tokenizer, data.train, Loader(data.train, plan.batch, seed=plan.run.seed)


def run_fitune(folder: Path, data: str, method: str, steps: int) -> dict[str, Any]:
    from fitune.train.loop import train
    from fitune.train.prepare import prepare

    plan = plan_of(folder, data, method, steps)
    _, _, loader = read_data(plan)
    meter = one_step_meter()
    ends, reports = [], []
    for report in train(plan, prepare(plan), loader, meter=meter):
        ends.append((time.perf_counter(), time.process_time()))
        reports.append(report)
        meter.wanted = report.step == MEASURED_STEP - 1
    peak = max(reports[MEASURED_STEP - 1].memory_bytes.values())
    tokens = [report.supervised_tokens for report in reports]
    return result(ends, tokens, [report.loss for report in reports], peak)


def one_step_meter() -> Any:
    """fitune's meter, which the loop also asks for the heaviest step: TRL's side is measured in one, so this is too."""
    from fitune.measure.memory import CpuMeter

    class OneStep(CpuMeter):
        wanted = False

        def measuring(self, alive: Any, host: Any = None) -> Any:
            return super().measuring(alive, host) if self.wanted else nullcontext()

    return OneStep()


def run_trl(folder: Path, data: str, method: str, steps: int) -> dict[str, Any]:
    from trl_side import train_by_trl

    from fitune.data.loader import LoaderState

    plan = plan_of(folder, data, method, steps)
    tokenizer, dataset, loader = read_data(plan)
    state, rows, tokens = LoaderState(epoch=0, position=0), [], []
    for _ in range(steps):
        batch = loader.batch_at(state)
        tokens.append(batch.supervised_tokens)
        rows += [row for micro in batch.micro_batches for row in micro.row_ids]
        state = loader.after(state)
    examples = [dataset.row(row) for row in rows]
    watch, losses = train_by_trl(plan, tokenizer, examples, folder, steps=steps, measured_step=MEASURED_STEP)
    return result(watch.ends, tokens, losses, watch.peak)


def result(
    ends: list[tuple[float, float]], tokens: list[int], losses: list[float], peak: int
) -> dict[str, Any]:
    """``ends`` of the steps by the clock and by the time this process had a core."""
    (start, start_cpu), (end, end_cpu) = ends[FIRST_TIMED_STEP - 1], ends[-1]
    timed = sum(tokens[FIRST_TIMED_STEP:])
    return {
        "speed": timed / (end - start),
        "cpu_speed": timed / (end_cpu - start_cpu),
        "peak_bytes": peak,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[0],
        "last_losses": statistics.fmean(losses[-5:]),
        "losses": losses,
    }


if __name__ == "__main__":
    main()
