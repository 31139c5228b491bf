"""The stages of a mixture of experts, and their bytes: router and inputs, gates, outputs, their weighted sum.

Symbols as in site.py; S = t · chosen are the pairs of token and expert, E the experts, w the bytes of an element
of an output times its routing weight. ``held`` are bytes beside a product: its packed matrices made whole, or what an
adapter adds; with either fitune's own forward runs (models/experts.py), else transformers'.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fitune.estimate.blocks import activations, transient
from fitune.estimate.blocks.site import FP32, INDEX, Site, norms_keep_input, whole_weight_bytes, with_linears
from fitune.values.model.block_profile import Stage
from fitune.values.model.model_spec import Linear
from fitune.values.plan import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class _Experts(Site):
    """A block with a mixture, and what is packed or adapted of the matrices into its experts and out of them."""

    adapted_in: bool
    adapted_out: bool
    held_in: int
    held_out: int

    @property
    def is_own(self) -> bool:
        """True if fitune's own forward runs, which lets go of what transformers' holds to its end."""
        return self.held_in + self.held_out > 0

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
        """S · (8 + w [+ 4]) + t · e · E: sorted numbers of experts, routing weights, numbers to be counted, scores of
        the router; transformers' holds them to the end of its forward."""
        counted = 0 if self.is_own else FP32
        return self.S * (INDEX + self.w + counted) + self.t * self.e * self.model.num_experts

    @property
    def forward_bytes(self) -> int:
        """2·t·e·h + routes + S · (2 · 8 + w): beside products in a forward that keeps nothing.

        Residual and norm output; the chosen experts, the pairs' order and their routing weights, which others keep.
        """
        return 2 * self.stream_bytes + self.routes_bytes + self.S * (2 * INDEX + self.w)

    @property
    def beside_bytes(self) -> int:
        """t·e·h for the residual and for the norm's output, where nobody keeps them; + routes."""
        streams = (not norms_keep_input(self.plan)) + (not self.full)
        return streams * self.stream_bytes + self.routes_bytes

    @property
    def frozen_inputs_bytes(self) -> int:
        """S·e·h: the pairs' inputs, which nobody keeps and transformers' forward holds to its end."""
        return 0 if self.is_own or self.trained_in else self.S * self.e * self.h


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``.
    """
    ways_in, ways_out = linears[:-1], linears[-1:]
    x = _experts(site, ways_in, ways_out)
    before_gates = x.S * x.e * (2 * x.f + x.h)  # gradients of gate and up, and of the grouped product's input
    incoming = x.stream_bytes + x.S * x.w * x.h  # the residual's, and one for each pair
    waiting = 0 if norms_keep_input(site.plan) else x.stream_bytes  # the block's input
    pairs_in, pairs_out = (_adapter_pairs_kept(site, ways) for ways in (ways_in, ways_out))
    inputs = Stage(
        name="expert inputs",
        kept=_inputs_kept(x, passes=passes) + pairs_in,
        forward=_inputs_forward(x) + pairs_in,
        backward=x.stream_bytes + before_gates,
        again=incoming + _inputs_again(x),
        making=waiting + _inputs_again(x),
        incoming=incoming,
    )
    yield with_linears(site, inputs, ways_in, gone_by_step=before_gates)
    yield _gates(x, passes=passes)
    before_product = x.S * x.e * (x.h + x.f)  # gradients of output and input
    outputs = Stage(
        name="expert outputs",
        kept=(x.S * x.e * x.f if x.trained_out else 0) + pairs_out,
        forward=_outputs_forward(x) + pairs_out,
        backward=x.stream_bytes + before_product,
        again=incoming + _outputs_again(x),
        making=waiting + _outputs_again(x),
        incoming=incoming,
    )
    yield with_linears(site, outputs, ways_out, gone_by_step=before_product)
    yield _weighted_sum(x, passes=passes, incoming=incoming, waiting=waiting)


def _experts(site: Site, ways_in: Sequence[Linear], ways_out: Sequence[Linear]) -> _Experts:
    output_bytes = site.t * site.model.experts_per_token * site.e
    whole_in, whole_out = (whole_weight_bytes(site, ways, again=True) for ways in (ways_in, ways_out))
    adapted_in, adapted_out = bool(site.adapted(ways_in)), bool(site.adapted(ways_out))
    return _Experts(
        site.plan, site.shape, site.gradient_enters, site.has_adapters, site.has_window,
        adapted_in=adapted_in, adapted_out=adapted_out,
        held_in=max(whole_in, adapted_in * output_bytes * 2 * site.f),
        held_out=max(whole_out, adapted_out * output_bytes * site.h),
    )  # fmt: skip


def _gates(x: _Experts, *, passes: bool) -> Stage:
    """The gated product of every pair, as wide as the chosen experts together."""
    width = x.f * x.model.experts_per_token
    kept = activations.gated_mlp_tensors_kept(x.activation, halves=True) * x.t * x.e * width
    tensors = max(4, x.activation.forward + 1)
    return Stage(
        name="expert gates",
        kept=kept if passes or x.adapted_in else 0,
        forward=x.forward_bytes + x.S * x.e * (x.h + tensors * x.f),
        backward=transient.gate_backward(x, width=width, halves=True),
    )


def _adapter_pairs_kept(site: Site, linears: Sequence[Linear]) -> int:
    """e·r·out for each expert of an adapted stack: PEFT's B, in the order that the grouped product takes."""
    lora = site.plan.tuning
    if not isinstance(lora, Lora):
        return 0
    stacks = [m for m in site.adapted(linears) if m.stacked]
    return site.e * lora.rank * sum(m.out_features * m.copies for m in stacks)


