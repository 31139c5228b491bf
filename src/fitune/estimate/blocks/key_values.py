"""Keys and values that an answer keeps: elements of one token in one block, and states of a fixed size."""

from collections.abc import Iterator, Sequence

from fitune.errors import ModelError
from fitune.values.model.model_spec import BlockKind, Linear, ModelSpec


def elements_of_blocks(model: ModelSpec, *, latent: bool = False) -> list[int]:
    """Elements of one token's keys and values in each block.

    k_heads · 2d; with MLA, as transformers caches it, n · (nope + rope) + n · v: keys and values of every head; as vLLM
    does, ``latent``, kv_lora_rank + rope: the vector that they are made of.
    Raises ModelError for a block whose state is not keys and values.
    """
    if not model.is_traced:
        return [2 * model.kv_dim] * model.num_layers
    by_kind = [
        0 if _recurrent_elements(kind) else _of_linears(kind.linears, model, latent=latent)
        for kind in model.kinds
    ]
    return [by_kind[kind] for kind in model.kind_of]


def states_of_row(model: ModelSpec) -> int:
    """Elements of one row's recurrent states in all blocks, however long the row is (gated delta rule, Qwen3-Next).

    A matrix of key × value for each value head, and the convolution's last inputs. Heads of keys are taken to be as
    large as those of values.
    """
    return sum(_recurrent_elements(model.kinds[kind]) for kind in model.kind_of)


def _recurrent_elements(kind: BlockKind) -> int:
    """0 for a block without a recurrent state."""
    mixers = [linear for linear in kind.linears if ".linear_attn." in f".{linear.name}"]
    if not mixers:
        return 0
    values = next(m.in_features for m in mixers if m.name.endswith("linear_attn.out_proj"))
    convolution = next(shape for shape in kind.others if len(shape) == 3)
    heads = min(shape[0] for shape in kind.others if len(shape) == 1)
    return values * (values // heads) + convolution[0] * convolution[2]


def elements_per_token(model: ModelSpec) -> int:
    """Elements that the caches of all blocks keep for one token."""
    return sum(elements_of_blocks(model))


def windowed_tokens(model: ModelSpec, tokens: int) -> Iterator[int]:
    """Tokens that each block still needs of a row of ``tokens``: at most its window."""
    for layer in range(model.num_layers):
        yield min(tokens, model.attention_of(layer).window or tokens)


def _of_linears(linears: Sequence[Linear], model: ModelSpec, *, latent: bool) -> int:
    named = {linear.short_name: linear for linear in linears if linear.part == "attention"}
    if "k_proj" in named and "v_proj" in named:
        return named["k_proj"].out_features + named["v_proj"].out_features
    if "kv_b_proj" in named and "kv_a_proj_with_mqa" in named:
        up, down = named["kv_b_proj"], named["kv_a_proj_with_mqa"]
        if latent:
            return down.out_features
        rope = down.out_features - up.in_features  # one head's, which transformers repeats for all
        return up.out_features + model.num_heads * rope
    if "qkv_proj" in named:
        return named["qkv_proj"].out_features - model.q_dim
    if (
        "q_proj" in named and "v_proj" not in named
    ):  # Gemma 4: values are the keys, or an earlier block's are read
        return 2 * named["k_proj"].out_features if "k_proj" in named else 0
    raise ModelError(
        f"{model.name} ({model.model_type}) has blocks whose state is more than keys and values: "
        "fitune does not know how large it grows",
        hint="score without --plan; measured bytes are in the report",
    )
