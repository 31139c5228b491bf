"""Liger's kernels and the loss', as fitune launches them, compiled for each generation of cards by Triton and ptxas."""

import pytest

pytestmark = pytest.mark.null_gpu

SPILLED = {
    "_geglu_tanh_backward_kernel": 448,
    "_geglu_tanh_forward_kernel": 128,
    "_swiglu_backward_kernel": 32,
    "_swiglu_fused_gate_up_backward_kernel": 32,
}
"""Bytes a thread may keep in its stack, by kernel; others none. Liger 0.8.5 by Triton 3.7.1: 392, 96, 16 and 16 at the
width of 28,672, where 32 warps leave 64 registers to a thread; 48, 0, 0 and 0 at 14,336."""

COMPILED = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import torch, triton
from triton.runtime.jit import JITFunction
from fitune.models.liger import operations_of_liger

compiled = {}
run = JITFunction.run

def seen(kernel, *args, **kwargs):
    found = run(kernel, *args, **kwargs)
    compiled[f"{kernel.__name__} {found.hash[:8]}"] = found
    return found

JITFunction.run = seen
o, dtype = operations_of_liger(), getattr(torch, sys.argv[1])

def tensor(*shape):
    return torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)

def back(*outputs):
    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])

SHAPES = (4096, 14336, 32, 8, 128), (3584, 14336, 16, 8, 256), (8192, 28672, 64, 8, 128)
for hidden, width, heads, keys, head in SHAPES:
    for offset, in_fp32 in ((0.0, False), (1.0, True)):
        for trained in (True, False):
            weight = tensor(hidden).detach().requires_grad_(trained)
            back(o.rms_norm(tensor(1, 64, hidden), weight, eps=1e-6, offset=offset, in_fp32=in_fp32))
    back(o.silu_product(tensor(1, 64, width), tensor(1, 64, width)))
    back(o.gelu_product(tensor(1, 64, width), tensor(1, 64, width)))
    back(o.silu_halves(tensor(1, 64, 2 * width)))
    cos, sin = (torch.empty(1, 64, head, dtype=dtype, device="cuda") for _ in range(2))
    back(*o.rotate(tensor(1, heads, 64, head), tensor(1, keys, 64, head), cos, sin))
for softcap in (None, 30.0):
    logits, labels = tensor(64, 128256).detach(), torch.zeros(64, dtype=torch.int64, device="cuda")
    o.cross_entropy(logits, labels, scale=1 / 64, softcap=softcap)

tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
usage = {}
for name, kernel in compiled.items():
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage[name] = {word: int(n) for word, n in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)}
    usage[name]["target"] = kernel.metadata.target.arch
print(json.dumps(usage))
"""


@pytest.mark.parametrize(
    ("card", "sm", "dtype"),
    [
        ("t4", 75, "float16"), ("a100", 80, "bfloat16"), ("4090", 89, "bfloat16"), ("h100", 90, "bfloat16"),
        ("5090", 120, "bfloat16"),
    ],
)  # fmt: skip
def test_few_registers_are_spilled(on_null_gpu, tmp_path, card, sm, dtype):
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED, encoding="utf-8")
    usage = on_null_gpu(
        ["python", script, dtype], cards=[card], environment={"TRITON_CACHE_DIR": tmp_path}
    ).value
    assert {kernel["target"] for kernel in usage.values()} == {sm}
    assert len({name.split()[0] for name in usage}) >= 8
    assert "cross_entropy_kernel" in {name.split()[0] for name in usage}
    for name, kernel in usage.items():
        most = SPILLED.get(name.split()[0], 0)
        assert kernel["LOCAL"] + kernel["STACK"] <= most, f"{name} spills more than {most} bytes: {kernel}"
