"""Bytes of answering: weights, keys and values, and what lives for a moment, while prompts are read and tokens written.

The transformers engine (score/engines/continuous.py) keeps keys and values in rectangles [rows, heads, width, d],
grown by a copy for every CACHE_ROOM tokens; vLLM keeps pages of a pool that it fills the device with. Formulas hold for
transformers 5.23 and say what its tensors are; tests count them.

Symbols: B rows, T tokens of the longest prompt, W columns of the cache, t = B·T, e bytes of an element, h hidden,
f intermediate, q and k widths of queries and keys, L blocks.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace

from fitune.estimate.blocks.key_values import (
    elements_of_blocks,
    elements_per_token,
    states_of_row,
    windowed_tokens,
)
from fitune.estimate.overhead import (
    allocator_slack_bytes,
    outside_terms,
    usable_bytes,
)
from fitune.units import GIB
from fitune.values.answering import CACHE_ROOM, Answering, Questions
from fitune.values.counts import count_parameters
from fitune.values.model.architectures import caches_latent
from fitune.values.model.traits import ACTIVATIONS

FP32, ID = 4, 8
"""Bytes of a number in fp32, and of a token's id, position or mask."""
MOST_SEQUENCES = 256
"""Rows that vLLM answers at once (max_num_seqs of its LLM class; 1,024 on the largest cards of late versions)."""
BATCHED_TOKENS = 8192
"""Tokens that vLLM reads in one step (max_num_batched_tokens of its LLM class)."""
VLLM_SHARE = 0.9
"""Share of a device that vLLM fills (gpu_memory_utilization)."""
GRAPHS_BYTES = GIB
"""CUDA graphs of vLLM and what NCCL keeps. Not measured by us."""
CPU_POOL_BYTES = 4 * GIB
"""Keys and values of vLLM on a processor (VLLM_CPU_KVCACHE_SPACE)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweringMemory:
    """Bytes by term on one device while prompts are read, and while the last token of the batch is written."""

    reading: dict[str, int]
    writing: dict[str, int]
    outside: dict[str, int]
    """Bytes that are in no tensor: contexts, workspaces."""
    entering: int
    """More than the peak when rows end early and others enter: their keys and values are joined to the batch's."""
    usable_bytes: int

    @property
    def tensor_peak_bytes(self) -> int:
        """The larger of the two moments, in tensors alone."""
        return max(sum(self.reading.values()), sum(self.writing.values()))

    @property
    def peak_bytes(self) -> int:
        """Tensors at their peak, rows that enter, and what is in no tensor."""
        return self.tensor_peak_bytes + self.entering + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """True if the peak is within the usable bytes."""
        return self.peak_bytes <= self.usable_bytes


def memory_of_answering(answering: Answering, questions: Questions) -> AnsweringMemory:
    """Bytes on one device; every answer is taken to be as long as it may be."""
    return (
        _of_vllm(answering, questions)
        if answering.engine == "vllm"
        else _of_transformers(answering, questions)
    )


def rows_that_fit(answering: Answering, questions: Questions, *, most: int) -> int:
    """Rows of transformers at once, at most ``most``, of as many questions as there may be; 0 where not even one
    fits."""
    endless = replace(questions, rows=most + 1)

    def is_too_much(rows: int) -> bool:
        """True if ``rows`` at once do not fit in memory."""
        return not memory_of_answering(replace(answering, batch_size=rows), endless).fits

    return bisect_left(range(1, most + 1), True, key=is_too_much) if is_too_much(most) else most


