"""Engines by name: what each needs of the settings, and what it refuses."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fitune.data.conversations.templates import ChatTemplate, load_template
from fitune.errors import HardwareError, ModelError, RecipeError
from fitune.estimate.answering import rows_that_fit
from fitune.estimate.blocks.key_values import elements_of_blocks
from fitune.measure.hardware import resolve_hardware
from fitune.models.adapter_file import AdapterConfig, check_adapter, read_adapter_config
from fitune.models.adapters import load_adapter, saved_rows
from fitune.models.headers import adapter_size
from fitune.models.readers import notes_on
from fitune.models.tokens import load_tokenizer
from fitune.models.weight_files import OnBytes, nobody
from fitune.models.weights import load_model, require_finite
from fitune.score.engines.continuous import Watch, unwatched
from fitune.score.engines.engine import Engine, listed_stop_ids
from fitune.score.plan import ScorePlan
from fitune.values.answering import ROWS_AT_ONCE, Answering, Questions, answering_precision
from fitune.values.model.model_config import load_model_spec


def choose_device() -> torch.device:
    """The first GPU when there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(device: torch.device) -> torch.dtype:
    """fp32 on a CPU; on a GPU bf16, or fp16 where there is none (before Ampere)."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def dtype_of(plan: ScorePlan) -> str:
    """The data type of the answers, by torch's name."""
    return plan.dtype or str(choose_dtype(choose_device()))


_BATCHES_PER_SHARD = 16
_VLLM_SHARD_ROWS = 2048
"""Twice what vLLM answers at once on the largest GPUs (max_num_seqs of its LLM class)."""


def rows_of_a_shard(plan: ScorePlan) -> int:
    """Rows that reach the disk together, in the order of the input: what a kill can cost.

    vLLM on a GPU has two shards at a time, so it is full while the last rows of the first are written.
    """
    rows = plan.rows_at_once * _BATCHES_PER_SHARD
    on_gpu = dtype_of(plan) != str(torch.float32)
    return max(rows, _VLLM_SHARD_ROWS) if plan.engine == "vllm" and on_gpu else rows


def check_engine(plan: ScorePlan) -> None:
    """Raises RecipeError for settings that the engine cannot honour, MissingExtra when it is not installed."""
    if (plan.engine == "server") != bool(plan.url):
        raise RecipeError(
            "engine server needs --url, the address of a server"
            if plan.engine == "server"
            else f"--url {plan.url} is for engine server, and the engine is {plan.engine}",
            hint="--engine server --url http://localhost:8000/v1",
        )
    if plan.engine == "server":
        from fitune.score.engines.engine_server import require_url

        require_url(plan.url)
        if plan.adapter:
            raise RecipeError(
                "--adapter has no effect with engine server: a server loads its adapters itself",
                hint="leave --adapter out, and name it as --served-model",
            )
    if plan.engine == "vllm":
        from fitune.score.engines.engine_vllm import python_of_vllm

        python_of_vllm()
        is_left = plan.adapter and not plan.merged
        if is_left and (why := why_merged_first(read_adapter_config(Path(plan.adapter)))):
            raise RecipeError(
                f"{plan.adapter}: vLLM cannot take this adapter as it is: {why}",
                hint="merge it first: fitune export RUN --as merged, and score that folder",
            )


def check_all(plan: ScorePlan, *, say: Callable[[str], None]) -> None:
    """``check_engine``, and what model and adapter say of themselves without being loaded: notes and warnings.

    Raises CheckpointError for an adapter that does not fit, too."""
    for note in notes_on(plan.model):
        say(f"note: {note}")
    check_engine(plan)
    if plan.adapter:
        for warning in check_adapter(Path(plan.adapter), base=plan.model):
            say(f"warning: {warning}")


def why_merged_first(config: AdapterConfig) -> str:
    """Reasons why vLLM would answer wrongly with the adapter, or not at all; empty when it takes it."""
    from fitune.score.engines.engine_vllm import LORA_RANKS, rounded_rank

    reasons = (
        (config.use_dora, "DoRA"),
        (config.lora_bias, "biases of the adapter"),
        (
            bool(config.target_parameters),
            f"adapters on stacked experts ({', '.join(config.target_parameters or [])})",
        ),
        (
            changes_the_base(config),
            f"init_lora_weights {config.init_lora_weights}, which changes the base weights",
        ),
        (bool(config.modules_to_save), f"modules trained whole ({', '.join(config.modules_to_save or [])})"),
        (bool(config.rank_pattern or config.alpha_pattern), "ranks or alphas that differ between modules"),
        (not rounded_rank(config.r), f"rank {config.r}, at most {LORA_RANKS[-1]}"),
    )
    return "; ".join(words for holds, words in reasons if holds)


