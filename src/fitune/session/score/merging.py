"""Adapters that vLLM cannot take are folded into their base first, verified as exports are, and kept in the cache."""

import hashlib
from pathlib import Path
from typing import Any

import torch

from fitune.checkpoint.export import export_merged
from fitune.checkpoint.layout import ExportFolder
from fitune.data.conversations.templates import load_template
from fitune.files import cache_folder
from fitune.models.adapter_file import read_adapter_config
from fitune.models.adapters import load_adapter, train_tables
from fitune.models.door import model_folder
from fitune.models.tokens import load_tokenizer
from fitune.models.weight_files import identity, stored_dtype
from fitune.models.weights import load_model
from fitune.score.engines.opening import why_merged_first
from fitune.session.events import Note, Tell, WeightsRead
from fitune.session.named_models import NamedModel
from fitune.units import format_bytes


def merged_where_needed(model: str, adapter: str, *, tell: Tell) -> str:
    """The folder of ``adapter`` merged into ``model``; empty where vLLM takes the adapter as it is.

    It is named by the content of both, so it is made once. Raises CheckpointError for an adapter that cannot be merged,
    or whose merged weights are not W + scaling · B A.
    """
    config = read_adapter_config(Path(adapter))
    if not (why := why_merged_first(config)):
        return ""
    both = f"{identity(model)}\n{identity(adapter)}".encode("utf-8", "surrogateescape")
    digest = hashlib.blake2b(both, digest_size=8).hexdigest()
    folder = cache_folder() / "merged" / f"{Path(model).name}-{digest}"
    if not folder.is_dir():
        tell(Note(f"vLLM cannot take {adapter} as it is ({why}): it is merged into its base first"))
        for warning in _merge(model, adapter, folder, tell=tell):
            tell(Note(f"warning: {warning}"))
    size = sum(file.stat().st_size for file in folder.iterdir())
    tell(Note(f"merged, verified: {folder} ({format_bytes(size)}; remove it when you like)"))
    return str(folder)


def _merge(model: str, adapter: str, folder: Path, *, tell: Tell) -> tuple[str, ...]:
    """Write the merged model in its base's type; returns warnings."""
    base = load_model(
        model,
        dtype=stored_dtype(model_folder(model)) or torch.float32,
        device=torch.device("cpu"),
        on_bytes=lambda done, total: tell(WeightsRead(done_bytes=done, total_bytes=total)),
    )
    adapted = load_adapter(base, adapter)
    settings: Any = adapted.peft_config[adapted.active_adapter]
    settings.modules_to_save = None  # load_adapter has put the tables in place
    train_tables(base, read_adapter_config(Path(adapter)).modules_to_save or ())
    tokenizer = load_tokenizer(NamedModel(title="", model=model, adapter=adapter).texts)
    card = f"# {Path(model).name} with an adapter merged into it\n\nMade for scoring: {adapter} on {model}.\n"
    into = ExportFolder(
        target=folder,
        tokenizer=tokenizer,
        chat_template=load_template(tokenizer).source,
        card=card,
        replace=True,
    )
    return export_merged(adapted, into, base_path=model).warnings
