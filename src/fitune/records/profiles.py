"""Other trainers by name: their switches, as ``trainers.yaml`` and the row itself say."""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from fitune.estimate.trainer import FITUNE, Trainer
from fitune.records.plans import steps_fp32, trains_all
from fitune.records.row import Row


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
    """Of ``trainers.yaml``, by name; what a trainer ``is_a`` stands before it there."""
    text = files("fitune.records").joinpath("trainers.yaml").read_text(encoding="utf-8")
    found = {"fitune": OURS, UNKNOWN.name: UNKNOWN}
    for name, facts in yaml.safe_load(text).items():
        parent = found[facts.get("is_a", UNKNOWN.name)]
        found[name] = Profile(
            name=name,
            names=tuple(facts["names"]),
            counter=facts.get("counter", parent.counter),
            dropout=facts.get("dropout", parent.dropout),
            without_figures=parent.name if facts.get("figures_known") else "",
            switches={**parent.switches, **facts["switches"]},
        )
    return found


def profile_of(row: Row, *, left_out: bool = False) -> Profile:
    """The trainer that remarks or source name; ``left_out``: without what was written with its figures in view."""
    for text in (row.remarks, row.words("source")):
        for profile in profiles().values():
            if any(name in text for name in profile.names):
                return profiles().get(profile.without_figures, profile) if left_out else profile
    return UNKNOWN


def trainer_of(row: Row, profile: Profile) -> Trainer:
    """The profile's switches; what the row says itself wins over them."""
    if not profile.switches:
        return FITUNE
    switches = dict(profile.switches)
    adapters, weights = switches.pop("fp32_adapters", False), switches.pop("fp32_weights", False)
    autocast = row.says("precision_mode", "autocast", "amp", "mixed")
    if trains_all(row):
        sharded = row.says("sharding", "fsdp", "hsdp")
        wide = steps_fp32(row) and (sharded or weights or row.says("precision_mode", "autocast", "amp"))
    else:
        wide = row.says("optimizer_dtype", "fp32") or (
            adapters and not row.says("optimizer_dtype", "bf16", "fp16")
        )
    if row.says("sharding", "fsdp"):
        # a packed base that FSDP is to divide is not prepared (trl, is_sharded_qlora)
        switches["fp32_root"] = switches["fp32_stream"] = False
    if row.flag("fused_ce"):
        switches["bytes_per_logit"] = 8
    if row.says("optimizer", "fused"):
        switches["foreach"] = False
    if "non reentrant" in row.remarks or "use reentrant=false" in row.remarks:
        switches["holds_inputs"] = False
    return Trainer(fp32_trained=wide, autocast=autocast, eager_mlp="foak" in row.remarks, **switches)
