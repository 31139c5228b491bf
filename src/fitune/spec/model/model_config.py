"""ModelSpec from a Hugging Face config.json: a folder, the built-in table, the cache or the Hub.

The table, models.json, has the part of each config.json that decides shapes, so that planning needs no network; a test
holds each entry against the published number of parameters.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fitune.errors import ModelError
from fitune.spec.hub import HUB_TIMEOUT_S, answers, is_offline
from fitune.spec.model.config_schema import ConfigFields, check_config
from fitune.spec.model.families import FAMILIES, stored_type
from fitune.spec.model.model_names import closest_name
from fitune.spec.model.model_spec import ModelSpec
from fitune.spec.serial import TABLE_BYTES, read_object

_ADOPTED_FROM_REMOTE_CODE = {
    "falcon": "modeling_falcon.FalconForCausalLM",
    "phi": "modeling_phi.PhiForCausalLM",
    "phi3": "modeling_phi3.Phi3ForCausalLM",
}
"""Their Hub folders still point at the code they came with; transformers has its own class of that name, and
only that one is ever used."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load_model_spec(name: str, *, offline: bool | None = None) -> ModelSpec:
    """The shapes of ``name``: a folder with a config.json, that file, a Hub name or a short name (``llama-3.1-8b``).

    Looked up in this order: folder, built-in table, Hugging Face cache, Hub (not when ``offline``; None
    follows HF_HUB_OFFLINE). The spec's ``name`` is one that transformers can load.
    Raises ModelError when nothing is found or what is found cannot be described exactly.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.name == "config.json":
        name, path = str(Path(name).parent), path.parent
    if (path / "config.json").is_file():
        return _spec_from_file(path / "config.json", name=name)
    known = find_known_model(name)
    if known is not None:
        spec = spec_from_config(known.config, name=known.name)
        return replace(spec, has_vision_part=known.has_vision_part)
    _refuse_folder_without_config(path, name)
    if not _HUB_NAME.fullmatch(name):
        raise _unknown(name)
    found = _cached_config(name)
    if found is None:
        if is_offline() if offline is None else offline:
            raise _unknown(name, why="it is not in the Hugging Face cache, and the Hub is switched off")
        found = _download_config(name)
    return _spec_from_file(found, name=name)


def spec_from_config(config: Mapping[str, Any], *, name: str, where: str | None = None) -> ModelSpec:
    """Read the values of a config.json. ``where`` is what errors call it. Of a model that also sees, the text part.

    Raises ModelError naming the field, its value and what is supported; nothing is guessed.
    """
    return replace(
        _text_spec(config, name=name, where=where), has_vision_part=config.get("vision_config") is not None
    )


def _text_spec(config: Mapping[str, Any], *, name: str, where: str | None) -> ModelSpec:
    fields = ConfigFields(values=config, where=where or f"config.json of {name}")
    if fields.values.get("model_type") in tuple(_WITH_TEXT_OF_A_FAMILY):  # it may be of any type, lists too
        fields = _text_part(fields)
    model_type = fields.values.get("model_type")
    if model_type is None:
        raise ModelError(f"{fields.where}: model_type is missing: this is no model's config.json")
    if not isinstance(model_type, str):
        fields.refuse("model_type", "is not supported")
    _refuse_other_code(fields, model_type)
    check_config(fields, traced=model_type not in FAMILIES)
    _refuse_other_tasks(fields)
    if model_type not in FAMILIES:
        from fitune.spec.model.tracing import shapes_for

        return shapes_for(fields.values, name=name, where=fields.where, dtype=stored_type(fields))
    spec = FAMILIES[model_type](fields, name)
    check_positions(fields, spec)
    return spec


_WITH_TEXT_OF_A_FAMILY = {"gemma3": "gemma3_text", "mistral3": "mistral"}
"""Type of a model that also sees -> type of its language model, where its text_config does not say."""


def _text_part(fields: ConfigFields) -> ConfigFields:
    """The language model's own config, inside the one that also holds the vision tower."""
    text = fields.values.get("text_config")
    if not isinstance(text, Mapping):
        fields.refuse("text_config", "must be the config of the language model")
    of_both = ("dtype", "torch_dtype", "auto_map", "quantization_config")
    outer = {key: fields.values[key] for key in of_both if key in fields.values}
    usual = _WITH_TEXT_OF_A_FAMILY[fields.values["model_type"]]
    values = {**outer, **text, "model_type": text.get("model_type", usual)}
    return ConfigFields(values=values, where=f"{fields.where}: text_config")


