"""The matrices decoder blocks are made of, under the names most architectures give them."""

from dataclasses import dataclass

from fitune.spec.model import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Widths:
    """What the matrices of a block are made of."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim


def attention(
    widths: Widths, *, qkv_bias: bool = False, out_bias: bool = False, out_name: str = "self_attn.o_proj"
) -> tuple[Linear, ...]:
    h, q, kv = widths.hidden, widths.q_dim, widths.kv_dim
    return (
        Linear(name="self_attn.q_proj", in_features=h, out_features=q, bias=qkv_bias),
        Linear(name="self_attn.k_proj", in_features=h, out_features=kv, bias=qkv_bias),
        Linear(name="self_attn.v_proj", in_features=h, out_features=kv, bias=qkv_bias),
        Linear(name=out_name, in_features=q, out_features=h, bias=out_bias),
    )


def gated_mlp(widths: Widths, *, bias: bool = False) -> tuple[Linear, ...]:
    h, f = widths.hidden, widths.intermediate
    return (
        Linear(name="mlp.gate_proj", in_features=h, out_features=f, bias=bias, part="mlp"),
        Linear(name="mlp.up_proj", in_features=h, out_features=f, bias=bias, part="mlp"),
        Linear(name="mlp.down_proj", in_features=f, out_features=h, bias=bias, part="mlp"),
    )


def plain_mlp(widths: Widths, up: str, down: str, *, bias: bool) -> tuple[Linear, ...]:
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
            copies=total, active_copies=chosen, part="experts", adaptable=False,
        ),
        Linear(
            name="mlp.experts.down_proj", in_features=f, out_features=h,
            copies=total, active_copies=chosen, part="experts", adaptable=False,
        ),
    )  # fmt: skip
