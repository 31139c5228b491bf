"""A job: the ``job:`` settings as people write them (a file, a cluster of a fleet file, or ``--set job.image=…``), and
what the processes of a plan ask of a cluster. The launchers write it down in their own words."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    ValidationError,
)

from fitune.errors import RecipeError
from fitune.recipe.strict_yaml import load_yaml, type_inside, typed_value
from fitune.recipe.types import Names, PositiveInt, Size, Strict, described, whole_number
from fitune.units import parse_seconds

T = TypeVar("T", bound=BaseModel)

System = Literal["kuberay", "kubernetes", "slurm"]

TESTED_RAY = "2.60.0"
"""The version of Ray that runs on a cluster are tested with."""
GPU_RESOURCE = "nvidia.com/gpu"
"""Kubernetes' name for the GPUs of a node."""

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


def object_name(value: str) -> str:
    """The name of a claim, a Secret, a queue: DNS-1123."""
    if value and not (len(value) <= 253 and _SUBDOMAIN.fullmatch(value)):
        raise ValueError("is no name of a Kubernetes object: lower-case letters, digits, '-' and '.'")
    return value


def _label_value(value: str) -> str:
    """The value of a Kubernetes label. Raises ValueError for any other text."""
    if not (len(value) <= 63 and _LABEL_VALUE.fullmatch(value)):
        raise ValueError("is no value of a label: at most 63 letters, digits, '-', '_' and '.'")
    return value


def _labels(value: Mapping[str, str]) -> Mapping[str, str]:
    for key, text in value.items():
        if not _LABEL_KEY.fullmatch(key):
            raise ValueError(f"{key!r} is no key of a label")
        _label_value(text)
    return value


def _devices(counts: Mapping[str, int]) -> Mapping[str, int]:
    """Resources beside those that the plan decides."""
    for name in counts:
        if name == GPU_RESOURCE:
            raise ValueError(f"{name} is the plan's: gpus in the recipe says how many")
        if "/" not in name or not _LABEL_KEY.fullmatch(name):
            raise ValueError(f"{name!r} is no device of a node, like rdma/hca")
    return counts


def _image(value: str) -> str:
    if value and not _IMAGE.fullmatch(value):
        raise ValueError("is no image: REGISTRY/NAME:TAG")
    return value


def _folder(value: str) -> str:
    if value and (
        not value.startswith("/") or ".." in value.split("/") or re.search(r"[:\s]", value) or value == "/"
    ):
        raise ValueError("is no absolute path of a folder, without '..', ':' and spaces")
    return value.rstrip("/")


def one_line(value: str) -> str:
    """The text itself. Raises ValueError for line breaks and control characters."""
    if not value.isprintable():
        raise ValueError("must be one line")
    return value


def _word(value: str) -> str:
    if value and not re.fullmatch(r"[A-Za-z0-9][\w.@:/+-]*", value, re.ASCII):
        raise ValueError("must be one word of letters, digits and . _ - @ : / +")
    return value


def _as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _object_names(names: list[str]) -> list[str]:
    return [object_name(name) for name in names]


def _as_seconds(value: Any) -> Any:
    seconds = parse_seconds(value) if isinstance(value, str) else value
    return whole_number(seconds)


ObjectName = Annotated[str, BeforeValidator(_as_text), AfterValidator(object_name)]
LabelValue = Annotated[str, BeforeValidator(_as_text), AfterValidator(_label_value)]
Labels = Annotated[dict[str, Annotated[str, BeforeValidator(_as_text)]], AfterValidator(_labels)]
Folder = Annotated[str, AfterValidator(_folder)]
Word = Annotated[str, BeforeValidator(_as_text), AfterValidator(_word)]
Duration = Annotated[int, BeforeValidator(_as_seconds), Field(gt=0, le=366 * 86_400)]
Lines = Annotated[list[Annotated[str, AfterValidator(one_line)]], BeforeValidator(_as_list)]
ObjectNames = Annotated[Names, AfterValidator(_object_names)]


class JobSettings(Strict):
    """Everything of a job that no plan can know. What is left out is taken from the plan, or is not asked for."""

    name: str = ""
    image: Annotated[str, AfterValidator(_image)] = ""
    claim: ObjectName = ""
    """A PersistentVolumeClaim, ReadWriteMany where there are several pods."""
    mount: Folder = "/mnt/fitune"
    """The folder that every process of the job sees: data, caches of tokens, and the run."""
    namespace: LabelValue = ""
    context: Word = ""
    """kubectl's."""
    queue: Word = ""
    """Kueue's local queue, or SLURM's partition."""
    priority: Word = ""
    """Kueue's priority class, or SLURM's quality of service."""
    account: Word = ""
    secrets: ObjectNames = []
    """Names of Secrets whose keys become environment variables. Their values are not known here."""
    image_pull_secrets: ObjectNames = []
    service_account: ObjectName = ""
    instance_type: LabelValue = ""
    node_selector: Labels = {}
    extra_resources: Annotated[dict[str, PositiveInt], AfterValidator(_devices)] = {}
    """Other devices of a node, as Kubernetes names them: ``rdma/hca``."""
    cpus: PositiveInt | None = None
    memory: Size | None = None
    shm: Size | None = None
    disk: Size | None = None
    retries: Annotated[int, BeforeValidator(whole_number), Field(ge=0, le=100)] = 2
    grace: Duration | None = None
    deadline: Duration | None = None
    """Seconds of the whole job, its retries included."""
    start_within: Duration | None = None
    """Seconds to wait for its nodes."""
    keep: Duration = 3600
    """A finished job stays listed so long."""
    ray_version: Word = TESTED_RAY
    setup: Lines = []
    """Lines of shell before the command, of SLURM: modules, a virtual environment."""
    constraint: Word = ""
    """SLURM's words for features of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One plan on one cluster. Each of ``nodes`` gives these resources to it; one pod or task a node, one process a
    GPU."""

    settings: JobSettings
    """The settings as people wrote them. Amounts that they left to the plan are the fields below."""
    name: str
    gpu: str
    """Canonical name; ``cpu`` for the processor."""
    gpus: int
    nodes: int
    cpus: int
    memory_bytes: int
    """Host memory, ``shm_bytes`` included."""
    shm_bytes: int
    """/dev/shm."""
    disk_bytes: int
    """Disk of the node for caches; it is gone when the job is."""
    grace_seconds: int
    """From the request to stop to the kill: longer than a step and a save."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Words for people, by name: what was planned and predicted."""


