"""The stages of a mixture of experts, and their bytes: router and inputs, gates, outputs.

Symbols as in site.py; S = t · chosen are the pairs of token and expert, E the experts, w the bytes of an element
of an output times its routing weight. ``held`` are bytes beside a product: its packed matrices made whole, or what an
adapter adds. They are 0 where transformers' own experts run; else fitune's own forward runs them (models/experts.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.site import FP32, INDEX, Site, with_linears
from fitune.spec.model.block_profile import Stage
from fitune.spec.model.model_spec import Linear
from fitune.spec.plan import Lomo, Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts(Site):
    """A block with a mixture, and what is packed or adapted of the matrices into its experts and out of them."""

    adapted_in: bool
    adapted_out: bool
    whole_in: int
    """Bytes of the packed matrices when they are made whole."""
    whole_out: int
    held_in: int
    held_out: int

    @property
    def S(self) -> int:
        """Pairs: each token with each of the experts it goes to."""
        return self.t * self.model.experts_per_token

    @property
    def w(self) -> int:
        """Bytes of one element of an output times its routing weight."""
        return FP32 if self.model.weighs_experts_in_fp32 else self.e

    @property
    def trained_in(self) -> bool:
        """True if the matrices into the experts train, or their adapters."""
        return self.full or self.adapted_in

    @property
    def trained_out(self) -> bool:
        """True if the matrices out of the experts train, or their adapters."""
        return self.full or self.adapted_out

    @property
    def stream_bytes(self) -> int:
        """t·e·h: one tensor of the residual stream."""
        return self.t * self.e * self.h

    @property
    def routes_bytes(self) -> int:
        """S · (e + 3 · 8) + t · e · E: routing weights, three lists of indices, and the router's scores."""
        return self.S * (self.e + 3 * INDEX) + self.t * self.e * self.model.num_experts


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``.
    """
    ways_in, ways_out = linears[:-1], linears[-1:]
    x = _experts(site, ways_in, ways_out)
    lomo = isinstance(site.plan.tuning, Lomo)
    outputs_back = _outputs_backward(x)
    beside_residual = outputs_back - x.stream_bytes
    incoming = x.stream_bytes + x.S * x.w * x.h if x.held_in else 0
    inputs = Stage(
        name="expert inputs",
        kept=(passes or x.adapted_in) * _inputs_kept(x) + _adapter_pairs_kept(site, ways_in),
        forward=_inputs_forward(x),
        backward=_inputs_backward(x),
        again=_inputs_again(x),
        incoming=incoming,
    )
    gate_and_up = 2 * x.S * x.e * x.f  # their gradients
    yield with_linears(site, inputs, ways_in, gone_by_step=lomo * gate_and_up)
    yield _gates(x, passes=passes)
    outputs_kept = (passes or x.adapted_in or x.adapted_out) * _outputs_kept(x)
    outputs = Stage(
        name="expert outputs",
        kept=outputs_kept + _adapter_pairs_kept(site, ways_out),
        forward=_outputs_forward(x),
        backward=outputs_back,
        again=_outputs_again(x),
        incoming=incoming,
    )
    # the product follows the weighting, when outputs are gone; the step follows the product
    yield with_linears(
        site,
        outputs,
        ways_out,
        gone_by_gradient=lomo * (beside_residual - x.S * x.e * x.f),
        gone_by_step=lomo * (beside_residual + x.S * x.e * x.h),
    )


def _experts(site: Site, ways_in: Sequence[Linear], ways_out: Sequence[Linear]) -> _Experts:
    output_bytes = site.t * site.model.experts_per_token * site.e
    whole_in, whole_out = site.whole_stack_bytes(ways_in), site.whole_stack_bytes(ways_out)
    adapted_in, adapted_out = bool(site.adapted(ways_in)), bool(site.adapted(ways_out))
    held_in = max(whole_in, adapted_in * output_bytes * 2 * site.f)
    held_out = max(whole_out, adapted_out * output_bytes * site.h)
    if held_in or held_out:  # fitune's own forward runs both ways
        held_in, held_out = max(1, held_in), max(1, held_out)
    return _Experts(
        site.plan, site.shape, site.gradient_enters, site.has_adapters, site.has_window,
        adapted_in=adapted_in, adapted_out=adapted_out, whole_in=whole_in, whole_out=whole_out, held_in=held_in,
        held_out=held_out,
    )  # fmt: skip


def _gates(x: _Experts, *, passes: bool) -> Stage:
    """The gated product of every pair, as wide as the chosen experts together."""
    width = x.f * x.model.experts_per_token
    kept = activations.gated_mlp_tensors_kept(x.activation, halves=True) * x.t * x.e * width
    tensors = max(4, x.activation.forward + 1)
    return Stage(
        name="expert gates",
        kept=kept if passes or x.adapted_in else 0,
        forward=transient.mlp_forward(x, width=width, tensors=tensors, beside=2 if x.held_in else 4),
        backward=transient.gate_backward(x, width=width, halves=True),
    )


def _adapter_pairs_kept(site: Site, linears: Sequence[Linear]) -> int:
    """e·r·out for each expert of an adapted stack: PEFT's B, in the order that the grouped product takes."""
    lora = site.plan.tuning
    if not isinstance(lora, Lora):
        return 0
    stacks = [m for m in site.adapted(linears) if m.stacked]
    return site.e * lora.rank * sum(m.out_features * m.copies for m in stacks)


