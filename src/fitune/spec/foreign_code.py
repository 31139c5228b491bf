"""Requests to run code in a stranger's JSON, told by names alone."""

from collections.abc import Iterator, Mapping
from typing import Any

AUTO_MAP = "auto_map"
"""Classes in Python files of the folder, or of another repository, that transformers would import."""

_INSTALLED = {
    "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4",
    "batched_mm", "grouped_mm",
}  # fmt: skip
"""Implementations of attention and of experts that come with a library; any other name is one of the Hub's."""


def code_asked_for(content: Mapping[str, Any], *, inside: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything, at any depth, that asks transformers or PEFT for code.

    The depth is what ``strict_json`` allows.
    """
    for key, value in content.items():
        place = f"{inside}{key}"
        if _asks(key, value):
            yield place, value
        elif isinstance(value, Mapping):
            yield from code_asked_for(value, inside=f"{place}.")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield from code_asked_for(item, inside=f"{place}[{number}].")


def _asks(key: str, value: Any) -> bool:
    if key in (AUTO_MAP, "trust_remote_code", "custom_generate", "use_kernels", "kernel_config"):
        return bool(value)
    if key == "megatron_config":  # PEFT imports the module that megatron_core names
        return value is not None
    if key == "auto_mapping" and isinstance(value, Mapping):
        library = value.get("parent_library")
        return library is not None and str(library).partition(".")[0] != "transformers"
    if key.removeprefix("_").removesuffix("_internal") in ("attn_implementation", "experts_implementation"):
        return any(name is not None and name not in _INSTALLED for name in _names(value))
    return False


def _names(value: Any) -> list[Any]:
    """One name, or one for each part of a model."""
    found = list(value.values()) if isinstance(value, Mapping) else [value]
    return [name if isinstance(name, str | None) else str(name) for name in found]
