"""A processor that was never measured is measured before its first training, or the first prediction of a scoring, in
about three seconds; by several processes at once where they will share it, in about ten."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace

from fitune.errors import HardwareError
from fitune.measure.calibrations import device_key, quick_key, store_calibration
from fitune.session.events import Note, Tell
from fitune.spec.machines.hardware import Calibration, Hardware
from fitune.units import format_seconds

CALIBRATE_VARIABLE = "FITUNE_CALIBRATE"
"""0 in the environment: nothing is measured by itself."""


def measure_on_first_use(
    hardware: Hardware, *, tell: Tell, environment: Mapping[str, str] = os.environ
) -> bool:
    """Measure and store the rates of this machine's processor, once; True if they are new. Those of one among several
    processes are measured while the others work, too.

    Rates that are here already stay, and a cache that cannot be written is said and does not stop the training.
    """
    is_new = hardware.gpu.is_cpu and hardware.nodes == 1 and hardware.calibration is None
    if not is_new or environment.get(CALIBRATE_VARIABLE) == "0":
        return False
    start = time.perf_counter()
    try:
        found = _measured(hardware)
    except HardwareError as error:
        tell(Note(f"note: the rates of this processor were not measured: {error.message}"))
        return False
    processes = hardware.gpus_per_node
    key = quick_key(device_key(hardware.gpu, cores=hardware.threads_per_process, processes=processes))
    try:
        store_calibration(replace(found, device=key))
    except HardwareError as error:
        tell(Note(f"note: the rates of this processor were measured and not kept: {error.message}"))
        return False
    took = format_seconds(time.perf_counter() - start)
    who = f" by {processes} processes" if processes > 1 else ""
    tell(
        Note(
            f"measured this processor{who} in {took}, once: plans use it from now on "
            f"(fitune doctor --calibrate: better; {CALIBRATE_VARIABLE}=0: never)"
        )
    )
    return True


def _measured(hardware: Hardware) -> Calibration:
    import torch  # not for those who only plan

    from fitune.measure.calibrate import calibrate, calibrate_together
    from fitune.measure.device_rates import HURRIED

    if hardware.gpus_per_node > 1:
        return calibrate_together(hardware, effort=HURRIED)
    with torch.random.fork_rng(devices=[]):  # the run draws what it would have drawn
        return calibrate(hardware, effort=HURRIED)
