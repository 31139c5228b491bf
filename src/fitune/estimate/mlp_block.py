"""The MLP half of a block: gated, plain, or a mixture of experts."""

from collections.abc import Iterator, Sequence

from fitune.estimate import activations, transient
from fitune.estimate.activations import FP32
from fitune.estimate.site import Site, linears_stage
from fitune.estimate.stages import Stage
from fitune.spec.model import Linear

_COMPOSED_GELU = ("gpt2", "phi")
"""Architectures whose GELU is written as small operations instead of one kernel."""
_WEIGHTED_IN_FP32 = ("mixtral",)
"""Mixtures whose routing weights stay in fp32, and so what they multiply."""


def mlp_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    inputs, down = linears[:-1], linears[-1:]
    h, f = model.hidden_size, model.intermediate_size
    gated = model.mlp_type == "gated"
    composed = model.model_type in _COMPOSED_GELU
    reaches = passes or site.trains(inputs)
    yield linears_stage(
        site, "MLP inputs", inputs,
        kept=0,
        forward=0,
        backward=transient.mlp_inputs_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, partial_gradients=2 if gated else 1
        ) + site.shared_dropout_gradient,
        input_has_gradient=site.gradient_enters if model.parallel_blocks else passes,
    )  # fmt: skip
    if gated:
        kept, backward = _gate(site, inputs)
    else:
        kept = activations.plain_mlp_kept(tokens=t, width=f, element_bytes=e, composed_gelu=composed)
        backward = transient.activation_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, third=composed or bool(site.adapted(down))
        )
    yield Stage(
        name="MLP activation",
        kept=kept if reaches else 0,
        forward=transient.mlp_forward(
            tokens=t, hidden=h, width=f, element_bytes=e,
            tensors=_tensors_at_once(site, inputs),
        ),
        backward=backward + site.shared_dropout_gradient if reaches else 0,
        again=transient.fused_mlp_again(
            tokens=t, hidden=h, width=f, element_bytes=e,
            adapted_output=bool(site.adapted(down)) and not model.dropout.mlp_output,
        )
        if _is_fused(site, inputs) and site.adapted(inputs)
        else 0,
    )  # fmt: skip
    yield linears_stage(
        site, "MLP output", down,
        kept=activations.linear_input_kept(tokens=t, size=f, element_bytes=e, needed=site.reads_input(down))
        + site.dropout_kept(model.dropout.mlp_output, passes=reaches or site.trains(down)),
        forward=0,
        backward=transient.down_projection_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, adapted=not site.full
        ) + site.dropout_backward(model.dropout.mlp_output),
        again=_output_again(site, inputs, down),
    )  # fmt: skip


def _output_again(site: Site, inputs: Sequence[Linear], down: Sequence[Linear]) -> int:
    """0 where the product's input is kept: then going back takes more."""
    if site.reads_input(down):
        return 0
    kept_by_norm = site.element_bytes == FP32 or site.model.norm_type == "layer"
    return transient.mlp_output_again(
        tokens=site.shape.tokens, hidden=site.model.hidden_size, width=site.model.intermediate_size,
        element_bytes=site.element_bytes,
        others=bool(site.adapted(down)) + (not kept_by_norm) + (not site.reads_input(inputs)),
    )  # fmt: skip


def _gate(site: Site, inputs: Sequence[Linear]) -> tuple[int, int]:
    """What the gated product keeps, and the worst moment of its way back."""
    sizes = {
        "tokens": site.shape.tokens,
        "width": site.model.intermediate_size,
        "element_bytes": site.element_bytes,
    }
    hidden = site.model.hidden_size
    if site.fused:
        kept = activations.fused_gated_mlp_kept(**sizes)
        halves = _is_fused(site, inputs)
        return kept, transient.fused_gate_backward(**sizes, hidden=hidden, halves=halves)
    return activations.gated_mlp_kept(**sizes), transient.gate_backward(**sizes, hidden=hidden)


def _is_fused(site: Site, inputs: Sequence[Linear]) -> bool:
    """Whether one linear makes gate and up (Phi-3)."""
    return site.model.mlp_type == "gated" and len(inputs) == 1


def _tensors_at_once(site: Site, inputs: Sequence[Linear]) -> int:
    adapted = bool(site.adapted(inputs))
    if _is_fused(site, inputs):
        return 6 if adapted else 4
    gated = site.model.mlp_type == "gated" or site.model.model_type in _COMPOSED_GELU
    return (3 if gated else 2) + adapted


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``: transformers' experts take no adapters.
    """
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    h, f, chosen = model.hidden_size, model.intermediate_size, model.experts_per_token
    sizes = {"tokens": t, "chosen": chosen, "hidden": h, "element_bytes": e}
    yield linears_stage(
        site, "expert inputs", linears[:-1],
        kept=passes * activations.expert_inputs_kept(**sizes, num_experts=model.num_experts, trained=site.full),
        forward=0,
        backward=transient.expert_inputs_backward(**sizes, width=f),
    )  # fmt: skip
    yield Stage(
        name="expert gates",
        kept=passes * chosen * activations.gated_mlp_kept(tokens=t, width=f, element_bytes=e),
        forward=transient.mlp_forward(tokens=t, hidden=2 * h, width=f * chosen, element_bytes=e, tensors=4),
        backward=transient.gate_backward(tokens=t, hidden=h, width=f * chosen, element_bytes=e),
    )
    yield linears_stage(
        site, "expert outputs", linears[-1:],
        kept=passes * activations.expert_outputs_kept(**sizes, width=f, trained=site.full),
        forward=0,
        backward=transient.expert_outputs_backward(**sizes, width=f),
        again=transient.expert_outputs_again(
            **sizes, weighted_bytes=FP32 if model.model_type in _WEIGHTED_IN_FP32 else e, trained=site.full
        ),
    )  # fmt: skip
