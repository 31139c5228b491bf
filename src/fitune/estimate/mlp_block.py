"""The MLP half of a block: gated, plain, or a mixture of experts."""

from collections.abc import Iterator, Sequence

from fitune.estimate import activations, transient
from fitune.estimate.activations import FP32
from fitune.estimate.site import Site, linears_stage
from fitune.spec.block_profile import Stage
from fitune.spec.model import Linear
from fitune.spec.traits import ACTIVATIONS


def mlp_stages(
    site: Site, linears: Sequence[Linear], *, passes: bool, attention_passes: bool
) -> Iterator[Stage]:
    """``passes``: a gradient goes through its input; ``attention_passes``: through what attention adds beside it."""
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    inputs, down = linears[:-1], linears[-1:]
    h, f = model.hidden_size, model.intermediate_size
    gated = model.mlp_type == "gated"
    activation = ACTIVATIONS[model.activation]
    reaches = passes or site.trains(inputs)
    goes_back = reaches or site.trains(down)
    drops_sum = model.parallel_blocks and not model.dropout.attention_output and attention_passes
    keeps_product = reaches and not gated and activation.keeps_output
    yield linears_stage(
        site, "MLP inputs", inputs,
        kept=0,
        forward=0,
        backward=transient.mlp_inputs_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, partial_gradients=2 if gated else 1
        ) + site.shared_dropout_gradient if reaches else 0,
        input_has_gradient=site.gradient_enters if model.parallel_blocks else passes,
    )  # fmt: skip
    if gated:
        kept, backward = _gate(site, inputs)
    else:
        kept = activations.plain_mlp_kept(tokens=t, width=f, element_bytes=e, activation=activation)
        backward = transient.activation_backward(
            tokens=t, hidden=h, width=f, element_bytes=e,
            tensors=max(activation.backward, 3 if site.adapted(down) else 0),
        )  # fmt: skip
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
            kept=activations.gated_mlp_tensors_kept(activation, halves=True),
            adapted_output=bool(site.adapted(down)) and not model.dropout.mlp_output,
        )
        if _is_fused(site, inputs) and site.adapted(inputs)
        else 0,
    )  # fmt: skip
    yield linears_stage(
        site, "MLP output", down,
        kept=activations.linear_input_kept(
            tokens=t, size=f, element_bytes=e, needed=site.reads_input(down) and not keeps_product
        )
        + site.dropout_kept(model.dropout.mlp_output, passes=goes_back or drops_sum),
        forward=0,
        backward=transient.down_projection_backward(
            tokens=t, hidden=h, width=f, element_bytes=e, adapted=not site.full
        ) + site.dropout_backward(model.dropout.mlp_output) if goes_back else 0,
        again=0 if keeps_product else _output_again(site, inputs, down),
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
    hidden, halves = site.model.hidden_size, _is_fused(site, inputs)
    if site.fused:
        kept = activations.fused_gated_mlp_kept(**sizes)
        return kept, transient.fused_gate_backward(**sizes, hidden=hidden, halves=halves)
    activation = ACTIVATIONS[site.model.activation]
    return (
        activations.gated_mlp_kept(**sizes, activation=activation, halves=halves),
        transient.gate_backward(**sizes, hidden=hidden, activation=activation, halves=halves),
    )


def _is_fused(site: Site, inputs: Sequence[Linear]) -> bool:
    """True if one linear makes gate and up (Phi-3)."""
    return site.model.mlp_type == "gated" and len(inputs) == 1


def _tensors_at_once(site: Site, inputs: Sequence[Linear]) -> int:
    adapted, activation = bool(site.adapted(inputs)), ACTIVATIONS[site.model.activation]
    if _is_fused(site, inputs):
        return max(6 if adapted else 4, activation.forward + 1)
    return max((3 if site.model.mlp_type == "gated" else 2) + adapted, activation.forward)


def expert_stages(site: Site, linears: Sequence[Linear], *, passes: bool) -> Iterator[Stage]:
    """Router and fused experts: into the pairs of token and expert, through the gates, and back to tokens.

    Nothing of them is kept where no gradient ``passes``: transformers' experts take no adapters.
    """
    model, t, e = site.model, site.shape.tokens, site.element_bytes
    h, f, chosen = model.hidden_size, model.intermediate_size, model.experts_per_token
    activation = ACTIVATIONS[model.activation]
    sizes = {"tokens": t, "chosen": chosen, "hidden": h, "element_bytes": e}
    weighted = FP32 if model.weighs_experts_in_fp32 else e
    yield linears_stage(
        site, "expert inputs", linears[:-1],
        kept=passes * activations.expert_inputs_kept(**sizes, num_experts=model.num_experts, trained=site.full),
        forward=0,
        backward=transient.expert_inputs_backward(**sizes, width=f),
    )  # fmt: skip
    yield Stage(
        name="expert gates",
        kept=activations.gated_mlp_kept(
            tokens=t * passes, width=f * chosen, element_bytes=e, activation=activation, halves=True
        ),
        forward=transient.mlp_forward(
            tokens=t, hidden=2 * h, width=f * chosen, element_bytes=e, tensors=max(4, activation.forward + 1)
        ),
        backward=transient.gate_backward(
            tokens=t, hidden=h, width=f * chosen, element_bytes=e, activation=activation, halves=True
        ),
    )
    yield linears_stage(
        site, "expert outputs", linears[-1:],
        kept=passes * activations.expert_outputs_kept(**sizes, width=f, trained=site.full),
        forward=0,
        backward=transient.expert_outputs_backward(**sizes, width=f, weighted_bytes=weighted),
        again=transient.expert_outputs_again(
            **sizes, weighted_bytes=weighted, trained=site.full
        ),
    )  # fmt: skip
