"""Every causal language model of transformers: can it be planned, and does a small one train as transformers does?

    python bench/architectures.py             all architectures, one process each; writes results/architectures.json
    python bench/architectures.py olmo2 phi   these alone, printed

For each architecture a small random model is made from its own config class and saved. Its plan is made as for any
folder, without a formula. Then two steps of three rows in one stream are run as fitune trains (full in fp32, LoRA, LoRA
on NF4), and the same rows one by one through transformers' own forward, with the same weights. Losses and gradients
must agree, and the peak of live tensors with the estimate.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ROWS = (40, 64, 25)
WAYS = ("full", "lora", "qlora")
LOSS_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 2e-3
"""Of the norm of all gradients: fp32 sums in another order."""
PEAK_TOLERANCE = 0.03

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "attention_hidden_size", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "d_inner", "dff"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "attention_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "shared_intermediate_size", "moe_shared_expert_intermediate_size", "intermediate_size_mlp",
                     "shared_expert_size"), 64),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "qk_head_dim": 24, "sliding_window": 16, "sliding_window_size": 16, "attention_chunk_size": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16, "state_size": 16,
    "hidden_size_per_layer_input": 16, "window_size": 16, "layer_types": None, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "time_step_rank": 4, "lru_width": 64, "conv_dim": 64,
    "mamba_chunk_size": 24, "chunk_size": 24, "rotary_dim": 8, "use_cache": False, "initializer_range": 0.1,
}  # fmt: skip
_WITH_SHARED_KEYS = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
}
_SPARSE = {**_WITH_SHARED_KEYS, "laurel_rank": 8, "activation_sparsity_pattern": [0.9, *[0.0] * 5]}
DIFFERENT: dict[str, dict[str, Any]] = {
    "mpt": {"max_seq_len": 256},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "layer_types": None},
    "glm4_moe": {"num_key_value_heads": 2},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "mamba"]},
    "falcon_h1": {"mamba_d_ssm": 128, "mlp_expansion_factor": 2, "mamba_n_heads": 8, "mamba_d_head": 16},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text", "gemma4", "gemma4_unified"), _WITH_SHARED_KEYS),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _SPARSE),
    "llama4_text": {"intermediate_size": 64, "intermediate_size_mlp": 128},
    "lara_mini": {
        "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
    },
}
"""Beside SMALL, where an architecture wants it."""


def small_config(model_type: str) -> Any:
    """A config of four small blocks with every setting that the class has a small value for."""
    from transformers import CONFIG_MAPPING

    from fitune.values.model.config_schema import is_random_rate

    kind = CONFIG_MAPPING[model_type]
    with_defaults = kind()
    text = with_defaults.get_text_config()
    known = text.to_dict()
    wanted = {**SMALL, **DIFFERENT.get(model_type, {})}
    values = {
        key: value for key, value in wanted.items() if key in known or key in DIFFERENT.get(model_type, {})
    }
    for key, value in known.items():
        if isinstance(value, list) and len(value) == text.num_hidden_layers and key not in values:
            values[key] = _short(value)
    if "kv_lora_rank" in known:  # keys and values are made for every head
        values["num_key_value_heads"] = values.get("num_attention_heads", 4)
    if "qk_rope_head_dim" in known:
        values.pop("head_dim", None)  # the size of what turns, whatever a head has beside it
    if known.get("layer_types") and "layer_types" not in DIFFERENT.get(model_type, {}):
        values["layer_types"] = _short(known["layer_types"])
    if not known.get("sliding_window") and not known.get("use_sliding_window"):
        values.pop("sliding_window", None)
    values |= {key: 0.0 for key in known if is_random_rate(key)}
    return type(text)(**values)


def _short(values: list[Any], count: int = 4) -> list[Any]:
    """``count`` of them, every kind among them, in the order in which kinds first come."""
    kinds = list(dict.fromkeys(map(str, values)))
    first = [next(v for v in values if str(v) == kind) for kind in kinds][:count]
    return [*first, *(first[-1:] * count)][:count]


def report_on(model_type: str, folder: Path) -> dict[str, Any]:
    """What was found for one architecture; ``plan`` and each way are "ok" or the reason against it."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    found: dict[str, Any] = {"model_type": model_type}
    try:
        config = small_config(model_type)
        found["model_type"] = config.model_type
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
        model.save_pretrained(folder)
    except Exception as error:  # whatever a class of transformers raises is the answer
        return {**found, "plan": f"no small model: {_first_line(error)}"}
    return {**found, **_planned_and_trained(folder, model)}


