"""Plans and estimates as text for people and as data for programs."""

from dataclasses import asdict, replace
from typing import Any

from fitune.estimate.parameters import trained_parameters
from fitune.estimate.predict import predict
from fitune.planner.defaults import price_of
from fitune.planner.whole_run import run_lines
from fitune.units import (
    GIB,
    MIB,
    format_bytes,
    format_count,
    format_dollars,
    format_percent,
    format_rate,
    format_seconds,
    wrapped,
)
from fitune.values.counts import count_parameters
from fitune.values.machines.gpus import find_gpu
from fitune.values.plan import Lora, Plan
from fitune.values.predictions import Estimate, MemoryBreakdown, Phase, PlanReport, Priced, WholeRun
from fitune.values.rules import broken_rules
from fitune.values.serial import to_data
from fitune.values.words import (
    describe_devices,
    describe_placement,
    describe_plan,
    describe_rates,
    devices_with_memory,
    method_name,
)


def verdict_of(plan: Plan) -> str:
    """Returns the model, its parameters, the method and the devices, in one line."""
    hardware, total = plan.hardware, count_parameters(plan.model).total
    taken = f", {hardware.taken_bytes / GIB:.1f} taken by others" if hardware.taken_bytes else ""
    cards = f"{describe_devices(hardware)} ({hardware.gpu.memory_bytes / GIB:.0f} GiB{taken})"
    cards += f"; not used: {hardware.left_out}" if hardware.left_out else ""
    return f"{plan.model.name} · {format_count(total)} · {method_name(plan.tuning)} · {cards}"


def describe_how(plan: Plan) -> str:
    """``bf16-master, parameters on the CPU, 11 of 32 blocks recomputed, micro-batch 2 × 2048 tokens``."""
    layers, blocks = plan.model.num_layers, plan.recompute.blocks
    recomputed = f"{blocks} of {layers} blocks recomputed" if blocks else ""
    batch = f"micro-batch {plan.batch.micro_batch_size} × {plan.batch.seq_len} tokens"
    return ", ".join(filter(None, (plan.precision.value, describe_placement(plan), recomputed, batch)))


def explain_plan(report: PlanReport) -> str:
    """The winner with its memory and time, the runners-up, what was rejected, what was decided."""
    trained: list[str] = []
    if broken_rules(report.chosen.plan, "train"):
        trained = [wrapped("no plan that keeps these settings and fits")]
        trained = trained if report.trained is None else _runner_up(report.trained, report.chosen)
    run = () if report.run is None else run_lines(report.run, report.taken.plan)
    sections = {
        "What fitune train takes": trained,
        "On your data" + " as it is trained" * bool(report.trained): [
            wrapped(line, hanging=2) for line in run
        ],
        "Also fits": [line for one in report.runners_up for line in _runner_up(one, report.chosen)],
        "Does not fit": [f"{wrapped(item.what)}\n{wrapped(item.why, indent=4)}" for item in report.rejected],
        "Decided for you": [wrapped(line, hanging=2) for line in report.decisions],
    }
    told = ("\n".join([title, *lines]) for title, lines in sections.items() if lines)
    return "\n\n".join([explain_priced(report.chosen, price=report.price_per_gpu_hour), *told])


def explain_priced(priced: Priced, *, price: float) -> str:
    """One plan: what it is, bytes by phase and on the host, seconds by phase, what that costs."""
    plan, estimate = priced.plan, priced.estimate
    hardware, total, trained = plan.hardware, count_parameters(plan.model).total, trained_parameters(plan)
    lines = []
    if why := "; ".join(rule.why(plan) for rule in broken_rules(plan, "train")):  # before anything else
        line = f"only planned: this version cannot train it, because {why}"
        lines.append(wrapped(line, indent=0, hanging=2))
    share = "all trained"
    if isinstance(plan.tuning, Lora):  # as PEFT counts: what is trained lies beside the model's own
        percent = format_percent(trained / (total + trained), digits=2)
        share = f"{format_count(trained)} trained ({percent})"
    title = (
        f"{plan.model.name} · {format_count(total)} parameters, {share} · on {devices_with_memory(hardware)}"
    )
    lines += [wrapped(title, indent=0, hanging=2), wrapped(describe_plan(plan)), ""]
    lines += [_memory_table(estimate.memory), "", wrapped(memory_sum(estimate))]
    if host := host_sum(estimate):
        lines.append(wrapped(f"on the host: {host}"))
    if estimate.nvme_bytes:
        lines.append(wrapped(f"on NVMe: {format_bytes(estimate.nvme_bytes)} a node"))
    if estimate.communication_bytes:
        lines.append(wrapped(f"each device sends {format_bytes(estimate.communication_bytes)} in a step"))
    phases = ", ".join(
        f"{phase.value} {format_seconds(seconds)} ({estimate.time.limits[phase]})"
        for phase, seconds in estimate.time.phases.items()
        if seconds >= 0.005 * estimate.step_seconds
    )
    lines.append(wrapped(f"{_speed(estimate)}: {phases} · {describe_rates(plan)}"))
    if hardware.gpu.slower_board and hardware.calibration is None:
        # the other end of the range of speeds, where the name of the GPU fits several boards
        slower = replace(hardware, gpu=find_gpu(hardware.gpu.slower_board))
        speed = _speed(predict(replace(plan, hardware=slower)))
        name = hardware.gpu.name.upper()
        lines.append(wrapped(f"{name} is sold as several boards; on the slowest, {slower.gpu.name}, {speed}"))
    if price:
        cost = 1e6 / estimate.tokens_per_second / 3600 * price * hardware.num_gpus
        assumed = "assumed; yours: " if price == price_of(hardware.gpu) else ""
        rate = f"{format_dollars(price)} per GPU-hour ({assumed}price_per_gpu_hour)"
        lines.append(wrapped(f"a million tokens cost {format_dollars(cost)} at {rate}"))
    return "\n".join(lines)


