"""A flat stream of rows that must not see one another: attention and rotary positions row by row.

A micro-batch is a stream [1, T] of several rows without padding. Each row attends to itself alone, so
no T × T mask is ever made and no work is spent across rows. transformers calls these functions by the
names registered here; ``rows`` travels through the model's keyword arguments.

Rotary frequencies may depend on a length: longrope (Phi-3.5, Phi-4-mini) and dynamic NTK. transformers takes the
largest position of a call for all of it, so a long row would change the answers and losses of the short rows beside it.
Here every row has the frequencies of its own length.

Shapes: B = 1, n heads, k key heads, T tokens of the stream, d head size (of rotary positions, its turned part).
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fitune.spec.plan import Attention


class Rows:
    """Lengths of the rows in a stream; one object goes through all blocks.

    Not a tuple: torch.compile looks into those, and would compile each block again for every new number of rows.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._bounds: dict[torch.device, Tensor] = {}
        self._cut: dict[int, Rows] = {}

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [rows + 1]: 0, and where each row ends. Brought to the device once for all blocks."""
        if device not in self._bounds:
            ends = list(itertools.accumulate(self.lengths, initial=0))
            self._bounds[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._bounds[device]

    def cut(self, chunk: int) -> "Rows":
        """Returns these tokens as rows of at most ``chunk``, each row cut from its beginning."""
        if self.longest <= chunk:
            return self
        if chunk not in self._cut:
            self._cut[chunk] = Rows(
                [min(chunk, n - start) for n in self.lengths for start in range(0, n, chunk)]
            )
        return self._cut[chunk]


# transformers reads meaning into names that contain "sdpa" or "flash"; these contain neither.
_REGISTERED_NAMES: dict[Attention, str] = {
    "flash": "rows_at_once",
    "sdpa": "rows",
    "eager": "rows_written_out",
}


def use_attention(model: PreTrainedModel, attention: Attention) -> None:
    """Make every block of ``model`` attend row by row with the given kernel.

    Families that bring their own attention classes (Falcon) keep them, and are given a mask instead.
    """
    if attends_by_rows(model):
        model.set_attn_implementation(_REGISTERED_NAMES[attention])


def attends_by_rows(model: PreTrainedModel) -> bool:
    """True if the attention function of ``model`` can be exchanged."""
    return bool(model._supports_attention_backend)


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


def rows_sdpa(
    module: nn.Module,
    query_BnTd: Tensor,
    key_BnTd: Tensor,
    value_BnTd: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Fused attention for each row of the stream; returns [B, T, n, d].

    Scores that are capped (Gemma-2), or weighed beside a sink (GPT-OSS), have no fused kernel: computed eagerly.
    """
    if softcap is not None or s_aux is not None:
        return rows_eager(
            module, query_BnTd, key_BnTd, value_BnTd, attention_mask, rows=rows,
            scaling=scaling, dropout=dropout, sliding_window=sliding_window, softcap=softcap, s_aux=s_aux,
        )  # fmt: skip
    outputs = []
    for q, k, v in _each_row(query_BnTd, key_BnTd, value_BnTd, rows.lengths):
        window = _window_mask(q.shape[2], sliding_window, q.device)
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _takes_groups(q, window):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=window, dropout_p=dropout, is_causal=window is None, scale=scaling,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )  # fmt: skip
    return _joined(outputs), None


def rows_flash(
    module: nn.Module, query_BnTd: Tensor, key_BkTd: Tensor, value_BkTd: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """All rows in one call of FlashAttention where it can; else row by row, with the memory-efficient kernel.

    Never by the one that writes the scores out: that would be slow and large without a word.
    """
    if kwargs.get("s_aux") is None and one_call(query_BnTd, softcap=kwargs.get("softcap")):
        return _all_rows_at_once(query_BnTd, key_BkTd, value_BkTd, **kwargs), None
    on_gpu = query_BnTd.device.type == "cuda"
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused) if on_gpu else nullcontext():
        return rows_sdpa(module, query_BnTd, key_BkTd, value_BkTd, *args, **kwargs)


def one_call(query_BnTd: Tensor, *, softcap: float | None = None) -> bool:
    """True if FlashAttention takes the whole stream: Ampere or newer, 16 bit, heads of 8, 16, … 256, no cap."""
    head_size = query_BnTd.shape[-1]
    capability = _capability(query_BnTd.device)
    takes_shape = softcap is None and head_size % 8 == 0 and head_size <= 256
    return takes_shape and query_BnTd.dtype != torch.float32 and (capability or (0, 0)) >= (8, 0)


