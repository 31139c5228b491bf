"""One recipe of another trainer while it is read: every key ends in exactly one line that says what became of it.

Keys of a mapping inside it have lines of their own if any of them is read; else the mapping's one line covers them.

translated | its key and value are a setting here, perhaps with a difference that is said
assumed    | the recipe leaves it open, and the trainer's default is not the one here
passed     | it does not touch the result: bookkeeping, or speed that the plan decides
refused    | it would change the result, and nothing here does the same
unknown    | no table knows it
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from fitune.errors import RecipeError, did_you_mean
from fitune.recipe.aliases import canonical_value
from fitune.recipe.recipe import Recipe
from fitune.recipe.types import MOST
from fitune.units import whole_number, wrapped

_WIDTH = 100
_LONGEST_VALUE = 60

Fate = Literal["translated", "assumed", "passed", "refused", "unknown"]

SUPERVISED = "fitune does supervised fine-tuning"
TRAINS_NOTHING = "a recipe that trains nothing"
ON_TEXT = "fitune trains on text"
_OTHER_TASKS = {
    SUPERVISED: "a recipe of supervised fine-tuning with data for it",
    TRAINS_NOTHING: "fitune score, chat or export with what was trained",
    ON_TEXT: "rows of text alone, without the settings of images and sounds",
}
"""Words in a refusal that tell of another task -> what to try: leaving the key out would train something else."""

SHARDING = ("zero", "hybrid_sharding", "offload_parameters", "offload_optimizer", "nvme_path")
"""Settings that divide states over devices or move them away: on one device the plan decides them."""


def is_on(value: Any) -> bool:
    """True unless the value of a switch is absent, false, none or 0."""
    return value is not None and str(value).lower() not in ("false", "no", "none", "0", "0.0")


def words(text: str) -> frozenset[str]:
    """The words of ``text``, which has blanks between them."""
    return frozenset(text.split())


class Inside(dict[str, Any]):
    """A mapping inside a recipe, which knows the keys that it was asked for."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        super().__init__({str(key): _watched(value) for key, value in mapping.items()})
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Notes ``key`` as asked for."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def _watched(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Inside(value)
    return [_watched(each) for each in value] if isinstance(value, list) else value


def _mappings(value: Any, where: str) -> Iterator[tuple[str, Inside]]:
    """Each mapping in ``value`` of which something was read, and its place in the recipe."""
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from _mappings(each, f"{where}[{number}]")
    elif isinstance(value, Inside) and value.asked:
        yield where, value
        for key, each in value.items():
            yield from _mappings(each, f"{where}.{key}")


