"""Makes a model keep the rows of a stream apart: in attention and in rotary positions.

A micro-batch is a stream [1, T] of several rows without padding. transformers calls the functions of
models/row_attention.py by the names registered here; ``rows`` travels through the model's keyword arguments.

Rotary frequencies may depend on a length: longrope (Phi-3.5, Phi-4-mini) and dynamic NTK. transformers takes the
largest position of a call for all of it, so a long row would change the answers and losses of the short rows beside it.
Here every row has the frequencies of its own length.

Shapes: B = 1, T tokens of the stream, d the turned part of a head's size.
"""

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fitune.models.row_attention import Kernel, attend_by, rows_eager, rows_flash, rows_sdpa
from fitune.values.plan import Attention

# transformers reads meaning into names that contain "sdpa" or "flash"; these contain neither.
_KERNELS: dict[Attention, tuple[str, Kernel]] = {
    "flash": ("rows_at_once", rows_flash),
    "sdpa": ("rows", rows_sdpa),
    "eager": ("rows_written_out", rows_eager),
}


# The row functions know what may be seen. transformers builds no mask for a name without a mask function, and then
# does not ask the device whether positions begin again, which would wait for all kernels.
# torch.compile stops here and goes on behind: rows change with every stream, and their loop with them.
for _name, _kernel in _KERNELS.values():
    AttentionInterface.register(_name, torch.compiler.disable(attend_by(_kernel)))


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make every block of ``model`` attend row by row with the given kernel.

    Families that bring their own attention classes (Falcon) keep them, and are given a mask instead.
    """
    if attends_by_rows(model):
        model.set_attn_implementation(_KERNELS[attention][0])


def attends_by_rows(model: PreTrainedModel) -> bool:
    """True if the attention function of ``model`` can be exchanged: it says so, or all its blocks ask for one.

    Either way its blocks hand on what the function is told beside the tensors (StableLM's and Nemotron's do not).
    """
    pairs = [
        (type(parent), type(child))
        for parent in model.modules()
        for child in parent.children()
        if type(child).__name__.lower().endswith("attention")
    ]
    for block in {parent for parent, _ in pairs}:
        forward = inspect.unwrap(block.forward)
        others = {w.name for w in inspect.signature(forward).parameters.values() if w.kind is w.VAR_KEYWORD}
        if not any(step.argval in others for step in dis.get_instructions(forward) if "LOAD" in step.opname):
            return False  # it does not read the keywords that it does not name
    codes = [getattr(inspect.unwrap(child.forward), "__code__", None) for _, child in pairs]
    asking = [code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names for code in codes]
    return bool(model._supports_attention_backend or (asking and all(asking)))


def takes_mask(model: PreTrainedModel) -> bool:
    """True if attention of the model's own tells rows apart by a mask; blocks that never attend take none."""
    attends = any("attention" in type(module).__name__.lower() for module in model.modules())
    return attends and not attends_by_rows(model)


def row_mask(sequence_lengths: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [1, 1, T, T] of causal blocks on the diagonal, for models that cannot attend by rows."""
    visible = torch.block_diag(
        *(torch.ones(n, n, dtype=torch.bool, device=device).tril() for n in sequence_lengths)
    )
    closed = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(
        ~visible.bool(), torch.finfo(dtype).min
    )
    return closed[None, None]


def use_cached_attention(model: PreTrainedModel) -> None:
    """Switch to transformers' own attention, which generation with a key/value cache needs."""
    if attends_by_rows(model):
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


_stream_rows: ContextVar[tuple[int, ...] | None] = ContextVar("_stream_rows", default=None)


def turn_by_rows(model: PreTrainedModel) -> None:
    """Make rotary positions that depend on a length take it from each row; others stay as they are."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if any(map(_depends_on_length, kinds.values() if isinstance(kinds, Mapping) else [kinds])):
            module.forward = _by_rows(module, module.forward)


@contextmanager
def rows_of_lengths(lengths: Sequence[int]) -> Iterator[None]:
    """A call of the model inside is given one stream of rows of these lengths."""
    token = _stream_rows.set(tuple(lengths))
    try:
        yield
    finally:
        _stream_rows.reset(token)


def turns_by_length(config: PretrainedConfig) -> bool:
    """True if the rotary frequencies of a row depend on its length, in any layer."""
    return any(_depends_on_length(parameters.get("rope_type")) for parameters in _rope_parameters(config))


def longrope_boundary(config: PretrainedConfig) -> int:
    """Tokens up to which a row is turned by longrope's short factors; 0 for a model without longrope."""
    return min(
        (
            int(parameters["original_max_position_embeddings"])
            for parameters in _rope_parameters(config)
            if parameters.get("rope_type") == "longrope"
        ),
        default=0,
    )


def _rope_parameters(config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Rotary settings of the model, and of each kind of layer where layers differ."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]


def _depends_on_length(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _by_rows(module: nn.Module, whole_call: Callable[..., Any]) -> Callable[..., Any]:
    """Cosines and sines [B, T, d] of a stream; outside of ``rows_of_lengths`` those of transformers."""
    turned = inspect.unwrap(type(module).forward)  # without what looks at the largest position

    @torch.no_grad()
    def forward(x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """As transformers calls it: cosines and sines of the positions [B, T]."""
        of_layer = {} if layer_type is None else {"layer_type": layer_type}
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        lengths = _stream_rows.get()
        if lengths is None or not _depends_on_length(kind):
            return whole_call(x, position_ids, **of_layer)
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        before, start = getattr(module, name), 0
        cosines: list[Tensor] = []
        sines: list[Tensor] = []
        is_longrope, boundary = kind == "longrope", longrope_boundary(module.config)
        usual = module.config.max_position_embeddings
        # One length stands for all with the same frequencies: of longrope one on each side of its boundary.
        for deciding, alike in itertools.groupby(
            lengths, lambda n: boundary + (n > boundary) if is_longrope else max(n, usual)
        ):
            end = start + sum(alike)
            seq_len = deciding if is_longrope else torch.tensor(deciding, device=x.device)
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](module.config, x.device, seq_len=seq_len, **of_layer)
            setattr(module, name, frequencies)
            cosine, sine = turned(module, x, position_ids[:, start:end], **of_layer)
            cosines, sines, start = [*cosines, cosine], [*sines, sine], end
        setattr(module, name, before)
        return torch.cat(cosines, dim=1), torch.cat(sines, dim=1)

    return forward