def _all_rows_at_once(
    query_BnTd: Tensor,
    key_BkTd: Tensor,
    value_BkTd: Tensor,
    *,
    rows: Rows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> Tensor:
    """FlashAttention over the stream [1, T, n, d], told where its rows begin: no mask, and no copy to join rows.

    Keys may have fewer heads than queries. A window of w lets i look at i − w + 1 … i, which the kernel calls w − 1
    to the left. The operation is torch's own (2.9 to 2.13 alike); its Python door varlen_attn changed in between.
    """
    q_Tnd, k_Tkd, v_Tkd = (x[0].transpose(0, 1) for x in (query_BnTd, key_BkTd, value_BkTd))
    # The output is laid out as the queries are: from Phi-3's heads-first layout it would be copied back.
    q_Tnd = q_Tnd.contiguous()
    bounds, longest = rows.bounds(q_Tnd.device), rows.longest
    left = -1 if sliding_window is None else sliding_window - 1
    output_Tnd, *_kept = torch.ops.aten._flash_attention_forward(
        q_Tnd, k_Tkd, v_Tkd, bounds, bounds, longest, longest, dropout, True, False, scale=scaling,
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return output_Tnd[None]


def rows_eager(
    module: nn.Module,
    query_BnTd: Tensor,
    key_BnTd: Tensor,
    value_BnTd: Tensor,
    attention_mask: Tensor | None,
    *,
    rows: Rows,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention written out, softmax in fp32; returns [B, T, n, d]. Materialises a score per pair within a row.

    ``s_aux`` [n]: a learned score of each head that takes part in the softmax and adds no value.
    """
    scale = query_BnTd.shape[-1] ** -0.5 if scaling is None else scaling
    groups = query_BnTd.shape[1] // key_BnTd.shape[1]
    outputs = []
    for q, k, v in _each_row(query_BnTd, key_BnTd, value_BnTd, rows.lengths):
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = _causal_mask(q.shape[2], sliding_window, q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if s_aux is not None:
            sink = s_aux.to(q.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype)
        if s_aux is not None:
            weights = weights[..., :-1]
        weights = F.dropout(weights, p=dropout, training=module.training)
        outputs.append((weights @ v).transpose(1, 2))
    return _joined(outputs), None


def _each_row(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Any:
    if len(lengths) == 1:
        return [(query, key, value)]
    return zip(*(x.split(list(lengths), dim=2) for x in (query, key, value)), strict=True)


def _takes_groups(query: Tensor, window: Tensor | None) -> bool:
    """True if the fused kernel for this row reads grouped key heads as they are.

    The CPU's and FlashAttention's do. The memory-efficient one, which is left for GPUs before Ampere, for fp32 and
    for masks, does not: with grouped heads torch would fall back to writing the scores out.
    """
    capability = _capability(query.device)
    flash = capability is not None and capability >= (8, 0) and query.dtype != torch.float32
    return capability is None or (window is None and flash)


_stands_for: ContextVar[tuple[int, int] | None] = ContextVar("_stands_for", default=None)


@contextmanager
def attending_as(capability: tuple[int, int]) -> Iterator[None]:
    """Attend on the CPU as a GPU of this compute capability would, (0, 0) for a CPU: what a rehearsal is for."""
    token = _stands_for.set(capability if capability > (0, 0) else None)
    try:
        yield
    finally:
        _stands_for.reset(token)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return _stands_for.get() if device.type == "cpu" else torch.cuda.get_device_capability(device)


def _joined(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """True where position i may look at j: j ≤ i, and i − j < window when there is one."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """A mask only where the window really cuts; rows shorter than it are plainly causal."""
    return None if window is None or length <= window else _causal_mask(length, window, device)


def _no_mask(*_: Any, **__: Any) -> None:
    """The row functions know what may be seen: transformers need not build a mask for them."""
    return None


def _in_chunks(attend: Any) -> Any:
    """``attend`` that cuts the rows of a block that sees one chunk of a row at a time (Llama 4)."""

    def run(module: nn.Module, *args: Any, rows: Rows, **kwargs: Any) -> Any:
        chunk = _chunk_of(module)
        return attend(module, *args, rows=rows.cut(chunk) if chunk else rows, **kwargs)

    return run


def _chunk_of(module: nn.Module) -> int:
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if config is None or "chunked_attention" not in kinds:
        return 0
    return config.attention_chunk_size if kinds[module.layer_idx] == "chunked_attention" else 0


# torch.compile stops here and goes on behind: rows change with every stream, and their loop with them.
_FUNCTIONS: dict[Attention, Any] = {
    "sdpa": rows_sdpa,
    "flash": rows_flash,
    "eager": rows_eager,
}
for _attention, _function in _FUNCTIONS.items():
    AttentionInterface.register(_REGISTERED_NAMES[_attention], torch.compiler.disable(_in_chunks(_function)))
    AttentionMaskInterface.register(_REGISTERED_NAMES[_attention], _no_mask)


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
        lengths = _stream_rows.get()
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
