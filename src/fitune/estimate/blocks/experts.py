"""The stages of a mixture of experts, and their bytes: router and inputs, gates, outputs, their weighted sum.

Symbols as in site.py; S = t · chosen are the pairs of token and expert, E the experts, w the bytes of an element
of an output times its routing weight. ``held`` are bytes beside a product: its packed matrices made whole, or what an
adapter adds; with either fitune's own forward runs (models/experts.py), else transformers'.
"""

from collections.abc import Iterator, Sequence

from fitune.estimate.blocks.mlp import gate_backward, gated_mlp_tensors_kept, holding_backward
from fitune.estimate.blocks.site import FP32, INDEX, Site, norms_keep_input, whole_weight_bytes, with_linears
from fitune.values.model.block_profile import Stage
from fitune.values.model.model_spec import Linear
from fitune.values.plan import Lora


class _Experts(Site):
    """A block with a mixture: what trains of the matrices into its experts and out of them, and bytes that recur."""

    def __init__(self, site: Site, ways_in: Sequence[Linear], ways_out: Sequence[Linear]) -> None:
        vars(self).update(vars(site))  # worked out once
        model, chosen = site.model, site.t * site.model.experts_per_token
        self.S = chosen  # pairs: each token with each of the experts it goes to
        # bytes of an output's element times its routing weight
        self.w = FP32 if model.weighs_experts_in_fp32 else site.e
        self.adapted_in, self.adapted_out = bool(site.adapted(ways_in)), bool(site.adapted(ways_out))
        self.trained_in, self.trained_out = site.full or self.adapted_in, site.full or self.adapted_out
        self.held_in = max(
            whole_weight_bytes(site, ways_in, again=True), self.adapted_in * chosen * site.e * 2 * site.f
        )
        self.held_out = max(
            whole_weight_bytes(site, ways_out, again=True), self.adapted_out * chosen * site.e * site.h
        )
        # fitune's own forward lets go of what transformers' holds to its end
        self.is_own = self.held_in + self.held_out > 0
        # sorted numbers of experts, routing weights, numbers to be counted, scores of the router
        self.routes_bytes = (
            self.S * (INDEX + self.w + (0 if self.is_own else FP32)) + site.t * site.e * model.num_experts
        )
        # beside products in a forward that keeps nothing: residual and norm output; the chosen experts, the pairs'
        # order and their routing weights, which others keep
        self.forward_bytes = 2 * site.stream + self.routes_bytes + self.S * (2 * INDEX + self.w)
        # in one that keeps: the residual and the norm's output, where nobody keeps them
        self.beside_bytes = (
            (not norms_keep_input(site.plan)) * site.stream
            + (not site.full) * site.stream
            + self.routes_bytes
        )
        # the pairs' inputs, where nobody keeps them and transformers' forward holds them to its end
        self.frozen_inputs_bytes = 0 if self.is_own or self.trained_in else self.S * site.e * site.h


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``. Running again holds a product's input, unless it is kept, and
    its output. transformers.integrations.moe.grouped_mm_experts_forward.
    """
    ways_in, ways_out = linears[:-1], linears[-1:]
    x = _Experts(site, ways_in, ways_out)
    S, e, h, f, w = x.S, x.e, x.h, x.f, x.w
    before_gates = S * e * (2 * f + h)  # gradients of gate and up, and of the grouped product's input
    incoming = x.stream + S * w * h  # the residual's, and one for each pair
    waiting = 0 if norms_keep_input(site.plan) else x.stream  # the block's input
    pairs_in, pairs_out = (_adapter_pairs_kept(site, ways) for ways in (ways_in, ways_out))
    kept = S * e * h if x.trained_in else 0
    if passes:
        # routing weights, before and after they are divided by their sum, and four lists of indices; the router's
        # softmax
        kept += S * (w + FP32 + 4 * INDEX) + x.t * FP32 * (x.model.num_experts + 1)
    elif x.adapted_in or x.adapted_out:
        kept += S * (w + INDEX)  # no gradient comes as far as the router: weights and the tokens' order
    again = x.beside_bytes + S * e * ((0 if x.trained_in else h) + 2 * f) + x.held_in
    inputs = Stage(
        name="expert inputs",
        kept=kept + pairs_in,
        forward=x.forward_bytes + S * e * (h + 2 * f) + x.held_in + pairs_in,
        backward=x.stream + before_gates,
        again=incoming + again,
        making=waiting + again,
        incoming=incoming,
    )
    yield with_linears(site, inputs, ways_in, gone_by_step=before_gates)
    # the gated product of every pair, as wide as the chosen experts together
    gates_kept = gated_mlp_tensors_kept(x.activation, halves=True) * S * e * f
    yield Stage(
        name="expert gates",
        kept=gates_kept if passes or x.adapted_in else 0,
        forward=x.forward_bytes + S * e * (h + max(4, x.activation.forward + 1) * f),
        backward=gate_backward(x, width=f * x.model.experts_per_token, halves=True),
        backward_holding=x.stream + holding_backward(x.activation, halves=True) * S * e * f,
    )
    before_product = S * e * (h + f)  # gradients of output and input
    again = x.beside_bytes + x.frozen_inputs_bytes + S * e * ((0 if x.trained_out else f) + h) + x.held_out
    outputs = Stage(
        name="expert outputs",
        kept=(S * e * f if x.trained_out else 0) + pairs_out,
        # transformers' holds the inputs, too
        forward=x.forward_bytes + S * e * (f + h) + (x.held_out if x.is_own else S * e * h) + pairs_out,
        backward=x.stream + before_product,
        again=incoming + again,
        making=waiting + again,
        incoming=incoming,
    )
    yield with_linears(site, outputs, ways_out, gone_by_step=before_product)
    yield _weighted_sum(x, passes=passes, incoming=incoming, waiting=waiting)


def _adapter_pairs_kept(site: Site, linears: Sequence[Linear]) -> int:
    """e·r·out for each expert of an adapted stack: PEFT's B, in the order that the grouped product takes."""
    lora = site.plan.tuning
    if not isinstance(lora, Lora):
        return 0
    stacks = [m for m in site.adapted(linears) if m.stacked]
    return site.e * lora.rank * sum(m.out_features * m.copies for m in stacks)


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
        backward=x.stream + 3 * x.w * pairs + cast,
        gone_again=cast,
        again=incoming + beside + x.w * pairs + INDEX * x.S,
        making=waiting + beside + 2 * x.w * pairs,
        incoming=incoming,
    )
