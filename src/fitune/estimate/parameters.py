"""Every parameter tensor: its bytes whole, packed and as one rank's share; weights, adapters and gradients in sum."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fitune.spec.counts import adapted_blocks, count_parameters, lora_parameters
from fitune.spec.model.model_spec import Linear, ModelSpec
from fitune.spec.plan import Ddp, Dense, Lora, Plan, Quantiser, Single, Zero, base_of
from fitune.spec.quantisers import is_packed
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
    if not isinstance(plan.tuning, Lora):
        return base_tensors(plan.model)
    return (*adapter_tensors(plan), *trained_tables(plan.model, plan.tuning))


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
    return tuple(_adapters(model, lora))


def _adapters(model: ModelSpec, lora: Lora) -> Iterator[ParameterTensor]:
    for m, layers in model.counted_linears(lora.layers):
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


def _block_tensors(model: ModelSpec, blocks: tuple[int, ...] = ()) -> Iterator[ParameterTensor]:
    """The tensors of all blocks, or of ``blocks``."""
    layers = model.num_layers
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


def stored_bytes(weights: int, base: Dense | Quantiser, *, element_bytes: int, copies: int = 1) -> int:
    """One matrix, or a stack of ``copies`` with so many weights in all, as the device holds it."""
    if isinstance(base, Dense):
        return weights * element_bytes
    divided = base.scale_bytes(weights // copies, element_bytes=element_bytes) - base.table_bytes()
    words = packed_bytes(weights, base, element_bytes=element_bytes, copies=copies)
    return words + copies * divided + base.table_bytes(copies=copies)


def packed_bytes(weights: int, base: Dense | Quantiser, *, element_bytes: int, copies: int = 1) -> int:
    """Bytes of ``weights`` as ``base`` packs them, ``copies`` of a matrix, without scales."""
    return (
        weights * element_bytes if isinstance(base, Dense) else copies * base.packed_bytes(weights // copies)
    )


def dequantisation_workspace_bytes(linear: Linear, *, element_bytes: int) -> int:
    """e·out·in·copies: the weight in the compute type while it is multiplied, forward and backward alike.

    Nothing of it is kept; the largest decides (bitsandbytes MatMul4Bit; hqq dequantises the same way). A stack of
    experts is made whole at once, for one grouped product (models/experts.py).
    """
    return linear.weights * element_bytes


def num_ranks(plan: Plan) -> int:
    """Processes that train together, one per device."""
    match plan.sharding:
        case Single():
            return 1
        case Ddp() | Zero():
            return plan.hardware.num_gpus


def num_shares(plan: Plan) -> int:
    """Parts into which states are divided: all ranks, or those of one node when hybrid."""
    match plan.sharding:
        case Single() | Ddp():
            return 1
        case Zero(hybrid=hybrid):
            return plan.hardware.gpus_per_node if hybrid else plan.hardware.num_gpus


def uses_fsdp(plan: Plan) -> bool:
    return isinstance(plan.sharding, Zero) and plan.sharding.backend == "fsdp"


def uses_deepspeed(plan: Plan) -> bool:
    return isinstance(plan.sharding, Zero) and plan.sharding.backend == "deepspeed"


def zero_stage(plan: Plan) -> int:
    """0 without ZeRO."""
    return plan.sharding.stage if isinstance(plan.sharding, Zero) else 0


def weights_are_divided(plan: Plan) -> bool:
    """Between two steps: by FSDP2 at every stage, by DeepSpeed at stage 3."""
    return uses_fsdp(plan) or zero_stage(plan) == 3


def accumulates_whole(plan: Plan) -> bool:
    """FSDP2's stage 1 with several micro-batches: whole gradients add up on whole weights until the last one.

    With a single micro-batch it does what stage 2 does.
    """
    return uses_fsdp(plan) and zero_stage(plan) == 1 and plan.batch.accumulation > 1


def gradients_are_divided(plan: Plan) -> bool:
    """True if a block's gradients are divided as soon as they exist."""
    return zero_stage(plan) >= 2 or (uses_fsdp(plan) and not accumulates_whole(plan))


