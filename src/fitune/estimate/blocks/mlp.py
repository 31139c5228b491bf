"""Stages of the MLP of a decoder block: inputs, activation, output. Mixtures of experts: experts.py.

Symbols as in site.py. Backward holds the gradient of the residual stream, t·e·h, through the whole block.
"""

from collections.abc import Iterator, Sequence

from fitune.estimate.blocks.site import Site, norms_keep_input, whole_weight_bytes, with_linears
from fitune.values.model.block_profile import Stage
from fitune.values.model.model_spec import Linear
from fitune.values.model.traits import Activation


def mlp_stages(
    site: Site, linears: Sequence[Linear], *, passes: bool, attention_passes: bool
) -> Iterator[Stage]:
    """``passes``: a gradient goes through its input; ``attention_passes``: through what attention adds beside it."""
    model, activation = site.model, site.activation
    inputs, down = linears[:-1], linears[-1:]
    gated = model.mlp_type == "gated"
    adapted_out = bool(site.adapted(down))
    reaches = passes or site.trains(inputs)
    goes_back = reaches or site.trains(down)
    drops_sum = model.parallel_blocks and not model.dropout.attention_output and attention_passes
    wide, stream = site.t * site.e * site.f, site.stream
    # the block's input, and what the MLP is added to
    waiting = 0 if norms_keep_input(site.plan) else 2 * stream
    input_held = 0 if site.reads_input(inputs) else stream  # by the MLP's caller alone
    # what attention gave, where that is not let go of
    beside_attention = stream if model.parallel_blocks or model.learned_positions else 0
    unpacked = whole_weight_bytes(site, down, again=True)
    keeps_product = reaches and not gated and activation.keeps_output
    # a packed product without adapter keeps nothing: a block runs again only when the gated product's gradient is there
    gate_first = gated and site.fused and unpacked and not adapted_out
    # gradients of gate and up, and partial ones of their shared input: adapters make another while both are there
    inputs_back = 2 * stream + (2 if gated else 1) * wide + (gated and not site.full) * stream
    yield with_linears(
        site,
        Stage(
            name="MLP inputs",
            backward=inputs_back + site.shared_dropout_gradient if reaches else 0,
            again=gate_first
            * (stream + input_held + 3 * wide + whole_weight_bytes(site, inputs, again=True)),
            incoming=gate_first * (stream + wide),
        ),
        inputs,
        input_has_gradient=site.gradient_enters if model.parallel_blocks else passes,
        # the gradient of up, or of all that one linear makes, and the input that it alone reads
        gone_by_step=wide if len(inputs) > 1 else inputs_back - stream,
    )
    yield _activation_stage(
        site, inputs, reaches=reaches, adapted_out=adapted_out, gate_first=bool(gate_first), waiting=waiting,
        input_held=input_held, beside_attention=beside_attention,
    )  # fmt: skip
    again = 0
    if not (keeps_product or site.reads_input(down)):  # else going back takes more
        # the product, the output and the residual's gradient; residual and input, where nobody keeps them, and the
        # adapter's output
        others = adapted_out + (not norms_keep_input(site.plan)) + (not site.reads_input(inputs))
        again = wide + (2 + others) * stream + beside_attention
    # the residual's gradient, and an adapter's scaled one
    incoming = (1 + (adapted_out and not site.norms_outputs)) * stream
    beside_packed = unpacked and adapted_out and not site.has_dora  # DoRA's norms take more: with_linears
    if beside_packed and site.reads_input(down):
        again = waiting // 2 + incoming + stream + unpacked
    # the gradient of the product appears while the product is still kept; in place of its scaled gradient an adapter
    # may hold the second of two partial ones, after the product is gone
    output_back = site.output_gradients * stream + wide + site.dropout_backward(model.dropout.mlp_output)
    # the adapter goes back first: its scaled gradient is gone when the base's weight is whole
    if beside_packed:
        output_back -= min(stream, whole_weight_bytes(site, down))
    product_kept = wide if site.reads_input(down) and not keeps_product else 0
    # the product, where nobody keeps it, and the output: of an adapter base, low rank and scaled
    product_held = 0 if keeps_product or product_kept else wide
    making = waiting + beside_attention + input_held + product_held
    making += stream + max(2 * stream * adapted_out, unpacked)
    outputs = Stage(
        name="MLP output",
        kept=product_kept + site.dropout_kept(model.dropout.mlp_output, passes=goes_back or drops_sum),
        backward=output_back if goes_back else 0,
        again=again,
        incoming=incoming if again else 0,
        making=making if goes_back else 0,
    )
    # the product, and the gradient that a norm behind it made
    yield with_linears(site, outputs, down, gone_by_step=product_kept + site.norms_outputs * stream)


