"""ModelSpec from a Hugging Face config.json: a folder, the built-in table, the cache or the Hub. And the tokens of a
model, from the tokenizer.json beside it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from fitune.errors import ModelError
from fitune.values.hub import HUB_TIMEOUT_S, answers, cached_file, is_hub_name, is_offline
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.config_schema import check_config
from fitune.values.model.families import FAMILIES, stored_type
from fitune.values.model.known_models import (
    accepted_model_names,
    closest_name,
    find_known_model,
    names_packed_weights,
)
from fitune.values.model.model_spec import ModelSpec
from fitune.values.serial import TABLE_BYTES, read_object

_ADOPTED_FROM_REMOTE_CODE = {
    "falcon": "modeling_falcon.FalconForCausalLM",
    "phi": "modeling_phi.PhiForCausalLM",
    "phi3": "modeling_phi3.Phi3ForCausalLM",
}
"""Their Hub folders still point at the code they came with; transformers has its own class of that name, and
only that one is ever used."""


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
    if (known := known_model_spec(name)) is not None:
        return known
    _refuse_folder_without_config(path, name)
    if "/" not in name or not is_hub_name(name):
        raise unknown_model(name)
    try:
        found = cached_file(name, "config.json")
    except ModuleNotFoundError:
        why = "huggingface_hub, which fetches its config.json, is not installed"
        raise unknown_model(name, why=why) from None
    if found is None:
        if is_offline() if offline is None else offline:
            raise unknown_model(name, why="it is not in the Hugging Face cache, and the Hub is switched off")
        found = _download_config(name)
    return _spec_from_file(found, name=name)


def known_model_spec(name: str) -> ModelSpec | None:
    """The shapes of a model of the built-in table, without a look at any file; None for another name."""
    known = find_known_model(name)
    if known is None:
        return None
    spec = spec_from_config(known.config, name=known.name)
    is_packed = bool(known.copy_of) and names_packed_weights(name)
    stored_as = ("FP8" if "fp8" in name.lower() else "bitsandbytes") if is_packed else spec.stored_as
    return replace(spec, has_vision_part=known.has_vision_part, stored_as=stored_as)


def spec_from_config(config: Mapping[str, Any], *, name: str, where: str | None = None) -> ModelSpec:
    """Read the values of a config.json. ``where`` is what errors call it. Of a model that also sees, the text part.

    Raises ModelError naming the field, its value and what is supported; nothing is guessed.
    """
    packed = config.get("quantization_config")
    return replace(
        _text_spec(config, name=name, where=where),
        has_vision_part=config.get("vision_config") is not None,
        stored_as=str(packed.get("quant_method", "")) if isinstance(packed, Mapping) else "",
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
        from fitune.values.model.tracing import shapes_for

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
            hint="name the model it was trained on (base_model_name_or_path in adapter_config.json); to go on from "
            "the adapter, merge it first: fitune export RUN --as merged",
        )
    if (path / "plan.json").is_file():
        raise ModelError(
            f"model = {name!r} is the directory of a run, not a model",
            hint=f"fitune export {quote(name)} --as merged, and name {path / 'merged'}; --resume makes the run longer",
        )
    if path.is_dir():
        raise ModelError(f"model = {name!r}: the folder has no config.json", hint="name a model's own folder")
    if path.is_file():
        raise ModelError(f"model = {name!r} is a file", hint="name the folder that holds config.json")
    if name.startswith(("/", ".", "~")) or "\\" in name:
        raise ModelError(f"model = {name!r}: no such folder")


def unknown_model(name: str, *, why: str = "") -> ModelError:
    """The error for a model that is not found, with the closest known name as its hint."""
    close = closest_name(name, accepted_model_names())
    reason = f": {why}" if why else " is not known"
    if close is None:
        hint = "a Hub name (meta-llama/Llama-3.1-8B) or a folder with a config.json"
    else:
        is_packed = names_packed_weights(name)
        hint = f"{close} in 16 bits; tuning: qlora packs it" if is_packed else f"did you mean {close!r}?"
    return ModelError(f"model = {name!r}{reason}", hint=hint)


def _download_config(name: str) -> Path:
    """Through huggingface_hub, which knows tokens and the cache, once it is clear that the Hub answers."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    if not answers(constants.ENDPOINT):
        raise unknown_model(
            name, why=f"not in the Hugging Face cache, and {constants.ENDPOINT} does not answer"
        )
    try:
        return Path(hf_hub_download(name, "config.json", etag_timeout=HUB_TIMEOUT_S))
    except GatedRepoError:
        raise ModelError(
            f"model = {name!r} is gated",
            hint=f"ask for access at {constants.ENDPOINT}/{name}, then set HF_TOKEN or run `hf auth login`",
        ) from None
    except RepositoryNotFoundError:
        raise unknown_model(
            name, why="the Hub has no such model, or it is private and HF_TOKEN is not set"
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise unknown_model(name, why=f"its config.json could not be downloaded ({error})") from None


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
            _check_rotary(ConfigFields(values=value, where=f"{fields.where}: {name}"), spec)
    kinds = fields.words("layer_types")
    if kinds and (len(kinds) != spec.num_layers or not set(kinds) <= set(_KINDS)):
        fields.refuse("layer_types", f"must name {' or '.join(_KINDS)} for each of {spec.num_layers} layers")
    if kinds and spec.model_type == "mistral":
        fields.refuse("layer_types", "makes it another architecture (ministral), which is not supported")


def _check_rotary(rotary: ConfigFields, spec: ModelSpec) -> None:
    """One description, or one for each kind of layer."""
    parts = [(key, part) for key, part in rotary.values.items() if isinstance(part, Mapping)]
    for key, part in parts:
        _check_rotary(ConfigFields(values=part, where=f"{rotary.where}: {key}"), spec)
    key = "rope_type" if rotary.values.get("rope_type") is not None else "type"
    kind = rotary.values.get(key) or "default"
    if spec.model_type == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its name before transformers 4.45
    if kind not in tuple(_NEEDS):  # it may be of any type, lists too
        rotary.refuse(key, f"is not known: transformers has {', '.join(_NEEDS)}")
    for name in _NEEDS[kind]:
        if rotary.values.get(name) is None:
            rotary.refuse(name, f"is missing, and {kind} positions need it")
    for name in ("long_factor", "short_factor") if kind == "longrope" else ():
        factors, wanted = rotary.values[name], int(spec.head_dim * spec.rotary_share) // 2
        if not isinstance(factors, list) or len(factors) != wanted:
            rotary.refuse(name, f"must be {wanted} factors: half of a head's turned elements")


def vocabulary_of(name: str) -> dict[str, int] | None:
    """Ids by token, from a model's folder or the Hugging Face cache; None without a tokenizer.json."""
    file = _tokenizer_file(name)
    if file is None:
        return None
    try:
        data = read_object(file, largest_bytes=TABLE_BYTES)
        tokens = data["model"]["vocab"]
        if not isinstance(tokens, dict):  # Unigram lists pairs of token and score in the order of the ids
            tokens = {token: place for place, (token, _) in enumerate(tokens)}
        tokens = {**tokens, **{token["content"]: token["id"] for token in data.get("added_tokens") or ()}}
        return tokens if all(type(each) is int for each in tokens.values()) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # whoever needs the tokenizer itself says what is wrong with it


def _tokenizer_file(name: str) -> Path | None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        file = folder / "tokenizer.json"
        return file if file.is_file() else None
    try:
        return cached_file(name, "tokenizer.json")
    except ModuleNotFoundError:
        return None