def _randomise(model: Any) -> None:
    """Weights that are initialised to zero or one would hide differences."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)


def _planned_and_trained(folder: Path, model: Any) -> dict[str, Any]:
    from fitune.errors import FituneError
    from fitune.estimate.predict import predict_memory
    from fitune.values.counts import count_parameters
    from fitune.values.model.model_config import load_model_spec

    found: dict[str, Any] = {}
    try:
        spec = load_model_spec(str(folder))
        counted, real = count_parameters(spec).total, sum(p.numel() for p in model.parameters())
        if counted != real:
            return {"plan": f"{counted} parameters were counted, the model has {real}"}
        found |= {"kinds": len(spec.kinds) or 1, "traced": spec.is_traced}
        for way in WAYS:
            predict_memory(_plan(spec, folder, way))
        found["plan"] = "ok"
    except FituneError as error:
        return {**found, "plan": str(error)}
    for way in WAYS:
        try:
            found[way] = _trained(spec, folder, way)
        except Exception as error:  # the reason goes into the table
            found[way] = {"why": f"{type(error).__name__}: {_first_line(error)}"}
    return found


def _plan(spec: Any, folder: Path, way: str) -> Any:
    from fitune.recipe.targets import resolve_targets
    from fitune.units import GIB
    from fitune.values.machines.gpus import cpu_gpu, hardware_for
    from fitune.values.plan import (
        AdamW,
        Dense,
        Full,
        Lora,
        Nf4,
        PlainLoss,
        Plan,
        Precision,
        Recompute,
        RunPlan,
        Schedule,
        Single,
        Steps,
    )  # fmt: skip

    base = Nf4(double_quant=False) if way == "qlora" else Dense()
    tuning: Any = Full()
    if way != "full":
        targets = resolve_targets(spec, ("all-linear",))
        tuning = Lora(rank=4, alpha=8, dropout=0.0, targets=targets, base=base)
    return Plan(
        model=spec, model_path=str(folder), hardware=hardware_for(gpu=cpu_gpu(memory_bytes=16 * GIB, cores=2)),
        tuning=tuning, precision=Precision.FP32, optimizer=AdamW(), sharding=Single(), recompute=Recompute(blocks=2),
        attention="sdpa", loss=PlainLoss(),
        batch=_batch(spec),
        schedule=Schedule(
            learning_rate=1e-2, kind="constant", warmup=Steps(count=0), duration=Steps(count=2), max_grad_norm=0.0
        ),
        run=RunPlan(output_dir=str(folder)),
    )  # fmt: skip


def _batch(spec: Any) -> Any:
    """One stream of all rows, or one row at a time where rows of a stream would see each other."""
    from fitune.values.plan import Batch

    if spec.separates_rows:
        return Batch(micro_batch_size=1, accumulation=1, seq_len=sum(ROWS), packing=True)
    return Batch(micro_batch_size=1, accumulation=len(ROWS), seq_len=max(ROWS), packing=False)


def _trained(spec: Any, folder: Path, way: str) -> dict[str, Any]:
    """Two steps of fitune's engine beside transformers' own forward, row by row, on the weights of each step."""
    import torch
    from transformers import AutoModelForCausalLM

    from fitune.estimate.predict import predict_memory
    from fitune.train.prepare import prepare_loaded
    from fitune.values.model.block_profile import BatchShape

    plan = _plan(spec, folder, way)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prepared = prepare_loaded(model, plan)
    if way != "full":
        _spread(prepared.model.trained.values())
    streams = [_stream(_rows())] if spec.separates_rows else [_stream([ids]) for ids in _rows()]
    supervised = sum(ROWS) - len(ROWS)
    found: dict[str, Any] = {}
    worst_loss = worst_gradient = 0.0
    for step in range(2):
        own_loss, own_norm, wanted = _own(prepared, way)
        loss = sum(
            prepared.engine.forward_backward(stream, divisor=supervised, enter_phase=lambda phase: None)
            for stream in streams
        )
        gap = _gap(prepared.model.trained, wanted)
        worst_loss = max(worst_loss, abs(float(loss) / supervised - own_loss) / abs(own_loss))
        worst_gradient = max(worst_gradient, gap / own_norm)
        del wanted
        prepared.engine.update(learning_rate=1e-2, enter_phase=lambda phase: None)
        if step == 1:
            found["peak"] = _second_peak(prepared, streams, supervised)
    rows = ROWS if spec.separates_rows else (max(ROWS),)
    shape = BatchShape.of_rows(rows, supervised_tokens=sum(rows) - len(rows))
    predicted = predict_memory(plan, shape).tensor_peak_bytes
    found |= {"loss": worst_loss, "gradient": worst_gradient, "peak": predicted / found["peak"] - 1}
    equal = worst_loss < LOSS_TOLERANCE and worst_gradient < GRADIENT_TOLERANCE
    return {**found, "ok": equal and abs(found["peak"]) < PEAK_TOLERANCE, "equal": equal}


def _second_peak(prepared: Any, streams: Any, supervised: int) -> int:
    from fitune.measure.memory import LiveTensors

    longest = max(streams, key=lambda stream: sum(stream.sequence_lengths))
    meter = LiveTensors([*prepared.resident_tensors(), *longest.tensors()])
    with meter:
        for _ in streams:  # gradients exist from the second one on
            prepared.engine.forward_backward(longest, divisor=supervised, enter_phase=meter.enter)
        prepared.engine.update(learning_rate=1e-2, enter_phase=meter.enter)
    return max(meter.peaks.values())


def _spread(parameters: Any) -> None:
    """LoRA's second factors begin as zeros, which would leave the first without gradients."""
    import torch

    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(torch.randn_like(parameter) * 0.02)


