"""Memory and traffic of the MLP's activation functions, under transformers' names. Known without torch.

Some are one kernel, others several operations in Python, each of which keeps what its own derivative reads
(transformers/activations.py). A test counts the same of every function.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Counts of tensors of the MLP's width, or of operations."""

    keeps_input: bool = True
    """Autograd keeps what comes in."""
    keeps_output: bool = False
    """It keeps what goes out, where the product behind it keeps the same tensor."""
    inner: int = 0
    """Kept besides these two."""
    makes_output: bool = True
    """False where input and output are one tensor."""
    forward: int = 2
    """At once, with the input, when nothing is kept."""
    backward: int = 2
    """At once beyond what is kept, with the gradients of output and input."""
    reads_and_writes: tuple[int, int] = (2, 3)
    """Numbers of elementwise operations, forward and backward."""
    operations: tuple[int, int] = (1, 1)

    @property
    def kept(self) -> int:
        """Kept besides the output."""
        return self.keeps_input + self.inner


_ONE_KERNEL = Activation()
_FROM_ITS_OUTPUT = Activation(keeps_input=False, keeps_output=True)
_WRITTEN_OUT_TANH = Activation(
    inner=3, forward=4, backward=3, reads_and_writes=(18, 28), operations=(8, 11)
)  # keeps x, ½x, tanh and 1 + tanh

ACTIVATIONS: dict[str, Activation] = {
    **dict.fromkeys(
        ("gelu", "gelu_pytorch_tanh", "hardswish", "leaky_relu", "mish", "relu6", "silu", "swish"), _ONE_KERNEL
    ),
    **dict.fromkeys(("relu", "sigmoid", "tanh"), _FROM_ITS_OUTPUT),
    **dict.fromkeys(("gelu_accurate", "gelu_new", "gelu_python_tanh"), _WRITTEN_OUT_TANH),
    "gelu_10": Activation(inner=1, forward=3, backward=3, reads_and_writes=(4, 10), operations=(2, 4)),
    "gelu_fast": Activation(inner=6, forward=5, backward=3, reads_and_writes=(21, 36), operations=(9, 13)),
    "gelu_python": Activation(
        keeps_input=False, inner=3, forward=4, backward=5, reads_and_writes=(11, 24), operations=(5, 10)
    ),
    "laplace": Activation(
        keeps_input=False, inner=1, forward=4, backward=6, reads_and_writes=(10, 15), operations=(5, 7)
    ),
    "linear": Activation(
        keeps_input=False, makes_output=False, forward=1, backward=1, reads_and_writes=(0, 0), operations=(0, 0)
    ),
    "quick_gelu": Activation(inner=1, forward=3, backward=3, reads_and_writes=(7, 14), operations=(3, 5)),
    "relu2": Activation(
        keeps_input=False, inner=1, forward=3, backward=4, reads_and_writes=(4, 10), operations=(2, 4)
    ),
    "sqrtsoftplus": Activation(
        keeps_output=True, forward=3, backward=3, reads_and_writes=(4, 8), operations=(2, 3)
    ),
}  # fmt: skip

WITH_WEIGHTS = frozenset(("prelu", "xielu"))
"""They have parameters of their own, which no part of a plan counts or trains."""
