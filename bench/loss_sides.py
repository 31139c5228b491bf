"""fitune's head and loss beside the plain one and torch's chunked one: seconds and peak bytes, on the CPU.

    python bench/loss_sides.py                     2048 tokens, hidden size 512, vocabulary 32,000, chunks of 256
    python bench/loss_sides.py --labelled 0.4      most tokens are prompt, as in instruction data

Each side runs in a process of its own, because torch's chunked loss is one operation that no dispatch mode can look
into: the peak is how far the process's largest resident size grew beyond what it held before. Sides take turns, and
seconds are those the process ran (one thread): others may use the machine too. All
give the gradient of the hidden states; with ``--trained-head`` the head's too.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fitune.models.loss_head import LossHead
from fitune.units import format_bytes
from fitune.values.model.block_profile import IGNORED

SIDES = ("plain", "torch, chunked", "fitune", "fitune, chunked")
Step = Callable[[], tuple[float, Tensor]]


def step_of(
    side: str, hidden_TD: Tensor, labels_T: Tensor, head: nn.Linear, *, scale: float, chunk: int
) -> Step:
    """Loss (summed) and gradient of the hidden states."""

    def by_autograd(loss_of: Callable[[Tensor], Tensor]) -> tuple[float, Tensor]:
        leaf_TD = hidden_TD.detach().requires_grad_()
        loss = loss_of(leaf_TD)
        (loss * scale).backward()
        assert leaf_TD.grad is not None
        return loss.item(), leaf_TD.grad

    def plain(leaf_TD: Tensor) -> Tensor:
        return F.cross_entropy(head(leaf_TD).float(), labels_T, ignore_index=IGNORED, reduction="sum")

    def chunked(leaf_TD: Tensor) -> Tensor:
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return F.linear_cross_entropy(
            leaf_TD, head.weight, labels_T, reduction="sum", ignore_index=IGNORED, options=options
        )

    def ours(size: int | None) -> tuple[float, Tensor]:
        loss_head = LossHead(module=head, chunk_tokens=size)
        losses_S, gradient_TD = loss_head.losses_and_gradient(hidden_TD, labels_T, scale=scale)
        return losses_S.sum().item(), gradient_TD

    steps: dict[str, Step] = {
        "plain": lambda: by_autograd(plain),
        "torch, chunked": lambda: by_autograd(chunked),
        "fitune": lambda: ours(None),
        "fitune, chunked": lambda: ours(chunk),
    }
    return steps[side]


def measure(side: str, args: argparse.Namespace) -> dict[str, float]:
    """In a fresh process: the median time it ran in three steps after the first, and the growth of the resident set."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden_TD = torch.randn(args.tokens, args.hidden, dtype=dtype)
    labels_T = torch.randint(0, args.vocabulary, (args.tokens,))
    labels_T[: round(args.tokens * (1 - args.labelled))] = IGNORED
    head = nn.Linear(args.hidden, args.vocabulary, bias=False, dtype=dtype).requires_grad_(args.trained_head)
    step = step_of(side, hidden_TD, labels_T, head, scale=1 / int((labels_T >= 0).sum()), chunk=args.chunk)
    small = torch.zeros(8, args.hidden, dtype=dtype)  # libraries take their workspaces before we count
    head(small).sum()
    before = _resident_peak()
    seconds = []
    for _ in range(4):
        head.weight.grad = None
        start = time.process_time()
        loss, gradient_TD = step()
        seconds.append(time.process_time() - start)
        norm = float(gradient_TD.float().norm())
        del gradient_TD
    return {
        "loss": loss,
        "norm": norm,
        "seconds": statistics.median(seconds[1:]),
        "peak_bytes": _resident_peak() - before,
    }


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def in_new_process(side: str) -> dict[str, float]:
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}  # what is freed goes back at once
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(result.stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--labelled", type=float, default=1.0, help="share of tokens that have a label")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--trained-head", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args)))
        return 0
    sides = [s for s in SIDES if s != "torch, chunked" or hasattr(F, "linear_cross_entropy")]
    rounds = [{side: in_new_process(side) for side in sides} for _ in range(args.rounds)]
    print(f"torch {torch.__version__}, {args.dtype}, {args.tokens} tokens × {args.vocabulary} words")
    print(f"{'side':18} {'seconds':>9} {'of plain':>9} {'peak':>11} {'of plain':>9} {'loss':>14}")
    for side in sides:
        seconds = statistics.median(r[side]["seconds"] for r in rounds)
        speed = statistics.median(r[side]["seconds"] / r["plain"]["seconds"] for r in rounds)
        peak = statistics.median(r[side]["peak_bytes"] for r in rounds)
        share = statistics.median(r[side]["peak_bytes"] / r["plain"]["peak_bytes"] for r in rounds)
        loss = rounds[0][side]["loss"]
        print(
            f"{side:18} {seconds:>9.3f} {speed:>9.2f} {format_bytes(int(peak)):>11} {share:>9.2f} {loss:>14.4f}"
        )
    losses = [rounds[0][side]["loss"] for side in sides]
    return 0 if max(losses) - min(losses) <= 1e-4 * max(losses) else 1


if __name__ == "__main__":
    sys.exit(main())