def _own(prepared: Any, way: str) -> tuple[float, float, dict[str, Any]]:
    """Loss, norm of all gradients, and gradients by transformers' own attention, loss and padding-free rows."""
    import torch

    from fitune.models.attention import use_attention, use_cached_attention

    whole = prepared.model.whole
    base = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    use_cached_attention(base)
    supervised = sum(ROWS) - len(ROWS)
    total = 0.0
    for ids in _rows():
        output = base(input_ids=ids[None], use_cache=False)
        logits = output.logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum") / supervised
        loss.backward()
        total += float(loss)
    gradients = {}
    for name, parameter in prepared.model.trained.items():
        gradients[name] = None if parameter.grad is None else parameter.grad.clone()
        parameter.grad = None
    norm = sum(float(g.norm()) ** 2 for g in gradients.values() if g is not None) ** 0.5
    use_attention(base, "sdpa")
    return total, norm, gradients


def _gap(trained: Any, wanted: dict[str, Any]) -> float:
    """Norm of the difference of all gradients."""
    import torch

    square = 0.0
    for name, parameter in trained.items():
        one = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        other = torch.zeros_like(parameter) if wanted[name] is None else wanted[name]
        square += float((one - other).norm()) ** 2
    return square**0.5


def _rows() -> list[Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 500, (n,), generator=generator) for n in ROWS]


def _stream(rows: list[Any]) -> Any:
    import torch

    from fitune.rehearse.step import RowStream
    from fitune.values.model.block_profile import IGNORED

    labels = [torch.cat([ids[1:], torch.tensor([IGNORED])]) for ids in rows]
    positions = [torch.arange(len(ids)) for ids in rows]
    lengths = tuple(len(ids) for ids in rows)
    return RowStream(torch.cat(rows), torch.cat(labels), torch.cat(positions), lengths)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--here", action="store_true", help="in this process")
    chosen = parser.parse_args()
    if chosen.here:
        print(json.dumps(_in_this_process(chosen.types)))
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = chosen.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    found = {}
    for start in range(0, len(types), 12):
        part = types[start : start + 12]
        command = [sys.executable, __file__, "--here", *part]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
        lines = ended.stdout.strip().splitlines()
        rows = (
            json.loads(lines[-1])
            if ended.returncode == 0 and lines
            else {t: {"plan": ended.stderr[-300:]} for t in part}
        )
        found |= rows
        for name, row in rows.items():
            print(name, json.dumps(row), flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


def _in_this_process(types: list[str]) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    from transformers import logging

    import fitune.session  # who traces

    del fitune
    logging.set_verbosity_error()
    found = {}
    for model_type in types:
        with tempfile.TemporaryDirectory() as folder:
            found[model_type] = report_on(model_type, Path(folder))
    return found


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
