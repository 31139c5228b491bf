"""A processor that was never measured is measured before its first training, in about three seconds."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from fitune.errors import HardwareError
from fitune.measure.calibrations import device_key, quick_key, store_calibration
from fitune.session.events import Note, Tell
from fitune.spec.machines.hardware import Hardware
from fitune.units import format_seconds

SWITCH = "FITUNE_CALIBRATE"
"""0 in the environment: nothing is measured before training."""


def measure_on_first_use(
    hardware: Hardware, *, tell: Tell, environment: Mapping[str, str] = os.environ
) -> bool:
    """Measure and store the rates of one process on this machine's processor, once; True if they are new.

    Rates that are here already stay, and a cache that cannot be written is said and does not stop the training.
    """
    is_new = hardware.gpu.is_cpu and hardware.num_gpus == 1 and hardware.calibration is None
    if not is_new or environment.get(SWITCH) == "0":
        return False
    import torch  # not for those who only plan

    from fitune.measure.calibrate import calibrate
    from fitune.measure.device_rates import HURRIED

    start = time.perf_counter()
    with torch.random.fork_rng(devices=[]):  # the run draws what it would have drawn
        found = calibrate(hardware, effort=HURRIED)
    key = quick_key(device_key(hardware.gpu, cores=hardware.cpu_cores))
    try:
        store_calibration(replace(found, device=key))
    except HardwareError as error:
        tell(Note(f"note: the rates of this processor were measured and not kept: {error.message}"))
        return False
    took = format_seconds(time.perf_counter() - start)
    tell(
        Note(
            f"measured this processor in {took}, once: plans use it from now on "
            f"(fitune doctor --calibrate: better; {SWITCH}=0: never)"
        )
    )
    return True
