"""Recipe: what the user wants, in the words of any of the popular frameworks.

``None`` means "you choose"; the planner decides it and prints what it decided. Unknown and duplicate
keys are refused with a did-you-mean.
"""

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BeforeValidator,
    PlainValidator,
    ValidationError,
)

from fitune.errors import RecipeError, did_you_mean
from fitune.recipe.aliases import (
    ALIASES,
    FOREIGN_FILES,
    SWITCHES,
    canonical_value,
    read_switch,
    refuse_foreign_value,
)
from fitune.recipe.deepspeed_file import with_deepspeed_file
from fitune.recipe.paths import with_absolute_paths
from fitune.recipe.strict_yaml import type_inside, typed_value
from fitune.recipe.types import (
    Bandwidth,
    CountFloat,
    CountInt,
    HeldOut,
    HubName,
    Layers,
    NamedPath,
    Names,
    PathText,
    PositiveFloat,
    PositiveInt,
    RowLength,
    Seed,
    Share,
    Size,
    Strict,
    Targets,
    TemplateText,
    as_columns,
    as_date,
    as_name,
    as_numbers,
    as_source,
    as_sources,
    described,
    quantiser_word,
    switch_or_count,
    whole_number,
)
from fitune.values.plan import Attention, Backend, DataFormat, Kernels, Place

Columns = Annotated[
    dict[Literal["system", "prompt", "completion", "text", "messages", "tools"], str],
    BeforeValidator(as_columns),
]


EVERY_KEY = "fitune plan --help lists every key"


class SourceRecipe(Strict):
    """One dataset: a path or Hub id (``path#500`` takes 500 rows), how to read it, its weight in the mix."""

    path: NamedPath
    format: DataFormat = "auto"
    split: str = "train"
    columns: Columns = {}
    sample: CountInt = 0
    weight: PositiveFloat = 1.0
    streaming: bool = False


Sources = Annotated[
    list[Annotated[SourceRecipe, BeforeValidator(as_source)]],
    BeforeValidator(as_sources),
]


