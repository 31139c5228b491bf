"""Rates of the processes that share one processor, measured while all of them work: alone, one of them finds the
memory, the caches and the clock of all.

    python -m fitune.measure.together FOLDER RANK PROCESSES EFFORT
"""

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fitune.errors import HardwareError
from fitune.measure.calibrate import calibrate
from fitune.measure.device_rates import Effort
from fitune.measure.hardware import detect_hardware
from fitune.spec.machines.hardware import Calibration, Hardware
from fitune.spec.serial import from_json, to_json

_SECONDS = 120
"""Starting torch is most of it."""
_FOUND = "found.json"


def calibrate_together(hardware: Hardware, *, effort: Effort) -> Calibration:
    """Measure one of the ``hardware.gpus_per_node`` processes on this machine's processor, and their collectives.

    Raises HardwareError where one of the processes ends badly or does not end.
    """
    processes = hardware.gpus_per_node
    environment = {**os.environ, "OMP_NUM_THREADS": str(hardware.threads_per_process)}
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, folder, str(rank), str(processes), to_json(effort)],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(processes)
        ]  # fmt: skip
        try:
            said = [process.communicate(timeout=_SECONDS)[1] for process in started]
        except subprocess.TimeoutExpired:
            raise HardwareError(
                f"{processes} processes did not measure this processor in {_SECONDS} s",
                hint="FITUNE_CALIBRATE=0 trains without",
            ) from None
        finally:
            for process in started:
                process.kill()
                process.wait()
        for process, words in zip(started, said, strict=True):
            if process.returncode:
                last = (words.strip().splitlines() or ["nothing"])[-1]
                raise HardwareError(
                    f"a process that measures this processor ended with {process.returncode} and said: {last}",
                    hint="FITUNE_CALIBRATE=0 trains without",
                )
        return from_json(Calibration, (Path(folder) / _FOUND).read_text(encoding="utf-8"))


def main(folder: Path, rank: int, processes: int, effort: Effort) -> None:
    """Measure as one of the processes; the first writes what it found."""
    dist.init_process_group(
        "gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=processes,
        timeout=timedelta(seconds=_SECONDS),
    )  # fmt: skip
    found = calibrate(detect_hardware(use_gpus=False), effort=effort)
    if rank == 0:
        (folder / _FOUND).write_text(to_json(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), from_json(Effort, sys.argv[4]))
