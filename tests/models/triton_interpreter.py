"""Liger's kernels on a CPU: Triton's interpreter runs a kernel's Python line by line.

Slow, and not the compiler's code, but the same arithmetic. Two things that Liger 0.8.5 asks of a kernel's arguments
and functions are there on a GPU only and are lent here: numbers that can be cast, and CUDA's own rsqrt and tanh.
"""

from contextlib import contextmanager

import numpy
import pytest

from fitune.models.liger import operations_of_liger


@contextmanager
def interpreted_liger():
    """Skips without triton or liger-kernel, and unless TRITON_INTERPRET=1 was set before anything imports triton."""
    triton = pytest.importorskip("triton", reason="Liger's kernels are written in triton")
    pytest.importorskip("liger_kernel.ops", reason="pip install 'fitune[liger]'")
    if isinstance(triton.language.standard.sum, triton.runtime.jit.JITFunction):
        pytest.skip("triton compiles in this process: run TRITON_INTERPRET=1 pytest …")
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
