"""How well the device was used."""

from collections.abc import Sequence

from fitune.spec.counts import model_flops, peak_flops
from fitune.spec.plan import Plan


def achieved_mfu(plan: Plan, row_lengths: Sequence[int], supervised_tokens: int, *, seconds: float) -> float:
    """Model FLOPs utilisation: the FLOPs the mathematics needs (spec/counts.py; recompute is not counted)
    over what the device could have done in the same time (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    0 when the device's peak is not known.
    """
    peak = peak_flops(plan.hardware.gpu, plan.precision) * plan.hardware.num_gpus
    if peak <= 0 or seconds <= 0:
        return 0.0
    flops = model_flops(plan.model, plan.tuning, row_lengths=row_lengths, supervised_tokens=supervised_tokens)
    return flops / (seconds * peak)