def _refuse_other_code(fields: ConfigFields, model_type: str) -> None:
    """A config may name Python files to run; fitune runs none, so it cannot know what they would build."""
    remote = (
        fields.values.get("auto_map") if model_type in FAMILIES else None
    )  # else transformers' class is built
    model_class = remote.get("AutoModelForCausalLM") if isinstance(remote, Mapping) else None
    adopted = _ADOPTED_FROM_REMOTE_CODE.get(model_type)
    if remote and (adopted is None or model_class != adopted):
        fields.refuse("auto_map", "brings its own model code, which fitune does not run")
    if fields.values.get("trust_remote_code"):
        fields.refuse("trust_remote_code", "is not for the model itself to say")


def _refuse_other_tasks(fields: ConfigFields) -> None:
    causal = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    architectures = fields.words("architectures")
    if architectures and not any(architecture.endswith(causal) for architecture in architectures):
        fields.refuse("architectures", "is no causal language model")
    if fields.flag("is_encoder_decoder"):
        fields.refuse("is_encoder_decoder", "is not supported: fitune trains decoder-only models")


def _spec_from_file(path: Path, *, name: str) -> ModelSpec:
    try:
        config = read_object(path)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path}: {error}", hint="fetch the model again") from None
    return spec_from_config(config, name=name, where=str(path))


def _refuse_folder_without_config(path: Path, name: str) -> None:
    if (path / "adapter_config.json").is_file():
        raise ModelError(
            f"model = {name!r} is an adapter, not a model",
            hint="name the model it was trained on (base_model_name_or_path in adapter_config.json)",
        )
    if path.is_dir():
        raise ModelError(f"model = {name!r}: the folder has no config.json", hint="name a model's own folder")
    if path.is_file():
        raise ModelError(f"model = {name!r} is a file", hint="name the folder that holds config.json")
    if name.startswith(("/", ".", "~")) or "\\" in name:
        raise ModelError(f"model = {name!r}: no such folder")


def _unknown(name: str, *, why: str = "") -> ModelError:
    close = closest_name(name, accepted_model_names())
    reason = f": {why}" if why else " is not known"
    return ModelError(
        f"model = {name!r}{reason}",
        hint=f"did you mean {close!r}?"
        if close
        else "a Hub name (meta-llama/Llama-3.1-8B) or a folder with a config.json",
    )


def _cached_config(name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, "config.json")
    return Path(found) if isinstance(found, str) else None