def _inputs_kept(x: _Experts) -> int:
    """S · e·h, the input of the grouped product, where the experts train; + S · 28 + t · E · (4 + 4).

    Routing weights and three lists of indices; the router's softmax.
    transformers.integrations.moe.grouped_mm_experts_forward.
    """
    inputs = x.S * x.e * x.h if x.trained_in else 0
    return inputs + x.S * (FP32 + 3 * INDEX) + x.t * x.model.num_experts * 2 * FP32


def _inputs_forward(x: _Experts) -> int:
    """2·t·e·h + S·e·(h + 2f) + routes + held; 0 where transformers' own experts run."""
    if not x.held_in:
        return 0
    product = x.S * x.e * (x.h + 2 * x.f)
    return 2 * x.stream_bytes + product + x.routes_bytes + x.held_in


def _inputs_backward(x: _Experts) -> int:
    """t·e·h + S·e·(2f + h) + whole: gradients of gate and up together, and of the grouped product's input."""
    return x.stream_bytes + x.S * x.e * (2 * x.f + x.h) + x.whole_in


def _inputs_again(x: _Experts) -> int:
    """3·t·e·h [fp32: 2] + S·(w·h + e·(h + 2f)) + held; 0 where transformers' own experts run.

    Residual, norm output and their gradient; gradient for each pair; input (unless an adapter keeps it) and output of
    the grouped product. In fp32 the norm keeps the residual itself.
    """
    if not x.held_in:
        return 0
    into = 0 if x.adapted_in else x.h
    product = x.S * (x.w * x.h + x.e * (into + 2 * x.f))
    return (2 if x.e == FP32 else 3) * x.stream_bytes + product + x.held_in


def _outputs_kept(x: _Experts) -> int:
    """S · e·h, the output that the routing weight multiplies; + S · e·f, the product's input, where it trains."""
    return x.S * x.e * (x.h + (x.f if x.trained_out else 0))


def _outputs_forward(x: _Experts) -> int:
    """2·t·e·h + routes + the worst of three; 0 where transformers' own experts run.

    S·e·(f + h) and what is held in the product; its output, S·e·h, and that times the routing weight, S·w·h; that
    twice, while it is put back in the tokens' order.
    """
    if not x.held_out:
        return 0
    product = x.S * x.e * (x.f + x.h) + x.held_out
    weighing = x.S * x.h * (x.w + max(x.w, x.e))
    return 2 * x.stream_bytes + x.routes_bytes + max(product, weighing)


def _outputs_backward(x: _Experts) -> int:
    """t·e·h + S·max(3·w·h, e·(h + f)): back to pairs of token and expert, or through the grouped product.

    Three are the gradients of the weighting and of both its factors. fitune's own forward has one cast, + S·e·h, where
    w is more than e; its product has whole matrices beside it, when what the weighting kept, S·e·h, is gone. An
    adapter's input is let go of before that product goes back, and its gradient is as large.
    """
    e = x.e
    through = x.S * e * (x.h + x.f)
    if x.held_out:
        through += max(1, x.whole_out) - x.S * e * x.h
    cast = e if x.held_out and x.w > e else 0
    return x.stream_bytes + max(x.S * (3 * x.w + cast) * x.h, through)


def _outputs_again(x: _Experts) -> int:
    """3·t·e·h + S·(2·w·h + 8): gradient for each pair and weighted output; residual, norm output, their gradient.

    + S·e·h while the experts are frozen: their inputs, which nothing keeps, are still there. The gradient is spread
    over the pairs before the block runs again. fitune's own forward lets go of those inputs; its product may be the
    worst moment instead, with its input and what is held.
    """
    e = x.e
    inputs = 0 if x.trained_out or x.held_out else e * x.h
    worst = x.S * (2 * x.w * x.h + inputs + 8)
    product = 0
    if x.held_out:
        input_bytes = 0 if x.trained_out else e * x.f
        product = x.S * (input_bytes + x.w * x.h) + x.held_out
    if e == FP32:
        product -= x.stream_bytes  # the norm keeps the residual itself
    return 3 * x.stream_bytes + max(worst, product)
