"""Liger's kernels on a CPU: Triton's interpreter runs a kernel's Python line by line.

Slow, and not the compiler's code, but the same arithmetic. Two things that Liger 0.8.5 asks of a kernel's arguments
and functions are there on a GPU only and are lent here: numbers that can be cast, and CUDA's own rsqrt and tanh.
"""

import sys
from contextlib import contextmanager

import numpy
import pytest

from fitune.models.liger import operations_of_liger


def kernel_modules():
    """Imported modules of triton and Liger by name, without triton's C code, which a process loads once."""
    return {
        name: module for name, module in sys.modules.items()
        if name.partition(".")[0] in ("triton", "liger_kernel") and not name.startswith("triton._C")
    }  # fmt: skip


@contextmanager
def imported_anew():
    """Inside, both are imported as copies whose kernels are interpreted: triton decides when it is imported."""
    compiling = kernel_modules()
    for name in compiling:
        del sys.modules[name]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            yield
    finally:
        for name in kernel_modules():
            del sys.modules[name]
        sys.modules.update(compiling)


@contextmanager
def interpreted_liger():
    """Liger's operations, which run only inside. Skips without triton or liger-kernel."""
    pytest.importorskip("triton", reason="Liger's kernels are written in triton")
    pytest.importorskip("liger_kernel.ops", reason="pip install 'fitune[liger]'")
    with imported_anew():
        yield from lent_what_gpus_have()


def lent_what_gpus_have():
    from liger_kernel.ops import geglu, rms_norm
    from triton import language as tl
    from triton.runtime import interpreter

    def as_argument(value):
        if type(value) is float:
            return tl.tensor(
                interpreter.TensorHandle(numpy.array([value], numpy.float32), tl.float32), tl.float32
            )
        return convert(value)

    convert = interpreter._implicit_cvt
    with (
        pytest.MonkeyPatch.context() as patch
    ):  # lambdas: while a kernel runs, tl has the interpreter's functions
        patch.setattr(interpreter, "_implicit_cvt", as_argument)
        patch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
        patch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
        yield operations_of_liger()
