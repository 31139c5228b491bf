"""The stages of a mixture of experts, and their bytes: router and inputs, gates, outputs.

Symbols as in activations.py; S = t · chosen are the pairs of token and expert, w is the width of an output times its
routing weight. ``held`` are bytes beside a product: its packed matrices made whole, or what an adapter adds. They are 0
where transformers' own experts run; else fitune's own forward runs them (models/experts.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.activations import FP32, INDEX
from fitune.estimate.blocks.site import Site, linears_stage
from fitune.spec.model.block_profile import Stage
from fitune.spec.model.model_spec import Linear
from fitune.spec.model.traits import ACTIVATIONS
from fitune.spec.plan import Lomo, Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts:
    """A mixture by its sizes, and what is packed, adapted or trained of the matrices into it and out of it."""

    tokens: int
    chosen: int
    num_experts: int
    hidden: int
    width: int
    element_bytes: int
    weighted_bytes: int
    adapted_in: bool
    adapted_out: bool
    trained_in: bool
    trained_out: bool
    whole_in: int
    """Bytes of the packed matrices when they are made whole."""
    whole_out: int
    held_in: int
    held_out: int

    @property
    def pairs(self) -> int:
        """S: each token with each of the experts it goes to."""
        return self.tokens * self.chosen

    @property
    def stream_bytes(self) -> int:
        """t·e·h: one tensor of the residual stream."""
        return self.tokens * self.element_bytes * self.hidden

    @property
    def routes_bytes(self) -> int:
        """S · (e + 3 · 8) + t · e · E: routing weights, three lists of indices, and the router's scores."""
        e = self.element_bytes
        return self.tokens * (self.chosen * (e + 3 * INDEX) + self.num_experts * e)


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``.
    """
    ways_in, ways_out = linears[:-1], linears[-1:]
    experts = _experts(site, ways_in, ways_out)
    pairs, e = experts.pairs, experts.element_bytes
    lomo = isinstance(site.plan.tuning, Lomo)
    outputs_back = _outputs_backward(experts)
    beside_residual = outputs_back - experts.stream_bytes
    incoming = (
        experts.stream_bytes + pairs * experts.weighted_bytes * experts.hidden if experts.held_in else 0
    )
    yield linears_stage(
        site, "expert inputs", ways_in,
        kept=(passes or experts.adapted_in) * _inputs_kept(experts) + _adapter_pairs_kept(site, ways_in),
        forward=_inputs_forward(experts),
        backward=_inputs_backward(experts),
        again=_inputs_again(experts),
        incoming=incoming,
        gone_by_step=lomo * 2 * pairs * e * experts.width,  # gradients of gate and up
    )  # fmt: skip
    yield _gates(site, experts, passes=passes)
    yield linears_stage(
        site, "expert outputs", ways_out,
        kept=(passes or experts.adapted_in or experts.adapted_out) * _outputs_kept(experts)
        + _adapter_pairs_kept(site, ways_out),
        forward=_outputs_forward(experts),
        backward=outputs_back,
        again=_outputs_again(experts),
        incoming=incoming,
        # the product follows the weighting, when outputs are gone; the step follows the product
        gone_by_gradient=lomo * (beside_residual - pairs * e * experts.width),
        gone_by_step=lomo * (beside_residual + pairs * e * experts.hidden),
    )  # fmt: skip


def _experts(site: Site, ways_in: Sequence[Linear], ways_out: Sequence[Linear]) -> _Experts:
    model, e = site.model, site.element_bytes
    pairs = site.shape.tokens * model.experts_per_token
    whole_in, whole_out = site.whole_stack_bytes(ways_in), site.whole_stack_bytes(ways_out)
    adapted_in, adapted_out = bool(site.adapted(ways_in)), bool(site.adapted(ways_out))
    held_in = max(whole_in, adapted_in * pairs * e * 2 * model.intermediate_size)
    held_out = max(whole_out, adapted_out * pairs * e * model.hidden_size)
    if held_in or held_out:  # fitune's own forward runs both ways
        held_in, held_out = max(1, held_in), max(1, held_out)
    return _Experts(
        tokens=site.shape.tokens,
        chosen=model.experts_per_token,
        num_experts=model.num_experts,
        hidden=model.hidden_size,
        width=model.intermediate_size,
        element_bytes=e,
        weighted_bytes=FP32 if model.weighs_experts_in_fp32 else e,
        adapted_in=adapted_in,
        adapted_out=adapted_out,
        trained_in=site.full or adapted_in,
        trained_out=site.full or adapted_out,
        whole_in=whole_in,
        whole_out=whole_out,
        held_in=held_in,
        held_out=held_out,
    )


def _gates(site: Site, x: _Experts, *, passes: bool) -> Stage:
    """The gated product of every pair, as wide as the chosen experts together."""
    activation = ACTIVATIONS[site.model.activation]
    sizes = {"width": x.width * x.chosen, "element_bytes": x.element_bytes}
    return Stage(
        name="expert gates",
        kept=activations.gated_mlp_kept(
            **sizes, tokens=x.tokens * (passes or x.adapted_in), activation=activation, halves=True
        ),
        forward=transient.mlp_forward(
            **sizes,
            tokens=x.tokens,
            hidden=x.hidden if x.held_in else 2 * x.hidden,
            tensors=max(4, activation.forward + 1),
        ),
        backward=transient.gate_backward(
            **sizes, tokens=x.tokens, hidden=x.hidden, activation=activation, halves=True
        ),
    )


def _adapter_pairs_kept(site: Site, linears: Sequence[Linear]) -> int:
    """e·r·out for each expert of an adapted stack: PEFT's B, in the order that the grouped product takes."""
    lora = site.plan.tuning
    if not isinstance(lora, Lora):
        return 0
    stacks = [m for m in site.adapted(linears) if m.stacked]
    return site.element_bytes * lora.rank * sum(m.out_features * m.copies for m in stacks)


