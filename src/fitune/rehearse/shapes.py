"""Shapes of an architecture that fitune has no formula for: its model is built without memory, and its modules read."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fitune.errors import ModelError
from fitune.models.attention import takes_mask
from fitune.models.language_model import blocks_of, body_of, carries_along
from fitune.models.low_bit.packing import places_in
from fitune.models.low_bit.quantised import is_dense_linear, is_read_by_kernels, is_state_space
from fitune.models.readers import empty_model
from fitune.values.model.config_schema import dropout_of
from fitune.values.model.model_spec import BlockAttention, BlockKind, Linear, ModelSpec
from fitune.values.plan import Nf4

MOST_KINDS = 8
"""Kinds of blocks in one model: more than any in transformers has."""

BLOCK_NUMBERS = {"layer_idx", "layer_id", "layer_number", "idx", "index", "block_idx", "layer_index"}
"""Attributes in which modules keep the number of their block, by which equal blocks differ."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")


def read_shapes(config: PretrainedConfig, *, name: str, digest: str, dtype: str) -> ModelSpec:
    """The spec of ``config``'s model. Raises ModelError for one that is not built of decoder blocks."""
    with torch.device("meta"):
        model = empty_model(config)
    text = model.config.get_text_config()
    blocks = blocks_of(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    blocks_name = next(n for n, module in model.named_modules() if module is blocks)
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward:
        raise ModelError(f"{type(model).__name__} has no language-modelling head that is one linear")
    if head.out_features != len(embedding.weight):
        raise ModelError(
            f"the head of {type(model).__name__} has {head.out_features:,} tokens and its embedding "
            f"{len(embedding.weight):,}, and fitune takes one vocabulary for both"
        )
    if _loops(body_of(model), blocks_name.rpartition(".")[2]):
        raise ModelError(
            f"{type(model).__name__} runs its blocks several times in one forward pass, and fitune counts each once"
        )
    if sum(1 for block in blocks for _ in block.parameters()) > sum(1 for _ in blocks.parameters()):
        raise ModelError(
            f"blocks of {type(model).__name__} share weights, and fitune counts each block's own"
        )
    kinds, kind_of = _kinds(blocks, text)
    attentions = tuple(_attention(blocks[kind.example], text, kind.example) for kind in kinds)
    first = kinds[kind_of[0]]
    of_blocks = text.per_layer_config if getattr(text, "is_heterogeneous", False) else [text]  # Gemma 4
    of_first = of_blocks[0]
    heads = _number(of_first, "num_attention_heads", "n_head", "num_heads", default=1)
    hidden = int(head.in_features)
    masks = [buffer.shape for buffer in blocks.buffers() if buffer.dtype is torch.bool and buffer.dim() >= 2]
    # queries are scaled by their position in the whole stream (Llama 4's blocks without rotary positions)
    counts_along = getattr(text, "attn_temperature_tuning", False) and not all(
        getattr(text, "no_rope_layers", None) or (1,)
    )
    return ModelSpec(
        name=name,
        model_type=text.model_type,
        num_layers=len(blocks),
        hidden_size=hidden,
        intermediate_size=max((m.out_features for m in first.linears if m.part == "mlp"), default=hidden),
        num_heads=heads,
        num_kv_heads=_number(of_first, "num_key_value_heads", "num_kv_heads", default=heads),
        head_dim=_number(of_first, "head_dim", "qk_head_dim", default=max(1, hidden // heads)),
        vocab_size=int(embedding.weight.shape[0]),
        max_seq_len=_number(
            text,
            "max_position_embeddings",
            "n_positions",
            "max_seq_len",
            "max_sequence_length",
            default=2**20,
        ),
        tied_embeddings=head.weight is embedding.weight,
        mlp_type="gated",
        norm_type="rms",
        norms_per_block=0,
        head_bias=head.bias is not None,
        sliding_window=_window(text),
        caps_logits=getattr(text, "final_logit_softcapping", None) is not None,
        blocks_name=blocks_name,
        dropout=dropout_of(text.to_dict()),
        dtype=dtype,
        linears=tuple(dict.fromkeys(linear for kind in kinds for linear in kind.linears)),
        kinds=kinds,
        kind_of=kind_of,
        attentions=attentions,
        has_sinks=any("sink" in name.rpartition(".")[2] for name, _ in blocks.named_parameters()),
        roots=tuple(_root_shapes(model, blocks, (head, embedding))),
        config_digest=digest,
        uneven_heads=any(map(_has_uneven_heads, of_blocks)),
        masks_whole_stream=takes_mask(model),
        chunk=_chunk(blocks),
        fp32_stream=bool(getattr(text, "residual_in_fp32", False)),
        separates_rows=not carries_along(blocks) and not counts_along,
        table_bytes=sum(b.numel() * b.element_size() for b in model.buffers() if b.dim() > 1),
        # tokens of the shortest mask that blocks keep as a table of pairs of positions
        longest_stream=min((int(shape[-1]) for shape in masks if shape[-1] == shape[-2]), default=0),
    )


def _loops(body: nn.Module, blocks: str) -> bool:
    """True if ``body`` goes through its list ``blocks`` inside of a loop: Dory and Inkling 2 Mini several times, xLSTM
    for each part of a row."""
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(body).forward)))
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)]
    inner = [
        node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.For) and node is not loop
    ]
    return any(getattr(name, "attr", None) == blocks for node in inner for name in ast.walk(node.iter))


