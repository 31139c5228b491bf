"""The one builder of plans for tests: any model, any choice, no hub and no torch."""

from dataclasses import replace

from fitune.planner.search import find_plan
from fitune.recipe.recipe import canonical_keys, parse_recipe
from fitune.recipe.strict_yaml import parse_value
from fitune.recipe.targets import resolve_targets
from fitune.units import GIB
from fitune.values.machines.gpus import cpu_gpu, find_gpu, hardware_for
from fitune.values.model.block_profile import BatchShape
from fitune.values.model.model_config import load_model_spec, spec_from_config
from fitune.values.model.tracing import shipped_profile, way_of
from fitune.values.plan import (
    AdamW,
    Batch,
    ChunkedLoss,
    Full,
    Lora,
    PlainLoss,
    Plan,
    Precision,
    Recompute,
    RunPlan,
    Schedule,
    Single,
    Steps,
)

CPU = hardware_for(gpu=cpu_gpu(memory_bytes=16 * GIB, cores=2))


def gpu(name, *, gpus=1, **different):
    return replace(hardware_for(gpu=find_gpu(name), gpus=gpus), **different)


def known(name):
    return load_model_spec(name, offline=True)


def recipe_of(model, words="", **settings):
    """A recipe as its file says it: ``words`` is ``tuning: lora, zero: 3``."""
    written = parse_value(f"{{{words}}}", where="test")
    return parse_recipe(canonical_keys({"model": model, **written, **settings}, where="test"))


def report_of(model, hardware, words="", **settings):
    """What the planner finds for a known model on this hardware, or on cards of this name."""
    recipe = recipe_of(model, words, **settings)
    if isinstance(hardware, str):
        hardware = CPU if hardware == "cpu" else gpu(hardware, gpus=recipe.gpus or 1)
    return find_plan(recipe, model=known(model), hardware=hardware)


def plan_of(model, hardware, words="", **settings):
    return report_of(model, hardware, words, **settings).chosen.plan


def lines_of(report, start):
    """Decisions that begin so."""
    return [line for line in report.decisions if line.startswith(start)]


SMALL_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 600, "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}  # fmt: skip


def small_llama(**different):
    return spec_from_config({**SMALL_LLAMA, **different}, name="tiny/llama")


def plan_for(
    model,
    *,
    hardware=CPU,
    tuning="full",
    precision="fp32",
    rank=8,
    alpha=None,
    dropout=0.0,
    targets=("all-linear",),
    recompute=0,
    chunk=0,
    rows=4,
    accumulation=1,
    seq_len=64,
    **different,
):
    lora = Lora(rank=rank, alpha=alpha or rank, dropout=dropout, targets=resolve_targets(model, targets))
    plan = Plan(
        model=model,
        model_path=model.name,
        hardware=hardware,
        tuning=Full() if tuning == "full" else lora,
        precision=Precision(precision),
        optimizer=AdamW(),
        sharding=Single(),
        recompute=Recompute(blocks=recompute),
        attention="sdpa",
        loss=ChunkedLoss(chunk_tokens=chunk) if chunk else PlainLoss(),
        batch=Batch(micro_batch_size=rows, accumulation=accumulation, seq_len=seq_len, packing=True),
        schedule=Schedule(
            learning_rate=1e-4,
            kind="constant",
            warmup=Steps(count=0),
            duration=Steps(count=2),
            max_grad_norm=1.0,
        ),
        run=RunPlan(output_dir="runs/test"),
    )
    return replace(plan, **different)


def borrowed_profile(way):
    """A shipped model's profile for all kinds of blocks of another: sizes that a plan can be made of, and untrue."""
    model, rows = known("EleutherAI/pythia-70m"), 2
    plan = plan_for(
        model, hardware=gpu("rtx-4090"), tuning="lora", rank=16, precision="bf16-master", attention="flash",
        rows=rows, accumulation=2, seq_len=2048,
    )  # fmt: skip
    shape = BatchShape(tokens=2048 * rows, supervised_tokens=2048 * rows, rows=rows)
    step = shipped_profile(model.config_digest, way_of(plan, shape).digest)
    return replace(step, blocks=step.blocks[:1] * len(way.plan.model.kinds))
