"""The command that serves a model through vLLM's or transformers' own server, with the arguments that it needs."""

import os
import shlex
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fitune.errors import CheckpointError, MissingExtra, RecipeError
from fitune.models.adapter_file import read_adapter_config
from fitune.models.readers import model_folder, read_config, reading
from fitune.models.weight_files import stored_dtype
from fitune.score.engines.engine_vllm import python_of_vllm, rounded_rank
from fitune.score.engines.opening import choose_device, why_merged_first
from fitune.session.named_models import NamedModel, find_model
from fitune.train.again import EXPORT_FOLDERS

Server = Literal["vllm", "transformers"]

_NEEDED = ("fastapi", "uvicorn", "openai")
"""Modules that `transformers serve` imports (the extra `serving` of transformers)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server's command, and the name under which it knows the model."""

    argv: tuple[str, ...]
    name: str
    url: str

    @property
    def words(self) -> str:
        """The command for a shell, and how to ask it."""
        name = shlex.quote(self.name)
        ask = f"fitune score --engine server --url {self.url} --served-model {name} --model … --data …"
        return f"{shlex.join(self.argv)}\n# {self.url}, model {self.name}; e.g. {ask}"


def serve_command(
    word: str, *, server: Server | None, host: str, port: int, context: int, only_print: bool
) -> Served:
    """The command for the model that ``word`` names; without ``server`` vLLM where it is, else transformers.

    Raises CheckpointError for an adapter that the server cannot take, MissingExtra for a server that is not installed.
    """
    named = find_model(word)
    try:
        python = python_of_vllm()
    except MissingExtra:
        if server == "vllm" and not only_print:
            raise
        python = ""
    if server == "vllm" or (server is None and python):
        return _by_vllm(named, python, host=host, port=port, context=context)
    if context:
        raise RecipeError("--context is for vLLM's server alone", hint="leave it out, or --server vllm")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if find_spec("transformers.cli.serve") is None:
        missing = ["a transformers that has a server (5.0 or later)"]
    if missing and not only_print:
        raise RecipeError(
            f"there is no server here: no vLLM, and transformers' own needs {', '.join(missing)}",
            hint="pip install 'transformers[serving]', or FITUNE_VLLM_PYTHON=PYTHON of an environment with vLLM; "
            "--print shows the command",
        )
    return _by_transformers(named, host=host, port=port)


def _by_vllm(named: NamedModel, python: str, *, host: str, port: int, context: int) -> Served:
    model, adapter = named.model, named.adapter
    if adapter and (why := why_merged_first(read_adapter_config(Path(adapter)))):
        model, adapter = _merged(named, f"vLLM cannot take this adapter as it is: {why}"), ""
    # not `vllm serve`, which asks for a distribution named vllm: builds for a CPU have another name
    argv = [python or os.environ.get("FITUNE_VLLM_PYTHON", "python")]
    argv += ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    argv += ["--host", host, "--port", str(port)]
    if python and choose_device().type == "cpu":  # without one here the command is for another machine
        argv.append("--enforce-eager")
    if dtype := _dtype_of(model):
        argv += ["--dtype", dtype]
    if length := context or getattr(read_config(model).get_text_config(), "max_position_embeddings", 0):
        argv += ["--max-model-len", str(length)]
    template = Path(named.texts if adapter else model) / "chat_template.jinja"
    if template.is_file():
        argv += ["--chat-template", str(template)]
    if adapter:
        rank = rounded_rank(read_adapter_config(Path(adapter)).r)
        argv += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(rank)]
        argv += ["--lora-modules", f"{named.title}={adapter}"]
    else:
        argv += ["--served-model-name", named.title]
    return Served(argv=tuple(argv), name=named.title, url=_url(host, port))


def _by_transformers(named: NamedModel, *, host: str, port: int) -> Served:
    model = named.model
    if named.adapter:
        model = _merged(named, "transformers' server takes whole models")
    folder = str(Path(model).resolve()) if Path(model).is_dir() else model
    argv = [sys.executable, "-m", "transformers.cli.transformers", "serve", *_model_words(folder)]
    argv += ["--host", host, "--port", str(port)]
    if dtype := _dtype_of(model):
        argv += ["--dtype", dtype]
    return Served(argv=tuple(argv), name=folder, url=_url(host, port))


def _dtype_of(model: str) -> str:
    """The type of its weights; empty where it is not trained in. Raises ModelError for a model that is not there."""
    with reading(model, "the model cannot be read"):
        return str(stored_dtype(model_folder(model)) or "").removeprefix("torch.")


def _model_words(folder: str) -> list[str]:
    """The model as ``transformers serve`` takes it: an argument, in some versions the option --force-model."""
    source = find_spec("transformers.cli.serve")
    text = Path(source.origin).read_text(encoding="utf-8") if source is not None and source.origin else ""
    after = text.partition("force_model:")[2]
    is_option = "typer.Option" in after[: max(after.find("] ="), 0)]
    return ["--force-model", folder] if is_option else [folder]


def _merged(named: NamedModel, why: str) -> str:
    """The merged model beside the adapter, where its run exported one. Raises CheckpointError otherwise."""
    run = Path(named.adapter).parent
    folder = run / EXPORT_FOLDERS["merged"]
    if (run / "plan.json").is_file() and folder.is_dir():
        return str(folder)
    of_run = (run / "plan.json").is_file()
    typed = shlex.quote(str(run)) if of_run else "RUN"
    raise CheckpointError(
        f"{named.adapter}: {why}",
        hint=f"fitune export {typed} --as merged, and serve {folder if of_run else 'that folder'}",
    )


def _url(host: str, port: int) -> str:
    return f"http://{'localhost' if host in ('0.0.0.0', '') else host}:{port}/v1"