def _download_config(name: str) -> Path:
    """Through huggingface_hub, which knows tokens and the cache, once it is clear that the Hub answers."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if not answers(constants.ENDPOINT):
        raise _unknown(name, why=f"not in the Hugging Face cache, and {constants.ENDPOINT} does not answer")
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT_S))
    except GatedRepoError:
        raise ModelError(
            f"model = {name!r} is gated",
            hint=f"ask for access at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise _unknown(
            name, why="the Hub has no such model, or it is private and HF_TOKEN is not set"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise _unknown(name, why=f"its config.json could not be downloaded ({error})") from None


_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("long_factor", "short_factor"),
}
"""Kind of rotary positions -> numbers without which transformers cannot compute them."""
_KINDS = ("full_attention", "sliding_attention")


def check_positions(fields: ConfigFields, spec: ModelSpec) -> None:
    """Raises ModelError for rotary positions, or a list of layers, that no model of ``spec``'s shapes can have.

    What transformers would refuse when it builds the model is refused as a plan already.
    """
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.values.get(name)
        if isinstance(value, Mapping):
            _check_rotary(ConfigFields(values=value, where=f"{fields.where}: {name}"), fields, spec)
    kinds = fields.words("layer_types")
    if kinds and (len(kinds) != spec.num_layers or not set(kinds) <= set(_KINDS)):
        fields.refuse("layer_types", f"must name {' or '.join(_KINDS)} for each of {spec.num_layers} layers")
    if kinds and spec.model_type == "mistral":
        fields.refuse("layer_types", "makes it another architecture (ministral), which is not supported")


def _check_rotary(rotary: ConfigFields, config: ConfigFields, spec: ModelSpec) -> None:
    """One description, or one for each kind of layer."""
    parts = [(key, part) for key, part in rotary.values.items() if isinstance(part, Mapping)]
    for key, part in parts:
        _check_rotary(ConfigFields(values=part, where=f"{rotary.where}: {key}"), config, spec)
    key = "rope_type" if rotary.values.get("rope_type") is not None else "type"
    kind = rotary.values.get(key) or "default"
    if spec.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its name before transformers 4.45
    if kind not in _NEEDS:
        rotary.refuse(key, f"is not known: transformers has {', '.join(_NEEDS)}")
    for name in _NEEDS[kind]:
        if rotary.values.get(name) is None:
            rotary.refuse(name, f"is missing, and {kind} positions need it")
    for name in ("long_factor", "short_factor") if kind == "longrope" else ():
        _check_length(rotary, name, config, spec)


def _check_length(rotary: ConfigFields, name: str, config: ConfigFields, spec: ModelSpec) -> None:
    share: Any = (
        rotary.values.get("partial_rotary_factor") or config.values.get("partial_rotary_factor") or 1.0
    )
    wanted, found = int(spec.head_dim * share) // 2, len(rotary.values[name])
    if found != wanted:
        rotary.refuse(name, f"has {found} factors, and half a head's turned part has {wanted}")


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
}
"""Short names that the rule of ``_short_name`` does not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """One line of the table: the exact Hub name and its config."""

    name: str
    config: Mapping[str, Any]
    """Fields of the text part, where the checkpoint has one for images too."""
    has_vision_part: bool = False


_MIRRORS = ("unsloth", "nousresearch")
"""They hold copies of others' models under the same names."""
_COPY = re.compile(r"(-unsloth)?-(bnb-4bit|bf16|fp8)$")
"""Endings of the names of copies in other types."""


def find_known_model(name: str) -> KnownModel | None:
    """The model of a Hub name or short name (``llama-3.1-8b``, ``qwen3-8b``), upper and lower case alike.

    A copy in fewer bits that can be read (models/low_bit_files.py) is the same model.
    """
    lowered = name.lower()
    owner, _, short = lowered.partition("/")
    if owner not in _MIRRORS:
        if (found := _index().get(lowered)) is not None or not short.endswith("-fp8"):
            return found
        found = _index().get(lowered.removesuffix("-fp8"))
    else:
        found = _index().get(_short_name(_COPY.sub("", short)))
    return None if found is None else replace(found, name=name)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    length: int
    """One more than the largest id."""
    tokens: dict[str, int]


def vocabulary_of(name: str) -> Vocabulary | None:
    """The vocabulary in a model's folder or the Hugging Face cache; None without a tokenizer.json."""
    file = _tokenizer_file(name)
    if file is None:
        return None
    try:
        data = read_object(file, largest_bytes=TABLE_BYTES)
        tokens = _model_tokens(data["model"]["vocab"])
        tokens |= {token["content"]: token["id"] for token in data.get("added_tokens") or ()}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever needs the tokenizer itself says what is wrong with it
    return Vocabulary(length=max(tokens.values(), default=-1) + 1, tokens=tokens)


def _model_tokens(vocabulary: Any) -> dict[str, int]:
    """Token -> id; Unigram models list pairs of token and score in the order of the ids."""
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {token: place for place, (token, _) in enumerate(vocabulary)}


def _tokenizer_file(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / "tokenizer.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None