def _speed(estimate: Estimate) -> str:
    return f"{format_rate(estimate.tokens_per_second)}, a step takes {format_seconds(estimate.step_seconds)}"


def _memory_table(memory: MemoryBreakdown) -> str:
    """Terms × phases; terms that never reach a hundredth of the unit are summed up as others."""
    unit, name = unit_for(memory.peak_bytes)
    phases = list(memory.phases.values())
    terms = list(dict.fromkeys(term for sizes in phases for term in sizes))
    large = [term for term in terms if any(sizes.get(term, 0) >= unit / 100 for sizes in phases)]
    rows = {term: [sizes.get(term, 0) for sizes in phases] for term in large}
    others = [sum(size for term, size in sizes.items() if term not in large) for sizes in phases]
    if any(size >= unit / 200 for size in others):
        rows["others"] = others
    rows["tensors"] = [sum(sizes.values()) for sizes in phases]
    cells = [(name, *(phase.value for phase in memory.phases))]
    cells += [
        (term, *(f"{n / unit:,.2f}" if n >= unit / 200 else "·" for n in row)) for term, row in rows.items()
    ]
    cells.append(("", *("peak" * (phase is memory.peak_phase) for phase in memory.phases)))
    return "\n".join(f"  {head:<18}{''.join(f'{cell:>11}' for cell in row)}".rstrip() for head, *row in cells)


def _runner_up(priced: Priced, chosen: Priced) -> list[str]:
    estimate = priced.estimate
    faster = estimate.tokens_per_second / chosen.estimate.tokens_per_second - 1
    beside = "as fast" if abs(faster) < 0.005 else format_percent(faster, signed=True, digits=0)
    planned = "; planned, not trained yet" if broken_rules(priced.plan, "train") else ""
    return [
        wrapped(describe_plan(priced.plan)),
        f"    {format_bytes(estimate.peak_bytes)}, {format_rate(estimate.tokens_per_second)} ({beside}){planned}",
    ]


def memory_sum(estimate: Estimate) -> str:
    """``weights 14.96 + … = 131.20 GiB in backward, 22.49 usable, 108.71 short (or: 1.20 spare)``, as in the table."""
    terms = {**estimate.memory.phases[estimate.memory.peak_phase], **estimate.memory.outside}
    unit, name = unit_for(estimate.peak_bytes)
    large = {term: round(size / unit, 2) for term, size in terms.items() if size >= unit / 20}
    shown = [f"{term} {size:,.2f}" for term, size in large.items()]
    rest = round(estimate.peak_bytes / unit, 2) - sum(
        large.values()
    )  # so that the line adds up as it is printed
    if rest >= 0.005:
        shown.append(f"others {rest:,.2f}")
    line = (
        f"{' + '.join(shown)} = {estimate.peak_bytes / unit:,.2f} {name} {moment(estimate.memory.peak_phase)}, "
        f"{verdict(estimate.peak_bytes, estimate.usable_bytes, unit, digits=2)}"
    )
    if estimate.peak_bytes <= estimate.usable_bytes < estimate.memory.reserved_bytes:
        cached = estimate.memory.reclaimable / unit
        line += f"; fits, with allocator retries: torch's cache would take {cached:,.1f} {name} more for FSDP's streams"
    if estimate.usable_nvme_bytes and estimate.nvme_bytes > estimate.usable_nvme_bytes:
        left = verdict(estimate.nvme_bytes, estimate.usable_nvme_bytes, GIB)
        line += f"; on NVMe {estimate.nvme_bytes / GIB:,.1f} GiB, {left}"
    host = host_sum(estimate)
    too_small = estimate.usable_host_bytes and estimate.host_bytes > estimate.usable_host_bytes
    return f"{line}; on the host {host}" if host and too_small else line


