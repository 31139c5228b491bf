"""Defaults: the number that is taken where the recipe leaves it open, and why; and what a recipe sets in vain."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace

from fitune.errors import RecipeError
from fitune.recipe.contradictions import source_weights
from fitune.recipe.recipe import Recipe, SourceRecipe
from fitune.values.machines.hardware import Gpu, Hardware
from fitune.values.model.model_config import vocabulary_of
from fitune.values.model.model_spec import ModelSpec
from fitune.values.named_templates import NAMED_TEMPLATES, require_marks
from fitune.values.plan import (
    AdamW,
    AdamW8bit,
    Batch,
    DataPlan,
    DataSource,
    Dense,
    Epochs,
    Fraction,
    Full,
    Lomo,
    Lora,
    Optimizer,
    Plan,
    RunPlan,
    Schedule,
    Sgd,
    Steps,
    Tracking,
    Tuning,
    base_of,
    updates_in_backward,
)
from fitune.values.words import method_name

GLOBAL_BATCH_SIZE = 16
"""Rows (packs) per optimizer step: small enough that a few thousand rows make hundreds of steps."""
MOST_MICRO_BATCH = 16
CHUNK_TOKENS = (4096, 1024, 256)
"""Tokens per chunk of the loss that are tried: products stay large, logits small."""
ROW_STEP = 64
"""Lengths of rows are proposed in multiples of it."""
SGD_RATE_FACTOR = 100
"""SGD's steps are not normalised by the gradient's size, so its rates are about this much larger."""
HIGH_RATE, LOW_RATE = 10.0, 0.01
"""A learning rate beyond these multiples of the method's default is most often a slip."""


HOST_PER_DEVICE_MEMORY = 2
"""A node's memory per byte of its devices' when nobody says: our assumption (DGX-1 and DGX A100 have 2)."""


def with_host_memory(hardware: Hardware) -> Hardware:
    """The hardware with its host memory assumed where it is not known: no plan may need a host that nobody has."""
    if hardware.host_memory_bytes:
        return hardware
    devices = hardware.gpus_per_node * hardware.gpu.memory_bytes
    return replace(hardware, host_memory_bytes=HOST_PER_DEVICE_MEMORY * devices)


def with_cards(hardware: Hardware, gpus: int, recipe: Recipe) -> Hardware:
    """The hardware with so many cards in a node; a host's memory that was assumed by them follows."""
    changed = replace(hardware, gpus_per_node=gpus)
    if not hardware.host_memory_bytes or recipe.host_memory is not None or recipe.gpu is None:
        return changed
    return with_host_memory(replace(changed, host_memory_bytes=0))


def with_usual_row(recipe: Recipe, model: ModelSpec) -> Recipe:
    """``seq_len`` by default, but no longer than the model takes."""
    if "seq_len" in recipe.model_fields_set or recipe.seq_len <= model.max_seq_len:
        return recipe
    return recipe.model_copy(update={"seq_len": model.max_seq_len})


def with_added_rows(recipe: Recipe, model: ModelSpec) -> ModelSpec:
    """The model with a row for each of ``recipe.added_tokens``; tables often have spare rows, which come first.

    Without a tokenizer.json at hand all of them get new rows. Raises RecipeError for tokens that are empty, named
    twice, or in the vocabulary already, and for a named chat template whose marks are no tokens.
    """
    is_named = recipe.chat_template in NAMED_TEMPLATES
    known = vocabulary_of(model.name) if recipe.added_tokens or is_named else None
    if known is not None and is_named:
        require_marks(recipe.chat_template, {*known, *recipe.added_tokens})
    if not recipe.added_tokens:
        return model
    _refuse_tokens(recipe.added_tokens, known)
    used = model.vocab_size if known is None else max(known.values(), default=-1) + 1
    return replace(model, vocab_size=max(model.vocab_size, used + len(recipe.added_tokens)))


def _refuse_tokens(tokens: list[str], known: dict[str, int] | None) -> None:
    for token in tokens:
        if not token.strip():
            raise RecipeError(
                f"added_tokens: {token!r} is empty", hint="added_tokens: ['<think>', '</think>']"
            )
        if tokens.count(token) > 1:
            raise RecipeError(f"added_tokens names {token!r} twice", hint="name it once")
        if known is not None and token in known:
            raise RecipeError(
                f"added_tokens: {token!r} is token {known[token]} of the tokenizer already",
                hint="leave it out; lora_modules_to_save: [embed_tokens, lm_head] trains its row with adapters",
            )


