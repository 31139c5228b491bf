"""The size of a saved adapter."""

import math
from pathlib import Path

from fitune.errors import CheckpointError
from fitune.models.headers import read_header
from fitune.spec.answering import NO_ADAPTER, Adapter

_MLP_NAMES = (".mlp.", "feed_forward", ".fc1.", ".experts.")


def adapter_size(folder: str) -> Adapter:
    """Elements of a saved adapter, by the header of its file. Raises CheckpointError where there is none, ModelError
    where it is damaged."""
    if not folder:
        return NO_ADAPTER
    file = Path(folder) / "adapter_model.safetensors"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is not there", hint="name an adapter's folder, with adapter_config.json"
        )
    tensors = read_header(file)
    elements = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return Adapter(elements=elements, on_mlp=any(part in name for name in tensors for part in _MLP_NAMES))
