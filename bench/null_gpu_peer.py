"""fitune against TRL's SFTTrainer on the null GPU: memory, bytes touched, launches and synchronisations of one step.

    NULL_VENV=.venv-null PYTHONPATH=bench:src tests/null_gpu/run.sh python bench/null_gpu_peer.py --out results

LoRA, QLoRA and full × recomputed or not × Liger or not; each side has one process without Liger, which changes
transformers' classes for good, and one with it. Kernels do nothing there (see tests/null_gpu/README.md), so nothing
here is a time; the card is given 400 GiB, so that every case has a peak.

The same on both sides: Llama-3.1-8B's shape with random weights, rows of equal length and the same micro-batch,
adapters of rank 16 on the same seven linears, NF4 with double quantisation, fused AdamW, clipping by norm 1.0, flash
attention inside torch's SDPA, bf16 products. Each side runs its own loop with its own loader.

Precision: the trained weights and Adam's states are of the same types. SFTTrainer has adapters in fp32 under autocast
for LoRA (here bf16-master: fp32 masters of bf16 adapters), in bf16 with bf16 states for QLoRA, and bf16 weights and
states for a full bf16 model. ``qlora-master`` is what fitune plans for QLoRA by default: fp32 masters, against TRL's
bf16.

What differs: the loss goes in chunks of 1,024 tokens on both sides, TRL's by a Triton kernel of its own, which also
gives the entropy and the accuracy that SFTTrainer logs. All blocks are recomputed, or none. Liger is RMSNorm, gated MLP
and rotary positions on both sides.

Step 3 is counted. In step 4 every operation of torch and every Triton kernel is seen: "touched" is the sum of their
arguments and results, views apart, so what fits a cache counts like memory.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

NAMES = ("idle", "allocated", "reserved", "touched", "launches", "syncs")
COUNTED, SEEN = 3, 4
"""Steps."""
CHUNK_TOKENS = 1024
METHODS = ("lora", "qlora", "qlora-master", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One case for both sides."""

    method: str
    recompute: bool
    liger: bool

    @property
    def words(self) -> str:
        return f"{self.method}{', recomputed' * self.recompute}{', Liger' * self.liger}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for null_gpu_peer.json")
    parser.add_argument("--operations", type=int, default=0, help="name so many by bytes touched")
    parser.add_argument("--side", choices=["fitune", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--liger", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    settings = [
        Setting(method=method, recompute=recompute, liger=liger)
        for method in options.methods for recompute in (False, True) for liger in (False, True)
    ]  # fmt: skip
    if options.side is not None:
        run_side(options, [setting for setting in settings if setting.liger == options.liger])
        return
    found = {side: side_of(side) for side in ("fitune", "trl")}
    cases = [
        {"case": setting.words, **{side: found[side][setting.words] for side in found}}
        for setting in settings
    ]
    for case in cases:
        case["ratio"] = {name: round(case["fitune"][name] / case["trl"][name], 3) for name in NAMES}
        print(line_of(case))
    if options.out is not None:
        text = json.dumps(record(options, cases), indent=1) + "\n"
        (options.out / "null_gpu_peer.json").write_text(text, encoding="utf-8")


def side_of(side: str) -> dict[str, dict[str, Any]]:
    """Case -> what was seen, from processes of its own: no side finds what another left."""
    environment = {
        # ids, labels and what is counted of them are real: sizes depend on them
        "NULLCUDA_COMPUTE": "400000",
        "NULLCUDA_CARDS": "NVIDIA H100 80GB HBM3|90|400",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        **os.environ,
    }
    lines: list[str] = []
    for liger in ([], ["--liger"]):
        words = [sys.executable, __file__, *sys.argv[1:], "--side", side, *liger]
        finished = subprocess.run(words, check=True, env=environment, stdout=subprocess.PIPE, text=True)
        lines += [line for line in finished.stdout.splitlines() if line.startswith('{"case"')]
    return {(seen := json.loads(line)).pop("case"): seen for line in lines}


def line_of(case: dict[str, Any]) -> str:
    parts = []
    for name in NAMES:
        ours, theirs = case["fitune"][name], case["trl"][name]
        unit = {"touched": 1e9, "launches": 1, "syncs": 1}.get(name, 2**30)
        form = "d" if unit == 1 else ".2f"
        parts.append(f"{name} {ours / unit if unit > 1 else ours:{form}} | "
                     f"{theirs / unit if unit > 1 else theirs:{form}} = {case['ratio'][name]:.2f}")  # fmt: skip
    return f"{case['case']:28} " + "  ".join(parts)


def record(options: argparse.Namespace, cases: list[dict[str, Any]]) -> dict[str, Any]:
    from datetime import date
    from importlib.metadata import version

    libraries = ("torch", "transformers", "trl", "peft", "bitsandbytes", "liger-kernel", "triton")
    return {
        "benchmark": "bench/null_gpu_peer.py",
        "date": date.today().isoformat(),
        "device": "the null GPU (tests/null_gpu): H100, sm_90, 400 GiB; kernels do nothing",
        "is_gpu": False,
        "versions": {name: version(name) for name in libraries},
        "shape": f"llama-3.1-8b, {options.layers} blocks, {options.rows} rows of {options.seq} tokens",
        "units": "bytes between steps, of allocated and reserved peak, bytes touched; ratio: fitune / TRL",
        "cases": cases,
    }


def run_side(options: argparse.Namespace, settings: list[Setting]) -> None:
    import torch

    run = {"fitune": run_fitune, "trl": run_trl}[options.side]
    math.isfinite = lambda _: True  # no value means anything here, and fitune stops at a loss of NaN
    for setting in settings:
        watch = Watch()
        run(setting, options, watch)
        print(json.dumps({"case": setting.words, **watch.seen}), flush=True)
        print(setting.words, options.side, file=sys.stderr)
        for name, size in watch.bytes.most_common(options.operations):
            print(f"{name:60} {watch.calls[name]:6d} {size / 1e9:8.1f} GB", file=sys.stderr)
        del watch
        gc.collect()
        torch.cuda.empty_cache()


class Watch:
    """Counts of step COUNTED, and what the operations of step SEEN touch."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        import nullcuda
        import torch

        if number == SEEN:
            with self._operations(), self._triton_kernels():
                yield
            self.seen["touched"] = sum(self.bytes.values())
            return
        torch.cuda.reset_peak_memory_stats()
        idle = torch.cuda.memory_allocated()
        before = nullcuda.counts()
        yield
        if number == COUNTED:
            counts = nullcuda.since(before)
            self.seen |= {
                "idle": idle,
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": torch.cuda.max_memory_reserved(),
                **{name: counts[name] for name in ("launches", "syncs", "copies", "mallocs")},
            }

    def _operations(self) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        watch = self

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                watch.calls[str(func)] += 1
                # an allocation writes nothing
                if not (func.is_view or func._schema.name.startswith(("aten::empty", "aten::detach"))):
                    tensors = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
                    # a weight that bitsandbytes makes whole inside of the product: written, and read
                    whole = 2 * 2 * math.prod(args[2]) if "gemm_4bit" in func._schema.name else 0
                    watch.bytes[str(func)] += sum(t.nbytes for t in tensors if t.is_cuda) + whole
                return result

        return Operations()

    @contextmanager
    def _triton_kernels(self) -> Iterator[None]:
        import torch
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def seen(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            self.calls[kernel.__name__] += 1
            self.bytes[kernel.__name__] += sum(t.nbytes for t in tensors)
            return run(kernel, *args, **kwargs)

        JITFunction.run = seen
        try:
            yield
        finally:
            JITFunction.run = run


def empty_llama(layers: int) -> Any:
    """Weights without values: kernels that do nothing do not mind."""
    import torch
    from gpu_cases import SHAPES, config_of

    from fitune.models.readers import empty_model

    with torch.device("meta"):
        return empty_model(config_of(replace(SHAPES["8b"], layers=layers)), torch.bfloat16)


def run_fitune(setting: Setting, options: argparse.Namespace, watch: Watch) -> None:
    """fitune's own loop and loader over the plan."""
    import numpy as np
    import torch
    from gpu_cases import CASES, SHAPES, plan_of

    from fitune.data.dataset import TokenDataset
    from fitune.data.loader import Loader
    from fitune.measure.memory import memory_meter
    from fitune.train.loop import train
    from fitune.train.prepare import prepare_loaded
    from fitune.values.machines.gpus import find_gpu, hardware_for
    from fitune.values.plan import ChunkedLoss, Precision, Steps

    shape = replace(SHAPES["8b"], layers=options.layers, seq_len=options.seq)
    plan = plan_of(
        CASES[setting.method.removesuffix("-master")], shape, hardware=hardware_for(gpu=find_gpu("h100")),
        rows=options.rows, recompute=options.layers * setting.recompute,
    )  # fmt: skip
    plan = replace(
        plan,
        kernels="liger" if setting.liger else "torch",
        loss=ChunkedLoss(chunk_tokens=CHUNK_TOKENS),
        schedule=replace(plan.schedule, duration=Steps(count=SEEN)),
        precision=Precision.BF16 if setting.method in ("qlora", "full") else Precision.BF16_MASTER,
    )
    device = torch.device("cuda", 0)
    prepared = prepare_loaded(empty_llama(options.layers).to_empty(device=device), plan, device=device)
    torch.cuda.empty_cache()  # a real run packs weights as they are read, and holds no whole model
    rows = options.rows * SEEN
    offsets = np.arange(rows + 1) * options.seq
    ids = np.arange(rows * options.seq, dtype=np.uint32) % 90
    loader = Loader(TokenDataset(ids, np.ones(len(ids), np.bool_), offsets), plan.batch, seed=0)
    steps = train(plan, prepared, loader, meter=memory_meter(device))
    for number in range(1, SEEN + 1):
        with watch.step(number):
            next(steps)


def run_trl(setting: Setting, options: argparse.Namespace, watch: Watch) -> None:
    """SFTTrainer as its users start it; callbacks at the ends of each step."""
    from contextlib import ExitStack

    from datasets import Dataset, disable_progress_bars
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    model = empty_llama(options.layers)
    model.config._attn_implementation = "sdpa"
    method = setting.method.removesuffix("-master")
    if method == "qlora":
        quantise(model)
    else:
        model = model.to_empty(device="cuda")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    class Steps(TrainerCallback):
        within = ExitStack()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.within.enter_context(watch.step(state.global_step + 1))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.within.close()

    with tempfile.TemporaryDirectory() as folder:
        settings = SFTConfig(
            output_dir=folder, per_device_train_batch_size=options.rows, max_steps=SEEN, max_length=options.seq,
            learning_rate=1e-5, lr_scheduler_type="constant", optim="adamw_torch_fused", max_grad_norm=1.0,
            weight_decay=0.0, bf16=True, gradient_checkpointing=setting.recompute, use_liger_kernel=setting.liger,
            logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model,
            args=settings,
            train_dataset=Dataset.from_dict(
                {"input_ids": [[i % 90 for i in range(options.seq)]] * (options.rows * SEEN)}
            ),
            processing_class=small_tokenizer(),
            peft_config=None
            if method == "full"
            else LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
            callbacks=[Steps()],
        )
        trainer.train()


def quantise(model: Any) -> None:
    """Blocks in NF4 by bitsandbytes' linears, the rest as it is; flags as transformers' loader sets them."""
    from types import SimpleNamespace

    import torch
    from bitsandbytes.nn import Linear4bit, Params4bit
    from torch import nn

    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                packed = Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16,
                    quant_type="nf4", device="meta",
                )  # fmt: skip
                whole = torch.empty(child.weight.shape, dtype=torch.bfloat16, device="cuda")
                packed.weight = Params4bit(whole, requires_grad=False, quant_type="nf4", module=packed)
                packed.weight = packed.weight._quantize("cuda")
                setattr(parent, name, packed)
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    real = torch.empty_like(tensor, device="cuda")
                    held[name] = nn.Parameter(real) if isinstance(tensor, nn.Parameter) else real
    model.is_loaded_in_4bit = model.is_quantized = True
    model.quantization_method = "bitsandbytes"
    model.hf_quantizer = SimpleNamespace(
        is_trainable=True, is_qat_trainable=False, is_compileable=False, requires_parameters_quantization=False,
        is_serializable=lambda *_, **__: True,
        quantization_config=SimpleNamespace(quant_method="bitsandbytes", to_dict=dict),
    )  # fmt: skip


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(100)} | {"<pad>": 100, "<eos>": 101}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    main()
