"""The one place that calls transformers' and PEFT's readers of model folders and of the Hub.

Before a reader sees a folder, its names and JSON are checked: pickles and code of the folder are refused
(models/remote_code.py), there is no standard input to ask for trust at, and whatever a reader trips over becomes a
ModelError.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from peft import LoraConfig, PeftModel
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fitune.errors import CheckpointError, FituneError, ModelError, is_failure
from fitune.models.expert_adapters import names_as_given, run_with_adapters, stacks_shown
from fitune.models.remote_code import CONFIG, GENERATION, JSON_FILES, TOKENIZER, refuse_remote_code
from fitune.values.hub import no_waiting_for_the_hub
from fitune.values.model.config_fields import ConfigFields
from fitune.values.model.config_schema import check_config, stop_ids
from fitune.values.model.families import FAMILIES
from fitune.values.model.known_models import find_known_model, text_model_like
from fitune.values.serial import read_object

FETCH_AGAIN = "the files may be cut short or of another model: fetch them again"


@contextmanager
def reading(path: str, what: str, *, hint: str = FETCH_AGAIN) -> Iterator[None]:
    """Around every use of the functions below: what a library raises while it reads ``path`` becomes a ModelError.

    A folder needs no Hub. Errors of fitune, and of memory that ran out, stay what they are.
    """
    is_folder = Path(path).is_dir()
    if not is_folder and path.startswith(("/", ".", "~")):
        raise ModelError(f"{path}: no such folder", hint="name a folder with a config.json, or a Hub id")
    with nullcontext("") if is_folder else no_waiting_for_the_hub() as unreachable:
        if unreachable:
            what = f"{what}: no such folder, not whole in the Hugging Face cache, and {unreachable}"
            hint = f"name a folder, or run `hf download {path}` where there is a network"
        with _named(f"{path}: {what}", hint=hint, with_cause=not unreachable):
            yield


@contextmanager
def _named(
    what: str, *, hint: str = FETCH_AGAIN, with_cause: bool = True, kind: type[FituneError] = ModelError
) -> Iterator[None]:
    """No schema stands between a stranger's file and the libraries: they raise whatever Python raises there."""
    try:
        yield
    except FituneError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise  # the files are right: the caller says what takes less
        first, _, rest = str(error).strip().partition("\n")
        if first.endswith(":"):
            first = f"{first} {rest.strip().partition(chr(10))[0]}"
        cause = first or type(error).__name__
        raise kind(f"{what}: {cause}" if with_cause else what, hint=hint) from error


def model_folder(path: str) -> Path:
    """``path`` itself, or where the Hub's cache has the model, fetched when it is not there.

    Raises ModelError when the folder is that of no model, or asks for code.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(
            snapshot_download(path, allow_patterns=["*.json", "tokenizer.model", "model*.safetensors"])
        )
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder}: no config.json, so this is no model folder")
    refuse_remote_code(folder, error=ModelError)
    return folder


def file_of_model(path: str, name: str) -> Path | None:
    """The file called ``name`` of a folder or, as far as it is in the cache, of a Hub id; None without one."""
    file: Any = Path(path) / name
    if not Path(path).is_dir():
        with suppress(ValueError):  # no Hub id: the folder is gone
            file = Path(str(try_to_load_from_cache(path, name)))
    return file if file.is_file() else None


def notes_on(path: str) -> tuple[str, ...]:
    """Notes for people about code that the model brings and that is not run."""
    with reading(path, "the model cannot be read"):
        return refuse_remote_code(_texts(path), error=ModelError)


def _texts(path: str) -> Path:
    """The folder with the JSON that names code, without the weights."""
    return Path(path) if Path(path).is_dir() else Path(snapshot_download(path, allow_patterns=[*JSON_FILES]))


def read_config(path: str) -> PretrainedConfig:
    """transformers' config of a folder or Hub id."""
    texts = _texts(path)
    refuse_remote_code(texts, error=ModelError)
    fields = _fields(texts / CONFIG)
    check_config(fields, traced=fields.values.get("model_type") not in FAMILIES)
    with _named(f"{texts / CONFIG}: cannot be read"):
        return _of_plain_weights(AutoConfig.from_pretrained(path, trust_remote_code=False))


def config_from(values: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' config of the built-in table's ``values``."""
    words = dict(values)
    return AutoConfig.for_model(words.pop("model_type"), **words)


def text_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' config of a language model, or of the language model's part of one that also sees.

    Raises ModelError for a type that transformers does not have.
    """
    from transformers import CONFIG_MAPPING

    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type = {model_type!r}: transformers has no such architecture",
            hint="a newer transformers may have it; fitune runs no model's own code: if blocks and tensor names are "
            "those of a known architecture, write its model_type into config.json (llama, for example)",
        )
    with _named(f"model_type = {model_type!r}: its config cannot be used"):
        config = CONFIG_MAPPING[model_type].from_dict(_with_floats(dict(values)))
        text = _of_plain_weights(config).get_text_config()
    if values.get("vision_config") is not None and type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        like = text_model_like(text.to_dict())
        raise ModelError(
            f"model_type = {model_type!r} is a vision model, and its text part cannot be trained alone: transformers "
            "has no language model of its own for it",
            hint=f"a text model of its size{f': {like}' if like else ''}",
        )
    return text


