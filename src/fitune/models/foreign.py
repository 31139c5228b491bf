"""Files of others that could run code, refused by looking at names and JSON alone."""

from pathlib import Path
from typing import Any

from fitune.errors import CheckpointError
from fitune.spec.pickles import PICKLE_SUFFIXES
from fitune.spec.strict_json import read_object


def pickled_files(folder: Path) -> list[str]:
    """Names of the files in ``folder`` that are pickles by their suffix."""
    return sorted(path.name for path in folder.iterdir() if path.suffix.lower() in PICKLE_SUFFIXES)


def refuse_pickle(folder: Path) -> None:
    """Raises CheckpointError when the only weights in ``folder`` are pickled; no pickle is ever opened."""
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    if pickled := pickled_files(folder):
        raise CheckpointError(
            f"{folder}: the weights are pickled ({', '.join(pickled[:3])}); reading them could run code",
            hint="convert them to safetensors where you trust the source, or take a safetensors revision",
        )


def refuse_remote_code(folder: Path) -> None:
    """Raises CheckpointError when ``folder`` can only be loaded by importing code that it brings or names.

    ``auto_map`` beside an architecture that transformers knows is harmless: transformers' own class is taken.
    """
    config = _read(folder / "config.json")
    if "auto_map" in config and not _known_to_transformers(config.get("model_type")):
        raise _refusal(folder / "config.json", "auto_map", config["auto_map"])
    adapter = _read(folder / "adapter_config.json")
    if "auto_map" in adapter:
        raise _refusal(folder / "adapter_config.json", "auto_map", adapter["auto_map"])
    library = (adapter.get("auto_mapping") or {}).get("parent_library")
    if library is not None and str(library).partition(".")[0] != "transformers":
        raise _refusal(folder / "adapter_config.json", "auto_mapping.parent_library", library)
    for name, content in (("config.json", config), ("adapter_config.json", adapter)):
        if content.get("trust_remote_code"):
            raise _refusal(folder / name, "trust_remote_code", content["trust_remote_code"])


def _known_to_transformers(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return read_object(file)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}", hint="fetch it again") from error


def _refusal(file: Path, key: str, value: object) -> CheckpointError:
    return CheckpointError(
        f"{file}: {key} = {value!r} asks to run code that comes with the files; fitune never does",
        hint="use a model or adapter whose architecture transformers knows",
    )