def _activation_stage(
    site: Site, inputs: Sequence[Linear], *, reaches: bool, adapted_out: bool, gate_first: bool, waiting: int,
    input_held: int, beside_attention: int,
) -> Stage:  # fmt: skip
    """``waiting``: bytes that the block holds for its end; ``input_held``: the input, where the caller alone has it."""
    model, activation = site.model, site.activation
    gated = model.mlp_type == "gated"
    halves = gated and len(inputs) == 1  # one linear makes gate and up (Phi-3)
    adapted_in = bool(site.adapted(inputs))
    wide, stream = site.t * site.e * site.f, site.stream
    if gated and site.fused:
        # gate and up; the activated gate is computed again (liger_kernel.ops.swiglu, geglu 0.8.5)
        tensors_kept = 2
        # the gradient of the product, over which those of gate and up are written; where one linear makes both theirs
        # is another tensor of 2·f, and where base and adapter each have a gradient of the product, so is their sum
        backward = stream + (3 if halves or adapted_out else 1) * wide
    elif gated:
        tensors_kept = gated_mlp_tensors_kept(activation, halves=halves)
        backward = gate_backward(site, width=site.f, halves=halves)
    else:  # 1 for GELU in one kernel, 4 for gelu_new
        tensors_kept = activation.kept + activation.keeps_output
        # of the activation's output and input, and what lies between; of base, adapter and their sum at least
        backward = stream + max(activation.backward, 3 if adapted_out else 0) * wide
    # of the MLP's width at once: 3 gated (activated gate, up, product), else 2; an adapter on the inputs adds one (base
    # and scaled low-rank output); more where the activation makes more on its way
    tensors = max((3 if gated else 2) + adapted_in, activation.forward)
    again = incoming = making = 0
    if gated and not site.fused and site.adapted(inputs[1:]):
        # the second half's base, low-rank output and this one scaled, of which one is kept
        making = waiting + input_held + 2 * wide
    if (
        halves
    ):  # gate and up are made together: both, activated gate and product, or three of both with an adapter
        tensors = max(6 if adapted_in else 4, activation.forward + 1)
    if halves and adapted_in:  # base, low-rank output and this one scaled of both at once
        making = waiting + input_held + (6 - tensors_kept) * wide
        incoming = (1 + (adapted_out and not model.dropout.mlp_output)) * stream
        # the block's input is counted with those that recompute keeps
        again = making - waiting // 2 + incoming
    if gate_first:
        incoming = stream + wide
        again = max(again, input_held + wide + incoming)
    return Stage(
        name="MLP activation",
        kept=tensors_kept * wide if reaches else 0,
        # in parallel blocks in place of the residual, which is the block's input
        forward=2 * stream + tensors * wide + (0 if model.parallel_blocks else beside_attention),
        backward=backward + site.shared_dropout_gradient if reaches else 0,
        # up's gradient has become one of the input by then
        backward_holding=(1 + (gated and not halves)) * stream
        + holding_backward(activation, halves=halves) * wide,
        again=again,
        making=making,
        incoming=incoming,
    )


def gated_mlp_tensors_kept(activation: Activation, *, halves: bool) -> int:
    """Tensors of the MLP's width that are kept, output and up included: 3 for SiLU, 2 for ReLU, 6 for gelu_new.

    The product of the last two belongs to the down projection's input. Where one linear makes gate and up
    (``halves``), both live as long as up does.
    """
    return 2 + (activation.inner + activation.makes_output if halves else activation.kept)


def holding_backward(activation: Activation, *, halves: bool) -> int:
    """Tensors of the MLP's width alive at the worst moment back through the activation where nothing is let go of: what
    it needs and what it kept between; where one linear makes gate and up (``halves``) beside up's gradient, or both
    gradients and both again as one tensor."""
    through = activation.backward + activation.inner
    return max(4, 1 + through) if halves else through


def gate_backward(site: Site, *, width: int, halves: bool) -> int:
    """t · e · max(h + 3f, 2h + (backward − freed)·f): back through the product, then through the activation.

    First gradients of the product, of the activated gate and of up; then what the activation needs, when the product
    has let go of up and, unless the activation itself keeps it, of the activated gate. Up's gradient has by then
    become one of the shared input; where one linear makes both (``halves``) it waits, with up, for the gate's.
    """
    activation = site.activation
    freed = int(activation.makes_output and not activation.keeps_output)
    if halves:
        freed -= 1 if activation.keeps_input else -1
        return site.t * site.e * (site.h + max(3, activation.backward - freed) * width)
    through = 2 * site.h + (activation.backward - freed - 1) * width
    return site.t * site.e * max(site.h + 3 * width, through)
