"""Types of a recipe's settings: what people write becomes a value, within the range that makes sense."""

import math
import re
from datetime import date
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from fitune.credentials import CREDENTIALS_ELSEWHERE, credential_in
from fitune.errors import did_you_mean
from fitune.files import is_template, path_fault
from fitune.units import MIB, TIB, parse_bandwidth, parse_bytes
from fitune.values.hub import is_hub_name
from fitune.values.quantisers import QUANTISERS

_STEPS = 1_000_000_000
"""At ten steps a second three years."""
_FP32_MAX = 3.4e38

MOST: dict[str, int | float] = {
    "lora_r": 65_536, "lora_alpha": 1_000_000, "quantization_group_size": 1_048_576,
    "gpus": 65_536, "nodes": 65_536, "host_memory": 1_024 * TIB, "nvme_size": 1_048_576 * TIB,
    "price_per_gpu_hour": 1_000_000.0, "gpu_memory": TIB, "gpu_flops": 1e18,
    "gpu_bandwidth": 1e15, "interconnect": 1e15, "node_network": 1e15,
    "seq_len": 100_000_000, "mean_row_tokens": 100_000_000,
    "micro_batch_size": 1_000_000, "gradient_accumulation_steps": 1_000_000,
    "global_batch_size": _STEPS, "loss_chunk_tokens": _STEPS,
    "num_epochs": 1_000_000.0, "max_steps": _STEPS, "warmup_steps": _STEPS,
    "log_steps": _STEPS, "eval_steps": _STEPS, "save_steps": _STEPS, "evals_per_epoch": _STEPS,
    "saves_per_epoch": _STEPS, "keep_checkpoints": 1_000_000,
    "samples": 100_000, "val_fraction": 1_000_000, "gradient_checkpointing": 9_999,
    # inside a source
    "sample": 1_000_000_000_000, "weight": 1_000_000.0, "data_weights": 1_000_000.0,
}  # fmt: skip
"""The largest value of a number, where it is not _FP32_MAX: far above what anybody trains with, far below what
overflows. Lower bounds are in the types below."""


def require_in_range(name: str, value: object) -> None:
    """Raises ValueError with the limit when a number in ``value`` is above that of the setting ``name``."""
    most = MOST.get(name, _FP32_MAX)
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int | float) and one > most:
            raise ValueError(f"must be at most {most:,}")


def number(value: Any) -> Any:
    """YAML 1.1 reads ``1e-4`` as text; people mean the number."""
    if isinstance(value, bool):
        raise ValueError("expected a number, found a boolean")
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"expected a number, found {value!r}") from None
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits is larger than any setting")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected a finite number")
    return value


_MOST_BITS = 512
"""Below the largest float."""


def whole_number(value: Any) -> Any:
    """An int for ``8``, ``8.0`` and ``"8"``. Raises ValueError for a fraction and whatever is no number."""
    value = number(value)
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"expected a whole number, found {value}")
        return int(value)
    return value


def share_or_count(value: Any) -> float:
    """A share below 1, or a whole number from 2 on. Raises ValueError for what is neither."""
    value = number(value)
    if not isinstance(value, int | float) or value < 0 or value == 1 or (value > 1 and value % 1):
        raise ValueError("must be a share below 1 or, from 2 on, a whole number of rows")
    return value if value < 1 else int(value)


def quantiser_word(value: Any) -> str:
    """A known quantiser, or ``none``. Raises ValueError that lists them."""
    if value != "none" and not (isinstance(value, str) and value in QUANTISERS):
        raise ValueError(f"must be {', '.join(map(repr, QUANTISERS))} or 'none'")
    return str(value)


def as_size(value: Any) -> Any:
    """Bytes. Raises ValueError for a size that lacks its unit: no machine has less than a MiB."""
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, int | float) and 0 < size < MIB:
        raise ValueError(f"{size:,.0f} bytes are less than 1 MiB; write the unit, e.g. {int(size)}GiB")
    return size


def as_bandwidth(value: Any) -> Any:
    """Bytes/s. Raises ValueError for less than a MB/s: the unit was forgotten."""
    rate = parse_bandwidth(value) if isinstance(value, str) else value
    if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate < 1e6:
        raise ValueError(f"{rate:g} bytes/s are less than 1 MB/s; write the unit, e.g. {rate:g}GB/s")
    return number(rate)