MOST_NAME = 47
"""Characters of a RayJob's name: KubeRay makes names of pods and services from it."""

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def job_name(output_dir: str, *, asked: str = "") -> str:
    """A DNS-1035 name of at most 47 characters, the same for the same run: a run that is there already cannot be
    started a second time under another name.

    Raises RecipeError where the name that was ``asked`` for is none.
    """
    if asked:
        if len(asked) <= MOST_NAME and _DNS_1035.fullmatch(asked):
            return asked
        raise RecipeError(
            f"job.name = {asked!r}: lower-case letters, digits and '-', a letter first, at most {MOST_NAME} characters",
            hint=f"job.name={_slug(asked)[:MOST_NAME].rstrip('-') or 'run'}",
        )
    mark = hashlib.sha256(output_dir.encode(errors="surrogatepass")).hexdigest()[:6]
    last = output_dir.rstrip("/").rsplit("/", 1)[-1]
    return f"{_slug(last)[: MOST_NAME - 7].rstrip('-') or 'run'}-{mark}"


def _slug(text: str) -> str:
    """``text`` in the letters of DNS-1035; empty where it has none of them."""
    slug = re.sub(r"-+", "-", re.sub(r"[^a-z0-9]", "-", text.lower())).strip("-")
    return f"run-{slug}" if slug and not slug[0].isalpha() else slug


_PODS = (
    "image", "claim", "mount", "namespace", "context", "secrets", "image_pull_secrets", "service_account",
    "instance_type", "node_selector", "extra_resources", "shm", "disk", "keep",
)  # fmt: skip
_ONLY_FOR: dict[str, tuple[System, ...]] = {
    **dict.fromkeys(_PODS, ("kuberay", "kubernetes")),
    **dict.fromkeys(("ray_version", "start_within"), ("kuberay",)),
    **dict.fromkeys(("account", "setup", "constraint"), ("slurm",)),
}
"""Settings that have no meaning on the other systems."""


def require_meaningful(settings: JobSettings, on: System) -> None:
    """Raises RecipeError for a setting that nothing on this system would honour, or find by its name."""
    for name, systems in _ONLY_FOR.items():
        if name in settings.model_fields_set and on not in systems:
            raise RecipeError(
                f"job.{name} has no meaning --on {on}", hint=f"leave it out, or --on {systems[0]}"
            )
    named = {"queue": settings.queue, "priority": settings.priority} if on != "slurm" else {}
    for name, value in named.items():  # SLURM's partitions have other names
        try:
            object_name(value)
        except ValueError as why:
            raise RecipeError(f"job.{name} = {value!r}: {why}", hint=f"job.{name}={value.lower()}") from None


def read_job_settings(
    path: Path | None, *, settings: Iterable[str], defaults: Mapping[str, Any] | None = None
) -> JobSettings:
    """``defaults``, then a YAML file, then ``image=…`` settings without their ``job.``; the later wins."""
    wanted = dict(defaults or {})
    where = "the job settings"
    if path is not None:
        wanted |= load_yaml(path, kind="job")
        where = str(path)
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise RecipeError(
                f"--set job.{setting} is not of the form key=value", hint="--set job.image=NAME:TAG"
            )
        head, _, inner = key.strip().partition(".")
        field = JobSettings.model_fields.get(head)
        kind = Any if field is None else reduce(type_inside, filter(None, [inner]), field.annotation)
        value = typed_value(kind, text, where=f"--set job.{setting}")
        inside = wanted.get(head)
        wanted[head] = {**(inside if isinstance(inside, dict) else {}), inner: value} if inner else value
    given = {key: value for key, value in wanted.items() if value is not None}
    return checked(JobSettings, given, where=where)


def checked(kind: type[T], wanted: Mapping[str, Any], *, where: str, examples: Mapping[str, str] = {}) -> T:
    """The settings as a value of ``kind``. Raises RecipeError naming every key that is wrong, and why.

    Its hint has the ``examples`` of those keys and the names of all settings.
    """
    try:
        return kind.model_validate(dict(wanted))
    except ValidationError as error:
        keys = dict.fromkeys(str(item["loc"][0]) for item in error.errors() if item["loc"])
        shown = [f"{key}: {examples[key]}" for key in keys if key in examples]
        hint = "; ".join([*shown, f"settings are {', '.join(kind.model_fields)}"])
        raise RecipeError(described(error, where=where, known=kind), hint=hint) from None