def _inputs_kept(x: _Experts, *, passes: bool) -> int:
    """S · e·h, the input of the grouped product, where the experts train; + S · (w + 4 + 4 · 8) + t · 4 · (E + 1).

    Routing weights, before and after they are divided by their sum, and four lists of indices; the router's softmax.
    Where no gradient ``passes`` to the router: + S · (w + 8), weights and the tokens' order, if one comes this far.
    transformers.integrations.moe.grouped_mm_experts_forward.
    """
    inputs = x.S * x.e * x.h if x.trained_in else 0
    if not passes:
        return inputs + (x.S * (x.w + INDEX) if x.adapted_in or x.adapted_out else 0)
    return inputs + x.S * (x.w + FP32 + 4 * INDEX) + x.t * FP32 * (x.model.num_experts + 1)


def _inputs_forward(x: _Experts) -> int:
    """S·e·(h + 2f) + held."""
    return x.forward_bytes + x.S * x.e * (x.h + 2 * x.f) + x.held_in


def _inputs_again(x: _Experts) -> int:
    """S·e·(h + 2f) + held: input (unless it is kept) and output of the grouped product."""
    into = 0 if x.trained_in else x.h
    return x.beside_bytes + x.S * x.e * (into + 2 * x.f) + x.held_in


def _outputs_forward(x: _Experts) -> int:
    """S·e·(f + h) + held; transformers' holds the inputs, S·e·h, too."""
    held = x.held_out if x.is_own else x.S * x.e * x.h
    return x.forward_bytes + x.S * x.e * (x.f + x.h) + held


def _outputs_again(x: _Experts) -> int:
    """S·e·(f + h) + held: input (unless it is kept) and output of the grouped product."""
    into = 0 if x.trained_out else x.f
    return x.beside_bytes + x.frozen_inputs_bytes + x.S * x.e * (into + x.h) + x.held_out


def _weighted_sum(x: _Experts, *, passes: bool, incoming: int, waiting: int) -> Stage:
    """Outputs times their routing weights, put back in the tokens' order and added up: S · 2·w·h in forward, once that
    where it runs again.

    Kept: S·e·h, the outputs, for the router's gradient. Transformers' forward holds outputs and inputs to its end,
    fitune's own neither. Backward: S·3·w·h, gradients of the weighting and of both its factors, one of which is cast,
    + S·e·h, where w is more than e; a block that ran again has let go of the outputs by then.
    """
    pairs = x.S * x.h
    held = 0 if x.is_own else 2 * x.e * pairs
    cast = x.e * pairs if x.w > x.e else 0
    beside = x.beside_bytes + x.frozen_inputs_bytes
    return Stage(
        name="expert sum",
        kept=passes * x.e * pairs,
        forward=x.forward_bytes + held + 2 * x.w * pairs,
        backward=x.stream_bytes + 3 * x.w * pairs + cast,
        gone_again=cast,
        again=incoming + beside + x.w * pairs + INDEX * x.S,
        making=waiting + beside + 2 * x.w * pairs,
        incoming=incoming,
    )
