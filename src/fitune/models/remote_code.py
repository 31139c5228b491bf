"""Refuses pickles and code that come with a model's or adapter's files, before a library's reader sees the folder."""

from pathlib import Path
from typing import Any

from fitune.errors import CheckpointError, FituneError
from fitune.files import PICKLE_SUFFIXES
from fitune.values.hub import AUTO_MAP, code_asked_for
from fitune.values.serial import read_object

CONFIG, TOKENIZER, GENERATION = "config.json", "tokenizer_config.json", "generation_config.json"
JSON_FILES = (CONFIG, TOKENIZER, GENERATION, "adapter_config.json")
"""JSON files from which transformers and PEFT take names of classes and modules."""


def refuse_pickle(folder: Path, *, error: type[FituneError] = CheckpointError) -> None:
    """Raises ``error`` when the only weights in ``folder`` are pickled; no pickle is ever opened."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    if pickled := sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES):
        raise error(
            f"{folder}: the weights are pickled ({', '.join(pickled[:3])}); reading them could run code",
            hint="convert them to safetensors where you trust the source, or take a safetensors revision",
        )


def refuse_remote_code(folder: Path, *, error: type[FituneError] = CheckpointError) -> tuple[str, ...]:
    """A note for each code that ``folder`` brings and that is left alone, because transformers has its own.

    Raises ``error`` when the folder can only be loaded by importing code that it brings or names. ``auto_map`` beside
    an architecture, or a tokenizer, that transformers knows is harmless: transformers' own class is taken.
    """
    contents: dict[str, dict[str, Any]] = {}
    for name in JSON_FILES:
        file = folder / name
        try:
            contents[name] = read_object(file) if file.is_file() else {}
        except (OSError, ValueError) as cause:
            raise error(f"{file}: {cause}", hint="fetch it again") from cause
    notes = []
    for name, content in contents.items():
        for key, value in code_asked_for(content):
            if key.rpartition(".")[2] != AUTO_MAP or not _transformers_has_its_own(name, contents):
                raise error(
                    f"{folder / name}: {key} = {value!r} asks to run code that comes with the files; fitune never does",
                    hint="use a model or adapter whose architecture transformers knows",
                )
            notes.append(f"{folder / name}: the code that {key} names is not run: transformers' own is taken")
    _refuse_no_tokenizer(folder, contents, error)
    return tuple(notes)


def _transformers_has_its_own(name: str, contents: dict[str, dict[str, Any]]) -> bool:
    """True if what ``auto_map`` of this file would replace is in transformers."""
    from transformers import CONFIG_MAPPING

    model_type = contents[CONFIG].get("model_type")
    knows_model = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if name == TOKENIZER:
        named = contents[TOKENIZER].get("tokenizer_class")
        return knows_model if named is None else _is_tokenizer(_of_transformers(named))
    return name == CONFIG and knows_model


def _refuse_no_tokenizer(folder: Path, contents: dict[str, dict[str, Any]], error: type[FituneError]) -> None:
    """transformers would take any class of its own by the name that a folder gives, and load whatever that loads."""
    for name in (TOKENIZER, CONFIG):
        named = contents[name].get("tokenizer_class")
        found = _of_transformers(named)
        if named is None or (isinstance(named, str) and (found is None or _is_tokenizer(found))):
            continue
        raise error(
            f"{folder / name}: tokenizer_class = {named!r} is no tokenizer",
            hint="copy the base model's file again",
        )


def _of_transformers(name: object) -> object:
    """Class that transformers has under that name, with or without "Fast"; None without one."""
    import transformers

    if not isinstance(name, str) or not name.isidentifier():
        return None
    return getattr(transformers, name, None) or getattr(transformers, name.removesuffix("Fast"), None)


def _is_tokenizer(found: object) -> bool:
    from transformers import PreTrainedTokenizerBase

    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)
