"""Sums of bytes in one line, and lines of a readable width."""

import textwrap

from fitune.spec.reports import Estimate, Phase
from fitune.units import GIB, MIB


def memory_sum(estimate: Estimate) -> str:
    """``weights 15.0 + gradients 15.0 + … = 131.2 GiB in backward, 22.5 usable, 108.7 short (or: 1.2 spare)``."""
    terms = {**estimate.memory.phases[estimate.memory.peak_phase], **estimate.memory.outside}
    unit, name = unit_for(estimate.peak_bytes)
    shown = [f"{term} {size / unit:,.1f}" for term, size in terms.items() if size >= unit / 20]
    rest = sum(size for size in terms.values() if size < unit / 20)
    if rest >= unit / 20:
        shown.append(f"others {rest / unit:,.1f}")
    line = (
        f"{' + '.join(shown)} = {estimate.peak_bytes / unit:,.1f} {name} {moment(estimate.memory.peak_phase)}, "
        f"{_verdict(estimate.peak_bytes, estimate.usable_bytes, unit)}"
    )
    if estimate.usable_nvme_bytes and estimate.nvme_bytes > estimate.usable_nvme_bytes:
        verdict = _verdict(estimate.nvme_bytes, estimate.usable_nvme_bytes, GIB)
        line += f"; on NVMe {estimate.nvme_bytes / GIB:,.1f} GiB, {verdict}"
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
        return f"{line}; host_memory is not known, so whether it is there was not checked"
    return f"{line}, {_verdict(estimate.host_bytes, estimate.usable_host_bytes, GIB)}"


def _verdict(size: int, usable: int, unit: int) -> str:
    difference = (usable - size) / unit
    left = f"{difference:,.1f} spare" if difference >= 0 else f"{-difference:,.1f} short"
    return f"{usable / unit:,.1f} usable, {left}"


def unit_for(size: int) -> tuple[int, str]:
    """GiB, or MiB for what is smaller than one GiB."""
    return (GIB, "GiB") if size >= GIB else (MIB, "MiB")


def moment(phase: Phase) -> str:
    words = {
        Phase.IDLE: "between steps",
        Phase.FORWARD: "at the end of forward",
        Phase.LOSS: "in the loss",
        Phase.BACKWARD: "in backward",
        Phase.UPDATE: "in the update",
    }
    return words[phase]


def wrapped(text: str, *, indent: int = 2, hanging: int = 0) -> str:
    """``text`` in lines of at most 100 columns; the lines after the first are indented by ``hanging`` more."""
    return textwrap.fill(
        text,
        width=100,
        initial_indent=" " * indent,
        subsequent_indent=" " * (indent + hanging),
        break_long_words=False,
        break_on_hyphens=False,
    )
