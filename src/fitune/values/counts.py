"""Exact counts: every parameter tensor by its shape, parameters in sum, and the FLOPs that training needs.

The estimate divides FLOPs by a rate to predict time; the measurement divides them by time to get utilisation: one
definition for both. A multiply-add counts as two.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fitune.values.choices import trains_embeddings
from fitune.values.machines.hardware import Gpu
from fitune.values.model.model_spec import BlockAttention, Linear, ModelSpec
from fitune.values.plan import Lora, Plan, Precision, Tuning, trains_head
from fitune.values.remembered import remembered, remembered_by


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTensor:
    """``count`` tensors of ``rows`` × ``row_elements``; ``rows`` is the dimension that FSDP2 divides."""

    rows: int
    row_elements: int = 1
    count: int = 1
    in_block: bool
    """In one of the decoder blocks; else embedding, final norm or head, which FSDP2 gathers as the root group."""
    linear: Linear | None = None
    """Set for the matrices of blocks, which a quantiser may pack."""

    @property
    def elements(self) -> int:
        """Elements of one of these weights."""
        return self.rows * self.row_elements

    @property
    def is_matrix(self) -> bool:
        """False for vectors: biases and the scales of norms."""
        return self.row_elements > 1

    @property
    def copies(self) -> int:
        """Matrices of the stack that it is; 1 for a matrix alone."""
        return self.linear.copies if self.linear is not None else 1

    def share(self, parts: int) -> int:
        """Elements of the largest share of one when FSDP2 divides its rows, the last share padded.

        Tensors with fewer rows than shares (fused experts, adapters of a low rank) are divided along the row where
        that comes out even, by fully_shard's ``shard_placement_fn``: with whole rows some ranks would hold nothing.
        """
        if self.rows < parts and self.row_elements % parts == 0:
            return self.elements // parts
        return -(-self.rows // parts) * self.row_elements


@remembered
def base_tensors(model: ModelSpec) -> tuple[ParameterTensor, ...]:
    """All parameters of the model without adapters; their sum is count_parameters(model).total."""
    return (*_block_tensors(model), *_root_tensors(model))


def adapter_tensors(plan: Plan) -> tuple[ParameterTensor, ...]:
    """A: r × in, B: out × r, and DoRA's norm of each of the out rows, for every adapted linear of adapted blocks.

    Of a stack of experts A is r·experts × in and B out × r·experts (PEFT's ParamWrapper).
    """
    if not isinstance(plan.tuning, Lora):
        return ()
    return adapters_of(plan.model, plan.tuning)


@remembered_by("model", "tuning")
def trained_tensors(plan: Plan) -> tuple[ParameterTensor, ...]:
    """All parameters of the model, or under LoRA the adapters and the tables trained whole."""
    if not isinstance(plan.tuning, Lora):
        return base_tensors(plan.model)
    return (*adapter_tensors(plan), *trained_tables(plan.model, plan.tuning))


@remembered_by("model", "tuning")
def trained_in_order(plan: Plan) -> tuple[ParameterTensor, ...]:
    """``trained_tensors`` block by block, as the model holds them; of a traced block the linears first."""
    model, lora = plan.model, plan.tuning
    if isinstance(lora, Lora):
        tables, before = trained_tables(model, lora), int("embed_tokens" in lora.modules_to_save)
        adapted = lora.layers or range(model.num_layers)
        blocks = [tensor for block in adapted for tensor in _adapters(model, lora, (block,))]
    else:
        tables, before = tuple(_root_tensors(model)), 2 if model.learned_positions else 1
        blocks = [tensor for block in range(model.num_layers) for tensor in _block_tensors(model, (block,))]
    return (*tables[:before], *blocks, *tables[before:])


def trained_tables(model: ModelSpec, lora: Lora) -> tuple[ParameterTensor, ...]:
    """Embedding and head where they are trained whole; once where they are one tensor."""
    table = ParameterTensor(rows=model.vocab_size, row_elements=model.hidden_size, in_block=False)
    bias = ParameterTensor(rows=model.vocab_size, in_block=False)
    embedding = (table,) if "embed_tokens" in lora.modules_to_save else ()
    if "lm_head" not in lora.modules_to_save:
        return embedding
    head = () if model.tied_embeddings else (table,)
    return (*embedding, *head, *((bias,) if model.head_bias else ()))


@remembered
def adapters_of(model: ModelSpec, lora: Lora) -> tuple[ParameterTensor, ...]:
    """``adapter_tensors`` by what they depend on alone."""
    return tuple(_adapters(model, lora, lora.layers))


def _adapters(model: ModelSpec, lora: Lora, blocks: tuple[int, ...]) -> Iterator[ParameterTensor]:
    for m, layers in model.counted_linears(blocks):
        if not m.is_target(lora.targets):
            continue
        rank = lora.rank * m.copies
        yield ParameterTensor(rows=rank, row_elements=m.in_features, count=layers, in_block=True)
        yield ParameterTensor(rows=m.out_features, row_elements=rank, count=layers, in_block=True)
        if lora.dora:
            yield ParameterTensor(rows=m.out_features, count=layers, in_block=True)


@remembered
def kind_tensors(model: ModelSpec, kind: int) -> tuple[ParameterTensor, ...]:
    """All parameters of one block of that kind, of a traced model."""
    return tuple(_block_tensors(model, (model.kinds[kind].example,)))


def trained_of_kind(plan: Plan, kind: int) -> tuple[ParameterTensor, ...]:
    """All that trains in one block of that kind, of a traced model."""
    if isinstance(plan.tuning, Lora):
        return adapters_of(plan.model, replace(plan.tuning, layers=(plan.model.kinds[kind].example,)))
    return kind_tensors(plan.model, kind)


def _block_tensors(model: ModelSpec, blocks: tuple[int, ...] = ()) -> Iterator[ParameterTensor]:
    """The tensors of all blocks, or of ``blocks``."""
    layers = len(blocks) or model.num_layers
    for m, count in model.counted_linears(blocks):
        rows, row = (m.copies, m.weights // m.copies) if m.copies > 1 else (m.out_features, m.in_features)
        yield ParameterTensor(rows=rows, row_elements=row, count=count, in_block=True, linear=m)
        if m.bias:
            yield ParameterTensor(rows=m.out_features * m.copies, count=count, in_block=True)
    if model.is_traced:
        numbers = [model.kind_of[block] for block in blocks] or model.kind_of
        for kind, count in Counter(numbers).items():
            yield from (_of_shape(shape, count, in_block=True) for shape in model.kinds[kind].others)
        return
    norms = model.norms_per_block * _vectors(model)
    yield ParameterTensor(rows=model.hidden_size, count=layers * norms, in_block=True)
    for width in _qk_norm_widths(model):
        yield ParameterTensor(rows=width, count=layers * _vectors(model), in_block=True)


def _root_tensors(model: ModelSpec) -> Iterator[ParameterTensor]:
    h, vocabulary = model.hidden_size, model.vocab_size
    yield ParameterTensor(rows=vocabulary, row_elements=h, in_block=False)
    if model.learned_positions:
        yield ParameterTensor(rows=model.learned_positions, row_elements=h, in_block=False)
    if model.is_traced:
        yield from (_of_shape(shape, 1, in_block=False) for shape in model.roots)
    else:
        yield ParameterTensor(rows=h, count=_vectors(model), in_block=False)
    if not model.tied_embeddings:
        yield ParameterTensor(rows=vocabulary, row_elements=h, in_block=False)
    if model.head_bias:
        yield ParameterTensor(rows=vocabulary, in_block=False)


def _of_shape(shape: tuple[int, ...], count: int, *, in_block: bool) -> ParameterTensor:
    rows = shape[0] if shape else 1
    return ParameterTensor(rows=rows, row_elements=math.prod(shape[1:]), count=count, in_block=in_block)


def _vectors(model: ModelSpec) -> int:
    """RMSNorm has a weight, LayerNorm a weight and a bias."""
    return 1 if model.norm_type == "rms" else 2


def _qk_norm_widths(model: ModelSpec) -> tuple[int, ...]:
    match model.qk_norm:
        case "none":
            return ()
        case "head":
            return (model.head_dim, model.head_dim)
        case "full":
            return (model.q_dim, model.kv_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Exact parameters by component; ``active`` is what one token goes through."""

    attention: int
    mlp: int
    experts: int
    router: int
    norms: int
    embeddings: int
    head: int
    active: int

    @property
    def total(self) -> int:
        """All parameters, whether or not a token goes through them."""
        return (
            self.attention + self.mlp + self.experts + self.router + self.norms + self.embeddings + self.head
        )


@remembered
def count_parameters(model: ModelSpec) -> ParameterCounts:
    """Parameters by component: blocks × (linears + norms) + embeddings + final norm + head.

    A tied head counts once, as embeddings. ``norms`` are all parameters that are in no linear and no table. ``active``
    leaves out the experts a token does not visit.
    """
    linears = list(model.counted_linears())
    parts = {
        part: sum(count * m.parameters for m, count in linears if m.part == part)
        for part in ("attention", "mlp", "experts", "router")
    }
    embeddings = (model.vocab_size + model.learned_positions) * model.hidden_size
    head = 0 if model.tied_embeddings else model.vocab_size * model.hidden_size
    head += model.vocab_size if model.head_bias else 0
    # Copies of a linear are the experts: a token does not go through those that were not chosen.
    idle = sum(count * (m.parameters // m.copies) * (m.copies - m.active_copies) for m, count in linears)
    total = sum(t.elements * t.count for t in base_tensors(model))
    norms = total - sum(parts.values()) - embeddings - head
    return ParameterCounts(**parts, norms=norms, embeddings=embeddings, head=head, active=total - idle)


@remembered
def lora_parameters(model: ModelSpec, lora: Lora) -> int:
    """Trainable parameters of LoRA: Σ rank · (in + out), + out with DoRA, over the adapted linears of adapted blocks.

    A is rank × in, B is out × rank (Hu et al. 2021, arXiv 2106.09685, section 4.1; of DoRA's norms Liu et al. 2024,
    arXiv 2402.09353, section 4.1); no bias is trained. Each expert of a stack has a pair of its own.
    """
    return sum(t.elements * t.count for t in adapters_of(model, lora))


@remembered
def adapted_blocks(model: ModelSpec, lora: Lora) -> tuple[int, ...]:
    """Numbers of the blocks with adapters, ascending: some of a hybrid's blocks may have no linear that is a target."""
    return tuple(
        index
        for index in range(model.num_layers)
        if lora.adapts(index) and any(m.is_target(lora.targets) for m in model.linears_of(index))
    )


def untouched_blocks(model: ModelSpec, tuning: Tuning) -> int:
    """Number of blocks, counted from the first, that backward does not reach: nothing before the next one trains."""
    if not isinstance(tuning, Lora) or trains_embeddings(tuning):
        return 0
    return min(adapted_blocks(model, tuning), default=0)


def model_flops(
    model: ModelSpec, tuning: Tuning, *, row_lengths: Sequence[int], supervised_tokens: int
) -> float:
    """One forward and backward over rows of these lengths. Work done twice by recompute is not counted.

    Per weight and token: 2 forward, 2 for the gradient of the input, 2 for the gradient of the weight where
    it is trained (Kaplan et al. 2020, arXiv 2001.08361, section 2.1; Chowdhery et al. 2022, arXiv 2204.02311,
    appendix B). A row of n tokens attends to the pairs that each block sees (BlockAttention), none across rows. Only
    supervised tokens pass the head. Blocks that no gradient reaches go forward only.
    """
    forward_only = untouched_blocks(model, tuning)
    kinds = Counter((model.attention_of(block), block < forward_only) for block in range(model.num_layers))
    attended = sum(
        count * attention_flops_per_pair(kind) / (3 if one_way else 1) * sum(map(kind.pairs, row_lengths))
        for (kind, one_way), count in kinds.items()
    )
    products = sum(row_lengths) * _linear_flops_per_token(model, tuning)
    return products + attended + supervised_tokens * head_flops_per_token(model, tuning)


@remembered
def _linear_flops_per_token(model: ModelSpec, tuning: Tuning) -> float:
    """Forward and backward of the linears of all blocks, with their adapters; forward alone where no gradient comes."""
    lora, forward_only = isinstance(tuning, Lora), untouched_blocks(model, tuning)
    flops = 0.0
    for block in range(model.num_layers):
        for m in model.linears_of(block):
            each = 2.0 if block < forward_only else 4.0 if lora else 6.0
            flops += each * m.in_features * m.out_features * m.active_copies
            if isinstance(tuning, Lora) and tuning.adapts(block) and m.is_target(tuning.targets):
                flops += 6.0 * tuning.rank * (m.in_features + m.out_features) * m.active_copies
    return flops


def attention_flops_per_pair(attention: BlockAttention) -> float:
    """Scores and weighted values, forward (2 + 2 per head element) and twice that backward, in one block."""
    return 12.0 * attention.width


def head_flops_per_token(model: ModelSpec, tuning: Tuning) -> float:
    """FLOPs of the output head for a token, forward and backward."""
    weights = model.hidden_size * model.vocab_size
    return (6.0 if trains_head(tuning) else 4.0) * weights


def peak_flops(gpu: Gpu, precision: Precision) -> float:
    """Datasheet FLOP/s of one device in the compute type of ``precision``; 0 when it cannot."""
    match precision:
        case Precision.FP32:
            return gpu.fp32_flops
        case Precision.FP16:
            return gpu.fp16_flops
        case Precision.BF16 | Precision.BF16_MASTER:
            return gpu.bf16_flops


def has_tf32(gpu: Gpu, precision: Precision) -> bool:
    """True if there are products that TF32 changes: of fp32 numbers, on Ampere or newer."""
    return precision is Precision.FP32 and gpu.capability >= (8, 0)


def achieved_mfu(plan: Plan, row_lengths: Sequence[int], supervised_tokens: int, *, seconds: float) -> float:
    """Model FLOPs utilisation: the FLOPs the mathematics needs (recompute is not counted)
    over what the device could have done in the same time (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    0 when the device's peak is not known: a processor's is a careful guess, which many exceed.
    """
    peak = peak_flops(plan.hardware.gpu, plan.precision) * plan.hardware.num_gpus
    if peak <= 0 or seconds <= 0 or plan.hardware.gpu.is_cpu:
        return 0.0
    flops = model_flops(plan.model, plan.tuning, row_lengths=row_lengths, supervised_tokens=supervised_tokens)
    return flops / (seconds * peak)


def rows_of_share(rows: int, shares: int, rank: int) -> tuple[int, int]:
    """The first row of ``rank``'s share and the row behind its last: shares of ⌈rows / shares⌉, the last ones smaller
    or empty, as torch divides (``Tensor.chunk``, FSDP2)."""
    size = -(-rows // shares)
    return min(rank * size, rows), min((rank + 1) * size, rows)
