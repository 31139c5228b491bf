"""Requests to the Hugging Face Hub, and the code of strangers that fitune never runs."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HUB_TIMEOUT_S = 5.0
"""The Hub's client retries for a minute where there is no network: it is asked only after a quick answer."""


_HUB_PART = re.compile(r"\w([\w.-]{0,94}\w)?", re.ASCII)


def is_hub_name(text: str) -> bool:
    """True for ``OWNER/NAME``, or ``NAME`` alone, by the Hub's rules."""
    parts = text.split("/")
    is_odd = any(wrong in text for wrong in ("--", "..")) or text.endswith(".git")
    return len(parts) <= 2 and not is_odd and all(map(_HUB_PART.fullmatch, parts))


def cached_file(name: str, file: str) -> Path | None:
    """A model's file in the Hub's cache; None where it is not there, also for a name that the Hub does not take.

    Raises ModuleNotFoundError without huggingface_hub.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file) if is_hub_name(name) else None
    return Path(found) if isinstance(found, str) else None


def is_offline() -> bool:
    """True if the user switched the Hub off."""
    switches = (os.environ.get(key, "").lower() for key in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value in ("1", "true", "yes", "on") for value in switches)


def answers(url: str) -> bool:
    """True if the host answers at all, whatever it answers."""
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    try:
        urlopen(Request(url, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except HTTPError:
        return True
    except (URLError, OSError):
        return False
    return True


@contextmanager
def no_waiting_for_the_hub() -> Iterator[str]:
    """Inside, the Hub's client looks into its cache alone when the Hub is off or does not answer.

    Yields why it is not asked, for an error message; empty when it is.
    """
    from huggingface_hub import constants

    if is_offline() or constants.HF_HUB_OFFLINE:
        yield "the Hub is switched off (HF_HUB_OFFLINE)"
        return
    if answers(constants.ENDPOINT):
        yield ""
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield f"{constants.ENDPOINT} does not answer"
    finally:
        constants.HF_HUB_OFFLINE = False


def keep_out_hub_kernels() -> None:
    """Make ``import kernels`` fail in this process, unless the user's own code imported it before.

    That library downloads compiled code and runs it, and nobody is asked: bitsandbytes imports it on every CPU with
    AVX-512 BF16, transformers where an attention or experts implementation is not installed. Without it both use what
    they bring themselves.
    """
    modules: dict[str, Any] = sys.modules
    modules.setdefault("kernels", None)
    os.environ.setdefault("USE_HUB_KERNELS", "NO")  # transformers asks this, too
    # bitsandbytes tells people at every start to install what is kept out.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    for name in ("transformers.integrations.hub_kernels", "transformers.activations"):
        logging.getLogger(name).addFilter(_is_no_fallback)


def _is_no_fallback(record: logging.LogRecord) -> bool:
    """False for the line that a Mamba mixer or xIELU logs where only transformers' own code is there to run it."""
    return "falling back to" not in record.getMessage()


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
        # one name, or one for each part of a model
        names = value.values() if isinstance(value, Mapping) else [value]
        return any(
            name is not None and (name if isinstance(name, str) else str(name)) not in _INSTALLED
            for name in names
        )
    return False
