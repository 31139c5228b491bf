"""Changes to an adapter that lies on the disk, and a pickle that shows whether it ran."""

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def edit_config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(adapter, change):
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)


class Payload:
    """Unpickling this leaves a file behind."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)
