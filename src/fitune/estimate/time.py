"""Seconds of one optimizer step: a roofline per phase.

Matrix products and everything else run one after the other on one stream, so a phase takes
products / rate + bytes / bandwidth, and never less than its operations take to launch. Transfers between ranks and
to the host run beside that or are waited for (transfers.py). The rates are measured or assumed (rates.py), the work of
each phase is counted (work.py, loss.py).
"""

from fitune.estimate.loss import loss_work
from fitune.estimate.rates import Rates, rates_of
from fitune.estimate.step import StepStages
from fitune.estimate.transfers import Transfers, backward_passes, transfers_of
from fitune.estimate.work import Work, backward_work, forward_work, update_work
from fitune.values.plan import updates_in_backward
from fitune.values.predictions import Phase, StepTime
from fitune.values.remembered import remembered

COLLECTIVE_SHARE = 0.15
"""Share of the device that a running collective keeps from other work: NCCL's kernels sit on about 16 of 108 to 132
multiprocessors. Not measured by us."""


@remembered
def step_time_of(step: StepStages) -> StepTime:
    """Seconds by phase of one optimizer step: ``accumulation`` micro-batches and one update."""
    plan = step.plan
    rates = rates_of(plan.hardware, plan.precision)
    forward = forward_work(step, rates)
    backward, update = backward_work(step, forward, rates), update_work(step)
    there, back = plan.batch.accumulation, backward_passes(plan)
    works = {
        Phase.FORWARD: [(there, forward)],
        Phase.LOSS: [(back, loss_work(step))],  # the head's gradients are let go of with the others
        Phase.BACKWARD: [(back, backward)],
        Phase.UPDATE: [(1, update)],
    }
    if updates_in_backward(plan.tuning):  # the last time it goes back it updates, too
        works[Phase.BACKWARD] = [(back - 1, backward), (1, backward + update)]
        works[Phase.UPDATE] = [(1, Work())]
    transfers = transfers_of(step)
    seconds, limits = {}, {}
    for phase, passes in works.items():
        timed = [(times, *roofline(rates, work)) for times, work in passes]
        own, limit = sum(times * once for times, once, _ in timed), timed[-1][2]
        seconds[phase], limits[phase] = _with_transfers(own, limit, transfers.get(phase))
    return StepTime(phases=seconds, limits=limits)


def _with_transfers(own: float, limit: str, transfers: Transfers | None) -> tuple[float, str]:
    """The longest of what runs side by side, and then what is waited for; the longest single part is the limit.

    Collectives take processors and bandwidth from the work they run beside.
    """
    if transfers is None:
        return own, limit
    together = max(own, *transfers.beside.values()) if transfers.beside else own
    together += COLLECTIVE_SHARE * min(own, transfers.beside.get("communication", 0.0))
    parts = [(own, limit)]
    parts += [
        (seconds, name) for each in (transfers.beside, transfers.waited) for name, seconds in each.items()
    ]
    return together + sum(transfers.waited.values()), max(parts, key=lambda part: part[0])[1]


def roofline(rates: Rates, work: Work) -> tuple[float, str]:
    """Products, attention and everything else one after the other; on a GPU beside the launches, else after them."""
    compute = (
        work.product_flops / rates.flops
        + work.products * rates.product_start_seconds
        + work.attention_seconds
    )
    traffic = work.logits * rates.logit_seconds + work.new_bytes * rates.new_page_seconds
    traffic += work.bytes_in_place / rates.in_place_bandwidth
    traffic += sum(moved / rates.bandwidth_for(tensor_bytes) for moved, tensor_bytes in work.copied)
    if work.bytes:
        traffic += work.bytes / rates.bandwidth_for(work.tensor_bytes)
    launch = (
        work.forward_operations * rates.forward_launch_seconds
        + work.backward_operations * rates.backward_launch_seconds
        + work.python_seconds
    )
    parts = {"compute": compute, "memory bandwidth": traffic, "launch": launch}
    if rates.waits_for_launches:
        return compute + traffic + launch, max(parts, key=parts.__getitem__)
    if launch >= compute + traffic:
        return launch, "launch"
    return compute + traffic, "compute" if compute >= traffic else "memory bandwidth"