def host_sum(estimate: Estimate) -> str:
    """``weights 32.1 + processes 6.0 = 38.1 GiB, 120.0 usable, 81.9 spare``; nothing when nothing waits there."""
    waiting = {term: size for term, size in estimate.host.items() if size >= MIB}
    if set(waiting) <= {"processes"}:
        return ""
    terms = " + ".join(f"{term} {size / GIB:,.1f}" for term, size in waiting.items())
    line = f"{terms} = {estimate.host_bytes / GIB:,.1f} GiB a node"
    if not estimate.usable_host_bytes:
        return f"{line}; host_memory is not known, so this was not checked"
    return f"{line}, {verdict(estimate.host_bytes, estimate.usable_host_bytes, GIB)}"


def verdict(size: int, usable: int, unit: int, *, digits: int = 1) -> str:
    """``22.5 usable, 1.2 spare`` (or: ``short``): the difference of the figures as they are printed."""
    difference = round(usable / unit, digits) - round(size / unit, digits)
    left = f"{abs(difference):,.{digits}f} {'spare' if usable >= size else 'short'}"
    return f"{usable / unit:,.{digits}f} usable, {left}"


def unit_for(size: int) -> tuple[int, str]:
    """GiB, or MiB for what is smaller than one GiB."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def moment(phase: Phase) -> str:
    """Returns the words for a phase of the step."""
    return {
        Phase.IDLE: "between steps",
        Phase.FORWARD: "at the end of forward",
        Phase.LOSS: "in the loss",
        Phase.BACKWARD: "in backward",
        Phase.UPDATE: "in the update",
    }[phase]


def plan_data(report: PlanReport) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    plan = report.chosen.plan
    counts = count_parameters(plan.model)
    return {
        "model": {
            "name": plan.model.name,
            "num_params": counts.total,
            "num_params_active": counts.active,
            "parameters": {k: v for k, v in to_data(counts).items() if k not in ("kind", "active")},
            "num_layers": plan.model.num_layers,
            "hidden_size": plan.model.hidden_size,
            "model_type": plan.model.model_type,
        },
        **priced_data(report.chosen),
        "runners_up": [priced_data(priced) for priced in report.runners_up],
        "rejected": [asdict(item) for item in report.rejected],
        "decisions": list(report.decisions),
        "price_per_gpu_hour": report.price_per_gpu_hour,
        "run": None if report.run is None else run_data(report.run),
        "trained": None if report.trained is None else priced_data(report.trained),
    }


def run_data(run: WholeRun) -> dict[str, Any]:
    """Counts, seconds and US dollars of the whole run."""
    return {
        "steps": run.steps,
        "steps_per_epoch": run.steps_per_epoch,
        "epochs": run.epochs,
        "warmup_steps": run.warmup_steps,
        "rows": run.epoch.rows,
        "tokens_per_epoch": run.epoch.tokens,
        "longest_row": run.epoch.longest_row,
        "packs": run.epoch.units if run.epoch.units != run.epoch.rows else 0,
        "seconds": run.seconds,
        "step_seconds": run.step_seconds,
        "cost": run.cost,
        "guess": run.epoch.guess,
        "bad_rows": dict(run.epoch.bad_rows),
    }


def priced_data(priced: Priced) -> dict[str, Any]:
    """A plan in words, the plan and its estimate."""
    return {
        "summary": describe_plan(priced.plan),
        "plan": to_data(priced.plan),
        "estimate": estimate_data(priced.estimate),
    }


def estimate_data(estimate: Estimate) -> dict[str, Any]:
    """The estimate as JSON: bytes by phase and term, seconds by phase, tokens/s."""
    return {
        "peak_bytes": estimate.peak_bytes,
        "usable_bytes": estimate.usable_bytes,
        "peak_phase": estimate.memory.peak_phase.value,
        "phases": {phase.value: dict(terms) for phase, terms in estimate.memory.phases.items()},
        "outside": dict(estimate.memory.outside),
        "host": dict(estimate.host),
        "usable_host_bytes": estimate.usable_host_bytes,
        "nvme_bytes": estimate.nvme_bytes,
        "checkpoint_bytes": estimate.checkpoint_bytes,
        "communication_bytes": estimate.communication_bytes,
        "step_seconds": estimate.step_seconds,
        "phase_seconds": {phase.value: seconds for phase, seconds in estimate.time.phases.items()},
        "limits": {phase.value: limit for phase, limit in estimate.time.limits.items()},
        "tokens_per_second": estimate.tokens_per_second,
    }
