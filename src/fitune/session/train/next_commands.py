"""What a person may do next with an export: commands that are true for this one."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch

from fitune.models.adapter_file import read_adapter_config
from fitune.models.weight_files import stored_dtype
from fitune.score.engines.engine_vllm import rounded_rank
from fitune.score.engines.opening import why_merged_first
from fitune.session.events import Note


def commands_for(folder: Path, name: str) -> list[str]:
    """Commands of vLLM, Ollama and llama.cpp that take the export in ``folder`` as it is; ``name``: its name there."""
    where, name = (
        shlex.quote(str(folder)),
        re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._") or "model",
    )
    if not (folder / "adapter_config.json").is_file():
        commands = [f"vllm serve {where}{_dtype_words(str(folder))}"]
        if (folder / "Modelfile").is_file():
            commands.append(f"ollama create {name} -f {shlex.quote(str(folder / 'Modelfile'))}")
        return [*commands, f"python convert_hf_to_gguf.py {where}   (llama.cpp)"]
    config = read_adapter_config(folder)
    base = config.base_model_name_or_path or ""
    if why_merged_first(config) or not base:
        return []
    served = ["vllm", "serve", base, "--enable-lora", "--lora-modules", f"{name}={folder}"]
    served += ["--max-lora-rank", str(rounded_rank(config.r))]
    template = ["--chat-template", str(folder / "chat_template.jinja")]
    commands = [shlex.join(served + template) + _dtype_words(base)]
    if not config.use_rslora:  # llama.cpp scales by alpha / r alone
        its_base = ["--base" if Path(base).is_dir() else "--base-model-id", base]
        commands.append(f"python convert_lora_to_gguf.py {where} {shlex.join(its_base)}   (llama.cpp)")
    return commands


def next_note(commands: Sequence[str]) -> Note:
    """Commands that a person may want next, one a line; a program gets them without what is said behind them."""
    lines = (f"{'next:' if not place else '':9}{one}" for place, one in enumerate(commands))
    return Note("\n".join(lines), {"next": [one.partition("   (")[0] for one in commands]})


def _dtype_words(model: str) -> str:
    """vLLM rounds fp32 weights to 16 bits unless it is told not to."""
    is_fp32 = Path(model).is_dir() and stored_dtype(Path(model)) == torch.float32
    return " --dtype float32" if is_fp32 else ""
