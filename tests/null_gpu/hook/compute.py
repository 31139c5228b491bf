"""Operations of the null GPU whose tensors are small are computed by the CPU, on the same memory.

The CUDA operation runs first, with all that it allocates and launches; then the CPU's works on views of the same bytes
and writes the results. So a tiny model has right losses, and in a large one ids, labels, masks and scalars are right
while products stay what they were. A dispatch mode of every thread that imports torch; autograd's threads inherit it.
NULLCUDA_COMPUTE: bytes of an operation's arguments and results up to which it is computed, or "all".
"""

import atexit
import collections
import ctypes
import math
import os
import sys
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NATIVE = {
    "record_stream",
    "set_",
    "resize_",
    "_pin_memory",
    "is_pinned",
    "detach",
    "alias",
    "view",
    "t",
    "expand",
    "as_strided",
    "_resize_output_",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
}
COUNTED_FIRST = {
    "nonzero",
    "masked_select",
    "masked_scatter_backward",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "repeat_interleave",
    "equal",
    "is_nonzero",
    "histc",
    "isin",
}
"""Results whose shape or value a kernel would have to say: the CPU is asked first."""
COPIES = {"copy_", "_to_copy", "_foreach_copy_"}
LATE = os.environ.get("NULLCUDA_LATE_COPIES", "0") != "0"
_lib = ctypes.CDLL(os.environ["NULLCUDA_LIB"])
left_out = collections.Counter()


def cpu_view(x):
    """The bytes of a tensor on the card, as a CPU tensor."""
    storage = x.untyped_storage()
    size = storage.nbytes()
    if size == 0 or x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    raw = torch.frombuffer((ctypes.c_char * size).from_address(storage.data_ptr()), dtype=torch.uint8)
    raw = raw[: size // x.element_size() * x.element_size()]
    return raw.view(x.dtype).as_strided(x.shape, x.stride(), x.storage_offset())


def _own_work():
    """Launches and copies of this thread so far."""
    launches, copies = ctypes.c_long(), ctypes.c_long()
    _lib.nullcuda_own(ctypes.byref(launches), ctypes.byref(copies))
    return launches.value, copies.value


def _was_copied(before):
    """The runtime copied, perhaps later, what a kernel need not change."""
    launches, copies = _own_work()
    return launches == before[0] and copies > before[1]


def _on_cpu(value):
    if isinstance(value, Tensor):
        return cpu_view(value) if value.is_cuda else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, torch.Generator):
        return None
    return value


def _bytes(values):
    return sum(v.numel() * v.element_size() for v in values)


