"""Rotary positions whose frequencies depend on a length: longrope (Phi-3.5, Phi-4-mini) and dynamic NTK.

transformers takes the largest position of a call to choose one set of frequencies for all of it, so that a long row
would change the answers and losses of the short rows beside it. Here every row has those of its own length.

Shapes: B = 1, T tokens of the stream, d turned part of a head.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_rows: ContextVar[tuple[int, ...] | None] = ContextVar("_rows", default=None)


def turn_by_rows(model: PreTrainedModel) -> None:
    """Make rotary positions that depend on a length take it from each row; others stay as they are."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_depends_on_length, kinds.values() if isinstance(kinds, Mapping) else [kinds])):
            module.forward = _by_rows(module, module.forward)


@contextmanager
def rows_of_lengths(lengths: Sequence[int]) -> Iterator[None]:
    """A call of the model inside is given one stream of rows of these lengths."""
    token = _rows.set(tuple(lengths))
    try:
        yield
    finally:
        _rows.reset(token)


def longrope_boundary(config: PretrainedConfig) -> int:
    """Tokens up to which a row is turned by longrope's short factors; 0 for a model without longrope."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    return min(
        (int(p["original_max_position_embeddings"]) for p in each if p.get("rope_type") == "longrope"),
        default=0,
    )


def _depends_on_length(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _by_rows(module: nn.Module, whole_call: Callable[..., Any]) -> Callable[..., Any]:
    """Cosines and sines [B, T, d] of a stream; outside of ``rows_of_lengths`` those of transformers."""
    turned = inspect.unwrap(type(module).forward)  # without what looks at the largest position

    @torch.no_grad()
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        lengths = _rows.get()
        if lengths is None or not _depends_on_length(kind):
            return whole_call(x, position_ids, **of_layer)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        before, start = getattr(module, name), 0
        cosines: list[Tensor] = []
        sines: list[Tensor] = []
        for deciding, alike in itertools.groupby(lengths, lambda n: _deciding_length(module.config, kind, n)):
            end = start + sum(alike)
            seq_len = deciding if kind == "longrope" else torch.tensor(deciding, device=x.device)
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, x.device, seq_len=seq_len, **of_layer)
            setattr(module, name, frequencies)
            cosine, sine = turned(module, x, position_ids[:, start:end], **of_layer)
            cosines, sines, start = [*cosines, cosine], [*sines, sine], end
        setattr(module, name, before)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    return forward


def _deciding_length(config: PretrainedConfig, kind: str, length: int) -> int:
    """Length that stands for all with the same frequencies: one beyond longrope's boundary for all beyond it."""
    if kind == "longrope":
        boundary = longrope_boundary(config)
        return boundary + 1 if length > boundary else boundary
    return max(length, config.max_position_embeddings)