def changes_the_base(config: AdapterConfig) -> bool:
    """True for an adapter that PEFT takes off the base weights when it is loaded; vLLM leaves them as they are."""
    return str(config.init_lora_weights).startswith(("pissa", "olora"))


def open_texts(plan: ScorePlan) -> tuple[Any, ChatTemplate]:
    """The tokenizer and the template of the plan's prompts."""
    tokenizer = load_tokenizer(tokenizer_folder(plan))
    return tokenizer, load_template(tokenizer, plan.chat_template)


def stop_ids_of(plan: ScorePlan, template: ChatTemplate) -> frozenset[int]:
    """Ids that end an answer: the template's, and those that the model's makers listed."""
    return template.stop_ids | listed_stop_ids(plan.model)


def open_engine(
    plan: ScorePlan,
    tokenizer: Any,
    template: ChatTemplate,
    *,
    on_bytes: OnBytes = nobody,
    watch: Watch = unwatched,
) -> Engine:
    """The engine of ``plan``, ready to answer."""
    stop_ids = stop_ids_of(plan, template)
    match plan.engine:
        case "server":
            from fitune.score.engines.engine_server import ServerEngine

            return ServerEngine(
                url=plan.url, model=plan.served_model or plan.model, stop_ids=stop_ids, batch_size=plan.rows_at_once,
                to_text=lambda ids: str(tokenizer.decode(ids)), key=os.environ.get("OPENAI_API_KEY", ""),
                vocabulary=len(tokenizer),
            )  # fmt: skip
        case "vllm":
            return _open_vllm(plan, stop_ids)
        case "transformers":
            from fitune.score.engines.engine_transformers import TransformersEngine

            room = room_for(plan)  # before the model: then what is taken of a GPU is taken by others
            return TransformersEngine(
                model=load_adapted(plan.model, plan.adapter, on_bytes=on_bytes), tokenizer=tokenizer,
                template=template, tokenizer_folder=tokenizer_folder(plan), batch_size=plan.rows_at_once,
                room=room, watch=watch,
            )  # fmt: skip


def _open_vllm(plan: ScorePlan, stop_ids: frozenset[int]) -> Engine:
    from fitune.score.engines.engine_vllm import VllmEngine

    device = choose_device()
    adapter = "" if plan.merged else plan.adapter
    rank = read_adapter_config(Path(adapter)).r if adapter else 0
    settings = {
        "dtype": str(choose_dtype(device)).removeprefix("torch."),
        "enforce_eager": device.type == "cpu",
        **({"tensor_parallel_size": plan.devices} if plan.devices > 1 else {}),
    }
    return VllmEngine(
        model=plan.merged or plan.model, tokenizer=plan.merged or tokenizer_folder(plan), stop_ids=stop_ids,
        adapter=adapter, rank=rank, settings=settings,
    )  # fmt: skip


def load_adapted(model: str, adapter: str, *, on_bytes: OnBytes) -> Any:
    """The model on its device, and the adapter on it. Raises ModelError for weights that are no numbers."""
    device = choose_device()
    loaded = load_model(model, dtype=choose_dtype(device), device=device, on_bytes=on_bytes)
    require_finite(loaded, model)
    return load_adapter(loaded, adapter).to(device) if adapter else loaded


def tokenizer_folder(plan: ScorePlan) -> str:
    """The adapter's, where embedding or head were trained with it: tokens may have been added."""
    folder = Path(plan.adapter) if plan.adapter else None
    if folder is not None and (folder / "tokenizer.json").is_file() and saved_rows(folder):
        return plan.adapter
    return plan.model


Room = Callable[[Questions], int]
"""Rows of such questions that may be answered together."""


def unlimited(questions: Questions) -> int:
    """More than there ever are."""
    return sys.maxsize


def room_for(plan: ScorePlan) -> Room:
    """Returns how many rows fit on the device of this process, at most ROWS_AT_ONCE; ``unlimited`` where the plan says
    how many are answered together."""
    if plan.batch_size:
        return unlimited
    answering = answering_of(plan)
    if answering is None:
        return lambda _questions: ROWS_AT_ONCE
    return lambda questions: max(1, rows_that_fit(answering, questions, most=ROWS_AT_ONCE))


def answering_of(plan: ScorePlan) -> Answering | None:
    """The embedded engine on this machine as the estimate takes it, of as many rows as are asked together at most; None
    where nothing can be predicted: for a model whose state is more than keys and values, on GPUs of two kinds."""
    try:
        hardware, model = resolve_hardware(gpus=1), load_model_spec(plan.model)
        elements_of_blocks(model)
        return Answering(
            engine="transformers", model=model, hardware=hardware, precision=answering_precision(hardware),
            batch_size=plan.rows_at_once, adapter=adapter_size(plan.adapter),
        )  # fmt: skip
    except (ModelError, HardwareError):
        return None
