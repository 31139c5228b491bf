"""The same of a whole process, as the operating system counts it whenever a tensor was read: with transformers' reading
threads, and whatever no tensor shows. Pages of the files themselves are the system's and not counted."""

import subprocess
import sys
from pathlib import Path

import pytest

from fitune.units import MIB
from models.tiny_models import tiny_model

SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 10, "vocab_size": 1000}
BLOCK_BYTES = 4 * (2 * 512 * 32 + 2 * 512 * 16 + 3 * 512 * 2048)
"""fp32: queries and output of four heads of 8, keys and values of two, three matrices of the MLP."""
SLACK_BYTES = 16 * MIB
"""Python's own objects, stacks of threads, rounding of the allocator."""

LOAD = """
import sys
import torch
from fitune.models.weights import load_model
from fitune.spec.plan import Dense, Hqq, Nf4

torch.set_num_threads(1)
small, folder, dtype, base = sys.argv[1:]


def load(path, on_bytes):
    on_bytes = on_bytes or (lambda done, total: None)
    device = torch.device("cpu")
    return load_model(path, dtype=getattr(torch, dtype), device=device, base=eval(base), on_bytes=on_bytes)


def bytes_of(model):
    return sum({t.untyped_storage()._cdata: t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def anonymous_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


load(small, None)  # everything is imported
seen = [anonymous_bytes()]
model = load(folder, lambda done, total: seen.append(anonymous_bytes()))
print(bytes_of(model), max(seen) - seen[0])
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model, and one of 130 MB in files of 20 MB."""
    small, large = tmp_path_factory.mktemp("small"), tmp_path_factory.mktemp("large")
    tiny_model().save_pretrained(small)
    tiny_model(**SIZES).save_pretrained(large, max_shard_size="20MB")
    return small, large


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux counts these bytes")
@pytest.mark.parametrize(
    ("dtype", "base"), [("bfloat16", "Dense()"), ("bfloat16", "Nf4()"), ("float32", "Hqq(bits=4)")]
)
def test_the_process_takes_the_finished_model_and_one_block(
    folders: tuple[Path, Path], dtype: str, base: str
) -> None:
    small, large = folders
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(small), str(large), dtype, base],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    final, peak = map(int, done.stdout.split())
    assert peak <= 1.05 * final + BLOCK_BYTES + SLACK_BYTES