def weights_bytes(answering: Answering) -> int:
    """P · e on one device: matrices are divided over ``devices``."""
    return -(-count_parameters(answering.model).total * _e(answering) // answering.devices)


def adapter_bytes(answering: Answering) -> int:
    """Bytes of an adapter that is not merged, in the type of the model's elements."""
    return answering.adapter.elements * _e(answering)


def kv_bytes(answering: Answering, *, rows: int, width: int) -> int:
    """B · W · e · Σ keys and values of a block, + recurrent states in fp32."""
    elements = rows * width * elements_per_token(answering.model)
    return elements * _e(answering) + rows * states_of_row(answering.model) * FP32


def _e(answering: Answering) -> int:
    return answering.precision.compute_bytes


def _of_transformers(answering: Answering, questions: Questions) -> AnsweringMemory:
    rows, new = min(answering.batch_size, max(1, questions.rows)), questions.new_tokens
    prompt = questions.longest_prompt
    weights = {"weights": weights_bytes(answering), "adapter": adapter_bytes(answering)}
    width = prompt + new - 1
    moving = _moving(answering, rows=rows, tokens=prompt, width=prompt)
    reading = {**weights, "keys and values": kv_bytes(answering, rows=rows, width=prompt), **moving}
    step = _moving(answering, rows=rows, tokens=1, width=width)
    before = prompt + (new - 2) // CACHE_ROOM * CACHE_ROOM if new > 1 else prompt
    grown = max(sum(step.values()), _growing(answering, rows=rows, before=before, width=width))
    writing = {**weights, "keys and values": kv_bytes(answering, rows=rows, width=width)}
    writing |= {"activations": grown - step["logits"], "logits": step["logits"]}
    peak_moves = max(sum(moving.values()), grown)
    slack = allocator_slack_bytes(answering.hardware, moving_bytes=peak_moves + writing["keys and values"])
    return AnsweringMemory(
        reading={name: size for name, size in reading.items() if size},
        writing={name: size for name, size in writing.items() if size},
        outside=outside_terms(answering.hardware, slack_bytes=slack),
        entering=_entering(answering, questions, rows=rows, width=width),
        usable_bytes=usable_bytes(answering.hardware),
    )


def _moving(answering: Answering, *, rows: int, tokens: int, width: int) -> dict[str, int]:
    """Beside weights, keys and values at the worst moment of a pass over ``tokens`` of each row: in a block, or at the
    logits behind all of them."""
    e, h, t = _e(answering), answering.model.hidden_size, rows * tokens
    along = ID * (rows * width + 2 * t if tokens == 1 else 3 * t)  # mask of columns, ids, positions
    block = _in_block(answering, rows=rows, tokens=tokens, width=width)
    logits = rows * answering.model.vocab_size
    made = logits * e * (2 if answering.model.caps_logits else 1)
    on_gpu = not answering.hardware.gpu.is_cpu
    chosen = logits * (
        e + (FP32 if e < FP32 else 0) + (FP32 if on_gpu else 0)
    )  # in fp32, and logsumexp's own copy
    at_head = max(made + t * e * h, chosen)
    if block >= at_head:
        return {"activations": block + along, "logits": 0}
    return {"activations": at_head - max(made, chosen) + along, "logits": max(made, chosen)}


def _in_block(answering: Answering, *, rows: int, tokens: int, width: int) -> int:
    """The worst of attention and MLP, + masks and rotary tables: t·e·2d."""
    model, e, t = answering.model, _e(answering), rows * tokens
    turned = 0 if model.learned_positions else 2 * round(model.head_dim * model.rotary_share)
    attention = _in_attention(answering, rows=rows, tokens=tokens, width=width)
    behind = _returned_scores(answering, rows=rows, tokens=tokens, width=width)
    worst = max(attention, behind + max(_in_mlp(answering, tokens=t), _in_norm(answering, t)))
    return worst + t * e * turned + _masks(answering, rows=rows, tokens=tokens, width=width)


def _masks(answering: Answering, *, rows: int, tokens: int, width: int) -> int:
    """B · T · W for each kind of attention: a byte where it is fused, e where it is written out (capped scores, and
    Falcon's own)."""
    model = answering.model
    kinds = len({model.has_window(layer) for layer in range(model.num_layers)})
    is_written_out = model.caps_scores or model.masks_whole_stream
    return rows * tokens * width * kinds * (_e(answering) if is_written_out else 1)


def _returned_scores(answering: Answering, *, rows: int, tokens: int, width: int) -> int:
    """Scores that a written-out attention returns, which its block holds to its end; of Falcon's the block before's,
    too."""
    model = answering.model
    blocks = min(2, model.num_layers) if model.masks_whole_stream else int(model.caps_scores)
    return blocks * rows * model.num_heads * tokens * width * _e(answering)


def _in_attention(answering: Answering, *, rows: int, tokens: int, width: int) -> int:
    """t·e·(3h + max(4q + 2k, 2q + 5k)) while queries and keys turn, less the block's own keys and values, which are
    not yet cached; t·e·(3h + 2q) + 2·B·W·e·q while grouped keys are repeated for a mask; scores where written out.

    3h: the embeddings, which the model's forward holds to its end, the residual and the norm's output. A step of one
    token needs no repeated keys (transformers packs its queries), but where scores are written out.
    """
    model, e, t = answering.model, _e(answering), rows * tokens
    h, q, k = model.hidden_size, model.q_dim, model.kv_dim
    held = 3 if model.num_layers > 1 else 2
    own = 2 * k if tokens > 1 else 0
    fused = q + 2 * k if sum(m.part == "attention" for m in model.linears) == 2 else 0  # its views hold it
    turning = 2 * q + k if model.learned_positions else max(4 * q + 2 * k, 2 * q + 5 * k)
    grouped = model.num_heads != model.num_kv_heads
    repeats = grouped and not model.is_multi_query and (tokens > 1 or model.caps_scores)
    repeated = 2 * rows * width * q * e if repeats else 0
    scores = rows * model.num_heads * tokens * width
    if model.masks_whole_stream:  # masked, their softmax, and the block before returned its own
        eager = scores * e * (4 if model.num_layers > 1 else 3)
    else:
        eager = 2 * scores * FP32 + t * e * q if model.caps_scores else 0
    at_scores = t * e * (held * h + (1 if eager else 2) * q + fused) + repeated + eager
    return max(t * e * (held * h + turning - own), at_scores)


def _in_mlp(answering: Answering, *, tokens: int) -> int:
    """t·e·(4h + n·f): embeddings, the block's input, the residual, the norm's output; n tensors of the MLP's width,
    3 of a gated one, 4 with fused gate and up or with an adapter. t·e·(5h + f) behind it, 7h with an adapter.

    Of a mixture S = t · experts of a token: S·e·(h + 4f), then 4·S·e·h while the outputs are weighed and put back.
    """
    model, e = answering.model, _e(answering)
    h, f = model.hidden_size, model.intermediate_size
    held = (4 if model.num_layers > 1 else 3) * h
    adapted = answering.adapter.on_mlp
    if model.num_experts or model.is_traced:
        routed = tokens * max(1, model.experts_per_token)
        routes = routed * 5 * ID + tokens * model.num_experts * FP32 if model.num_experts else 0
        weighed = FP32 if model.weighs_experts_in_fp32 else e
        put_back = routed * h * (2 * e + 2 * weighed)
        return tokens * e * held + max(routed * e * (h + 4 * f), put_back) + routes
    activation = ACTIVATIONS[model.activation]
    if model.mlp_type == "plain":
        width = max(2 + adapted, activation.forward)
    elif model.fuses_gate_and_up:
        width = 6 if adapted else 4
    else:
        width = max(3 + adapted, activation.forward)
    behind = held + h * (3 if adapted else 1) + f
    return tokens * e * max(held + width * f, behind)


def _in_norm(answering: Answering, tokens: int) -> int:
    """RMSNorm in 16 bit: t·h·(3e + 8), + 4 where its weight multiplies in fp32; else t·5e·h, t·6e·h where norms stand
    behind attention and MLP, too."""
    e, h, model = _e(answering), answering.model.hidden_size, answering.model
    if model.norm_type == "rms" and e < FP32:
        return tokens * h * (3 * e + FP32 * (3 if model.scales_norms_in_fp32 else 2))
    return tokens * h * (6 if model.norms_per_block > 2 else 5) * e


def _growing(answering: Answering, *, rows: int, before: int, width: int) -> int:
    """Beside the grown cache, the old tensor of one block while it is copied to the new one: B·before·e·k, where
    ``before`` are the columns that it had."""
    e, model = _e(answering), answering.model
    largest = max(elements_of_blocks(model)) // 2
    few = rows * (3 * model.hidden_size + 2 * model.q_dim + model.kv_dim)
    return rows * before * largest * e + few * e + ID * rows * (width + 2)


def _entering(answering: Answering, questions: Questions, *, rows: int, width: int) -> int:
    """More than the peak when a quarter of the rows leaves early and others enter: 0 where none waits, or none stays.

    They take the places of those that left; meanwhile their own cache is alive, and where their prompts are wider than
    all there is, a second copy of one block.
    """
    if questions.rows <= rows or rows == 1:
        return 0
    quarter = -(-rows // 4)
    largest = max(elements_of_blocks(answering.model)) // 2
    own = kv_bytes(answering, rows=quarter, width=questions.longest_prompt)
    return own + rows * width * largest * _e(answering)


def _of_vllm(answering: Answering, questions: Questions) -> AnsweringMemory:
    """Weights and activations of its largest step; all else of its share of the device is the pool."""
    gpu, devices = answering.hardware.gpu, answering.devices
    weights = {"weights": weights_bytes(answering), "adapter": adapter_bytes(answering)}
    e, model = _e(answering), answering.model
    sequences = min(MOST_SEQUENCES, max(1, questions.rows))
    wide = max(3 * model.intermediate_size * max(1, model.experts_per_token), model.q_dim + 2 * model.kv_dim)
    activations = BATCHED_TOKENS * e * (4 * model.hidden_size + -(-wide // devices))
    logits = sequences * model.vocab_size * (e + 2 * FP32)
    outside = outside_terms(answering.hardware, slack_bytes=0, ranks=devices)
    outside |= {} if gpu.is_cpu else {"CUDA graphs": GRAPHS_BYTES}
    taken = sum(weights.values()) + activations + logits + sum(outside.values())
    room = usable_bytes(answering.hardware) if gpu.is_cpu else round(VLLM_SHARE * gpu.memory_bytes)
    needed = pooled_bytes(answering, questions.longest_prompt + questions.new_tokens)
    pool = max(needed, min(CPU_POOL_BYTES, room - taken) if gpu.is_cpu else room - taken)
    terms = {name: size for name, size in weights.items() if size}
    outside = {name: size for name, size in outside.items() if size}
    terms |= {"keys and values": pool, "activations": activations, "logits": logits}
    return AnsweringMemory(
        reading=terms, writing=terms, outside=outside, entering=0, usable_bytes=max(room, 0)
    )


def pooled_bytes(answering: Answering, tokens: int) -> int:
    """Keys and values of one row of ``tokens`` on one device of vLLM's: windows keep what they see.

    One latent vector for all heads (MLA) is on every device whole.
    """
    e, model = _e(answering), answering.model
    latent = caches_latent(model)
    per_block = zip(elements_of_blocks(model, latent=latent), windowed_tokens(model, tokens), strict=True)
    shares = 1 if latent else max(1, min(answering.devices, model.num_kv_heads))
    row = sum(elements * kept for elements, kept in per_block) * e + states_of_row(model) * FP32
    return -(-row // shares)


def rows_at_once(answering: Answering, questions: Questions, memory: AnsweringMemory) -> int:
    """Rows that are written together: the batch; of vLLM those whose keys and values the pool holds."""
    rows = max(1, questions.rows)
    if answering.engine == "transformers":
        return min(answering.batch_size, rows)
    row = pooled_bytes(answering, round(questions.mean_prompt) + questions.new_tokens)
    return max(1, min(rows, MOST_SEQUENCES, memory.writing["keys and values"] // max(1, row)))