def _inputs_kept(x: _Experts) -> int:
    """S · e·h, the input of the grouped product, where the experts train; + S · 28 + t · E · (4 + 4).

    Routing weights and three lists of indices; the router's softmax.
    transformers.integrations.moe.grouped_mm_experts_forward.
    """
    inputs = x.pairs * x.element_bytes * x.hidden if x.trained_in else 0
    return inputs + x.pairs * (FP32 + 3 * INDEX) + x.tokens * x.num_experts * 2 * FP32


def _inputs_forward(x: _Experts) -> int:
    """2·t·e·h + S·e·(h + 2f) + routes + held; 0 where transformers' own experts run."""
    if not x.held_in:
        return 0
    product = x.pairs * x.element_bytes * (x.hidden + 2 * x.width)
    return 2 * x.stream_bytes + product + x.routes_bytes + x.held_in


def _inputs_backward(x: _Experts) -> int:
    """t·e·h + S·e·(2f + h) + whole: gradients of gate and up together, and of the grouped product's input."""
    return x.stream_bytes + x.pairs * x.element_bytes * (2 * x.width + x.hidden) + x.whole_in


def _inputs_again(x: _Experts) -> int:
    """3·t·e·h [fp32: 2] + S·(w·h + e·(h + 2f)) + held; 0 where transformers' own experts run.

    Residual, norm output and their gradient; gradient for each pair; input (unless an adapter keeps it) and output of
    the grouped product. In fp32 the norm keeps the residual itself.
    """
    if not x.held_in:
        return 0
    into = 0 if x.adapted_in else x.hidden
    product = x.pairs * (x.weighted_bytes * x.hidden + x.element_bytes * (into + 2 * x.width))
    return (2 if x.element_bytes == FP32 else 3) * x.stream_bytes + product + x.held_in


def _outputs_kept(x: _Experts) -> int:
    """S · e·h, the output that the routing weight multiplies; + S · e·f, the product's input, where it trains."""
    return x.pairs * x.element_bytes * (x.hidden + (x.width if x.trained_out else 0))


def _outputs_forward(x: _Experts) -> int:
    """2·t·e·h + routes + the worst of three; 0 where transformers' own experts run.

    S·e·(f + h) and what is held in the product; its output, S·e·h, and that times the routing weight, S·w·h; that
    twice, while it is put back in the tokens' order.
    """
    if not x.held_out:
        return 0
    product = x.pairs * x.element_bytes * (x.width + x.hidden) + x.held_out
    weighing = x.pairs * x.hidden * (x.weighted_bytes + max(x.weighted_bytes, x.element_bytes))
    return 2 * x.stream_bytes + x.routes_bytes + max(product, weighing)


def _outputs_backward(x: _Experts) -> int:
    """t·e·h + S·max(3·w·h, e·(h + f)): back to pairs of token and expert, or through the grouped product.

    Three are the gradients of the weighting and of both its factors. fitune's own forward has one cast, + S·e·h, where
    w is more than e; its product has whole matrices beside it, when what the weighting kept, S·e·h, is gone. An
    adapter's input is let go of before that product goes back, and its gradient is as large.
    """
    e = x.element_bytes
    through = x.pairs * e * (x.hidden + x.width)
    if x.held_out:
        through += max(1, x.whole_out) - x.pairs * e * x.hidden
    cast = e if x.held_out and x.weighted_bytes > e else 0
    return x.stream_bytes + max(x.pairs * (3 * x.weighted_bytes + cast) * x.hidden, through)


def _outputs_again(x: _Experts) -> int:
    """3·t·e·h + S·(2·w·h + 8): gradient for each pair and weighted output; residual, norm output, their gradient.

    + S·e·h while the experts are frozen: their inputs, which nothing keeps, are still there. The gradient is spread
    over the pairs before the block runs again. fitune's own forward lets go of those inputs; its product may be the
    worst moment instead, with its input and what is held.
    """
    e = x.element_bytes
    inputs = 0 if x.trained_out or x.held_out else e * x.hidden
    worst = x.pairs * (2 * x.weighted_bytes * x.hidden + inputs + 8)
    product = 0
    if x.held_out:
        input_bytes = 0 if x.trained_out else e * x.width
        product = x.pairs * (input_bytes + x.weighted_bytes * x.hidden) + x.held_out
    if e == FP32:
        product -= x.stream_bytes  # the norm keeps the residual itself
    return 3 * x.stream_bytes + max(worst, product)