_SHARED_ROWS = (
    "{} devices share each row there; here each has rows of its own, so a step on as many devices has more rows: "
    "global_batch_size says how many"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One key of theirs, the settings here that it became, and what a reader should know about it."""

    key: str
    value: Any
    fate: Fate
    settings: tuple[str, ...] = ()
    said: str = ""


@dataclass(slots=True, kw_only=True)
class Reading:
    """Keys of another trainer's recipe, the settings here that they became, and a line for each key."""

    trainer: str
    where: str
    raw: Mapping[str, Any]
    folder: Path
    """Relative file names are looked up here."""
    settings: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    """Keys that were asked for, for a did-you-mean."""
    watched: dict[str, Any] = field(default_factory=dict)
    """Values that hold mappings, by their keys: what is not read of them is accounted for, too."""
    known_inside: dict[str, tuple[Fate, str]] = field(default_factory=dict)
    """Keys of mappings inside the recipe that are passed over or refused wherever they stand, and why."""
    latest: str = ""
    """The key that was asked for last, for an error about its value."""

    def take(self, key: str) -> Any:
        """The value of their ``key``; None where it is absent, null or empty."""
        self.known.add(key)
        value = self.raw.get(key)
        if key in self.raw:
            self.latest = key
        return None if _is_empty(value) else self.watch(key, value)

    def watch(self, where: str, value: Any) -> Any:
        """``value``, which stands at ``where``; of its mappings the keys that are asked for are counted."""
        return self.watched.setdefault(where, _watched(value)) if isinstance(value, Mapping | list) else value

    def inside(self, fate: Fate, reasons: Mapping[str, str]) -> None:
        """Say what becomes of these keys of nested mappings if nothing reads them, and why."""
        self.known_inside |= {name: (fate, said) for key, said in reasons.items() for name in key.split()}

    def put(self, name: str, value: Any, *, key: str = "", said: str = "") -> None:
        """Set ``name`` here to ``value``, because of their ``key`` or, without one, their default."""
        value = canonical_value(name, value)
        if key and name in self.settings and self.settings[name] != value:
            self.refuse(key, f"another key sets {name} to {self.settings[name]!r} already")
            return
        self.settings[name] = value
        self.known.add(key)
        if key.split("[")[0] in self.raw:
            self._add(key, "translated", said, name)
        else:
            self._add("", "assumed", said or f"{self.trainer}'s default", name)

    def also(self, name: str, value: Any, *, key: str) -> None:
        """Set ``name`` here, which another of their keys set before, to ``value``, because of their ``key`` too."""
        self.settings.pop(name, None)
        self.put(name, value, key=key)

    def assume(self, said: str = "", **defaults: Any) -> None:
        """Set the other trainer's defaults where its recipe leaves them open; steps of warm-up leave no share open."""
        for name, value in defaults.items():
            if name not in self.settings and (name != "warmup_ratio" or "warmup_steps" not in self.settings):
                self.put(name, value, said=said)

    def same(self, names: Mapping[str, str]) -> None:
        """Keys that mean the same here: their name -> ours."""
        for key, name in names.items():
            if (value := self.take(key)) is not None:
                self.put(name, value, key=key)

    def passed(self, names: str | Iterable[str], said: str = "") -> None:
        """Say why these keys, one or a text of several with blanks between them, change nothing here, unless they have
        a line already."""
        for key in names.split() if isinstance(names, str) else names:
            self.known.add(key)
            if key in self.raw and not any(line.key == key for line in self.lines):
                is_off = _is_empty(self.raw[key]) or self.raw[key] is False
                self._add(key, "passed", "" if is_off else said)

    def refuse(self, key: str, why: str) -> None:
        """Say why ``key`` would change the result."""
        self.known.add(key)
        self._add(key, "refused", why)

    def refuse_if_on(self, reasons: Mapping[str, str]) -> None:
        """Refuse each key that is there and on."""
        for key, why in reasons.items():
            if is_on(self.take(key)):
                self.refuse(key, why)
            else:
                self.passed(key)

    def pass_shared_rows(self, names: str) -> None:
        """Say of numbers of devices that work on one row together that a step here has as many times more rows."""
        for key in names.split():
            together = whole_number(str(self.take(key)), most=int(MOST["gpus"])) or 0
            self.passed(key, _SHARED_ROWS.format(together) if together > 1 else "")

    def finish(self) -> None:
        """Give each key that nothing took a line: off and empty ones are passed over, others are unknown."""
        done = {line.key.split("[")[0].split(".")[0] for line in self.lines}
        for key, value in self.raw.items():
            if key in done:
                continue
            if _is_empty(value) or value is False:
                self._add(key, "passed")
            elif key in self.known:
                self._add(key, "passed", "read together with other keys")
            else:
                self._add(key, "unknown", did_you_mean(str(key), sorted(self.known - {""})) or "")
        refused = {line.key.split("[")[0] for line in self.of("refused")}
        for where, inside in [each for key, value in self.watched.items() for each in _mappings(value, key)]:
            for key, value in inside.items() if where.split("[")[0].split(".")[0] not in refused else ():
                if key in inside.asked or _is_empty(value) or value is False:
                    continue
                known = sorted(inside.asked | self.known_inside.keys())
                fate, said = self.known_inside.get(key) or ("unknown", did_you_mean(key, known) or "")
                self.lines.append(Line(key=f"{where}.{key}", value=value, fate=fate, said=said))

    def of(self, fate: Fate) -> list[Line]:
        """The lines of one fate."""
        return [line for line in self.lines if line.fate == fate]

    def _add(self, key: str, fate: Fate, said: str = "", *names: str) -> None:
        self.lines.append(Line(key=key, value=self.raw.get(key), fate=fate, settings=names, said=said))


def paths_of(source: Mapping[str, Any]) -> list[str]:
    """``data_files`` are files by themselves beside a layout (``path: json``) or with a whole path, and inside the path
    else. ``name`` is a configuration of a dataset on the Hub, and a word for people beside files."""
    path, files, name = str(source["path"]), source.get("data_files"), source.get("name")
    if isinstance(files, Mapping):
        files = files.get(str(source.get("split") or "train"))
    if not files:
        return [f"{path}:{name}" if name and not _ROWS_IN_FILE.search(path) else path]
    names = [str(file) for file in files] if isinstance(files, list) else [str(files)]
    own = path in ("json", "csv", "parquet", "text")
    return [each if own or each.startswith("/") or "://" in each else f"{path}/{each}" for each in names]


_ROWS_IN_FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|arrow|txt)(\.\w+)?$")


_ABOUT_DATA = words("datasets dataset dataset_name dataset_mixture train_dataset")
"""Keys that name the rows to train on."""


