"""The habits of one row: those of the trainer that its source or its remarks name, of the usual one if none is.

What the row states itself always wins over a habit.
"""

import re
from dataclasses import replace

from fitune.records.habits import Habits, Logits
from fitune.records.row import Row
from fitune.records.trainers import FAST_LOGITS, TRAINERS, TRANSFORMERS


def habits_of(row: Row) -> Habits:
    """The trainer that is named, changed by the kernels that are."""
    found = _named_in(row.source.lower()) or _named_in(row.remarks) or TRANSFORMERS
    return _with_kernels(row, _as_remarked(row, found))


_DROPOUT = re.compile(r"dropout[ =:of]*(0?\.\d+|0)(?!\d)")


def _as_remarked(row: Row, habits: Habits) -> Habits:
    """What the row's own remarks say of one run wins over what its trainer usually does."""
    remarks = f"{row.words['must_assume']} {row.words['notes']}"
    dropout = _DROPOUT.search(remarks)
    if dropout:
        habits = replace(habits, dropout=float(dropout.group(1)))
    if "expandable_segments" in remarks:
        habits = replace(habits, expandable_segments=True)
    if "backward prefetch on" in remarks or "backward_pre" in remarks:
        habits = replace(habits, prefetches=True)
    if "2023" in row.words["attention"]:
        habits = replace(habits, clamps_scores=True)
    if "non-reentrant" in remarks or "use_reentrant=false" in remarks:
        habits = replace(habits, checkpoints_units=False)
    return habits


def _named_in(text: str) -> Habits | None:
    return next((habits for names, habits in TRAINERS if any(name in text for name in names)), None)


def _with_kernels(row: Row, habits: Habits) -> Habits:
    remarks = row.remarks + " " + row.words["fused_ce"]
    if habits.autocast_logits and row.says("precision_mode", "autocast"):
        habits = replace(habits, logits=habits.autocast_logits)
    if "foak" in remarks:
        habits = replace(habits, fused_norms=True)
    elif "liger" in remarks:
        habits = replace(habits, fused_norms=True, fused_mlp=True)
    if row.switches["compile"]:
        # inductor fuses what is elementwise and makes it again in backward rather than keep it
        habits = replace(habits, fused_norms=True, fused_mlp=True, remakes_product=True)
        habits = replace(habits, logits=habits.compiled_logits or habits.logits)
    if "baseline-peft-bnb" in remarks and (row.size("n_gpus") or 1) == 1:
        habits = replace(habits, fp32_stream=True)
    if "granite" in remarks or "powerlm" in row.model.lower():
        # GraniteForCausalLM divides its logits by a scale: the 16-bit ones are let go
        habits = replace(habits, logits=Logits(per_logit=12, hidden_copies=4))
    if row.says("fused_ce", "liger", "linear", "cut"):
        return replace(habits, logits=Logits(per_logit=0, hidden_copies=2))
    if row.switches["fused_ce"]:
        # fms-acceleration's first reference run is older than its cross-entropy update: 16-bit logits stay beside
        first = "refs/a100_80gb.csv" in remarks
        return replace(habits, logits=replace(FAST_LOGITS, per_logit=10) if first else FAST_LOGITS)
    return habits
