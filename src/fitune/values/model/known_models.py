"""Models whose config.json is built in, by Hub name and short name, and the one that an unknown name may mean.

The table, models.json, has the part of each config.json that decides shapes, so that planning needs no network; a test
holds each entry against the published number of parameters.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fitune.values.model.families import FAMILIES

_USUAL_MEANING = {
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-3.5-mini": "microsoft/Phi-3.5-mini-instruct",
    "phi-3-medium": "microsoft/Phi-3-medium-4k-instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "gemma-3-1b": "google/gemma-3-1b-pt",
    "gemma-3-4b": "google/gemma-3-4b-pt",
    "gemma-3-12b": "google/gemma-3-12b-pt",
    "gemma-3-27b": "google/gemma-3-27b-pt",
    "mamba-codestral-7b": "mistralai/Mamba-Codestral-7B-v0.1",
    "nemotron-nano-9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nemotron-nano-12b-v2": "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
}
"""Short names that the rule of ``_short_name`` does not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One line of the table: the exact Hub name and its config."""

    name: str
    config: Mapping[str, Any]
    """Fields of the text part, where the checkpoint has one for images too."""
    has_vision_part: bool = False
    copy_of: str = ""
    """Name of the model that a mirror or a copy in few bits holds; empty for the model itself."""


_MIRRORS = ("unsloth", "nousresearch")
"""They hold copies of others' models under the same names."""
_COPY = re.compile(r"(-unsloth)?-(bnb-4bit|bf16|fp8)$")
"""Endings of the names of copies in other types."""


def find_known_model(name: str) -> KnownModel | None:
    """The model of a Hub name or short name (``llama-3.1-8b``, ``qwen3-8b``), upper and lower case alike.

    A copy in fewer bits that can be read (models/low_bit/files.py) is the same model.
    """
    lowered = name.lower()
    owner, _, short = lowered.partition("/")
    if owner not in _MIRRORS:
        if (found := _index().get(lowered)) is not None or not short.endswith("-fp8"):
            return found
        found = _index().get(lowered.removesuffix("-fp8"))
    else:
        found = _index().get(_short_name(_COPY.sub("", short)))
    return None if found is None else replace(found, name=name, copy_of=found.name)


def text_model_like(config: Mapping[str, Any]) -> str | None:
    """The known model with the widths of a vision model's text part, and the nearest number of blocks."""
    widths = ("hidden_size", "intermediate_size", "num_attention_heads")
    alike = [
        model
        for model in _index().values()
        if not model.has_vision_part and all(model.config.get(key) == config.get(key) for key in widths)
    ]
    layers = config.get("num_hidden_layers") or 0
    nearest = min(alike, key=lambda model: abs(model.config["num_hidden_layers"] - layers), default=None)
    return None if nearest is None else nearest.name


def known_model_names() -> tuple[str, ...]:
    """Every Hub name of the table, in its order."""
    return tuple(dict.fromkeys(model.name for model in _index().values()))


def names_with_formulas() -> tuple[str, ...]:
    """Known names of models whose architecture needs no tracing."""
    models = {model.name: model for model in _index().values()}
    return tuple(name for name, model in models.items() if model.config["model_type"] in FAMILIES)


def configs_to_trace() -> tuple[str, ...]:
    """The first name of each config in the table whose architecture has no formula."""
    firsts = {id(model.config): model for model in reversed(_index().values())}
    return tuple(
        model.name for model in reversed(firsts.values()) if model.config["model_type"] not in FAMILIES
    )


def accepted_model_names() -> tuple[str, ...]:
    """Hub names and short names: what a did-you-mean may offer."""
    return (*known_model_names(), *_index())


@cache
def _index() -> dict[str, KnownModel]:
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    models = [
        KnownModel(name=name, config=entry["config"], has_vision_part=entry.get("has_vision_part", False))
        for entry in json.loads(text)
        for name in entry["names"]
    ]
    index = {model.name.lower(): model for model in models}
    for model in models:
        index.setdefault(_short_name(model.name), model)
    for short, name in _USUAL_MEANING.items():
        index.setdefault(short, index[name.lower()])
    return index


def _short_name(name: str) -> str:
    """``meta-llama/Meta-Llama-3-8B`` -> ``llama-3-8b``; ``meta-llama/Llama-2-7b-hf`` -> ``llama-2-7b``."""
    return name.rsplit("/", 1)[-1].lower().removeprefix("meta-").removesuffix("-hf")


