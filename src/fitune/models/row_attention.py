"""Attention over a flat stream of rows that must not see one another: by FlashAttention, fused, or written out.

Each row attends to itself alone, so no T × T mask is ever made and no work is spent across rows.

Shapes: B = 1, n heads, k key heads, T tokens of the stream, d head size.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; to a GPU by way of pinned memory: a pageable copy would wait for all kernels."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


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
        """Tokens of the longest row."""
        return max(self.lengths)

    def bounds(self, device: torch.device) -> Tensor:
        """int32 [rows + 1]: 0, and where each row ends. Brought to the device once for all blocks."""
        if device not in self._bounds:
            ends = list(itertools.accumulate(self.lengths, initial=0))
            self._bounds[device] = sent(torch.tensor(ends, dtype=torch.int32), device)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """One call of a block's attention over a stream: what attends to what, and how."""

    query_BnTd: Tensor
    key_BkTd: Tensor
    value_BkTd: Tensor
    rows: Rows
    scale: float | None
    """Factor of the scores; None: d^−½."""
    dropout: float
    window: int | None
    """A window of w lets position i look at i − w + 1 … i."""
    softcap: float | None
    sinks_n: Tensor | None
    """A learned score of each head that takes part in the softmax and adds no value."""

    def each_row(self) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of one row after the other."""
        stream = (self.query_BnTd, self.key_BkTd, self.value_BkTd)
        lengths = list(self.rows.lengths)
        return [stream] if len(lengths) == 1 else zip(*(x.split(lengths, dim=2) for x in stream), strict=True)


Kernel = Callable[[RowCall], Tensor]
"""Attends row by row; returns [B, T, n, d]."""


def attend_by(kernel: Kernel) -> Callable[..., tuple[Tensor, None]]:
    """``kernel`` as a function that transformers' attention calls, with the names that it gives.

    A block that sees one chunk of a row at a time (Llama 4) gets rows that are cut.
    """

    def attend(
        module: nn.Module,
        query_BnTd: Tensor,
        key_BkTd: Tensor,
        value_BkTd: Tensor,
        attention_mask: Tensor | None,
        *,
        rows: Rows,
        dropout: float = 0.0,
        **given: Any,
    ) -> tuple[Tensor, None]:
        """[B, T, n, d] and no scores; the other names are used as far as they are ``given``."""
        config: Any = getattr(module, "config", None)
        chunk = 0
        kinds = getattr(config, "layer_types", None) or ()
        if "chunked_attention" in kinds and kinds[module.layer_idx] == "chunked_attention":
            chunk = config.attention_chunk_size
        call = RowCall(
            query_BnTd=query_BnTd, key_BkTd=key_BkTd, value_BkTd=value_BkTd, rows=rows.cut(chunk) if chunk else rows,
            scale=given.get("scaling"), dropout=dropout if module.training else 0.0,
            window=given.get("sliding_window"), softcap=given.get("softcap"), sinks_n=given.get("s_aux"),
        )  # fmt: skip
        return kernel(call), None

    return attend


def rows_sdpa(call: RowCall) -> Tensor:
    """Fused attention for each row of the stream; returns [B, T, n, d].

    Scores that are capped (Gemma-2), or weighed beside a sink (GPT-OSS), have no fused kernel: computed eagerly.
    """
    if call.softcap is not None or call.sinks_n is not None:
        return rows_eager(call)
    if len(call.rows.lengths) == 1:  # several are joined into one more copy, however they are laid out
        call = replace(call, query_BnTd=_tokens_first(call.query_BnTd))
    outputs = []
    for q, k, v in call.each_row():
        # a mask only where the window really cuts; rows shorter than it are plainly causal
        cuts = call.window is not None and q.shape[2] > call.window
        window = _causal_mask(q.shape[2], call.window, q.device) if cuts else None
        grouped = q.shape[1] != k.shape[1]
        if grouped and not _takes_groups(q, window):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            grouped = False
        outputs.append(
            F.scaled_dot_product_attention(
                q, k, v, attn_mask=window, dropout_p=call.dropout, is_causal=window is None, scale=call.scale,
                enable_gqa=grouped,
            ).transpose(1, 2)
        )  # fmt: skip
    return _joined(outputs)


def rows_flash(call: RowCall) -> Tensor:
    """All rows in one call of FlashAttention where it can; else row by row, with the memory-efficient kernel.

    Never by the one that writes the scores out: that would be slow and large without a word.
    """
    if call.sinks_n is None and one_call(call.query_BnTd, softcap=call.softcap):
        return _all_rows_at_once(call)
    on_gpu = call.query_BnTd.device.type == "cuda"
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    with sdpa_kernel(fused) if on_gpu else nullcontext():
        return rows_sdpa(call)


def one_call(query_BnTd: Tensor, *, softcap: float | None) -> bool:
    """True if FlashAttention takes the whole stream: Ampere or newer, 16 bit, heads of 8, 16, … 256, no cap."""
    head_size = query_BnTd.shape[-1]
    capability = _capability(query_BnTd.device)
    takes_shape = softcap is None and head_size % 8 == 0 and head_size <= 256
    return takes_shape and query_BnTd.dtype != torch.float32 and (capability or (0, 0)) >= (8, 0)


def _all_rows_at_once(call: RowCall) -> Tensor:
    """FlashAttention over the stream [1, T, n, d], told where its rows begin: no mask, and no copy to join rows.

    Keys may have fewer heads than queries. The kernel calls a window of w: w − 1 to the left. The operation is torch's
    own (2.9 to 2.13 alike); its Python door varlen_attn changed in between.
    """
    stream = (_tokens_first(call.query_BnTd), call.key_BkTd, call.value_BkTd)
    q_Tnd, k_Tkd, v_Tkd = (x.squeeze(0).transpose(0, 1) for x in stream)  # x[0] would be copied going back
    bounds, longest = call.rows.bounds(q_Tnd.device), call.rows.longest
    left = -1 if call.window is None else call.window - 1
    output_Tnd, *_kept = torch.ops.aten._flash_attention_forward(
        q_Tnd, k_Tkd, v_Tkd, bounds, bounds, longest, longest, call.dropout, True, False, scale=call.scale,
        window_size_left=left, window_size_right=0,
    )  # fmt: skip
    return output_Tnd[None]


def _tokens_first(query_BnTd: Tensor) -> Tensor:
    """The queries with each token's heads together. FlashAttention's output is laid out as they are: from Phi-3's
    heads-first layout it would be copied back, and both copies kept."""
    heads_first = query_BnTd.stride(2) < query_BnTd.stride(1)
    return query_BnTd.transpose(1, 2).contiguous().transpose(1, 2) if heads_first else query_BnTd


def rows_eager(call: RowCall) -> Tensor:
    """Attention written out, softmax in fp32; returns [B, T, n, d]. Materialises a score per pair within a row."""
    scale = call.query_BnTd.shape[-1] ** -0.5 if call.scale is None else call.scale
    groups = call.query_BnTd.shape[1] // call.key_BkTd.shape[1]
    outputs = []
    for q, k, v in call.each_row():
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = q @ k.transpose(2, 3) * scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        visible = _causal_mask(q.shape[2], call.window, q.device)
        scores = scores.masked_fill(~visible, float("-inf"))
        if call.sinks_n is not None:
            sink = call.sinks_n.to(q.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        if call.sinks_n is not None:
            weights = weights[..., :-1]
        weights = F.dropout(weights, p=call.dropout)
        outputs.append((weights @ v).transpose(1, 2))
        del scores, weights  # not held while the next row's are made
    return _joined(outputs)


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
