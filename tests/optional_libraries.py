"""Marks of cases that need a library which is not in every installation."""

from importlib.util import find_spec

import pytest

NEEDS_BITSANDBYTES = pytest.mark.skipif(
    not find_spec("bitsandbytes"), reason="needs bitsandbytes: fitune[quant]"
)
NEEDS_DEEPSPEED = pytest.mark.skipif(not find_spec("deepspeed"), reason="needs deepspeed: fitune[deepspeed]")