class Recipe(Strict):
    """Everything a user may ask for. Only ``model`` has no default."""

    model: NamedPath
    """A folder, a name on the Hub, or a config.json"""
    tuning: Literal["full", "lora", "qlora", "lomo", "adalomo"] | None = None
    """How to train; chosen: the best quality that fits"""
    precision: Literal["fp32", "bf16", "bf16-master", "fp16"] | None = None
    """Type of weights and arithmetic; bf16-master: fp32 masters too"""
    lora_r: PositiveInt = 16
    """Rank of the adapters"""
    lora_alpha: PositiveInt | None = None
    """Adapters are scaled by alpha / r; chosen: 2 · r"""
    lora_dropout: Share = 0.0
    """Share of an adapter's inputs that is dropped"""
    lora_target_modules: Targets = ["all-linear"]
    """Linears that get adapters: names or patterns"""
    lora_layers: Layers = []
    """Blocks that get adapters: 24-31; empty is all"""
    lora_modules_to_save: Names = []
    """Tables trained whole beside adapters: embed_tokens, lm_head"""
    added_tokens: Names = []
    """New tokens, each with a row in the embedding"""
    dora: bool = False
    """DoRA: train a weight's magnitude apart from its direction"""
    rslora: bool = False
    """Scale adapters by alpha / √r"""
    quantization: Annotated[str, PlainValidator(quantiser_word)] | None = None
    """Pack the frozen base: {quantisers} or none"""
    quantization_bits: Annotated[Literal[2, 3, 4, 8], BeforeValidator(whole_number)] | None = None
    """Bits of a packed weight; other than 4: hqq"""
    quantization_group_size: PositiveInt = 64
    """Weights with one scale (hqq)"""
    double_quantization: bool = True
    """Pack the scales, too (nf4)"""

    gpu: Annotated[str, BeforeValidator(as_name)] | None = None
    """A GPU by name (rtx-4090), or cpu; chosen: what is here"""
    gpu_memory: Size | None = None
    """Memory of a GPU that has no name here: 24GiB"""
    gpu_flops: PositiveFloat | None = None
    """Its dense bf16 FLOP/s"""
    gpu_bandwidth: Bandwidth | None = None
    """Its memory bandwidth: 1008GB/s"""
    interconnect: Bandwidth | None = None
    """Bandwidth between the GPUs of a node, one direction: 64GB/s"""
    node_network: Bandwidth | None = None
    """Bandwidth between nodes: 400Gbit/s"""
    gpus: PositiveInt | None = None
    """GPUs of a node; without gpu all of one kind that are here"""
    nodes: PositiveInt = 1
    """Machines"""
    host_memory: Size | None = None
    """Memory of a node: 128GiB"""
    nvme_path: PathText = ""
    """A folder on NVMe for what is offloaded there"""
    nvme_size: Size | None = None
    """Room in nvme_path: 2TiB"""
    price_per_gpu_hour: PositiveFloat | None = None
    """US dollars; chosen: a market price, assumed and shown"""
    objective: Literal["fastest", "cheapest", "least-memory"] = "fastest"
    """Aim of the search for a plan"""

    data: Sources = []
    """Files, folders, URLs, names on the Hub; FILE#500 takes 500"""
    data_weights: Annotated[list[PositiveFloat], BeforeValidator(as_numbers)] = []
    """One for each source: 2 repeats its rows, 0.5 takes half"""
    columns: Columns = {}
    """Columns of other names: prompt=question,completion=best_reply"""
    eval_data: Sources = []
    """Rows to evaluate on"""
    val_fraction: HeldOut = 0.0
    """Rows held out to evaluate on: 0.05 is a share, 200 a number"""
    chat_template: TemplateText = ""
    """A Jinja file, its text or chatml; else the tokenizer's own"""
    chat_template_date: Annotated[str, BeforeValidator(as_date)] = ""
    """Day that the template writes: 2026-01-31; else 2024-07-26"""
    train_on_prompt: bool = False
    """Learn prompts, too, not only answers"""
    train_on_empty_thinking: bool = False
    """Learn the empty <think> blocks that a template puts in"""
    packing: bool = False
    """Put several rows into one of seq_len tokens"""
    on_bad_row: Literal["error", "skip"] = "error"
    """When a row cannot be read"""
    on_long_row: Literal["truncate", "drop", "split", "error"] = "truncate"
    """When a row is longer than seq_len"""
    cache_dir: PathText = ""
    """Where tokenised rows are kept"""
    allow_https: bool = False
    """Fetch data from https:// addresses"""
    allow_private_addresses: bool = False
    """Also without encryption: http://"""

    seq_len: RowLength = 2048
    """Longest row in tokens"""
    mean_row_tokens: PositiveInt | None = None
    """Mean tokens of a row, for speeds; chosen: from the data"""
    micro_batch_size: PositiveInt | None = None
    """Rows on a device at once"""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-batches in a step"""
    global_batch_size: PositiveInt | None = None
    """Rows in a step on all devices; chosen: near 16"""

    optimizer: Literal["adamw", "adamw-8bit", "sgd", "momentum"] = "adamw"
    """Update rule"""
    optimizer_in_backward: bool = False
    """Update each weight as soon as its gradient is there"""
    learning_rate: PositiveFloat | None = None
    """Peak learning rate; chosen: by tuning and optimizer"""
    lr_scheduler: Literal["constant", "linear", "cosine"] = "cosine"
    """How the learning rate falls"""
    min_lr_ratio: Share = 0.0
    """Share of the learning rate that it falls to"""
    warmup_steps: CountInt | None = None
    """Steps over which the learning rate rises"""
    warmup_ratio: Share = 0.03
    """Steps of the rise as a share of all steps"""
    weight_decay: CountFloat = 0.0
    """Share of a weight, times the rate, taken off each step"""
    adam_beta1: Share = 0.9
    """Decay of AdamW's first moment"""
    adam_beta2: Share = 0.999
    """Decay of AdamW's second moment"""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to AdamW's denominator"""
    momentum: Share = 0.9
    """With optimizer: momentum"""
    max_grad_norm: CountFloat = 1.0
    """Clip the gradient's norm to this; 0 is off"""
    max_grad_value: PositiveFloat | None = None
    """Clip each entry of the gradient (LOMO, optimizer_in_backward)"""
    num_epochs: PositiveFloat = 1.0
    """Passes over the data"""
    max_steps: PositiveInt | None = None
    """Stop after so many steps, whatever num_epochs says"""
    seed: Seed = 42
    """Seed of every random draw"""

    zero: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole_number)] | None = None
    """0 is DDP; 1 divides states, 2 also gradients, 3 also weights"""
    backend: Backend | None = None
    """Library that divides: FSDP2 or DeepSpeed"""
    hybrid_sharding: bool | None = None
    """Divide within each node, replicate across nodes"""
    deepspeed: dict[str, int | bool] = {}
    """Path of a ds_config.json"""
    offload_parameters: Place | None = None
    """Where weights wait"""
    offload_optimizer: Place | None = None
    """Where optimizer states wait"""
    offload_activations: Place | None = None
    """Where activations wait for the backward pass"""

    gradient_checkpointing: Annotated[bool | int, PlainValidator(switch_or_count)] | None = None
    """Recompute activations: true, false, or of how many blocks"""
    loss: Literal["plain", "chunked"] | None = None
    """Chunked never holds all logits at once"""
    loss_chunk_tokens: PositiveInt | None = None
    """Tokens in a chunk of the loss"""
    attn_implementation: Attention | None = None
    """Kernel of attention"""

    kernels: Kernels = "torch"
    """liger: fused norms, MLPs, rotary positions and loss"""
    torch_compile: bool = False
    """Compile the blocks"""
    tf32: bool = False
    """With precision fp32: products of 10 bits, on Ampere and newer"""

    output_dir: PathText | None = None
    """Folder of the run, or a URL; chosen: runs/MODEL-TUNING"""
    upload_to: PathText = ""
    """A URL that gets checkpoints, export and report, too"""
    resume: bool | PathText = False
    """Go on from the newest checkpoint, or from a path or URL"""
    log_steps: PositiveInt = 1
    """Print a line every so many steps"""
    eval_steps: CountInt = 0
    """Evaluate every so many steps; 0: never"""
    evals_per_epoch: CountInt = 0
    """Evaluations per epoch"""
    save_steps: CountInt | None = None
    """Save a checkpoint every so many steps; 0: never"""
    saves_per_epoch: CountInt | None = None
    """Checkpoints per epoch"""
    keep_checkpoints: PositiveInt = 2
    """Number of newest checkpoints that are kept"""
    async_save: bool | None = None
    """Write checkpoints while training goes on"""
    export: Literal["adapter", "merged", "full"] | None = None
    """Form of the model that is written at the end"""
    push_to_hub: HubName = ""
    """OWNER/NAME on the Hub that gets the export; private"""
    hub_public: bool = False
    """Let everybody read what push_to_hub sends"""
    samples: CountInt = 4
    """Answers before and after training shown in the report"""

    report_to: Names = []
    """Also log to: wandb, mlflow, comet, tensorboard"""
    run_name: str = ""
    """Name of the run there; chosen: that of output_dir"""
    track_project: str = ""
    """Project (wandb, Comet) or experiment (MLflow); chosen: fitune"""
    track_team: str = ""
    """Entity (wandb) or workspace (Comet)"""
    track_server: str = ""
    """Tracking URI of MLflow"""
    track_id: str = ""
    """A run there to go on with"""
    track_offline: bool = False
    """Keep what wandb and Comet would get, to be sent later"""

    @property
    def quantization_is_asked_for(self) -> bool:
        """True if the recipe names a quantiser or its bits; ``none`` is the wish for none."""
        return self.quantization not in (None, "none") or self.quantization_bits is not None

    @property
    def adapters_asked_by(self) -> str:
        """The first key that only adapters can honour; empty when there is none."""
        named = {
            "export": self.export in ("adapter", "merged"), "quantization": self.quantization not in (None, "none"),
            "quantization_bits": self.quantization_bits, "dora": self.dora, "rslora": self.rslora,
            "lora_layers": self.lora_layers,
        }  # fmt: skip
        return next((name for name, is_asked in named.items() if is_asked), "")


