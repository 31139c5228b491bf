"""The linears of a model's blocks, packed by the quantiser that the plan names.

Another quantiser is a file with its linear and a row in ``LINEARS``. Embedding, head, norms and biases stay in the
compute type; so do routers and experts, which transformers holds as bare parameters.
"""

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fitune.models.hqq import HqqLinear
from fitune.models.nf4 import Nf4Linear
from fitune.models.quantised_linear import QuantisedLinear
from fitune.spec.plan import Dense, Hqq, Nf4

LINEARS: dict[type[Nf4 | Hqq], type[QuantisedLinear]] = {Nf4: Nf4Linear, Hqq: HqqLinear}


def require_quantiser(base: Dense | Nf4 | Hqq) -> None:
    """Raises MissingExtra before anything is read: inside a conversion transformers would take it for damaged files."""
    if not isinstance(base, Dense):
        LINEARS[type(base)].require()


def quantise_linears(blocks: nn.Module, base: Dense | Nf4 | Hqq) -> None:
    """Replace every dense linear inside ``blocks``; each dense weight is let go of before the next is packed."""
    if isinstance(base, Dense):
        return
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if is_dense_linear(child):
                setattr(parent, name, packed_linear(child, child.weight.detach(), base))


def is_dense_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D) and not isinstance(module, QuantisedLinear)


def packed_linear(linear: nn.Module, weight: Tensor, base: Nf4 | Hqq) -> QuantisedLinear:
    """A linear like ``linear`` that holds ``weight`` in few bits.

    GPT-2's Conv1D keeps its weight transposed, [in, out]; packed it is a linear like all others.
    """
    weight_OI = weight.T if isinstance(linear, Conv1D) else weight
    out_features, in_features = weight_OI.shape
    packed = LINEARS[type(base)](
        in_features, out_features, bias=linear.bias, base=base, dtype=weight_OI.dtype
    )
    packed.pack(weight_OI)
    packed.train(linear.training)
    return packed


def quantised_base(model: nn.Module) -> Dense | Nf4 | Hqq:
    """What the linears of ``model`` are packed by."""
    found = next((m.base for m in model.modules() if isinstance(m, QuantisedLinear)), None)
    return Dense() if found is None else found


def count_weights(model: nn.Module) -> int:
    """Parameters of ``model``, a packed matrix by the weights it stands for."""
    packed = (m for m in model.modules() if isinstance(m, QuantisedLinear))
    stored = sum(parameter.numel() for parameter in model.parameters())
    return stored + sum(m.in_features * m.out_features - m.weight.numel() for m in packed)
