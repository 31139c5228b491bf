"""Examination of this machine: devices, memory, measured rates, libraries."""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fitune.errors import FituneError, HardwareError, installed_versions
from fitune.measure.hardware import calibrated, describe_hardware, detect_hardware, of_one_kind, see_one_kind
from fitune.measure.measurements import device_key, quick_key, store_calibration
from fitune.measure.nvml import gpus_here
from fitune.planner.study import largest as largest_of
from fitune.recipe.recipe import parse_recipe
from fitune.session.events import Emit, Note
from fitune.units import format_seconds
from fitune.values.machines.hardware import Calibration, Hardware
from fitune.values.model.model_config import known_model_spec
from fitune.values.serial import to_data

_NEEDED = ("torch", "transformers", "peft", "safetensors", "datasets")
ROW = 2048
_EXTRAS = {
    "torch": ("train", "training, rehearsing, scoring and exporting"),
    "matplotlib": ("plots", "pictures in report.html"),
    "starlette": ("ui", "fitune ui, a page to plan in"),
    "tensorboard": ("tensorboard", "TensorBoard logs"),
    "wandb": ("wandb", "logs at Weights & Biases"),
    "mlflow": ("mlflow", "logs in MLflow"),
    "comet_ml": ("comet", "logs at Comet"),
    "rouge_score": ("metrics", "the ROUGE grader"),
    "sacrebleu": ("metrics", "the BLEU and chrF graders"),
    "jsonschema": ("metrics", "the grader of JSON by a schema"),
    "lm_eval": ("lm-eval", "fitune score --lm-eval"),
    "bitsandbytes": ("quant", "bases in NF4, 8-bit AdamW"),
    "hqq": ("quant", "bases in 2, 3, 4 or 8 bits by HQQ"),
    "liger_kernel": ("liger", "kernels: liger"),
    "deepspeed": ("deepspeed", "backend: deepspeed"),
    "ray": ("ray", "fitune train and score --on ray"),
    "s3fs": ("remote", "data, runs and models at s3://"),
    "vllm": ("vllm", "fitune score --engine vllm, fitune serve"),
}
"""Module -> its extra, and what it adds."""


def examine() -> tuple[str, dict[str, Any]]:
    """Devices, measured rates, versions of libraries, and what each missing library would add: as text and as data.

    torch is asked where there is a GPU.
    """
    versions = installed_versions(("fitune", *_NEEDED))
    missing = [extra for name, extra in _EXTRAS.items() if importlib.util.find_spec(name) is None]
    problem = ""
    gpus = of_one_kind(gpus_here())
    if gpus and importlib.util.find_spec("torch") is not None:
        from fitune.measure.cuda_cards import torch_problem  # torch: seconds

        problem = torch_problem(gpus[0])  # why the installed torch cannot train on it, and what to do
    hardware = calibrated(detect_hardware())
    largest = largest_here(hardware)
    fits = " · ".join(f"{tuning} {model}" for tuning, model in largest.items())
    lines = [
        describe_hardware(hardware),
        f"largest known models that fit, rows of {ROW:,} tokens: {fits or 'none'}",
        describe_calibration(hardware.calibration),
        *([f"problem: {problem}"] if problem else []),
        "  ".join(f"{name} {version}" for name, version in versions.items()),
        *(f"missing: {what}; pip install 'fitune[{extra}]'" for extra, what in missing),
    ]
    if hardware.gpu.is_cpu:
        none = "no GPU found: this processor plans and trains; fitune plan --gpu rtx-4090 plans for a card"
        lines = [none, *lines]
    return "\n".join(lines), {
        "hardware": to_data(hardware),
        "versions": versions,
        "problem": problem,
        "largest": largest,
        "missing_extras": sorted(extra for extra, _ in missing),
    }


def largest_here(hardware: Hardware) -> dict[str, str]:
    """The largest known model that full, LoRA and QLoRA train on ``hardware``; without those that train none."""
    recipe = parse_recipe({"model": "Qwen/Qwen3-0.6B", "seq_len": ROW}, where="doctor")
    model, found = known_model_spec(recipe.model), dict[str, str]()
    assert model is not None
    try:
        methods = largest_of(recipe, "model", model=model, hardware=hardware)
    except FituneError:  # doctor examines what is no machine to train on, too
        return found
    for (tuning, _, _), name in methods.items():
        if tuning in ("full", "lora", "qlora") and name is not None:
            found.setdefault(tuning, str(name))
    return found


