"""Changes to an adapter that lies on the disk."""

import json

from safetensors.torch import load_file, save_file


def edit_config(adapter, **changes):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(adapter, change):
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file)