def _with_floats(value: Any) -> Any:
    """transformers writes infinity as {"__float__": "Infinity"}, which JSON has no number for."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_floats(inner) for key, inner in value.items()}
    return [_with_floats(inner) for inner in value] if isinstance(value, list) else value


def _fields(file: Path) -> ConfigFields:
    try:
        return ConfigFields(values=read_object(file), where=str(file))
    except ValueError as error:
        raise ModelError(f"{file}: {error}", hint=FETCH_AGAIN) from None


def _of_plain_weights(config: PretrainedConfig) -> PretrainedConfig:
    """Drop ``auto_map``, an export has no code beside it, and ``quantization_config``: weights of few bits are read as
    the 16-bit ones that they stand for (models/low_bit/files.py)."""
    for part in (config, config.get_text_config()):
        for name in ("auto_map", "quantization_config"):
            part.__dict__.pop(name, None)
    return config


def empty_model(config: PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model with parameters of the right shapes and no content; on "meta" or fake tensors they take no memory.

    Of a model that also sees, the language model alone.
    Raises ModelError for a config that no model can be built from.
    """
    typed = {} if dtype is None else {"dtype": dtype}
    with _named(f"{config.name_or_path or config.model_type}: no model can be built from its config"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config.get_text_config(), trust_remote_code=False, **typed
        )
    return model


def filled_model(
    architecture: type[PreTrainedModel], config: PretrainedConfig, tensors: Mapping[str, Any], **how: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of ``architecture`` with ``tensors`` put in place, and what did not match."""
    return architecture.from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, trust_remote_code=False, **how
    )


def whole_model(folder: Path, *, attention: str) -> PreTrainedModel:
    """Load a folder that was just exported, in its own types, as transformers alone does."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation=attention, local_files_only=True, trust_remote_code=False
    )


def read_generation_config(folder: Path) -> GenerationConfig | None:
    """The generation settings of the model's makers; None where they give none."""
    if not (folder / GENERATION).is_file():
        return None
    stop_ids(_fields(folder / GENERATION))  # raises ModelError for a wrong eos_token_id
    with _named(f"{folder / GENERATION}: cannot be read"):
        return GenerationConfig.from_pretrained(folder)


def read_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id."""
    texts = _texts(path)
    refuse_remote_code(texts, error=ModelError)
    # else it would read that one, and name no file
    config = read_config(path) if (texts / CONFIG).is_file() else None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        path, config=config, trust_remote_code=False
    )
    # transformers checks neither, and makes the text "false" a special token
    if not isinstance(longest := tokenizer.model_max_length, int | float):
        raise ModelError(f"{texts / TOKENIZER}: model_max_length = {longest!r} must be a number")
    for flag in ("add_bos_token", "add_eos_token"):
        if flag in (marks := tokenizer.special_tokens_map):
            raise ModelError(f"{texts / TOKENIZER}: {flag} = {marks[flag]!r} must be true or false")
    tokenizer.init_kwargs.pop("auto_map", None)
    return tokenizer


def with_adapter(
    model: PreTrainedModel,
    folder: Path,
    *,
    config: LoraConfig | None = None,
    names: Mapping[str, str] | None = None,
    in_fp32: bool = False,
) -> PeftModel:
    """``model`` with the adapter in ``folder`` put on it, not for training; 16-bit ones made fp32 where asked.

    ``config``: in place of the one in the folder, which is read only where fitune wrote it. ``names``: patterns of
    the file's names and what is put in their place.

    Raises CheckpointError for one that PEFT cannot take.
    """
    with (
        _named(f"{folder}: the adapter cannot be loaded", kind=CheckpointError),
        stacks_shown(model),
        names_as_given(),
    ):
        adapted = PeftModel.from_pretrained(
            model,
            str(folder),
            config=config,
            key_mapping=None if names is None else dict(names),
            is_trainable=False,
            autocast_adapter_dtype=in_fp32,
        )
    run_with_adapters(adapted)
    return adapted


def model_config(path: str) -> PretrainedConfig:
    """transformers' config of a folder, of a model in the built-in table, or from the Hub and its cache.

    Raises ModelError when there is none. Of a model that also sees, the language model's part.
    """
    known = None if Path(path).is_dir() else find_known_model(path)
    if known is not None:
        return config_from(known.config).get_text_config()
    with reading(path, "its config cannot be read"):
        return read_config(path).get_text_config()


def with_layers(config: PretrainedConfig, count: int) -> PretrainedConfig:
    """``config`` with only the first ``count`` blocks."""
    shallow = copy.deepcopy(config)
    shallow.num_hidden_layers = count
    if vars(config).get("layer_types"):  # Mamba's are a property of the number of blocks
        shallow.layer_types = config.layer_types[:count]
    return shallow