def require_readable(reading: Reading, *, own_data: bool = False) -> None:
    """Raises RecipeError that lists every key that is refused or unknown, each with its reason.

    A recipe of another task has keys of its own, which are not listed. With ``own_data`` other rows are named than
    the recipe's.
    """
    about_data = [line for line in reading.lines if re.split(r"[.\[]", line.key)[0] in _ABOUT_DATA]
    passed = about_data if own_data else []
    refused = [line for line in reading.of("refused") if line not in passed]
    unknown = [line for line in reading.of("unknown") if line not in passed]
    if not refused and not unknown:
        return
    other = next((hint for said, hint in _OTHER_TASKS.items() for line in refused if said in line.said), None)
    unknown = [] if other else unknown
    lines = [f"{reading.where}: read as a recipe of {reading.trainer}"]
    for line in refused:
        text = "" if line.value is None else f": {_short(str(line.value))}"
        lines.append(f"  {line.key}{text} would change the result: {line.said}")
    lines += [f"  unknown key {line.key!r}" + (f" ({line.said})" if line.said else "") for line in unknown]
    others = len(unknown) + sum(line not in about_data for line in refused)
    hints = []
    if others < len(refused) + len(unknown):
        hints = ["other rows in their place: --data FILE --columns prompt=question,completion=answer"]
    if others:
        which = "the others" if hints else "them" if others > 1 else "it"
        hints.append(f"leave {which} out to train without")
    raise RecipeError("\n".join(lines), hint=other or "; ".join(hints))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def explain_reading(reading: Reading) -> list[str]:
    """Lines for people: what was renamed, what differs and how, the trainer's defaults, what was passed over."""
    renamed = [line for line in reading.of("translated") if not line.said]
    different = [line for line in reading.of("translated") if line.said]
    noted = [line for line in reading.of("passed") if line.said]
    empty = [line.key for line in reading.of("passed") if not line.said]
    lines = [f"{reading.where} is a recipe of {reading.trainer}; fitune convert writes it as one of fitune's"]
    lines += _paragraph("means the same", [_renamed(line, reading) for line in renamed])
    lines += [text for line in different for text in _paragraph(_renamed(line, reading), [line.said])]
    assumed = [line.settings[0] for line in reading.of("assumed")]
    unusual = [each for each in assumed if Recipe.model_fields[each].default != reading.settings.get(each)]
    defaults = [_setting(name, reading) for name in unusual]
    lines += _paragraph(f"defaults of {reading.trainer} that differ", defaults)
    for said in dict.fromkeys(line.said for line in noted):
        lines += _paragraph(", ".join(line.key for line in noted if line.said == said), [said])
    lines += _paragraph("passed over, being empty, off or bookkeeping", empty)
    return lines


_IN_PYTHON = {"Unsloth": "a notebook loads its rows in Python"}
"""Trainers whose settings name no data, and why."""


def without_data(reading: Reading) -> str:
    """Says that the recipe names no data, and how to; empty where keys of its own were about data."""
    if {"data", "datasets", "dataset"} & {*reading.settings, *reading.raw}:
        return ""
    why = f": {_IN_PYTHON[reading.trainer]}" if reading.trainer in _IN_PYTHON else ""
    return f"no data is named{why}; data: FILE in the recipe, or --data FILE, gives steps, time and cost"


NO_NEWS = "empty, off or bookkeeping"
"""Why a key was passed over, where nothing else is said."""


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines, such as templates, as blocks, which people can read and change."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def recipe_with_comments(reading: Reading, values: dict[str, Any]) -> str:
    """YAML of ``values``, fitune's settings, each with a comment that says where it comes from."""
    lines = [f"# {' '.join(reading.where.split())}, a recipe of {reading.trainer}, in fitune's words", ""]
    if without_data(reading):
        lines.append(f"# data: train.jsonl  # {_IN_PYTHON.get(reading.trainer, 'none is named')}")
    for name, value in values.items():
        written = yaml.dump(
            {name: value}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000
        ).splitlines()
        origins = [_origin(line, name, reading) for line in reading.lines if name in line.settings]
        comment = " ".join("; ".join(dict.fromkeys(origins)).split())
        if (
            isinstance(value, str) and len(written) > 1
        ):  # a comment behind its first line would be of the text
            lines += [f"# {name}: {comment}", *written]
        else:
            lines += [f"{written[0]}  # {comment}" if comment else written[0], *written[1:]]
    passed = reading.of("passed")
    groups = dict.fromkeys(line.said for line in passed)
    if passed:
        lines += ["", f"# Not taken over from {reading.trainer}:"]
    for said in groups:
        keys = ", ".join(line.key for line in passed if line.said == said)
        text = f"{keys}: {said or NO_NEWS}"
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ",
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _origin(line: Line, name: str, reading: Reading) -> str:
    if not line.key:
        return line.said
    key = f"as in {reading.trainer}" if line.key == name else f"from {line.key}"
    return f"{key}: {line.said}" if line.said else key


def _renamed(line: Line, reading: Reading) -> str:
    values = ", ".join(_setting(name, reading) for name in line.settings)
    return values if line.key in line.settings else f"{line.key} → {values}"


def _setting(name: str, reading: Reading) -> str:
    value = reading.settings.get(name)
    if name in ("data", "eval_data") and isinstance(value, list):
        return f"{name} {', '.join(_source(each) for each in value)}"
    if isinstance(value, list):
        return f"{name} {', '.join(map(str, value))}"
    return f"{name} {_short(str(value).lower() if isinstance(value, bool) else str(value))}"


def _short(text: str) -> str:
    """The first words of a long value, such as a template."""
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."


def _source(source: Any) -> str:
    if not isinstance(source, dict):
        return str(source)
    others = [f"{key} {value}" for key, value in source.items() if key != "path"]
    return f"{source['path']} ({', '.join(others)})" if others else str(source["path"])


def _paragraph(title: str, parts: Sequence[str]) -> list[str]:
    if not parts:
        return []
    return wrapped(f"{title}: {', '.join(parts)}", hanging=2).splitlines()
