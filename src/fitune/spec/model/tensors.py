"""Every parameter tensor by its shape: those of the model, of its adapters, and those that train."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fitune.spec.model.model_spec import Linear, ModelSpec
from fitune.spec.plan import Lora, Plan
from fitune.spec.remembered import remembered, remembered_by


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