def reduce_width(plan: Plan) -> int:
    """Bytes of an element while FSDP2 sums it: 4 when the optimizer works in fp32, else the compute type's."""
    return 4 if plan.precision.has_master else plan.precision.compute_bytes


def share_elements(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Elements of the largest share, padding included.

    FSDP2 divides the rows of every tensor: Σ ⌈rows / N⌉ · row (fully_shard, Shard(0)). DeepSpeed divides every
    tensor's elements at stage 3, Σ ⌈n / N⌉ (partition_parameters.py), and one flat buffer of all before: ⌈Σ n / N⌉.
    """
    parts = num_shares(plan)
    if parts == 1:
        return sum(t.elements * t.count for t in tensors)
    if uses_fsdp(plan):
        return sum(t.share(parts) * t.count for t in tensors)
    if zero_stage(plan) == 3:
        return sum(-(-t.elements // parts) * t.count for t in tensors)
    return -(-sum(t.elements * t.count for t in tensors) // parts)


@remembered_by("model", "tuning", "sharding", "hardware")
def trained_share(plan: Plan) -> int:
    """Trained elements whose masters and optimizer states one rank holds and steps."""
    return share_elements(trained_tensors(plan), plan)


def base_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Whole tensors of the base as they are stored: packed where quantised, else in the compute type."""
    base, e = base_of(plan), plan.precision.compute_bytes
    return sum(
        t.count * stored_bytes(t.elements, _stored_as(t, base), element_bytes=e, copies=t.copies)
        for t in tensors
    )


def gathered_bytes(tensors: Iterable[ParameterTensor], plan: Plan) -> int:
    """Bytes of them that are sent around when they are divided: all but the tables of packed ones."""
    tensors = list(tensors)
    return base_bytes(tensors, plan) - _table_bytes(tensors, base_of(plan))


@remembered_by("model", "tuning", "precision", "sharding", "hardware")
def base_share_bytes(plan: Plan) -> int:
    """The base's weights on the rank that holds most: words and scales are divided like long rows, tables are whole."""
    base, e, parts = base_of(plan), plan.precision.compute_bytes, num_shares(plan)
    tensors = base_tensors(plan.model)
    packed = [t for t in tensors if _stored_as(t, base) is not _DENSE]
    dense = [t for t in tensors if t not in packed]
    divided = 0
    for t in packed:
        words = packed_bytes(t.elements, base, element_bytes=e, copies=t.copies)
        stored = stored_bytes(t.elements, base, element_bytes=e, copies=t.copies)
        scales = stored - words - _table_bytes([t], base) // t.count
        divided += t.count * (-(-words // parts) + -(-scales // parts))
    return divided + table_bytes(plan) + share_elements(dense, plan) * e


@remembered_by("model", "tuning")
def table_bytes(plan: Plan) -> int:
    """Tables beside packed matrices, which every rank holds whole."""
    return _table_bytes(base_tensors(plan.model), base_of(plan))


def _table_bytes(tensors: Iterable[ParameterTensor], base: Dense | Quantiser) -> int:
    if isinstance(base, Dense):
        return 0
    return sum(
        t.count * base.table_bytes(copies=t.copies) for t in tensors if _stored_as(t, base) is not _DENSE
    )


_DENSE = Dense()


def _stored_as(tensor: ParameterTensor, base: Dense | Quantiser) -> Dense | Quantiser:
    return base if tensor.linear is not None and is_packed(tensor.linear, base) else _DENSE


def base_parameters(model: ModelSpec) -> int:
    """Every parameter of the model without adapters; tied embeddings count once."""
    return count_parameters(model).total


@remembered_by("model", "tuning")
def trained_parameters(plan: Plan) -> int:
    """Parameters that get a gradient: all of them, or adapters and what is trained whole beside them."""
    if not isinstance(plan.tuning, Lora):
        return base_parameters(plan.model)
    tables = trained_tables(plan.model, plan.tuning)
    return lora_parameters(plan.model, plan.tuning) + sum(table.elements for table in tables)


def blocks_trained(plan: Plan) -> int:
    """Number of blocks that have something that trains."""
    return adapted_blocks(plan.model, plan.tuning) if isinstance(plan.tuning, Lora) else plan.model.num_layers


@remembered_by("model", "tuning", "precision")
def weights_bytes(plan: Plan) -> int:
    """P · e: the model in the compute type; e = 4 for fp32, 2 for bf16 and fp16. Rotary tables are not in it.

    The linears of a quantised base are packed (quantised.py). Whole, however it is divided.
    """
    if isinstance(base_of(plan), Dense):
        return base_parameters(plan.model) * plan.precision.compute_bytes
    return base_bytes(base_tensors(plan.model), plan)


def weights_share_bytes(plan: Plan) -> int:
    """Bytes of the weights that one rank holds between two steps, wherever it keeps them."""
    if weights_are_divided(plan) and num_shares(plan) > 1:
        return base_share_bytes(plan)
    return weights_bytes(plan)


@remembered_by("model", "tuning", "precision", "sharding", "offload", "hardware")
def weights_on_device_bytes(plan: Plan) -> int:
    """Between two steps. Of offloaded ones embedding, final norm and head stay on one device, tables on several."""
    if plan.offload.parameters == "device":
        return weights_share_bytes(plan)
    if isinstance(plan.sharding, Single):
        return base_bytes([t for t in base_tensors(plan.model) if not t.in_block], plan)
    return table_bytes(plan)


@remembered_by("model", "tuning", "precision", "sharding", "offload", "hardware")
def weights_away_bytes(plan: Plan) -> int:
    """Bytes of a rank's share of the weights that wait on the host or on NVMe."""
    if plan.offload.parameters == "device":
        return 0
    adapters = _adapter_share_bytes(plan) if uses_fsdp(plan) else 0
    return weights_share_bytes(plan) - weights_on_device_bytes(plan) + adapters


@remembered_by("model", "tuning", "precision", "sharding", "offload", "hardware")
def adapters_bytes(plan: Plan) -> int:
    """Adapters in the compute type, P_lora · e (models/adapters.py keeps PEFT from casting them to fp32).

    Divided like the base's weights; they stay on the device when those are offloaded, but FSDP2 sends whole blocks.
    """
    if uses_fsdp(plan) and plan.offload.parameters != "device":
        return 0
    return _adapter_share_bytes(plan)


def _adapter_share_bytes(plan: Plan) -> int:
    if not isinstance(plan.tuning, Lora):
        return 0
    divided = weights_are_divided(plan)
    parameters = (
        share_elements(adapter_tensors(plan), plan) if divided else lora_parameters(plan.model, plan.tuning)
    )
    return parameters * plan.precision.compute_bytes


def weights_read_bytes(plan: Plan) -> int:
    """Stored bytes once; FSDP2 also reads and writes them when it copies them out of its all-gather buffer."""
    return weights_bytes(plan) * (3 if uses_fsdp(plan) else 1)


@remembered_by("model", "tuning", "precision")
def unpacking_bytes(plan: Plan) -> int:
    """2·e per packed weight: it is written in the compute type and read back by the product, in every pass."""
    base, e = base_of(plan), plan.precision.compute_bytes
    packed = [t for t in base_tensors(plan.model) if t.linear is not None and is_packed(t.linear, base)]
    return 2 * e * sum(t.elements * t.count for t in packed)


def gradients_bytes(plan: Plan) -> int:
    """P_trained · e: a gradient has the type of its weight. Whole; states.py says what rests where."""
    return trained_parameters(plan) * plan.precision.compute_bytes


def embedding_parameters(model: ModelSpec) -> int:
    """V · h, the input table alone; with tied embeddings it is the head too."""
    return model.vocab_size * model.hidden_size


def head_parameters(model: ModelSpec) -> int:
    """V · h, + V with a bias; the same tensor as the embedding when tied."""
    return model.vocab_size * model.hidden_size + (model.vocab_size if model.head_bias else 0)
