"""``fitune doctor``."""

import importlib.metadata
import importlib.util
import json as json_text
import platform

from fitune import __version__
from fitune.measure.hardware import describe_hardware, detect_hardware
from fitune.spec.serial import to_data

_NEEDED = ("torch", "transformers", "peft", "safetensors", "datasets")
_EXTRAS = {
    "matplotlib": ("plots", "pictures in report.html"),
    "tensorboard": ("track", "TensorBoard logs"),
    "rouge_score": ("metrics", "the ROUGE grader"),
}


def examine(*, json: bool) -> None:
    """Print devices, memory, libraries and missing extras."""
    hardware = detect_hardware()
    versions = {"python": platform.python_version(), "fitune": __version__}
    versions |= {name: importlib.metadata.version(name) for name in _NEEDED}
    missing = {name: extra for name, extra in _EXTRAS.items() if importlib.util.find_spec(name) is None}
    if json:
        content = {
            "hardware": to_data(hardware),
            "versions": versions,
            "missing_extras": sorted(extra for extra, _ in missing.values()),
        }
        print(json_text.dumps(content, indent=2))
        return
    print(describe_hardware(hardware))
    print("  ".join(f"{name} {version}" for name, version in versions.items()))
    for extra, what in missing.values():
        print(f"missing: {what}; pip install 'fitune[{extra}]'")
