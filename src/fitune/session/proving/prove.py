"""All checks of a card, one after the other, and the record of them."""

import datetime
import gc
import hashlib
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from fitune.errors import FituneError, HardwareError, TrainingFailed, installed_versions
from fitune.measure.device_rates import COPY_BYTES, fastest_seconds
from fitune.measure.hardware import calibrated, detect_hardware
from fitune.measure.measurements import (
    MOST_MEMORY_ERROR,
    Proof,
    ProofCheck,
    ProvedPlan,
    device_key,
    measured_by,
    store_proof,
)
from fitune.measure.nvml import driver_version
from fitune.session.proving.kernels import kernel_checks
from fitune.session.proving.steps import CASES, offloaded, proved_plan, same_losses
from fitune.units import format_bytes, format_percent, format_rate, format_seconds
from fitune.values.machines.hardware import Gpu, Hardware, Numbers

Result = ProofCheck | ProvedPlan
Parts = Mapping[str, Callable[[], Result]]
"""Name -> what is to be run."""
_NO_MORE_AFTER_S = 540.0
_LIBRARIES = ("fitune", "torch", "transformers", "peft", "bitsandbytes", "hqq", "liger_kernel", "triton")


def parts_of(hardware: Hardware, device: torch.device) -> dict[str, Callable[[], Result]]:
    """Everything that is proved on ``device``: kernels, losses, offload, copies, plans."""
    half: Numbers = "bf16" if hardware.gpu.is_cpu or hardware.gpu.has_bf16 else "fp16"
    parts: dict[str, Callable[[], Result]] = {}
    for numbers in ("fp32", half):
        parts |= kernel_checks(numbers, device)
    for numbers in ("fp32", half):
        for tuning in ("full", "lora"):
            parts[f"20 steps {tuning} {numbers}"] = partial(same_losses, tuning, numbers, hardware)
        for name in ("lora-activations-away", "lora-weights-away", "full-optimizer-away"):
            parts[f"{name} {numbers}"] = partial(offloaded, name, numbers, hardware)
    parts["copies"] = partial(copies, hardware.gpu, device)
    return parts | {name: partial(proved_plan, name, hardware) for name in CASES}


def this_device() -> tuple[Hardware, torch.device]:
    """One device of this machine, the first that is visible, and torch's name for it."""
    hardware = calibrated(replace(detect_hardware(), gpus_per_node=1))
    return hardware, torch.device("cpu") if hardware.gpu.is_cpu else torch.device("cuda", 0)


def prove(*, tell: Callable[[str], None], out: Path | None = None, parts: Parts | None = None) -> Proof:
    """Run ``parts``, by default all, on this device; tell each and write the record where plans read it and to ``out``.

    What was measured is written also when a signal ends it. Raises HardwareError when the record cannot be written.
    """
    if out is not None:  # a record that has no place is refused before ten minutes are spent on it
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            is_new = not out.exists()
            out.open("a").close()
            if is_new:
                out.unlink()
        except OSError as error:
            raise HardwareError(
                f"--out {out}: {error.strerror}", hint="a file in a folder of yours"
            ) from None
    hardware, device = this_device()
    parts = parts_of(hardware, device) if parts is None else parts
    began, found = time.perf_counter(), dict[str, Result]()
    tell(f"proving {hardware.gpu.name}: {len(parts)} checks, at most {format_seconds(_NO_MORE_AFTER_S)}")
    try:
        for name, run in parts.items():
            late = time.perf_counter() - began > _NO_MORE_AFTER_S
            found[name] = _not_run(name, "no time left") if late else _result(name, run, device)
            tell(f"[{len(found)}/{len(parts)}] {line_of(found[name])}")
    finally:
        results = [found.get(name) or _not_run(name, "interrupted") for name in parts]
        proof = _record(hardware, device, results)
        for path in dict.fromkeys((None, out)) if found else ():  # where plans read it first
            tell(f"written to {store_proof(proof, path)}")
    return proof


def _result(name: str, run: Callable[[], Result], device: torch.device) -> Result:
    """Runs a part and returns its result, a failed one for an error; then empties the device for the next part."""
    try:
        return run()
    except TrainingFailed as error:
        return ProofCheck(name=name, passed=False, why=error.message)
    except FituneError as reason:
        return _not_run(name, reason.message)
    except (
        Exception
    ) as error:  # a kernel may raise anything, and the parts behind it are still to be measured
        why = (str(error).strip().splitlines() or [""])[0]
        return ProofCheck(name=name, passed=False, why=f"{type(error).__name__}: {why}")
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _not_run(name: str, why: str) -> ProofCheck:
    return ProofCheck(name=name, passed=None, why=why)


