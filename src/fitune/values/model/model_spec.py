"""ModelSpec: the shapes of a decoder-only transformer, read from a Hugging Face config.json.

Counts are exact, and they are sums over one list: the linears of a block. Whatever needs the
shapes (parameter counts, adapters, activations, FLOPs) goes through that list.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One matrix of a decoder block, under the name transformers gives it inside the block."""

    name: str
    in_features: int
    out_features: int
    bias: bool = False
    copies: int = 1
    """More than one for the experts of a mixture."""
    active_copies: int = 1
    """Number of copies that one token goes through."""
    part: Literal["attention", "mlp", "experts", "router"] = "attention"
    adaptable: bool = True
    """False when transformers holds it as a bare parameter that LoRA cannot wrap (fused experts, routers)."""
    stacked: bool = False
    """True for experts that transformers runs through its experts interface: packed, and adapted by name."""

    @property
    def short_name(self) -> str:
        """Last part of the name, as LoRA targets are mostly given: ``q_proj``."""
        return self.name.rsplit(".", 1)[-1]

    def is_target(self, targets: Collection[str]) -> bool:
        """True if LoRA with these targets adapts it; a stack of experts by its whole name only."""
        if self.stacked:
            return self.name in targets
        return self.adaptable and (self.short_name in targets or self.name in targets)

    @property
    def weights(self) -> int:
        """Elements of the matrix, times its copies (experts in one stack); without bias."""
        return self.in_features * self.out_features * self.copies

    @property
    def parameters(self) -> int:
        """Elements with bias, of all copies."""
        return self.weights + (self.out_features * self.copies if self.bias else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Shares of elements that the model's own config drops out while it trains."""

    attention: float = 0.0
    """Dropout of the attention probabilities."""
    attention_output: float = 0.0
    """Dropout of what attention adds to the residual stream."""
    mlp_output: float = 0.0
    """Dropout of what the MLP adds to it; where attention and MLP are one sum (Falcon), of that sum."""
    embedding: float = 0.0


NO_DROPOUT = Dropout()


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKind:
    """One kind of decoder block of an architecture that was read from its modules, not by a formula."""

    linears: tuple[Linear, ...]
    others: tuple[tuple[int, ...], ...]
    """Shapes of all parameters that are in no linear: norms, convolutions, scales."""
    example: int
    """Number of a block of this kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockAttention:
    """The attention of one block."""

    width: int
    """Elements of all query heads; where heads of values differ in size, the mean of both. 0 without attention."""
    window: int = 0
    """Tokens that a token sees at most; 0: all before it."""
    in_chunks: bool = False
    """The window does not slide: a row is cut into chunks of it (Llama 4)."""

    def pairs(self, row: int) -> int:
        """Pairs of a token and one that it sees in a ``row`` of n: n(n+1)/2, or w(w+1)/2 + (n − w)·w."""
        seen = min(row, self.window or row)
        if self.in_chunks:
            whole, rest = divmod(row, max(1, seen))
            return whole * seen * (seen + 1) // 2 + rest * (rest + 1) // 2
        return seen * (seen + 1) // 2 + (row - seen) * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shapes of one model. Field names are Hugging Face's where it has one."""

    name: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    tied_embeddings: bool
    mlp_type: Literal["gated", "plain"]
    norm_type: Literal["rms", "layer"]
    norms_per_block: int
    """Norms over the hidden size in one block; q/k norms are counted apart."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """Norm of queries and keys: over head_dim (Qwen3, Gemma-3) or over all heads."""
    num_experts: int = 0
    experts_per_token: int = 0
    learned_positions: int = 0
    """Rows of a trained position table (GPT-2), 0 with rotary positions."""
    rotary_share: float = 1.0
    """Share of every head that turns with its position."""
    head_bias: bool = False
    parallel_blocks: bool = False
    """Attention and MLP read the same input (Falcon, Phi-2)."""
    sliding_window: int = 0
    full_attention_layers: tuple[int, ...] = ()
    """Blocks that see whole rows although others have the window; empty when all or none have it."""
    caps_scores: bool = False
    """Attention scores go through a hyperbolic tangent (Gemma-2), which no fused kernel does."""
    caps_logits: bool = False
    """The head's logits do."""
    scales_norms_in_fp32: bool = False
    """RMSNorms multiply by 1 + weight before they cast back (Gemma), not after."""
    weighs_experts_in_fp32: bool = False
    """Routing weights stay in fp32, and so what they multiply (Mixtral)."""
    masks_whole_stream: bool = False
    """Attention code of its own tells the rows of a stream apart by a mask of all its tokens (Falcon)."""
    has_liger_kernels: bool = False
    """Liger's RMSNorm, rotary positions and, but for mixtures of experts, gated MLP compute what its modules do."""
    blocks_name: str = "model.layers"
    """Prefix of a block's number in transformers' names."""
    dropout: Dropout = NO_DROPOUT
    activation: str = "silu"
    """Activation function of the MLP, by a name of values/model/traits.py."""
    dtype: str = "bfloat16"
    linears: tuple[Linear, ...]
    """The matrices of one decoder block, in the order they are applied; of all kinds of blocks where these differ."""
    kinds: tuple[BlockKind, ...] = ()
    """Set for an architecture without formulas: its blocks are read from its modules and traced."""
    kind_of: tuple[int, ...] = ()
    """Index into ``kinds`` for each block."""
    attentions: tuple[BlockAttention, ...] = ()
    """Traced architectures: the attention of each of ``kinds``."""
    has_sinks: bool = False
    """A learned score of each head joins the softmax (gpt-oss): attention is written out."""
    roots: tuple[tuple[int, ...], ...] = ()
    """Traced architectures: shapes of the parameters outside of blocks, embedding and head."""
    config_digest: str = ""
    """Traced architectures: digest of the config together with the libraries that built it."""
    uneven_heads: bool = False
    """Heads of values differ in size from those of queries and keys (MLA)."""
    separates_rows: bool = True
    """False where a block carries something from token to token by itself: rows of one stream would see each other."""
    chunk: int = 0
    """Tokens to whole multiples of which state-space mixers pad a row (Mamba 2), 1 where they go token by token
    (Mamba); 0 without such mixers."""
    fp32_stream: bool = False
    """The residual stream is fp32 in every precision (Mamba's ``residual_in_fp32``)."""
    has_vision_part: bool = False
    """Its checkpoint also has a part for images, which is neither planned nor trained."""
    stored_as: str = ""
    """Few bits in which its checkpoint holds the weights that are read as 16-bit ones: ``bitsandbytes``, ``mxfp4``."""
    table_bytes: int = 0
    """Bytes of a traced model's tables that are no parameters: masks and positions (GPT-Neo, GPT-J)."""
    longest_stream: int = 0
    """Most tokens of all rows of a micro-batch that blocks take, whose mask is a table (GPT-Neo); 0: any number."""

    @property
    def is_traced(self) -> bool:
        """True if blocks come from tracing: no formula knows them."""
        return bool(self.kinds)

    @property
    def has_delta_rule(self) -> bool:
        """True if some mixers are gated delta rules (Qwen3-Next, Qwen3.5), which copy a row that they pad."""
        return any(".linear_attn." in f".{linear.name}" for linear in self.linears)

    def linears_of(self, block: int) -> tuple[Linear, ...]:
        """The matrices of that block, in the order they are applied."""
        return self.kinds[self.kind_of[block]].linears if self.kinds else self.linears

    def counted_linears(self, blocks: Collection[int] = ()) -> Iterator[tuple[Linear, int]]:
        """Each matrix and the number of blocks that have it; of the given ``blocks`` alone when there are any."""
        if not self.kinds:
            count = len(blocks) or self.num_layers
            yield from ((linear, count) for linear in self.linears)
            return
        times = Counter(self.kind_of[block] for block in blocks or range(self.num_layers))
        for kind, count in sorted(times.items()):
            yield from ((linear, count) for linear in self.kinds[kind].linears)

    @property
    def q_dim(self) -> int:
        """Width of all query heads together: heads · head size."""
        return self.num_heads * self.head_dim

    @property
    def is_multi_query(self) -> bool:
        """True for Falcon-7B: one key head that all queries share, without copies for each of them."""
        return self.masks_whole_stream and self.num_kv_heads == 1

    @property
    def fuses_gate_and_up(self) -> bool:
        """True if one linear makes gate and up (Phi-3)."""
        return any(m.part == "mlp" and m.out_features == 2 * self.intermediate_size for m in self.linears)

    @property
    def kv_dim(self) -> int:
        """Width of all key heads together, and of all value heads: key/value heads · head size."""
        return self.num_kv_heads * self.head_dim

    @property
    def writes_scores(self) -> bool:
        """True if no fused kernel computes its attention: scores are capped, or weighed beside a sink."""
        return self.caps_scores or self.has_sinks

    def attention_of(self, block: int) -> BlockAttention:
        """Width and window of the attention in that block; window 0 where it sees all tokens."""
        if self.attentions:
            return self.attentions[self.kind_of[block]]
        has_window = block not in self.full_attention_layers
        return BlockAttention(width=self.q_dim, window=self.sliding_window if has_window else 0)

    def has_window(self, layer: int) -> bool:
        """True if the attention of this block sees ``sliding_window`` tokens at most."""
        return self.attention_of(layer).window > 0

    @property
    def adaptable_names(self) -> tuple[str, ...]:
        """Names that ``all-linear`` stands for: the last parts of those that LoRA can wrap, in order."""
        return tuple(dict.fromkeys(m.short_name for m in self.linears if m.adaptable))


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """Widths of the matrices of a block."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_dim(self) -> int:
        """Heads · head size."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Key/value heads · head size."""
        return self.kv_heads * self.head_dim


def attention(
    widths: Widths, *, qkv_bias: bool = False, out_bias: bool = False, out_name: str = "self_attn.o_proj"
) -> tuple[Linear, ...]:
    """The four projections of a block: q, k and v read the hidden state, the last writes it."""
    h, q, kv = widths.hidden, widths.q_dim, widths.kv_dim
    return (
        Linear(name="self_attn.q_proj", in_features=h, out_features=q, bias=qkv_bias),
        Linear(name="self_attn.k_proj", in_features=h, out_features=kv, bias=qkv_bias),
        Linear(name="self_attn.v_proj", in_features=h, out_features=kv, bias=qkv_bias),
        Linear(name=out_name, in_features=q, out_features=h, bias=out_bias),
    )


def gated_mlp(widths: Widths, *, bias: bool = False) -> tuple[Linear, ...]:
    """gate and up (hidden × intermediate) and down (intermediate × hidden)."""
    h, f = widths.hidden, widths.intermediate
    return (
        Linear(name="mlp.gate_proj", in_features=h, out_features=f, bias=bias, part="mlp"),
        Linear(name="mlp.up_proj", in_features=h, out_features=f, bias=bias, part="mlp"),
        Linear(name="mlp.down_proj", in_features=f, out_features=h, bias=bias, part="mlp"),
    )


def plain_mlp(widths: Widths, up: str, down: str, *, bias: bool) -> tuple[Linear, ...]:
    """Two matrices without a gate, named ``up`` and ``down`` as the architecture names them."""
    h, f = widths.hidden, widths.intermediate
    return (
        Linear(name=up, in_features=h, out_features=f, bias=bias, part="mlp"),
        Linear(name=down, in_features=f, out_features=h, bias=bias, part="mlp"),
    )


def experts(widths: Widths, *, total: int, chosen: int) -> tuple[Linear, ...]:
    """transformers 5 holds router and experts as bare parameters, gate and up of an expert fused."""
    h, f = widths.hidden, widths.intermediate
    return (
        Linear(name="mlp.gate", in_features=h, out_features=total, part="router", adaptable=False),
        Linear(
            name="mlp.experts.gate_up_proj", in_features=h, out_features=2 * f,
            copies=total, active_copies=chosen, part="experts", adaptable=False, stacked=True,
        ),
        Linear(
            name="mlp.experts.down_proj", in_features=f, out_features=h,
            copies=total, active_copies=chosen, part="experts", adaptable=False, stacked=True,
        ),
    )  # fmt: skip
