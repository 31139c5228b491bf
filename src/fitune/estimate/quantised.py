"""Bytes of a frozen base in few bits, and what it takes to multiply with one (spec/quantisers.py)."""

from fitune.spec.model import Linear
from fitune.spec.plan import Dense, Quantiser


def is_quantised(linear: Linear, base: Dense | Quantiser) -> bool:
    return linear.adaptable and not isinstance(base, Dense)


def stored_bytes(weights: int, base: Dense | Quantiser, *, element_bytes: int) -> int:
    """One matrix as the device holds it."""
    scales = 0 if isinstance(base, Dense) else base.scale_bytes(weights, element_bytes=element_bytes)
    return packed_bytes(weights, base, element_bytes=element_bytes) + scales


def packed_bytes(weights: int, base: Dense | Quantiser, *, element_bytes: int) -> int:
    """One matrix's words without what scales them: the parameter, of which sharding makes shares."""
    return weights * element_bytes if isinstance(base, Dense) else base.packed_bytes(weights)


def dequantisation_workspace_bytes(*, in_features: int, out_features: int, element_bytes: int) -> int:
    """e·out·in: the matrix in the compute type while it is multiplied, forward and backward alike.

    Nothing of it is kept; the largest linear decides (bitsandbytes MatMul4Bit; hqq dequantises the same way).
    """
    return in_features * out_features * element_bytes