class Computed(TorchDispatchMode):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        leaves = tree_leaves((args, kwargs))
        given = [x for x in leaves if isinstance(x, Tensor)]
        on_card = any(x.is_cuda for x in given) or any(
            isinstance(x, torch.device) and x.type == "cuda" for x in leaves
        )
        name = func._schema.name.split("::")[1]
        if (
            not on_card
            or name in NATIVE
            or func.namespace in ("c10d", "_c10d_functional", "prim")
            or any(type(x) not in (Tensor, torch.nn.Parameter) for x in given)
        ):
            return func(*args, **kwargs)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            args = (args[0], self._positions(args[1]), *args[2:])
        size = _bytes(given)
        if size > self.limit:
            return func(*args, **kwargs)
        if name in COUNTED_FIRST:
            found = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
            device = next(x.device for x in given if x.is_cuda)
            return tree_map(lambda r: _moved(r, device) if isinstance(r, Tensor) else r, found)
        before = _own_work()
        result = func(*args, **kwargs)
        if name in COPIES and LATE and _was_copied(before):
            return result
        made = [r for r in tree_leaves(result) if isinstance(r, Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        shares = [r.untyped_storage().data_ptr() in storages and r.numel() > 0 for r in made]
        if made and all(shares) and not func._schema.is_mutable and func.namespace != "fsdp":
            return result  # a view
        if size + _bytes(made) > self.limit:
            return result
        try:
            right = (SPECIAL.get(name) or func)(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        except (NotImplementedError, RuntimeError, TypeError) as error:  # the CPU has no such operation
            left_out[f"{func}: {str(error).splitlines()[0][:120]}"] += 1
            return result
        if not made:
            return right
        for to, shared, value in zip(
            made, shares, [r for r in tree_leaves(right) if isinstance(r, Tensor)], strict=False
        ):
            if not shared and value is not None and value.shape == to.shape:
                (cpu_view(to) if to.is_cuda else to).copy_(value)
        return result

    def _positions(self, indices):
        """Small masks as positions: a kernel would have to count them, for tensors of any size."""
        found = []
        for i in indices:
            small = (
                i is not None
                and i.dtype in (torch.bool, torch.uint8)
                and i.is_cuda
                and _bytes([i]) <= self.limit
            )
            found += [_moved(p, i.device) for p in torch.nonzero(cpu_view(i)).unbind(1)] if small else [i]
        return found


def _moved(r, device):
    to = torch.empty(r.shape, dtype=r.dtype, device=device)
    if r.numel():
        cpu_view(to).copy_(r)
    return to


# Attention has no CPU operation of the same name, but one that does the same and rounds as runs on the CPU do: written
# out in fp32, bf16 losses were 3e-3 from theirs. Rows are [T, H, D] here.
def _settings(q, k, causal, scale, window, bias):
    """Arguments of the CPU's operation after the dropout; the mask is causal from the end, as on the card."""
    tq, tk = q.shape[0], k.shape[0]
    if bias is None and (window is None or window < 0) and (tq == tk or not causal):
        return (causal,), {"scale": scale}
    behind = torch.arange(tq)[:, None] + (tk - tq) - torch.arange(tk)[None]
    hidden = (behind < 0) & causal
    if window is not None and window >= 0:
        hidden |= behind > window
    mask = torch.zeros(tq, tk, dtype=q.dtype).masked_fill(hidden, -math.inf)
    return (False,), {"scale": scale, "attn_mask": mask if bias is None else (mask + bias)[None]}


def _forward_on_cpu(rows, words, named):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*rows, 0.0, *words, **named)


def _row_forward(q, k, v, causal, scale, window=None, bias=None):
    words, named = _settings(q, k, causal, scale, window, bias)
    out, lse = _forward_on_cpu([x.transpose(0, 1)[None] for x in (q, k, v)], words, named)
    return out[0].transpose(0, 1), lse[0]


def _row_backward(go, q, k, v, o, causal, scale, window=None, bias=None):
    words, named = _settings(q, k, causal, scale, window, bias)
    go, q, k, v, o = (x.transpose(0, 1)[None] for x in (go, q, k, v, o))
    lse = _forward_on_cpu((q, k, v), words, named)[1]
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        go, q, k, v, o, lse, 0.0, *words, **named
    )
    return tuple(g[0].transpose(0, 1) for g in grads)


def _rows(query, key, cum_q, cum_k):
    if cum_q is None:  # [B, T, H, D]
        return [(b, b) for b in range(len(query))]
    q, k = cum_q.tolist(), cum_k.tolist()
    return [(slice(*a), slice(*c)) for a, c in zip(pairwise(q), pairwise(k), strict=True)]


def _flash_forward(
    query,
    key,
    value,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    debug,
    *,
    scale=None,
    window_size_left=None,
    **_,
):
    out = torch.zeros_like(query)
    for i, j in _rows(query, key, cum_q, cum_k):
        out[i] = _row_forward(
            query[i], key[j], value[j], causal, scale or query.shape[-1] ** -0.5, window_size_left
        )[0]
    return (out,)


def _flash_backward(
    go,
    query,
    key,
    value,
    out,
    lse,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    causal,
    *_,
    scale=None,
    window_size_left=None,
    **__,
):
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for i, j in _rows(query, key, cum_q, cum_k):
        dq, dk, dv = _row_backward(
            go[i],
            query[i],
            key[j],
            value[j],
            out[i],
            causal,
            scale or query.shape[-1] ** -0.5,
            window_size_left,
        )
        grads[0][i], grads[1][j], grads[2][j] = dq, dk, dv
    return tuple(grads)


def _batch(row, tensors, bias, causal, scale):
    """``row`` for every entry of tensors [B, H, T, D]."""
    heads = tensors[0].shape[1]
    found = [
        row(
            *(x[b].transpose(0, 1) for x in tensors),
            causal,
            scale or tensors[0].shape[-1] ** -0.5,
            None,
            None if bias is None else bias[b].expand(heads, -1, -1),
        )
        for b in range(len(tensors[0]))
    ]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def _efficient_forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    out, lse = _batch(_row_forward, (q, k, v), bias, causal, scale)
    return out.transpose(1, 2), lse


def _efficient_backward(
    go, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale=None
):
    return tuple(g.transpose(1, 2) for g in _batch(_row_backward, (go, q, k, v, out), bias, causal, scale))


def _sdpa_flash_forward(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    return _efficient_forward(q, k, v, None, True, dropout, causal, scale=scale)


def _sdpa_flash_backward(go, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, *_, scale=None):
    return _efficient_backward(go, q, k, v, None, out, lse, None, None, dropout, None, causal, scale=scale)


SPECIAL = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _sdpa_flash_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_flash_backward,
}


def begin():
    words = os.environ["NULLCUDA_COMPUTE"]
    Computed(math.inf if words == "all" else float(words)).__enter__()
    if os.environ.get("NULLCUDA_TRACE"):
        atexit.register(
            lambda: [print("not computed:", n, what, file=sys.stderr) for what, n in left_out.most_common()]
        )