def _record(hardware: Hardware, device: torch.device, results: Sequence[Result]) -> Proof:
    gpu, on_gpu = hardware.gpu, device.type == "cuda"
    number = str(torch.cuda.get_device_properties(device).uuid) if on_gpu else platform.node()
    return Proof(
        device=device_key(gpu, cores=hardware.cpu_cores),
        card=hashlib.sha256(number.encode()).hexdigest()[:12],
        date=datetime.datetime.now().isoformat(timespec="seconds"),
        gpu=torch.cuda.get_device_name(device) if on_gpu else gpu.name,
        capability=gpu.capability,
        memory_bytes=gpu.memory_bytes,
        versions={
            **installed_versions(_LIBRARIES),
            "cuda": torch.version.cuda or "none",
            "driver": driver_version(),
        },
        checks=tuple(one for one in results if isinstance(one, ProofCheck)),
        rows=tuple(one for one in results if isinstance(one, ProvedPlan)),
    )


def line_of(found: Result) -> str:
    """Name, verdict and figures of one result."""
    if isinstance(found, ProvedPlan):
        memory, speed = found.measured / found.predicted - 1, found.predicted_s / found.measured_s - 1
        peaks = f"{format_bytes(found.predicted)} predicted, {format_bytes(found.measured)} measured"
        rates = [format_rate(found.tokens / seconds) for seconds in (found.predicted_s, found.measured_s)]
        return (
            f"{'passed' if found.passed else 'FAILED'}: {found.id}: {peaks} ({format_percent(memory, signed=True)}, at "
            f"most {format_percent(MOST_MEMORY_ERROR, digits=0)}); {rates[0]} predicted, {rates[1]} measured "
            f"({format_percent(speed, signed=True, digits=0)})"
        )
    verdict = {True: "passed", False: "FAILED", None: "told" if found.figures else "not run"}[found.passed]
    figures = ", ".join(f"{name} {value:.2g}" for name, value in found.figures.items())
    return ": ".join(part for part in (verdict, found.name, figures, found.why) if part)


def describe_proof(proof: Proof) -> str:
    """How many checks passed, which failed, what was measured of plans."""
    verdicts = [check.passed for check in proof.checks] + [row.passed for row in proof.rows]
    words = {"passed": True, "failed": False, "not judged": None}
    lines = [", ".join(f"{verdicts.count(verdict)} {word}" for word, verdict in words.items())]
    if (measured := measured_by([proof])) is not None:
        lines.append(f"measured: {measured}")
    return "\n".join([*lines, *map(line_of, proof.failed)])


def copies(gpu: Gpu, device: torch.device) -> ProofCheck:
    """Bytes/s of pinned copies, and the share of a copy that products hide. Told and not judged: plans have no figure
    for the rate of both directions at once."""
    if device.type == "cpu":
        raise HardwareError("a processor has no second memory")
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    x_DD = torch.ones(4096, 4096, device=device, dtype=torch.bfloat16 if gpu.has_bf16 else torch.float16)

    def seconds(*directions: int, products: int = 0) -> float:
        """Seconds of a copy in each of the directions, 0 to the host and 1 to the device, beside so many products."""

        def work() -> None:
            """Starts all of them, each copy on a stream of its own."""
            for number in directions:
                target, source = ((host[0], there[0]), (there[1], host[1]))[number]
                with torch.cuda.stream(streams[number]):
                    target.copy_(source, non_blocking=True)
            for _ in range(products):
                x_DD @ x_DD

        return fastest_seconds(work, device)

    out, back, together, product = seconds(0), seconds(1), seconds(0, 1), seconds(products=1)
    products = max(1, round(back / product))  # as long as the copy takes
    hidden = (back + products * product - seconds(1, products=products)) / min(back, products * product)
    figures = {
        "to_host": COPY_BYTES / out, "to_device": COPY_BYTES / back, "both_at_once": 2 * COPY_BYTES / together,
        "planned": gpu.host_bandwidth, "hidden": hidden,
    }  # fmt: skip
    return ProofCheck(name="copies", passed=None, figures=figures)
