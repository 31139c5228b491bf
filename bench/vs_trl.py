"""fitune against TRL's SFTTrainer: same model, tokens, batches, order, precision; supervised tokens/s and peak memory.

    python bench/vs_trl.py --data gsm8k_train.jsonl            # any dataset fitune reads
    python bench/vs_trl.py --data gsm8k_train.jsonl --methods lora --steps 40 --repeats 3

Needs the `bench` extra. Each side runs in a process of its own, the sides take turns, and the first turn of each
is a warm-up that does not count. Time runs from the end of step 4 to the end of the last; step 2 is the one whose
live tensors are counted (fitune.measure.memory, the same counter on both sides), so it is not timed.
Recompute is off on both sides, fp32, AdamW, no warm-up, constant rate, no clipping difference (1.0 on both).
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEQ_LEN = 512
BATCH = 8
FIRST_TIMED_STEP = 4
MEASURED_STEP = 2
RATES = {"lora": 2e-4, "full": 2e-5}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--methods", nargs="+", default=["lora", "full"], choices=["lora", "full"])
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
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


def compare_method(folder: Path, options: argparse.Namespace, method: str) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {"fitune": [], "trl": []}
    for turn in range(options.repeats + 1):
        for side, results in runs.items():
            command = [
                sys.executable,
                __file__,
                "--side",
                side,
                "--folder",
                str(folder),
                "--data",
                options.data,
            ]
            command += ["--methods", method, "--steps", str(options.steps)]
            finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            if turn > 0:
                results.append(json.loads(finished.stdout.splitlines()[-1]))
    ours, theirs = runs["fitune"], runs["trl"]
    row = {
        "method": method,
        "fitune": summary(ours),
        "trl": summary(theirs),
        "speed_ratio": median(ours, "speed") / median(theirs, "speed"),
        "memory_ratio": median(ours, "peak_bytes") / median(theirs, "peak_bytes"),
    }
    print_row(row)
    return row


def summary(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {
        key: median(runs, key)
        for key in ("speed", "peak_bytes", "process_bytes", "first_loss", "last_losses")
    }


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def print_row(row: dict[str, Any]) -> None:
    print(f"{row['method']}")
    for side in ("fitune", "trl"):
        found = row[side]
        print(
            f"  {side:7} {found['speed']:8,.0f} supervised tokens/s"
            f"   peak of tensors {found['peak_bytes'] / 2**20:7.1f} MiB"
            f"   process {found['process_bytes'] / 2**20:6.0f} MiB"
            f"   loss {found['first_loss']:.4f} → {found['last_losses']:.4f} (mean of the last 5)"
        )
    print(f"  ratio   speed {row['speed_ratio']:.2f}   memory {row['memory_ratio']:.2f}")


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
    config = LlamaConfig(
        vocab_size=4096, hidden_size=320, intermediate_size=880, num_hidden_layers=6, num_attention_heads=5,
        num_key_value_heads=5, max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def plan_of(folder: Path, data: str, method: str, steps: int) -> Any:
    """The planner's own choice for everything but what the comparison holds equal."""
    from fitune.cli.planning import plan_for
    from fitune.spec.recipe import parse_recipe

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
    from fitune.data.dataset import prepare_data
    from fitune.data.loader import Loader
    from fitune.models.weights import load_tokenizer

    tokenizer = load_tokenizer(plan.model_path)
    data = prepare_data(
        plan.data, tokenizer=tokenizer, tokenizer_path=plan.model_path, seq_len=SEQ_LEN, seed=plan.run.seed
    )
    return tokenizer, data.train, Loader(data.train, plan.batch, seed=plan.run.seed)


def run_fitune(folder: Path, data: str, method: str, steps: int) -> dict[str, Any]:
    from fitune.measure.memory import memory_meter
    from fitune.train.loop import train
    from fitune.train.prepare import prepare

    plan = plan_of(folder, data, method, steps)
    _, _, loader = read_data(plan)
    prepared = prepare(plan)
    ends, reports = [], []
    for report in train(plan, prepared, loader, meter=memory_meter(prepared.model.device)):
        ends.append(time.perf_counter())
        reports.append(report)
    peak = max(max(report.memory_bytes.values(), default=0) for report in reports)
    tokens = [report.supervised_tokens for report in reports]
    return result(ends, tokens, [report.loss for report in reports], peak)


def run_trl(folder: Path, data: str, method: str, steps: int) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from fitune.data.loader import LoaderState
    from fitune.measure.memory import LiveTensors

    plan = plan_of(folder, data, method, steps)
    tokenizer, dataset, loader = read_data(plan)
    state, rows, tokens = LoaderState(epoch=0, position=0), [], []
    for _ in range(steps):
        batch = loader.batch_at(state)
        tokens.append(batch.supervised_tokens)
        rows += [row for micro in batch.micro_batches for row in micro.row_ids]
        state = loader.after(state)
    examples = [dataset.row(row) for row in rows]
    columns = {
        "input_ids": [ids.tolist() for ids, _ in examples],
        "completion_mask": [supervised.astype(int).tolist() for _, supervised in examples],
    }

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset or self.train_dataset)

    class Watch(TrainerCallback):
        """Ends of steps, and the live tensors of one step."""

        def __init__(self) -> None:
            self.ends: list[float] = []
            self.tracker: LiveTensors | None = None
            self.peak = 0

        def on_step_begin(
            self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
        ) -> None:
            if state.global_step == MEASURED_STEP - 1:
                kept = [
                    v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
                ]
                self.tracker = LiveTensors([*model.parameters(), *model.buffers(), *kept])
                self.tracker.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ends.append(time.perf_counter())
            if self.tracker is not None:
                self.tracker.__exit__(None, None, None)
                self.peak = max(self.tracker.peaks.values())
                self.tracker = None

    lora = plan.tuning if method == "lora" else None
    watch = Watch()
    trainer = InOrder(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH, max_length=SEQ_LEN, max_steps=steps,
            learning_rate=RATES[method], lr_scheduler_type="constant", warmup_steps=0, max_grad_norm=1.0, bf16=False,
            weight_decay=0.0, gradient_checkpointing=False, completion_only_loss=True, optim="adamw_torch_fused",
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, seed=42,
        ),
        train_dataset=Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=[watch],
        peft_config=None if lora is None else LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=list(lora.targets),
            task_type="CAUSAL_LM",
        ),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return result(watch.ends, tokens, losses, watch.peak)


def result(ends: list[float], tokens: list[int], losses: list[float], peak: int) -> dict[str, Any]:
    seconds = ends[-1] - ends[FIRST_TIMED_STEP - 1]
    return {
        "speed": sum(tokens[FIRST_TIMED_STEP:]) / seconds,
        "peak_bytes": peak,
        "process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_loss": losses[0],
        "last_losses": statistics.fmean(losses[-5:]),
        "losses": losses,
    }


if __name__ == "__main__":
    main()