def calibrate_device(*, log: Callable[[str], None]) -> bool:
    """Measure this machine's device and store it; False on every rank but the first, which has nothing to show."""
    see_one_kind()
    from fitune.engine.ranks import joined_ranks
    from fitune.measure.calibrate import calibrate

    start = time.perf_counter()
    with joined_ranks() as ranks:
        hardware = detect_hardware()
        if ranks.is_first:
            log(f"measuring {hardware.gpu.name}: this takes one to two minutes")
        found = calibrate(hardware)
    if not ranks.is_first:
        return False
    path = store_calibration(found)
    log(f"measured {found.device} in {format_seconds(time.perf_counter() - start)}: {path}")
    return True


CALIBRATE_VARIABLE = "FITUNE_CALIBRATE"
"""0 in the environment: nothing is measured by itself."""


def measure_on_first_use(
    hardware: Hardware, *, emit: Emit, environment: Mapping[str, str] = os.environ
) -> bool:
    """Measure and store the rates of this machine's processor before its first training, or the first prediction of a
    scoring, in about three seconds; True if they are new. By several processes at once, in about ten, where they will
    share it.

    Rates that are here already stay, and a cache that cannot be written is said and does not stop the training.
    """
    is_new = hardware.gpu.is_cpu and hardware.nodes == 1 and hardware.calibration is None
    if not is_new or environment.get(CALIBRATE_VARIABLE) == "0":
        return False
    import torch  # not for those who only plan

    from fitune.measure.calibrate import calibrate, calibrate_together
    from fitune.measure.device_rates import HURRIED

    start, processes, missed = time.perf_counter(), hardware.gpus_per_node, "not measured"
    key = quick_key(device_key(hardware.gpu, cores=hardware.threads_per_process, processes=processes))
    try:
        if processes > 1:
            found = calibrate_together(hardware, effort=HURRIED)
        else:
            with torch.random.fork_rng(devices=[]):  # the run draws what it would have drawn
                found = calibrate(hardware, effort=HURRIED)
        missed = "measured and not kept"
        store_calibration(replace(found, device=key))
    except HardwareError as error:
        emit(Note(f"note: the rates of this processor were {missed}: {error.message}"))
        return False
    took = format_seconds(time.perf_counter() - start)
    who = f" by {processes} processes" if processes > 1 else ""
    emit(
        Note(
            f"measured this processor{who} in {took}, once: plans use it from now on "
            f"(fitune doctor --calibrate: better; {CALIBRATE_VARIABLE}=0: never)"
        )
    )
    return True


def describe_calibration(calibration: Calibration | None) -> str:
    """A few lines: products, attention, memory, launches, links."""
    if calibration is None:
        return "not calibrated: times come from the datasheet; fitune doctor --calibrate measures them"
    small, large = calibration.traffic[0], calibration.traffic[-1]
    products = [f"{rate.flops / 1e12:,.3g} TFLOP/s {rate.numbers}" for rate in calibration.products]
    attention = [f"{rate.flops / 1e12:,.3g} TFLOP/s {rate.numbers}" for rate in calibration.attention]
    links = [f"CPU Adam {calibration.cpu_adam / 1e6:,.0f} M parameters/s"]
    if calibration.host_bandwidth:
        links.append(f"host link {calibration.host_bandwidth / 1e9:,.3g} GB/s")
    if (found := calibration.collectives) is not None:
        start = f"{found.start_seconds * 1e6:,.0f} µs a collective"
        links.append(f"{found.ranks} ranks: {start}, {found.bandwidth / 1e9:,.3g} GB/s")
    return "\n  ".join(
        [
            f"calibrated on {calibration.date} as {calibration.device}",
            f"products {', '.join(products)}",
            f"attention {', '.join(attention)}",
            f"memory {small.bandwidth / 1e9:,.3g} GB/s on small tensors, {large.bandwidth / 1e9:,.3g} GB/s on large; "
            f"an operation every {calibration.forward_launch_seconds * 1e6:,.0f} µs in forward, "
            f"{calibration.backward_launch_seconds * 1e6:,.0f} µs in backward",
            ", ".join(links),
        ]
    )
