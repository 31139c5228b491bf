"""Predicted against measured: fitune's own runs, other trainers by source with their switches, trainers without."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from statistics import fmean, median, quantiles
from typing import Any

import yaml

from fitune.errors import FituneError
from fitune.estimate.memory import memory_of
from fitune.estimate.predict import largest_batch
from fitune.estimate.time import step_time_of
from fitune.estimate.trainer import FITUNE, Trainer, describe_step_of
from fitune.records.plans import (
    Unrepresented,
    device_bytes,
    device_is_named,
    fuses_head,
    plan_of,
    steps_fp32,
    trains_all,
)
from fitune.records.row import Row
from fitune.units import GIB
from fitune.values.model.block_profile import BatchShape
from fitune.values.predictions import TORCHS_OWN, WORKSPACE, MemoryBreakdown

GROUPS = ("fitune", "others", "defaults")
"""Runs of ours; of trainers whose switches are known; of trainers that are not, priced as though they were ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One row: bytes and speed of one device, and whether it is said to fit. None where nothing is to be compared."""

    row: Row
    trainer: str
    device: tuple[int, int] = (0, 0)
    predicted_bytes: float | None = None
    measured_bytes: float | None = None
    predicted_speed: float | None = None
    measured_speed: float | None = None
    fits: bool | None = None

    @property
    def group(self) -> str:
        """One of GROUPS; a trainer that is named counts among the others."""
        return self.trainer if self.trainer in GROUPS else "others"

    @property
    def memory_error(self) -> float | None:
        """Relative error of the memory; None for an out-of-memory error, at which a device shows no peak."""
        return None if self.row.oom else _error(self.predicted_bytes, self.measured_bytes)

    @property
    def speed_error(self) -> float | None:
        """Relative error of the tokens per second; None unless both are known."""
        return _error(self.predicted_speed, self.measured_speed)


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1 if predicted is not None and measured is not None else None


def compare_rows(
    rows: Iterable[Row], *, leave_one_out: bool = False
) -> tuple[list[Comparison], list[tuple[Row, str]]]:
    """Every row is compared, or skipped with the reason.

    ``leave_one_out``: each source without what was learnt from it: its trainer counts as unknown where its figures were
    seen when the switches were written, and speeds are corrected by the other sources on the same kind of device.
    """
    compared, skipped = [], []
    for row in rows:
        try:
            compared.append(_recorded(row) or compare_row(row, left_out=leave_one_out))
        except (Unrepresented, FituneError) as reason:
            skipped.append((row, str(reason).replace("\n ", ";")))
    if leave_one_out:
        compared = [_by_other_sources(one, compared) for one in compared]
    return compared, skipped


def _recorded(row: Row) -> Comparison | None:
    """A row of results/, which has the prediction that was made when it ran: bytes, seconds of a step, or both."""
    said = {key: float(v) for key, v in row.facts.items() if type(v) in (int, float) and v > 0}
    has_bytes, has_seconds = ({f"predicted{unit}", f"measured{unit}"} <= said.keys() for unit in ("", "_s"))
    if not has_bytes and not has_seconds:
        return None
    tokens = said.get("tokens", 1.0)
    return Comparison(
        row=row,
        trainer="fitune",
        predicted_bytes=said["predicted"] if has_bytes else None,
        measured_bytes=said["measured"] if has_bytes else None,
        predicted_speed=tokens / said["predicted_s"] if has_seconds else None,
        measured_speed=tokens / said["measured_s"] if has_seconds else None,
    )


def _by_other_sources(one: Comparison, compared: Sequence[Comparison]) -> Comparison:
    """The comparison at the speed by other sources' median; no speed where there is no other on such a device."""
    if one.predicted_speed is None or one.group == "fitune":
        return one
    ratios: dict[str, list[float]] = {}
    for other in compared:
        if other.device == one.device and other.speed_error is not None:
            ratios.setdefault(other.row.source, []).append(1 / (1 + other.speed_error))
    ratios.pop(one.row.source, None)
    correction = median(median(each) for each in ratios.values()) if ratios else None
    return replace(one, predicted_speed=one.predicted_speed * correction if correction else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One trainer. ``counter``: allocated, reserved, or the whole device as nvidia-smi shows it."""

    name: str
    names: tuple[str, ...] = ()
    counter: str = "device"
    dropout: float = 0.0
    without_figures: str = ""
    """The profile that --leave-one-out takes instead; "" where no figures were seen when this one was written."""
    switches: dict[str, Any] = field(default_factory=dict)


UNKNOWN = Profile(name="defaults")
OURS = Profile(name="fitune", names=("fitune",), counter="allocated")


@cache
def profiles() -> dict[str, Profile]:
    """Profiles of ``trainers.yaml`` by name; what a trainer ``is_a`` stands before it there."""
    text = files("fitune.records").joinpath("trainers.yaml").read_text(encoding="utf-8")
    found = {"fitune": OURS, UNKNOWN.name: UNKNOWN}
    for name, facts in yaml.safe_load(text).items():
        parent = found[facts.get("is_a", UNKNOWN.name)]
        found[name] = Profile(
            name=name,
            names=tuple(facts["names"]),
            counter=facts.get("counter", parent.counter),
            dropout=facts.get("dropout", parent.dropout),
            without_figures=(parent.without_figures or parent.name) if facts.get("figures_known") else "",
            switches={**parent.switches, **facts["switches"]},
        )
    return found


def profile_of(row: Row, *, left_out: bool = False) -> Profile:
    """The trainer that remarks or source name, by the longest of the names that stand there.

    ``left_out``: without what was written with its figures in view.
    """
    for text in (row.remarks, row.words("source")):
        named = [(len(name), p.name) for p in profiles().values() for name in p.names if name in text]
        if named:
            profile = profiles()[max(named)[1]]
            return profiles().get(profile.without_figures, profile) if left_out else profile
    return UNKNOWN


def trainer_of(row: Row, profile: Profile) -> Trainer:
    """The profile's switches; what the row says itself wins over them."""
    if not profile.switches:
        return FITUNE
    switches = dict(profile.switches)
    adapters, weights = switches.pop("fp32_adapters", False), switches.pop("fp32_weights", False)
    autocast = row.says("precision_mode", "autocast", "amp")
    fsdp = row.says("sharding", "fsdp", "fully")
    if trains_all(row):
        wide = steps_fp32(row) and (fsdp or row.says("sharding", "hsdp") or weights or autocast)
    else:
        narrow = row.says("optimizer_dtype", "bf16", "fp16")
        wide = row.says("optimizer_dtype", "fp32") or (adapters and not narrow)
    if fsdp:  # a packed base that FSDP is to divide is not prepared (trl, is_sharded_qlora)
        switches["fp32_root"] = switches["fp32_stream"] = False
    loss = "chunked" if fuses_head(row) else "fused" if row.flag("fused_ce") else "plain"
    each = switches["bytes_per_logit"]
    switches["bytes_per_logit"] = each.get(loss, each["plain"])
    if row.says("optimizer", "fused"):
        switches["foreach"] = False
    if "non reentrant" in row.remarks or "use reentrant=false" in row.remarks:
        switches["holds_inputs"] = switches["reentrant"] = False
    autocast = autocast or row.says("precision_mode", "mixed")
    return Trainer(fp32_trained=wide, autocast=autocast, eager_mlp="foak" in row.remarks, **switches)


def compare_row(row: Row, *, left_out: bool) -> Comparison:
    """Raises Unrepresented, or FituneError for a plan that cannot be priced."""
    profile = profile_of(row, left_out=left_out)
    plan = plan_of(row, dropout=profile.dropout)
    trainer = trainer_of(row, profile)
    tokens = plan.batch.micro_batch_tokens
    # others run one rectangle through attention, and all its tokens through the head
    rectangle = BatchShape(tokens=tokens, supervised_tokens=tokens, rows=1, longest_row=plan.batch.seq_len)
    step = describe_step_of(trainer, plan, largest_batch(plan) if profile is OURS else rectangle)
    memory, seconds = memory_of(step), step_time_of(step).step_seconds
    named, measured = device_is_named(row), row.amount("peak_mem_gib")
    measured = None if row.says("mem_kind", "component") else measured  # parts of several moments are no peak
    return Comparison(
        row=row,
        trainer=profile.name,
        device=plan.hardware.gpu.capability,
        predicted_bytes=_counted(row, profile, memory),
        measured_bytes=None if measured is None else measured * GIB,
        predicted_speed=tokens * plan.batch.accumulation / seconds if named else None,
        measured_speed=row.amount("tok_s_per_gpu") if named else None,
        fits=memory.peak_bytes <= device_bytes(row) if named else None,
    )


def _counted(row: Row, profile: Profile, memory: MemoryBreakdown) -> float:
    """Bytes that the row's instrument would have shown: allocated or reserved bytes, or all of the device."""
    kind = row.words("mem_kind")
    counter = "allocated" if "alloc" in kind or "active" in kind else "reserved" if "reserved" in kind else ""
    counter = counter or ("device" if "nv" in kind else profile.counter)
    context = sum(size for name, size in memory.outside.items() if name not in TORCHS_OWN)
    if counter == "allocated":
        return memory.tensor_peak_bytes + memory.outside.get(WORKSPACE, 0)
    roomy = memory.reserved_bytes  # a full device has torch give its cache back
    whole = max(memory.peak_bytes, min(roomy, device_bytes(row))) if device_is_named(row) else roomy
    return whole - (context if counter == "reserved" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Fractions of |predicted / measured − 1|; None when there is nothing to compare."""

    count: int
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    """Mean of predicted / measured − 1: above zero means more was predicted than measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Errors of a source, or of a group of ``sources``: the median of their medians and the mean of their biases.

    ``ok`` runs went through, ``ok_fit`` of them were said to; ``oom`` ran out of memory, ``oom_not_fit`` were said to.
    """

    group: str
    source: str
    rows: int
    memory: Errors
    speed: Errors
    ok: int
    ok_fit: int
    oom: int
    oom_not_fit: int


def scores_of(compared: Sequence[Comparison], *, confidence: Collection[str]) -> list[Score]:
    """Scores by group and source; only rows of the wanted confidence are evidence. Recorded rows of ours always are."""
    found = []
    for group, source in dict.fromkeys((one.group, one.row.source) for one in compared):
        own = [one for one in compared if (one.group, one.row.source) == (group, source)]
        memory, speed = (
            [one for one in own if group == "fitune" or (one.row.facts.get(key) or "") in confidence]
            for key in ("confidence_mem", "confidence_speed")
        )
        verdicts = [one for one in own if (one in memory or one in speed) and one.fits is not None]
        ok, oom = ([one.fits for one in verdicts if one.row.oom is gone] for gone in (False, True))
        found.append(
            Score(
                group=group, source=source, rows=len(own),
                memory=errors_of([one.memory_error for one in memory if one.memory_error is not None]),
                speed=errors_of([one.speed_error for one in speed if one.speed_error is not None]),
                ok=len(ok), ok_fit=sum(map(bool, ok)), oom=len(oom), oom_not_fit=len(oom) - sum(map(bool, oom)),
            )
        )  # fmt: skip
    return sorted(found, key=lambda score: GROUPS.index(score.group))


def group_score(scores: Sequence[Score], group: str) -> Score:
    """Sources count alike, however many rows they have."""
    own = [score for score in scores if score.group == group]
    sums = {
        name: sum(getattr(score, name) for score in own)
        for name in ("rows", "ok", "ok_fit", "oom", "oom_not_fit")
    }
    memory, speed = (_over([score.memory for score in own]), _over([score.speed for score in own]))
    return Score(group=group, source=f"{len(own)} sources", memory=memory, speed=speed, **sums)


def _over(errors: Sequence[Errors]) -> Errors:
    count = sum(each.count for each in errors)
    medians = [each.median_abs_error for each in errors if each.median_abs_error is not None]
    ninetieths = [each.p90_abs_error for each in errors if each.p90_abs_error is not None]
    biases = [each.bias for each in errors if each.bias is not None]
    if not medians:
        return errors_of([])
    return Errors(
        count=count, median_abs_error=median(medians), p90_abs_error=median(ninetieths), bias=fmean(biases)
    )


def errors_of(errors: Sequence[float]) -> Errors:
    """The percentile lies between the two values beside rank 0.9 · (n − 1), in proportion."""
    if not errors:
        return Errors(count=0, median_abs_error=None, p90_abs_error=None, bias=None)
    sizes = [abs(error) for error in errors]
    ninetieth = quantiles(sizes, n=10, method="inclusive")[-1] if len(sizes) > 1 else sizes[0]
    return Errors(
        count=len(sizes), median_abs_error=median(sizes), p90_abs_error=ninetieth, bias=fmean(errors)
    )