_SIZE = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])")
_GENERATION = re.compile(r"[a-z]?\d+(?:\.\d+)?[a-z]?")
_LETTERS_THEN_NUMBER = re.compile(r"(?<![a-z])([a-z]{2,})(\d)")
_PACKED = re.compile(
    r"[-.](?:gguf|awq|gptq|mlx|exl\d|hqq|bnb|unsloth|i?q\d(?:[-_][a-z\d]+)*|(?:int|fp)[48]|[48]-?bits?"
    r"|(?:quantized\.)?w\d+a\d+)(?=[-.]|$)"
)
"""Parts of names that say in which bits a copy is packed."""
_MEANINGS = {"it": "instruct", "chat": "instruct", "pt": "base"}
_KINDS = {"mamba", "h", "rwkv", "vl", "vision", "omni", "audio", "multimodal", "distill"}
"""Words of names that make another model of a family's name: Falcon Mamba is no Falcon."""
_SIZE_WORDS = {"nano", "micro", "tiny", "mini", "small", "medium", "large", "xl"}
_NEAR = 1.3
"""Sizes within this factor may be meant for one another."""


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name most like ``name`` in its family and generation: of its size, or one within half of it.

    A name with a colon is ollama's, which means the instructed model.
    """
    wanted = _words(name)
    if not wanted:
        return None
    words = {each: _words(each) for each in known}
    family = _closest_family(wanted[0], {its[0] for its in words.values() if its})
    apart = _KINDS - {"distill"} if "r1" in wanted else _KINDS  # a small R1 is one of its distills
    kind = apart.intersection(wanted)
    alike = [
        each for each, its in words.items() if its and its[0] == family and apart.intersection(its) == kind
    ]
    generation = _generation(wanted)
    if generation:
        alike = [each for each in alike if _generation(words[each]) == generation]
    alike = _of_size(wanted, alike, words)
    is_ollamas = ":" in name

    def likeness(each: str) -> tuple[float, float, float]:
        """Likeness to the wanted name, larger is nearer: common words, their order, then letters."""
        its = words[each]
        common = sum(bool(get_close_matches(word, its, n=1, cutoff=0.8)) for word in wanted)
        return (
            4 * common - len(its) + 1.5 * (is_ollamas and "instruct" in its),
            SequenceMatcher(None, wanted, its).ratio(),
            SequenceMatcher(None, name.lower(), each.lower()).ratio(),
        )

    return max(alike, key=likeness, default=None)


def names_packed_weights(name: str) -> bool:
    """True if the name says that the weights are packed in 4 or 8 bits, such as GGUF, AWQ or GPTQ."""
    return _PACKED.search(_plain(name)) is not None


def _plain(name: str) -> str:
    return name.rsplit("/", 1)[-1].lower().replace("_", "-").replace(":", "-").replace(" ", "-")


def _words(name: str) -> list[str]:
    """``meta-llama/Meta-Llama-3-8B-it`` -> ``[llama, 3, 8b, instruct]``."""
    plain = _LETTERS_THEN_NUMBER.sub(r"\1-\2", _PACKED.sub("", _plain(name)).removeprefix("meta-"))
    return [_MEANINGS.get(word, word) for word in plain.split("-") if word]


def _closest_family(wanted: str, families: set[str]) -> str | None:
    """``wanted`` if it is one, else the one that a slip of a letter or two makes of it; if short, letters swapped."""
    if wanted in families:
        return wanted
    best = max(sorted(families), key=lambda each: SequenceMatcher(None, wanted, each).ratio(), default="")
    is_near = len(best) > 3 and SequenceMatcher(None, wanted, best).ratio() >= 0.75
    return best if is_near or sorted(best) == sorted(wanted) else None


def _generation(words: list[str]) -> str:
    """The number behind the family, unless it is the size."""
    second = words[1] if len(words) > 1 else ""
    is_one = _GENERATION.fullmatch(second) and not _SIZE.fullmatch(second)
    return second.removesuffix(".0") if is_one else ""


def _of_size(wanted: list[str], names: list[str], words: dict[str, list[str]]) -> list[str]:
    """Names of ``wanted``'s size or of the nearest, if it is near; else what it adds a size to. All if it has none."""
    size = next(filter(None, map(_billions, wanted)), 0.0)
    in_words = _SIZE_WORDS.intersection(wanted)
    if not size and in_words:  # of this size, or of none that their names say
        return [
            each
            for each in names
            if in_words.intersection(words[each])
            or not (any(map(_billions, words[each])) or _SIZE_WORDS.intersection(words[each]))
        ]
    if not size:
        return names
    away = {each: _times(size, words[each]) for each in names}
    nearest = min(away.values(), default=_NEAR)
    if nearest > _NEAR:
        return [each for each in names if set(words[each]) < set(wanted)]
    return [each for each in names if away.get(each) == nearest]


def _times(size: float, words: list[str]) -> float:
    """The factor between ``size`` and the nearest size in a name; infinite without one."""
    sizes = filter(None, map(_billions, words))
    return min((max(size / each, each / size) for each in sizes), default=float("inf"))


def _billions(word: str) -> float:
    """Parameters that ``word`` says, in billions; 0 if it says none."""
    found = _SIZE.fullmatch(word)
    if found is None:
        return 0.0
    return int(found[1] or 1) * float(found[2]) / (1 if found[3] == "b" else 1000)