def default_learning_rate(tuning: Tuning, optimizer: Optimizer) -> float:
    """LoRA 2e-4 (Dettmers et al. 2023, arXiv 2305.14314, table 9), full 2e-5 (Touvron et al. 2023, arXiv
    2307.09288, section 3.1) with AdamW; 100 × that with SGD.

    AdaLomo 5e-4 and LOMO 1e-2: the sizes their papers train with (arXiv 2310.10195, 2306.09782).
    """
    if isinstance(tuning, Lomo):
        return 5e-4 if tuning.adaptive else 1e-2
    rate = 2e-4 if isinstance(tuning, Lora) else 2e-5
    return rate if isinstance(optimizer, AdamW | AdamW8bit) else rate * SGD_RATE_FACTOR


def learning_rate_words(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """The rate where the recipe left it open, or how far from it the recipe's is."""
    rate = recipe.learning_rate
    if rate is None:
        yield f"learning rate: {plan.schedule.learning_rate:g}, fitune's default for this tuning and optimizer"
    else:
        usual = default_learning_rate(plan.tuning, plan.optimizer)
        times, note = rate / usual, f"note on learning_rate: {rate:g} is"
        if times > HIGH_RATE:
            yield f"{note} {times:,.0f} × the usual {usual:g}; the loss may diverge"
        elif 0 < times < LOW_RATE:
            yield f"{note} 1/{1 / times:,.0f} of the usual {usual:g}; the model may hardly change"


def optimizer_of(recipe: Recipe) -> Optimizer:
    """The optimizer that the recipe names, with its settings."""
    match recipe.optimizer:
        case "adamw" | "adamw-8bit" as name:
            return adamw_of(recipe, AdamW if name == "adamw" else AdamW8bit)
        case "sgd":
            return Sgd(weight_decay=recipe.weight_decay)
        case "momentum":
            return Sgd(momentum=recipe.momentum, weight_decay=recipe.weight_decay)


def adamw_of(recipe: Recipe, kind: type[AdamW | AdamW8bit]) -> Optimizer:
    """AdamW of a kind with the recipe's settings."""
    return kind(
        beta1=recipe.adam_beta1,
        beta2=recipe.adam_beta2,
        eps=recipe.adam_epsilon,
        weight_decay=recipe.weight_decay,
    )


def schedule_of(recipe: Recipe, tuning: Tuning, optimizer: Optimizer) -> Schedule:
    """The schedule of the recipe: its rates, warm-up and length in steps or epochs."""
    return Schedule(
        learning_rate=recipe.learning_rate or default_learning_rate(tuning, optimizer),
        kind=recipe.lr_scheduler,
        warmup=Fraction(of=recipe.warmup_ratio)
        if recipe.warmup_steps is None
        else Steps(count=recipe.warmup_steps),
        duration=Epochs(count=recipe.num_epochs)
        if recipe.max_steps is None
        else Steps(count=recipe.max_steps),
        max_grad_norm=recipe.max_grad_norm,
        min_ratio=recipe.min_lr_ratio,
    )


def batch_of(recipe: Recipe, *, micro: int, steps: int) -> Batch:
    """``steps`` micro-batches of ``micro`` rows or packs, as the recipe has them."""
    return Batch(
        micro_batch_size=micro, accumulation=steps, seq_len=recipe.seq_len, packing=recipe.packing,
        mean_row_tokens=min(recipe.mean_row_tokens or 0, recipe.seq_len),
    )  # fmt: skip


def data_of(recipe: Recipe) -> DataPlan:
    """The data of the recipe: its sources with their weights, and how rows are read."""
    return DataPlan(
        sources=tuple(
            _source(source, recipe, weight=weight)
            for source, weight in zip(recipe.data, source_weights(recipe), strict=True)
        ),
        eval_sources=tuple(_source(source, recipe, weight=source.weight) for source in recipe.eval_data),
        val_fraction=recipe.val_fraction,
        chat_template=recipe.chat_template,
        chat_template_date=recipe.chat_template_date,
        train_on_prompt=recipe.train_on_prompt,
        train_on_empty_thinking=recipe.train_on_empty_thinking,
        on_bad_row=recipe.on_bad_row,
        on_long_row=recipe.on_long_row,
        cache_dir=recipe.cache_dir,
    )


def _source(source: SourceRecipe, recipe: Recipe, *, weight: float) -> DataSource:
    return DataSource(
        path=source.path,
        format=source.format,
        split=source.split,
        columns=tuple((source.columns or recipe.columns).items()),
        sample=source.sample,
        weight=weight,
        allow_https=recipe.allow_https,
        allow_private_addresses=recipe.allow_private_addresses,
        streaming=source.streaming,
    )


def run_of(recipe: Recipe, *, model: ModelSpec, tuning: Tuning) -> RunPlan:
    """The settings of the run; an output_dir that is a URL becomes a folder here that is uploaded there."""
    directory, upload_to = recipe.output_dir or default_output_dir(model, tuning), recipe.upload_to
    saves = recipe.saves_per_epoch
    if saves is None:  # once an epoch where nothing is said: a run that is killed loses an epoch at most
        saves = 1 if recipe.save_steps is None else 0
    if "://" in directory:
        directory, upload_to = staging_of(directory), directory
    return RunPlan(
        output_dir=directory,
        upload_to=upload_to,
        seed=recipe.seed,
        log_every=recipe.log_steps,
        eval_every=recipe.eval_steps,
        evals_per_epoch=recipe.evals_per_epoch,
        save_every=recipe.save_steps or 0,
        saves_per_epoch=saves,
        keep_checkpoints=recipe.keep_checkpoints,
        async_save=recipe.async_save or False,
        export=recipe.export or ("adapter" if isinstance(tuning, Lora) else "full"),
        push_to_hub=recipe.push_to_hub,
        hub_public=recipe.hub_public,
        report_to=tuple(recipe.report_to),
        tracking=Tracking(
            run_name=recipe.run_name,
            project=recipe.track_project,
            team=recipe.track_team,
            server=recipe.track_server,
            run_id=recipe.track_id,
            offline=recipe.track_offline,
        ),
        samples=recipe.samples,
    )


def default_output_dir(model: ModelSpec, tuning: Tuning) -> str:
    """``runs/llama-3.1-8b-lora``."""
    short = model.name.rstrip("/").rsplit("/", 1)[-1].lower()
    return f"runs/{short}-{method_name(tuning)}"


def staging_of(url: str) -> str:
    """The folder of this machine in which a run is written that goes to ``url``; the same for every start of it."""
    url = url.rstrip("/")
    mark = hashlib.sha256(url.encode(errors="surrogatepass")).hexdigest()[:6]
    return f"runs/{re.sub('[^A-Za-z0-9._-]+', '-', url.rsplit('/', 1)[-1])[:64].strip('.') or 'run'}-{mark}"


def idle_words(recipe: Recipe, plan: Plan) -> Iterator[str]:
    """Settings that were given and that belong to a method or an optimizer that was not taken."""
    base, is_lora = base_of(plan), isinstance(plan.tuning, Lora)
    packs, read = ("tuning", frozenset()) if isinstance(base, Dense) else ("quantization", base.settings)
    owners = {
        "lora_": ("tuning", is_lora),
        "rslora": ("tuning", is_lora),
        "adam_": ("optimizer", isinstance(plan.optimizer, AdamW | AdamW8bit)),
        "momentum": ("optimizer", recipe.optimizer == "momentum"),
        "quantization_group": (packs, "quantization_group_size" in read),
        "double_quant": (packs, "double_quantization" in read),
        "max_grad_value": ("tuning", updates_in_backward(plan.tuning)),
        "optimizer_in_backward": ("tuning", isinstance(plan.tuning, Full)),
    }
    for name, field in type(recipe).model_fields.items():
        idle = [what for start, (what, taken) in owners.items() if name.startswith(start) and not taken]
        if idle and name in recipe.model_fields_set and getattr(recipe, name) != field.default:
            yield f"note on {name}: it does nothing with the {idle[0]} of this plan"


PRICES = {
    "t4": 0.15, "v100-16gb": 0.23, "v100-32gb": 0.21, "l4": 0.49, "l40": 0.69, "l40s": 0.79, "a40": 0.49,
    "a100-40gb": 1.00, "a100-80gb": 1.39, "h100": 2.69, "h100-pcie": 1.99, "h100-nvl": 2.59,
    "h200": 3.59, "h200-nvl": 3.79, "b200": 5.98, "b300": 6.94, "rtx-3080": 0.17, "rtx-3090": 0.22,
    "rtx-4080": 0.27, "rtx-4090": 0.34, "rtx-5080": 0.39, "rtx-5090": 0.69, "rtx-a5000": 0.16, "rtx-a6000": 0.33,
    "rtx-6000-ada": 0.74, "rtx-pro-6000": 1.69,
}  # fmt: skip
"""US dollars for an hour of one GPU, all of one kind: the lowest on demand at a GPU marketplace, on 1 October 2026.
RunPod's catalogue; for t4 and v100-32gb, which it did not offer, the verified hosts of Vast.ai. Both were read by
github.com/toolshedlabs-hash/gpu-price-feed (data/history/v2/2026-10.jsonl). An assumption and nobody's offer: the
recipe's ``price_per_gpu_hour`` always wins."""


def price_of(gpu: Gpu) -> float:
    """0 when it is not known."""
    return PRICES.get(gpu.name, 0.0)