def _number(config: PretrainedConfig | nn.Module, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if type(value) is int and value > 0:
            return value
    return default


def _window(config: PretrainedConfig) -> int:
    """Tokens of the sliding window of some blocks, 0 where all see whole rows."""
    kinds = set(getattr(config, "layer_types", None) or ())
    used = getattr(config, "use_sliding_window", True) and (not kinds or "sliding_attention" in kinds)
    return _number(config, "sliding_window", "attention_chunk_size", default=0) if used else 0


def _attention(block: nn.Module, config: PretrainedConfig, index: int) -> BlockAttention:
    """Its width: the input size of the output projection (heads of values), or more where queries' are larger."""
    width = 0
    for module in block.modules():
        if not type(module).__name__.lower().endswith("attention"):
            continue
        outputs = [
            _linear(name, child, called=True).in_features
            for name, child in module.named_children()
            if isinstance(child, nn.Linear | Conv1D) and name in _ATTENTION_OUTPUTS
        ]
        values, queries = (getattr(module, f"{part}_head_dim", None) for part in ("v", "qk"))
        uneven = (1 + queries / values) / 2 if values and queries else 1
        width += round(sum(outputs) * uneven)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * (index + 1)
    if width and kinds[index] == "chunked_attention":
        return BlockAttention(width=width, window=config.attention_chunk_size, in_chunks=True)
    sees_window = width > 0 and kinds[index] == "sliding_attention"
    return BlockAttention(width=width, window=_window(config) if sees_window else 0)


_ATTENTION_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo")
"""Names of the linear behind the heads."""


def _has_uneven_heads(config: PretrainedConfig) -> bool:
    values = getattr(config, "v_head_dim", None)
    nope, turned = (getattr(config, f"qk_{part}_head_dim", None) or 0 for part in ("nope", "rope"))
    return bool(values and nope + turned and values != nope + turned)


def _chunk(blocks: nn.ModuleList) -> int:
    """Tokens of the chunks in which state-space mixers and delta rules go along a row, 1 for Mamba's; 0 without any."""
    sizes = [0]
    for module in blocks.modules():
        if is_state_space(module):
            sizes.append(_number(module, "chunk_size", default=1))
        if isinstance(module._parameters.get("A_log"), nn.Parameter):
            rule = getattr(sys.modules[type(module).__module__], "torch_chunk_gated_delta_rule", None)
            sizes.append(0 if rule is None else int(inspect.signature(rule).parameters["chunk_size"].default))
    return max(sizes)


def _kinds(blocks: nn.ModuleList, config: PretrainedConfig) -> tuple[tuple[BlockKind, ...], tuple[int, ...]]:
    """The kinds of blocks in the order they first come, and the kind of each block."""
    numbers: dict[object, int] = {}
    kind_of, kinds = [], []
    for index, block in enumerate(blocks):
        mark = _mark(block)
        if mark not in numbers:
            numbers[mark] = len(numbers)
            kinds.append(_kind(block, config, example=index))
        kind_of.append(numbers[mark])
    if len(kinds) > MOST_KINDS:
        raise ModelError(f"the blocks are of {len(kinds)} kinds, more than the {MOST_KINDS} that are traced")
    return tuple(kinds), tuple(kind_of)


def _mark(block: nn.Module) -> object:
    """Equal for blocks that compute the same: modules, plain settings of each, and shapes of parameters."""
    modules = []
    for name, module in block.named_modules():
        plain = {
            key: value for key, value in vars(module).items() if isinstance(value, bool | int | float | str)
        }
        settings = tuple(sorted((key, value) for key, value in plain.items() if key not in BLOCK_NUMBERS))
        modules.append((name, type(module).__name__, settings))
    return tuple(modules), tuple((name, tuple(p.shape)) for name, p in block.named_parameters())


def _kind(block: nn.Module, config: PretrainedConfig, *, example: int) -> BlockKind:
    experts = _number(config, *_EXPERTS, default=0)
    chosen = min(_number(config, *_CHOSEN, default=experts), experts)
    linears: list[Linear] = []
    inside: set[int] = set()
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            inside.update(id(p) for p in module.parameters(recurse=False))
            path, _, last = name.rpartition(".")
            called = not is_read_by_kernels(block.get_submodule(path), last)
            linears.append(_linear(name, module, called=called))
    packable = {name for name, _ in places_in(block, Nf4())}
    others: list[tuple[int, ...]] = []
    for name, parameter in block.named_parameters():
        if id(parameter) in inside:
            continue
        if parameter.dim() == 3 and experts and parameter.shape[0] == experts:
            linears.append(_fused_experts(name, parameter, chosen=chosen, stacked=name in packable))
        elif parameter.dim() == 2 and name.endswith(("gate.weight", "router.weight")):
            rows, row = parameter.shape
            linears.append(
                Linear(
                    name=name.removesuffix(".weight"), in_features=row, out_features=rows,
                    part="router", adaptable=False,
                )
            )  # fmt: skip
        else:
            others.append(tuple(parameter.shape))
    return BlockKind(linears=tuple(linears), others=tuple(others), example=example)


def _linear(name: str, module: nn.Module, *, called: bool) -> Linear:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    plain = is_dense_linear(module)  # else it makes more than a product, as Llama 4's router does
    out, into = weight.T.shape if isinstance(module, Conv1D) else weight.shape
    lowered = name.lower()
    mixes = any(word in lowered for word in ("attn", "attention", "mixer", "mamba", "conv"))
    return Linear(
        name=name, in_features=int(into), out_features=int(out), bias=module.bias is not None,
        part="router" if not plain else "attention" if mixes else "mlp",
        adaptable=plain and called,
    )  # fmt: skip


def _fused_experts(name: str, parameter: torch.Tensor, *, chosen: int, stacked: bool) -> Linear:
    """Which of the two inner sizes is read does not change a count."""
    copies, one, other = map(int, parameter.shape)
    return Linear(
        name=name, in_features=one, out_features=other, copies=copies, active_copies=chosen, part="experts",
        adaptable=False, stacked=stacked,
    )  # fmt: skip


def _root_shapes(
    model: PreTrainedModel, blocks: nn.ModuleList, tables: tuple[nn.Module, ...]
) -> Iterator[tuple[int, ...]]:
    known = {id(p) for p in blocks.parameters()}
    # of a table its own alone: Inkling 2 has a norm inside
    known |= {id(p) for table in tables for p in table.parameters(recurse=False)}
    for parameter in model.parameters():
        if id(parameter) not in known:
            yield tuple(parameter.shape)