def as_path(value: str) -> str:
    """The path or URL itself. Raises ValueError where it cannot be one, and for ``s3:/bucket``: a slash is missing."""
    if fault := path_fault(value):
        raise ValueError(fault)
    if match := _SLASH_MISSING.match(value):
        meant = f"{match[1] or match[2]}://{value[match.end() :]}"
        raise ValueError(
            f"looks like a URL whose '://' is not whole: {meant}, or ./{value} for a folder here"
        )
    return value


def as_template(value: str) -> str:
    """The text of a Jinja template as it is, else ``as_path`` of it."""
    return value if is_template(value) else as_path(value)


_SLASH_MISSING = re.compile(r"([A-Za-z][\w+.-]*):/(?!/)|(s3a?|gc?s|abfs|hdfs|ftp|https?)//")


def require_plain_text(value: Any) -> None:
    """Raises ValueError for a text that cannot be written into a file, or should not: a run saves its recipe."""
    if not isinstance(value, str):
        return
    if re.search("[\ud800-\udfff]", value):
        raise ValueError("contains an unpaired surrogate")
    if found := credential_in(value):
        raise ValueError(f"contains {found}, and settings are saved and shown; {CREDENTIALS_ELSEWHERE}")


def as_name(value: Any) -> Any:
    """YAML reads ``4090`` as a number; people mean a name."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def as_hub_name(value: Any) -> Any:
    """``OWNER/NAME``, or ``NAME`` of the token's own account, by the Hub's rules; nothing for false. A command line has
    true and false as texts."""
    if str(value).lower() == "true":
        raise ValueError("names the repository here: OWNER/NAME")
    if str(value).lower() == "false":
        return ""
    text = str(value) if value else ""
    if text and not (is_hub_name(text) and len(text) <= _HUB_NAME):
        raise ValueError(
            f"is no name on the Hub: OWNER/NAME of at most {_HUB_NAME} letters, digits and - _ . , without -- and .."
        )
    return text


_HUB_NAME = 96


def as_date(value: Any) -> Any:
    """A day as ``2026-01-31``, which YAML reads as a date."""
    try:
        return value and date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a day: 2026-01-31") from None


def as_names(value: Any) -> Any:
    """One name, a comma-separated text or a list."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def as_numbers(value: Any) -> Any:
    """One number, a comma-separated text or a list."""
    return [value] if isinstance(value, int | float) else as_names(value)


def as_columns(value: Any) -> Any:
    """``prompt=question, completion=reply``, or a list of such parts, as a mapping; a mapping as it is."""
    if not isinstance(value, str | list):
        return value
    parts = value if isinstance(value, list) else [value]
    columns: dict[str, str] = {}
    for part in (piece.strip() for one in parts for piece in re.split(r",(?=\s*\w+=)", str(one))):
        role, equals, column = part.partition("=")
        if not (role and equals and column) or role in columns:
            raise ValueError(f"{part!r} is not role=column, each role once: prompt=question")
        columns[role] = column
    return columns


def as_targets(value: Any) -> Any:
    """A list of names of linears; a regular expression keeps its commas."""
    if isinstance(value, str) and set(value) & set("()[]{}|*+?^$\\"):
        return [value.strip()]
    return as_names(value)


def as_layers(value: Any) -> Any:
    """Numbers of blocks and ranges of them, ``0-3, 7``, as single numbers; ``all`` is none in particular."""
    if isinstance(value, str) and value.strip().lower() == "all":
        return []
    parts = value if isinstance(value, list) else str(value).split(",")
    return [number for part in parts for number in _range_of(part)]


def _range_of(part: Any) -> range:
    match = _RANGE.fullmatch(str(part))
    if isinstance(part, bool) or match is None:
        raise ValueError(f"{part!r} is neither the number of a block nor a range like 24-31")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first or last > _MOST_BLOCKS:
        raise ValueError(f"{part!r}: a range goes from the lower number to the higher, up to {_MOST_BLOCKS}")
    return range(first, last + 1)


_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")
_MOST_BLOCKS = 9_999
"""No model has as many; a slip must not make a list of a billion."""