def layered_recipe(
    keys: Mapping[str, Any],
    *,
    where: str,
    settings: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Recipe:
    """Canonical keys of a file, then ``a=c`` settings, then options, then ``a.b=c`` settings, which change a part of
    what an option names; the later wins. Raises RecipeError."""
    wanted = dict(keys)
    settings = tuple(settings)
    for setting in settings:
        if not _sets_a_part(setting):
            _apply_setting(wanted, setting)
    wanted.update(canonical_keys(options or {}, where="the options"))
    for setting in filter(_sets_a_part, settings):
        _apply_setting(wanted, setting)
    return parse_recipe(wanted, where=where)


def _sets_a_part(setting: str) -> bool:
    """True for ``data.format=alpaca``."""
    return "." in setting.partition("=")[0]


def parse_recipe(wanted: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """Validate keys that are already canonical; ``null`` leaves a setting as it is by itself."""
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if "deepspeed" in wanted:
        wanted = with_deepspeed_file(wanted, where=where)
    if "model" not in wanted:
        raise RecipeError(
            f"{where}: no model is named",
            hint="model: meta-llama/Llama-3.1-8B, or --model on the command line; `fitune init` writes a recipe",
        )
    try:
        return Recipe.model_validate(wanted)
    except ValidationError as error:
        raise RecipeError(described(error, where=where, known=SourceRecipe)) from None


def canonical_keys(raw: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Replace other frameworks' names and values by ours; refuse unknown keys and two names for one setting."""
    _refuse_unknown(raw, where=where)
    result: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in raw.items():
        name = ALIASES.get(key, key)
        if key in SWITCHES:
            switched = read_switch(key, value, where=where)
            if switched is None:
                continue
            name, value = switched
        refuse_foreign_value(name, value, where=where)
        # "auto" means "you choose", where there is a choice
        is_left_open = str(value).lower() == "auto" and Recipe.model_fields[name].default is None
        value = None if is_left_open else canonical_value(name, value)
        if name in spelled and result[name] != value:
            raise RecipeError(
                f"{where}: {spelled[name]!r} and {key!r} both set {name}, to {result[name]!r} and {value!r}",
                hint=f"keep one of them, as {name}",
            )
        spelled[name] = key
        result[name] = value
    return result


def _refuse_unknown(raw: Mapping[str, Any], *, where: str) -> None:
    """Raises RecipeError for all unknown keys at once, each with what it may have been meant for."""
    known = [*Recipe.model_fields, *ALIASES, *SWITCHES]
    unknown = [key for key in raw if key not in known]
    hints = [FOREIGN_FILES.get(key) or did_you_mean(str(key), known) for key in unknown]
    if len(unknown) == 1:
        raise RecipeError(f"{where}: unknown key {unknown[0]!r}", hint=hints[0] or EVERY_KEY)
    if unknown:
        lines = [
            f"  {key!r}" + (f": {hint}" if hint else "") for key, hint in zip(unknown, hints, strict=True)
        ]
        raise RecipeError("\n".join([f"{where}: {len(unknown)} unknown keys", *lines]))


def _apply_setting(wanted: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting!r} is not of the form key=value", hint="--set lora_r=32")
    head, *rest = key.strip().split(".")
    name = ALIASES.get(head, head)
    field = Recipe.model_fields.get(name)
    kind = Any if field is None or head in SWITCHES else reduce(type_inside, rest, field.annotation)
    value = typed_value(kind, text, where=f"--set {setting}")
    if rest:
        value = _set_inside(_with_parts(name, wanted.get(name), setting), rest, value, setting)
    wanted.update(canonical_keys({head: value}, where=f"--set {setting}"))


def _set_inside(container: Any, keys: list[str], value: Any, setting: str) -> Any:
    """A copy of ``container`` with the value at ``keys`` (list positions or names) replaced.

    In a list of one the position may be left out: ``data.format=alpaca``.
    """
    if not keys:
        return value
    head, *rest = keys
    if isinstance(container, list):
        if not head.isdecimal() and len(container) <= 1:
            return [_set_inside(container[0] if container else None, keys, value, setting)]
        if not head.isdecimal() or int(head) >= len(container):
            raise RecipeError(f"--set {setting}: {head!r} is no position in a list of {len(container)}")
        items = list(container)
        items[int(head)] = _set_inside(items[int(head)], rest, value, setting)
        return items
    inside = {} if container is None else container
    if not isinstance(inside, dict):
        raise RecipeError(f"--set {setting}: there is nothing inside {container!r} to set")
    return {**inside, head: _set_inside(_with_parts(head, inside.get(head), setting), rest, value, setting)}


def _with_parts(name: str, value: Any, setting: str) -> Any:
    """Sources and columns, which may be written as one text, as a list and a mapping; any other value as it is."""
    if name in ("data", "eval_data"):
        return [as_source(one) for one in as_sources(value)]
    try:
        return as_columns(value) if name == "columns" else value
    except ValueError as why:
        raise RecipeError(f"--set {setting}: {name} = {value!r}: {why}") from None


def dump_recipe(recipe: Recipe, *, anywhere: bool = False) -> str:
    """YAML of the settings that were given, in the order of the Recipe; ``anywhere``: for a reader in any folder."""
    keys = with_absolute_paths(given_keys(recipe)) if anywhere else given_keys(recipe)
    text: str = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=120)
    return text


def given_keys(recipe: Recipe) -> dict[str, Any]:
    """The keys that were given, inside sources too, and among them those that were given their default: max_grad_norm
    and weight mean another thing when they are given."""
    return recipe.model_dump(mode="json", exclude_unset=True)