def as_sources(value: Any) -> Any:
    """A list of sources from one, several or none (null)."""
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def as_source(value: Any) -> Any:
    """The fields of a source that may be written as its path alone."""
    return {"path": value} if isinstance(value, str) else value


def switch_or_count(value: Any) -> bool | int:
    """All blocks or none (true, on, all, false, off, none), or how many. Raises ValueError for other words."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _SWITCH_WORDS:
        return _SWITCH_WORDS[value.lower()]
    try:
        count = whole_number(value)
    except ValueError:
        count = None
    if type(count) is not int or count < 0:
        raise ValueError("expected true, false or a number of blocks")
    return count


_SWITCH_WORDS = {"true": True, "on": True, "all": True, "false": False, "off": False, "none": False}

PositiveInt = Annotated[int, BeforeValidator(whole_number), Field(gt=0)]
RowLength = Annotated[int, BeforeValidator(whole_number), Field(ge=2)]
"""A row of one token has no next token to learn."""
CountInt = Annotated[int, BeforeValidator(whole_number), Field(ge=0)]
Seed = Annotated[int, BeforeValidator(whole_number), Field(ge=0, lt=2**63)]
PositiveFloat = Annotated[float, BeforeValidator(number), Field(gt=0)]
CountFloat = Annotated[float, BeforeValidator(number), Field(ge=0)]
Share = Annotated[float, BeforeValidator(number), Field(ge=0, lt=1)]
HeldOut = Annotated[int | float, PlainValidator(share_or_count)]
Bandwidth = Annotated[float, BeforeValidator(as_bandwidth), Field(gt=0)]
Size = Annotated[int, BeforeValidator(as_size), Field(gt=0)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, AfterValidator(as_path)]
"""A path, or what stands in its place: a Hub id, an address."""
TemplateText = Annotated[str, AfterValidator(as_template)]
"""The path of a Jinja file, or what would stand in it."""
NamedPath = Annotated[str, Field(min_length=1), AfterValidator(as_path)]
HubName = Annotated[str, BeforeValidator(as_hub_name)]
Names = Annotated[list[Text], BeforeValidator(as_names)]
Targets = Annotated[list[Text], BeforeValidator(as_targets)]
Layers = Annotated[list[int], BeforeValidator(as_layers)]


class Strict(BaseModel):
    """Settings that are saved and shown: unknown keys are refused, and so are credentials."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="after")
    @classmethod
    def _allowed(cls, value: Any, info: ValidationInfo) -> Any:
        require_in_range(info.field_name or "", value)
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for each in parts if isinstance(parts, list) else [parts]:
            require_plain_text(each)
        return value


def described(error: ValidationError, *, where: str = "", known: type[BaseModel]) -> str:
    """A line for each fault: where, the key, its value, and what may stand there; for an unknown key a close one of
    ``known``."""
    place = f"{where}: " if where else ""
    return "\n".join(dict.fromkeys(f"{place}{_describe_one(item, known)}" for item in error.errors()))


def _describe_one(item: Any, known: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        close = did_you_mean(str(item["loc"][-1]), [*known.model_fields])
        return f"unknown key {path!r}" + (f"; {close}" if close else "")
    if item["type"] == "missing":
        return f"{path} is missing"
    return f"{path} = {item['input']!r}: {_in_words(item)}"


def _in_words(item: Any) -> str:
    """pydantic speaks to programmers; these are the refusals that people meet."""
    context = item.get("ctx", {})
    match item["type"]:
        case "string_too_short":
            return "must not be empty"
        case "greater_than":
            return f"must be greater than {context['gt']}"
        case "greater_than_equal":
            return f"must be at least {context['ge']}"
        case "less_than_equal":
            return f"must be at most {context['le']}"
        case "less_than":
            return f"must be less than {context['lt']}"
        case "literal_error":
            near = did_you_mean(str(item["input"]), re.findall(r"'([^']*)'", context["expected"]))
            return f"must be {context['expected']}" + (f"; {near}" if near else "")
        case "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_type":
            return "must be a number"
        case "string_type":
            return "must be a text: write it in quotes"
        case "bool_parsing" | "bool_type":
            return "must be true or false"
        case "string_unicode":
            return "contains an unpaired surrogate"
        case _:
            return str(item["msg"]).removeprefix("Value error, ")
